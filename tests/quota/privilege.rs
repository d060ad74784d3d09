//! What the monitor may do, and so what the driver does for it.

use caps::Capability;

use crate::gated::{Gated, rmtool};
use crate::support::{run_with_timeout, timeout};

/// What reaching into the container's processes takes, and nothing that the driver asks for.
const RETAINED: [Capability; 4] = [
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_KILL,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_CHECKPOINT_RESTORE,
];

/// No thread of a monitor may do more than answering calls takes.
#[test]
fn monitor_threads_have_only_the_needed_privileges() {
    let gated = Gated::new();
    let bundle = gated.sleeping("app", 1000);
    gated.fills(&bundle, 1000);
    let monitor = gated.monitor("app_________");
    let process = procfs::process::Process::new(monitor.as_raw()).unwrap();
    let retained = RETAINED.iter().fold(0, |retained, cap| retained | cap.bitmask());
    for thread in process.tasks().unwrap().flatten() {
        let status = thread.status().unwrap();
        for (set, has) in [("effective", status.capeff), ("permitted", status.capprm)] {
            assert_eq!(has & !retained, 0, "{set} of thread {}: {has:#x}", thread.tid);
        }
        assert_eq!((status.capinh, status.capamb), (0, Some(0)), "thread {}", thread.tid);
        assert_eq!(status.nonewprivs, Some(1), "thread {}", thread.tid);
        // `SECCOMP_MODE_FILTER`: the monitor's deny list.
        assert_eq!(status.seccomp, Some(2), "thread {}", thread.tid);
    }
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
}

/// The driver checks the thread that calls it, which is the monitor's.
#[test]
fn administrator_only_controls_are_refused_to_containers() {
    let gated = Gated::new();
    // NV2080_CTRL_CMD_NVLINK_IS_GPU_DEGRADED, which reads, and asks for CAP_SYS_ADMIN.
    let words = ["run", "start", "control subdevice 0x20803041 8"];
    let bundle = gated.sleeping("app", 1000);
    let reported = gated.exec(&bundle, &words);
    assert!(reported.stdout.contains("control 0x20803041 status=0x1b"), "{reported}");
    let asked = |gated: &Gated| gated.sim.state().calls.get("control:0x20803041").copied();
    assert_eq!(asked(&gated), Some(1), "it was the driver that refused: {:?}", gated.sim.state());
    gated.host.runtime().delete(&bundle).ok();
    gated.soon_is_empty();
    // A caller that has it gets it done.
    let dev = gated.host.scratch.path().join("sim/dev");
    let mut command = gated.host.scratch.command(rmtool());
    let reported = run_with_timeout(command.arg("--dev").arg(dev).args(words), timeout()).ok();
    assert!(reported.stdout.contains("control 0x20803041 ok"), "{reported}");
}
