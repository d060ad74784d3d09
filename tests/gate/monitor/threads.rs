//! A monitor's threads: which there are before the first call, and calls for which the host has none.

use std::fs;
use std::path::{Path, PathBuf};

use crate::monitor::host::{Monitor, script, until, wait};

/// The names of a monitor's threads, in order.
fn threads(monitor: u32) -> Vec<String> {
    let name = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("comm")).ok();
    let tasks = fs::read_dir(format!("/proc/{monitor}/task")).unwrap();
    let mut names: Vec<String> = tasks.filter_map(|task| name(task.ok()?)).collect();
    names.iter_mut().for_each(|name| name.truncate(name.trim_end().len()));
    names.sort_unstable();
    names
}

#[test]
fn monitor_has_two_threads_until_first_call() {
    let monitor = Monitor::new();
    let at_rest = || threads(monitor.pid()) == ["audit", "cgpu-monitor"];
    until("they have their names", at_rest);
    // A program that calls nothing.
    monitor.run(&script("sleep 1"));
    assert!(at_rest());
    monitor.run(&script("start\nalloc 1MiB as x"));
    let has_all = || {
        let now = threads(monitor.pid());
        let mut all = ["audit", "calls", "mappings", "shares", "shares heard"].into_iter();
        all.all(|name| now.iter().any(|of| of == name))
    };
    until("all are there", has_all);
    // The next program has them from its beginning.
    monitor.update();
    until("all are there", has_all);
}

/// A cgroup that a process is alone in, with a limit of tasks.
struct TaskLimit {
    dir: PathBuf,
    process: u32,
}

impl TaskLimit {
    /// `None` where this host has no such limits.
    fn on(process: u32) -> Option<Self> {
        let roots = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"].map(Path::new);
        let dir = roots.into_iter().find_map(|root| {
            let dir = root.join(format!("cgpu-test-threads-{process}"));
            fs::create_dir(&dir).ok()?;
            if dir.join("pids.events").exists() {
                return Some(dir);
            }
            let _ = fs::remove_dir(&dir);
            None
        })?;
        let limit = TaskLimit { dir, process };
        fs::write(limit.dir.join("cgroup.procs"), process.to_string()).ok()?;
        Some(limit)
    }

    fn set(&self, most: &str) {
        fs::write(self.dir.join("pids.max"), most).expect("it can be set");
    }

    /// How often it has refused a task.
    fn refused(&self) -> u64 {
        let text = fs::read_to_string(self.dir.join("pids.events")).expect("it can be read");
        text.split_whitespace().nth(1).and_then(|text| text.parse().ok()).expect("a number")
    }
}

impl Drop for TaskLimit {
    fn drop(&mut self) {
        let above = self.dir.parent().expect("it's below a root");
        let _ = fs::write(above.join("cgroup.procs"), self.process.to_string());
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Calls wait for threads that the host doesn't have yet.
#[test]
fn calls_wait_while_threads_cannot_be_started() {
    let monitor = Monitor::new();
    let Some(limit) = TaskLimit::on(monitor.pid()) else {
        return println!("skipped: this host has no cgroups that limit tasks");
    };
    limit.set("2");
    let mut child = monitor.spawn(&script("start\nalloc 1MiB as x"));
    // One that answers, and all but one of those that track what calls create.
    for most in ["2", "3", "4", "5"] {
        limit.set(most);
        let before = limit.refused();
        until("one more thread was refused", || limit.refused() > before);
        assert!(
            child.try_wait().unwrap().is_none(),
            "with {most} threads the program has not got all answers"
        );
    }
    assert_eq!(monitor.sim.used(0), 0);
    limit.set("max");
    let output = wait(child);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(monitor.log().matches("a thread for them can't be started").count(), 1);
    // The next call finds all of them.
    let refused = limit.refused();
    monitor.run(&script("start\nalloc 2MiB as x")).must("alloc x ok");
    assert_eq!(limit.refused(), refused);
}
