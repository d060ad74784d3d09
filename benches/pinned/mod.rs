//! Who runs on which processors.

use std::fs;

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;

/// Puts all threads of a process, and what they start, on these processors.
pub(crate) fn pin(pid: u32, cpus: &[usize]) {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu).expect("it is a processor's number"));
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it lives");
    for thread in threads.flatten() {
        let number = thread.file_name().to_str().and_then(|name| name.parse().ok());
        let thread = Pid::from_raw(number.expect("a thread is a number"));
        sched_setaffinity(thread, &set).expect("the machine has these processors");
    }
}
