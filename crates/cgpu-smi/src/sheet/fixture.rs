//! Hosts for tests.

use cgpu_cli::view::{ContainerView, GpuView, Mode, ProcessView, ShareView, Snapshot, State};
use cgpu_core::plan::{Caveats, Kind, PlannedGpu};
use cgpu_core::units::MIB;

/// A host of so many GPUs, each with so many containers that have a quota on it.
pub(crate) fn host(gpus: u32, containers: u32) -> Snapshot {
    let each = (0..gpus).flat_map(|gpu| (0..containers).map(move |number| (gpu, number)));
    Snapshot {
        cgpu_version: "0.1.0".into(),
        hostname: "node".into(),
        driver_version: Some("580.95.05".into()),
        gpus: (0..gpus).map(|index| gpu(index, containers)).collect(),
        containers: each.map(|(gpu, number)| container(gpu, number)).collect(),
        gaps: Vec::new(),
    }
}

fn gpu(index: u32, containers: u32) -> GpuView {
    GpuView {
        index,
        uuid: format!("GPU-{index}"),
        bus_id: format!("0000:{:02x}:00.0", 7 + index),
        name: "Tesla V100".into(),
        lost: false,
        memory_total_bytes: 16384 * MIB,
        memory_reserved_bytes: 0,
        memory_promised_bytes: u64::from(containers) * 2048 * MIB,
        memory_used_bytes: Some(8192 * MIB),
        utilization_percent: Some(42),
        temperature_celsius: Some(41),
        power_watts: Some(211.6),
        power_limit_watts: Some(300.0),
        policy: Some(5),
        max_inst: Some(20),
        prio_ratio: Some(80),
        shared_containers: containers,
        other_containers: 0,
        free_weight: Some(20_u32.saturating_sub(containers)),
    }
}

fn container(gpu: u32, number: u32) -> ContainerView {
    let share = ShareView {
        gpu: PlannedGpu {
            index: gpu,
            uuid: format!("GPU-{gpu}"),
            minor: gpu,
            memory_total_bytes: 16384 * MIB,
            memory_reserved_bytes: 0,
            memory_limit_bytes: Some(2048 * MIB),
            mig: None,
        },
        memory_used_bytes: Some(1024 * MIB),
        memory_enforced_bytes: Some(2048 * MIB),
        utilization_percent: Some(37),
        compute_share: Some(0.25),
        compute_held: Some(0.31),
    };
    let pid = i32::try_from(4000 + 100 * gpu + number).expect("it is small");
    ContainerView {
        id: format!("c{gpu:x}{number:02x}{}", "0".repeat(60)),
        short_id: format!("c{gpu:x}{number:02x}00000000"),
        name: Some(format!("default/pod-{gpu}-{number}/main")),
        root: "/run/containerd/runc/k8s.io".into(),
        backend: Kind::Gate,
        mode: Mode::Shared,
        state: State::Active,
        enforced: true,
        pid: Some(pid),
        age_s: Some(3700),
        weight: 1,
        high_priority: false,
        shares: vec![share],
        processes: vec![ProcessView {
            pid: pid + 1,
            name: Some("python".into()),
            memory: vec![(gpu, 1000 * MIB)],
        }],
        process_count: Some(1),
        calls: None,
        durations: None,
        monitor_updates: None,
        leaked_to: Vec::new(),
        caveats: Caveats::default(),
    }
}
