use crate::host::{MIB, Monitor, Said, wait};

/// Resident memory of a process, in KiB.
fn resident_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn a_worker_stays_small_with_ten_thousand_objects() {
    let monitor = Monitor::new();
    let before = resident_kib(monitor.worker_pid());
    let load: Vec<String> = (0..10_000).map(|at| format!("alloc 4KiB as x{at}")).collect();
    let mut lines = vec!["run", "start"];
    lines.extend(load.iter().map(String::as_str));
    lines.push("wait");
    let child = monitor.spawn(&lines);
    let begun = std::time::Instant::now();
    while monitor.used() < 10_000 * 4096 {
        assert!(begun.elapsed().as_secs() < 30);
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    println!("resident: {before} KiB, with 10000 objects {} KiB", resident_kib(monitor.worker_pid()));
    let mut child = child;
    child.kill().unwrap();
    wait(child);
    assert!(MIB > 0);
}

#[test]
fn what_calls_cost() {
    let monitor = Monitor::new();
    let untrapped = std::process::Command::new(
        std::env::current_exe().unwrap().parent().unwrap().parent().unwrap().join("rmtool"),
    )
    .arg("--dev")
    .arg(monitor.sim.dev())
    .args(["bench", "2000"])
    .output()
    .unwrap();
    println!("without: {}", Said::of(&untrapped).text);
    println!("with:    {}", monitor.run(&["bench", "2000"]).text);
}
