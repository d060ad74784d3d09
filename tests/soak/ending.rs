//! The end: all threads stop, and nothing may be left.

use std::time::Duration;

use crate::engine::{Ask, Handle};
use crate::gated::monitors;
use crate::host::names;
use crate::support::{cgroup_members, run_with_timeout, timeout, wait_until};
use crate::tally::Kind;
use crate::{GPUS_MIB, Soak};

/// How long what is collected may take to be gone.
const GOING: Duration = Duration::from_secs(30);

/// What a state directory keeps without any container.
const RETAINED: [&str; 13] = [
    "cdi.json",
    "containers",
    "driver",
    "driver.cache",
    "driver.lock",
    "events",
    "events.1",
    "gate",
    "index",
    "inventory.json",
    "lock",
    "runtime.json",
    "shares",
];

/// The file by which monitors hear of shares; it stays with the directory.
const SHARES_NOTICE: &str = ".notice";

/// Removes what workers left because they were broken, and collects.
pub(crate) fn clear(soak: &Soak) {
    let docker = soak.engines.docker();
    let listed = docker.call(&["ps", "-aq"]).ok();
    for id in listed.stdout.split_whitespace() {
        let _ = docker.remove(id); // the next check reports what is left
    }
    let runtime = soak.gated.host.runtime();
    let listed = runtime.call(&["list", "--quiet"]).ok();
    for id in listed.stdout.split_whitespace() {
        let _ = runtime.call(&["delete", "--force", id]);
    }
    for scratch in [soak.gated.host.scratch.cgroup(), docker.scratch().cgroup()] {
        for pid in cgroup_members(scratch.trim_start_matches('/')) {
            crate::kill::kill_if(pid, |_| true);
        }
    }
    soak.gated.host.gc();
}

/// What is left, by what it is.
fn left(soak: &Soak) -> Vec<String> {
    let host = &soak.gated.host;
    let mut left = Vec::new();
    for record in host.records() {
        left.push(format!("record {record}"));
    }
    let state_dir = host.state_dir();
    for name in names(&state_dir.join("gate")) {
        left.push(format!("gate/{name}"));
    }
    for name in names(&state_dir.join("shares")).into_iter().filter(|name| name != SHARES_NOTICE) {
        left.push(format!("shares/{name}"));
    }
    let retained = |name: &String| RETAINED.contains(&name.as_str());
    for name in names(&state_dir).into_iter().filter(|name| !retained(name)) {
        left.push(format!("file {name}"));
    }
    for pid in monitors(host) {
        left.push(format!("monitor {pid}"));
    }
    let own = soak.gated.sim.dir();
    let driver = state_dir.join("driver");
    let traces = host.scratch.traces();
    for mount in traces.mounts.iter().filter(|mount| *mount != own && !mount.starts_with(&driver)) {
        left.push(format!("mount {}", mount.display()));
    }
    for process in traces.processes {
        left.push(format!("process {process}"));
    }
    let state = soak.gated.sim.state();
    for gpu in state.gpus.iter().filter(|gpu| gpu.used_bytes != 0) {
        left.push(format!("{} bytes of GPU {}: {:?}", gpu.used_bytes, gpu.index, gpu.processes));
    }
    for client in &state.clients {
        left.push(format!(
            "client {:x} of process {}, {}",
            client.handle, client.process, client.cgroup
        ));
    }
    for file in &state.files {
        left.push(format!("open file of {}, process {}", file.node, file.process));
    }
    left
}

/// Collects once more, and says whether nothing is left: what a monitor leaves can be collected as
/// soon as it has ended.
fn is_collected(soak: &Soak) -> bool {
    soak.gated.host.gc();
    left(soak).is_empty()
}

/// Finds what is left, and that all of each GPU can be had again.
pub(crate) fn check(soak: &Soak) {
    wait_until(GOING, || is_collected(soak));
    for what in left(soak) {
        // A record and a directory of the gate's have an id in their name.
        let all = soak.fleet.all();
        let of = all
            .iter()
            .find(|(id, _)| what.contains(id.as_str()) || what.contains(&id[..id.len().min(12)]));
        let story =
            of.map(|(id, member)| format!("; {id} of {}", member.story())).unwrap_or_default();
        soak.tally.find(Kind::Leaked, format!("{what}{story}"));
    }
    let ask = Ask((0..).zip(GPUS_MIB).collect());
    let words = ["sleep".to_owned(), "1000".to_owned()];
    let (all, id) =
        Handle::prepare(soak, false, "all", &ask, &words).expect("runc is always there");
    let made = run_with_timeout(&mut all.create(soak), timeout());
    if !made.status.success() {
        soak.tally.find(Kind::Leaked, format!("all of the GPUs can't be had again: {made}"));
    }
    run_with_timeout(&mut all.remove(soak), timeout()).ok();
    wait_until(GOING, || is_collected(soak));
    for what in left(soak) {
        if soak.fleet.mark(&format!("{id} {what}")) {
            soak.tally.find(Kind::Leaked, format!("after one more container: {what}"));
        }
    }
}
