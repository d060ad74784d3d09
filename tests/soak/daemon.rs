//! What runs next to the containers: collectors, and a dockerd that comes and goes.

use std::time::Duration;

use procfs::process::Process;

use crate::Soak;
use crate::kill::kill_if;
use crate::support::{Restart, run_with_timeout, timeout};

/// `cgpu gc` again and again, with the least priority.
pub(crate) fn collect(soak: &Soak) {
    let host = &soak.gated.host;
    while soak.goes_on() {
        let mut command = host.scratch.command("nice");
        command
            .args(["-n", "19"])
            .arg(crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu"));
        let collected =
            run_with_timeout(command.arg("--config").arg(host.config()).arg("gc"), timeout());
        soak.tally.count("collections", if collected.status.success() { "ok" } else { "failed" });
        if !collected.status.success() {
            soak.tally.wonder(collected.to_string());
        }
        soak.nap(Duration::from_millis(20));
    }
}

/// SIGKILL of dockerd, and another one a moment later; now and then SIGTERM.
pub(crate) fn restart(soak: &Soak, thread: u64) {
    let mut choices = soak.choices(thread);
    loop {
        soak.nap(Duration::from_millis(choices.u64(5_000..30_000)));
        let (how, away) = (choices.u8(..4), Duration::from_millis(choices.u64(..1_500)));
        if !soak.goes_on() {
            return;
        }
        soak.engines.note_death();
        if how == 0 {
            soak.engines.docker_mut().restart(Restart::Graceful);
            soak.engines.note_death();
            soak.tally.count("restarts", "of dockerd");
            continue;
        }
        let file = soak.engines.docker().scratch().path().join("docker.pid");
        let pid = std::fs::read_to_string(file).ok().and_then(|text| text.trim().parse().ok());
        let is = |process: &Process| process.exe().is_ok_and(|path| path.ends_with("dockerd"));
        if pid.is_some_and(|pid| kill_if(pid, is)) {
            soak.tally.count("kills", "dockerd");
        }
        std::thread::sleep(away);
        soak.engines.docker_mut().restart(Restart::Killed);
        soak.engines.note_death();
    }
}
