//! Real programs under ptrace, until they are left. Needs python3.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::fs;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use cgpu_record::follow::{Task, Then, Watch, follow, read, start};
use nix::libc;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

/// Threads that wait, that make calls all the time, and that come and go, and a child with two of them;
/// then a word, and an end where it's asked for.
const PROGRAM: &str = r#"
import os, signal, threading, time

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

def wait():
    time.sleep(60)

def ask():
    while True:
        os.getppid()

def come_and_go():
    while True:
        thread = threading.Thread(target=os.getppid)
        thread.start()
        thread.join()

def begin(*tasks):
    for task in tasks:
        threading.Thread(target=task, daemon=True).start()

child = os.fork()
if child == 0:
    begin(wait, ask)
    time.sleep(60)
begin(wait, wait, ask, come_and_go)
time.sleep(0.2)
os.write(1, b"word %d\n" % child)
signal.sigwait({signal.SIGUSR1})
os.kill(child, 9)
os._exit(0 if os.waitpid(child, 0)[1] == 9 else 1)
"#;

/// Leaves a program at its word.
#[derive(Default)]
struct Listener {
    word: String,
    calls: u64,
}

impl Watch for Listener {
    type Begun = Option<u64>;

    fn begins(&mut self, _: Task, number: i64, arguments: &[u64; 6]) -> Option<Option<u64>> {
        Some((number == libc::SYS_write && arguments[0] == 1).then_some(arguments[1]))
    }

    fn ended(&mut self, task: Task, begun: Option<u64>, result: i64) -> anyhow::Result<Then> {
        self.calls += 1;
        let Some(address) = begun else { return Ok(Then::Follow) };
        let bytes = read(task.id, address, usize::try_from(result)?).unwrap();
        // python3 may be a script that says things to itself first.
        if !bytes.starts_with(b"word") {
            return Ok(Then::Follow);
        }
        self.word = String::from_utf8(bytes)?;
        Ok(Then::Leave)
    }
}

/// The states of a process's tasks, and who traces them.
fn tasks(process: Pid) -> Vec<(String, String)> {
    let entries = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let status = |path: std::path::PathBuf| fs::read_to_string(path.join("status")).ok();
    let line = |text: &str, field: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(field)).unwrap();
        found.trim().to_owned()
    };
    let texts = entries.filter_map(|entry| status(entry.unwrap().path()));
    texts.map(|text| (line(&text, "State:"), line(&text, "TracerPid:"))).collect()
}

#[test]
fn detached_program_runs_on_with_threads_and_children() {
    // Other tests' children would be waited for here, so there is one test.
    let [main, other] = [(); 2].map(|()| {
        let mut program = Command::new("python3");
        program.args(["-c", PROGRAM]).stdout(Stdio::null());
        start(program).unwrap()
    });
    let mut listener = Listener::default();
    let ended = follow(&[main, other], &mut listener).unwrap();
    assert!(listener.calls > 100, "{}", listener.calls);
    // What ended before its program was left were threads.
    assert!(!ended.contains_key(&main) && !ended.contains_key(&other), "{ended:?}");
    let child: i32 = listener.word.strip_prefix("word ").unwrap().trim().parse().unwrap();
    for process in [main, other, Pid::from_raw(child)] {
        let deadline = Instant::now() + Duration::from_secs(5);
        loop {
            let tasks = tasks(process);
            let runs = |(state, tracer): &(String, String)| !state.contains('T') && tracer == "0";
            if tasks.len() > 1 && tasks.iter().all(runs) {
                break;
            }
            assert!(Instant::now() < deadline, "{process}: {tasks:?}");
        }
    }
    for process in [main, other] {
        kill(process, Signal::SIGUSR1).unwrap();
        assert_eq!(waitpid(process, None).unwrap(), WaitStatus::Exited(process, 0));
    }
}
