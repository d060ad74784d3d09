//! The kernel gives a number again when it has given all others; `clone3` gives it at once.

use std::process::Child;
use std::time::{Duration, Instant};

use crate::monitor::host::{MIB, Monitor, wait};
use crate::support::timeout;

/// A script with files to wait by, which are there as long as it is.
struct Play {
    dir: tempfile::TempDir,
    child: Option<Child>,
}

impl Play {
    fn new(monitor: &Monitor, script: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().display().to_string();
        let script = script.replace("DIR", &place);
        let lines: Vec<&str> = std::iter::once("run").chain(script.lines()).collect();
        Play { child: Some(monitor.spawn(&lines)), dir }
    }

    #[track_caller]
    fn wait_until_made(&mut self) {
        let begun = Instant::now();
        while !self.dir.path().join("made").exists() {
            let over = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(over.is_none() && begun.elapsed() < timeout(), "{over:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill(&mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    fn touch(&self, name: &str) {
        std::fs::write(self.dir.path().join(name), "").unwrap();
    }

    /// Its end; others of its processes may take a moment longer to see the file.
    #[track_caller]
    fn end(&mut self) {
        self.touch("end");
        if let Some(child) = self.child.take() {
            let said = wait(child);
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stdout));
        }
    }
}

impl Drop for Play {
    /// Where a test failed its children wait still.
    fn drop(&mut self) {
        let _ = std::fs::write(self.dir.path().join("end"), "");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// What it holds counts though the thread's process, which it must not be taken for, is gone.
#[test]
fn process_with_reused_thread_id_is_distinguished() {
    for monitor in [Monitor::new(), Monitor::without_thread_pidfds()] {
        // By the descriptors that both have, so that nothing fails by which of them is asked.
        let script = "start\nend-a-thread\nfork-as-ended {\nclient\ndevice 0\nsubdevice\n\
                      alloc 700MiB as a\ntouch DIR/made\nwait DIR/end\n}\nwait DIR/end";
        let mut play = Play::new(&monitor, script);
        play.wait_until_made();
        assert_eq!(monitor.used(), 700 * MIB);
        play.kill();
        // Its exit is seen, and what is left is checked.
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!((monitor.used(), monitor.sim.used(0)), (700 * MIB, 700 * MIB));
        assert_eq!(monitor.run(&["fill"]).number("got_bytes"), 324 * MIB);
        play.end();
        monitor.wait_for(0);
        assert_eq!(monitor.sim.used(0), 0);
        assert_eq!(monitor.status().calls.killed, 0);
    }
}

/// Descriptors are searched for in the process that has the id now.
#[test]
fn descriptors_are_searched_in_current_owner_of_pid() {
    for monitor in [Monitor::new(), Monitor::without_thread_pidfds()] {
        // The child's own files have numbers that its parent hasn't.
        let script = "start\nend-a-thread\nfork-as-ended {\nstart\nalloc 700MiB as a\nfree a\n}";
        Play::new(&monitor, script).end();
    }
}
