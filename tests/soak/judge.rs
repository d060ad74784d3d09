//! What must be so at all times.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use cgpu_sim::State;

use crate::tally::Kind;
use crate::{GPUS_MIB, Soak};

/// How often the driver is asked for what containers had at most since then.
const SAMPLE: Duration = Duration::from_millis(20);

/// How long between two checks of the records.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// The container that a cgroup is of.
fn id_of(cgroup: &str) -> &str {
    cgroup.rsplit('/').next().unwrap_or_default()
}

/// Compares the driver usage with the quotas.
///
/// To the byte and at every moment, by the most that a container had since it was asked last: what
/// a container allocates never exceeds its quota, and only what reconciliation alone can find may
/// for a second. No program of the soak goes past the monitor, so nothing has that second. What a
/// monitor charges next to memory, for contexts, is in none of these values and makes a
/// container's less.
pub(crate) fn memory(soak: &Soak) {
    // This thread's alone. Where the host forbids it, there are fewer samples.
    let _ = rustix::process::setpriority_process(None, -10);
    let docker = soak.engines.docker().scratch().cgroup();
    let scratches = [soak.gated.host.scratch.cgroup(), docker];
    while !soak.has_ended.load(Ordering::Acquire) {
        for ((cgroup, gpu), bytes) in soak.gated.sim.take_cgroup_peaks() {
            // A monitor's duplicates are in none.
            if !scratches.iter().any(|scratch| cgroup.contains(scratch)) {
                continue;
            }
            let id = id_of(&cgroup);
            let quota = soak.fleet.all().get(id).and_then(|of| of.quotas.get(&gpu).copied());
            if bytes > quota.unwrap_or(0) && soak.fleet.mark(id) {
                let now = holders(&soak.gated.sim.state(), id, gpu);
                let what = format!(
                    "{bytes} bytes of GPU {gpu}, quota {quota:?}, now {now:?}; {}",
                    soak.known_of(id)
                );
                soak.tally.find(Kind::OverQuota, what);
            }
        }
        soak.tally.count("samples", "of the driver");
        std::thread::sleep(SAMPLE);
    }
}

impl Soak {
    /// What happened to a container, here and by cgpu's own log, and whether it has a record now.
    pub(crate) fn known_of(&self, id: &str) -> String {
        let record = self.gated.host.records().into_iter().find(|name| name.contains(id));
        let log = self.gated.host.log();
        let lines: Vec<_> = log.lines().filter(|line| line.contains(id)).collect();
        format!(
            "{}\n    record now: {record:?}\n    cgpu.log: {}",
            self.fleet.story(id),
            lines.join("\n    cgpu.log: ")
        )
    }
}

/// Who of a container has memory of that GPU, and how much.
fn holders(state: &State, id: &str, gpu: usize) -> Vec<String> {
    let clients = state.clients.iter().filter(|client| id_of(&client.cgroup) == id);
    let shown = clients.map(|client| {
        let mine = client.objects.iter().filter(|object| object.gpu == Some(gpu));
        let bytes: u64 = mine.map(|object| object.bytes).sum();
        format!("{} ({}): {bytes}", client.process, words(client.process))
    });
    shown.collect()
}

fn words(process: u32) -> String {
    let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
    String::from_utf8_lossy(&line).replace('\0', " ").trim_end().to_owned()
}

/// Holds the records to the containers that live, and the promises to the GPUs.
pub(crate) fn records(soak: &Soak) {
    while !soak.has_ended.load(Ordering::Acquire) {
        let before = soak.fleet.living();
        let listed = soak.gated.host.ps();
        let after = soak.fleet.living();
        let text = |id: &serde_json::Value| id.as_str().unwrap_or_default().to_owned();
        let ids: BTreeSet<String> = listed.iter().map(|container| text(&container["id"])).collect();
        // They lived before that check and after it, so they did all the time.
        let lived: BTreeMap<_, _> =
            before.iter().filter(|(id, _)| after.contains_key(*id)).collect();
        for id in lived.keys().filter(|id| !ids.contains(**id)) {
            if soak.fleet.mark(id) {
                soak.tally.find(Kind::Lost, format!("no record of {}", soak.known_of(id)));
            }
        }
        let promised = listed.iter().flat_map(|container| container["gpus"].as_array()).flatten();
        let promised =
            promised.map(|gpu| (gpu["index"].as_u64(), gpu["memory_limit_bytes"].as_u64()));
        let mut sums = [("by records", [0; GPUS_MIB.len()]), ("to who lives", [0; GPUS_MIB.len()])];
        for (index, bytes) in promised {
            let index = index.and_then(|index| usize::try_from(index).ok()).unwrap_or(usize::MAX);
            if let Some(sum) = sums[0].1.get_mut(index) {
                *sum += bytes.unwrap_or(0);
            }
        }
        for (gpu, bytes) in lived.values().flat_map(|quotas| quotas.iter()) {
            sums[1].1[*gpu] += bytes;
        }
        for (how, sums) in sums {
            for (gpu, sum) in sums.into_iter().enumerate() {
                let all = GPUS_MIB[gpu] << 20;
                if sum > all && soak.fleet.mark(&format!("GPU {gpu} {how}")) {
                    let what = format!(
                        "GPU {gpu} has {all} bytes, and {sum} are promised {how}: {listed:?}; {lived:?}"
                    );
                    soak.tally.find(Kind::OverQuota, what);
                }
            }
        }
        soak.tally.count("samples", "of the records");
        std::thread::sleep(POLL_INTERVAL);
    }
}
