//! What a container's calls do to another container: nothing.

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdout};

use cgpu_sim::ClientState;
use cgpu_sim::abi::AMPERE_CHANNEL_GPFIFO_A;

use crate::gated::Gated;
use crate::support::Bundle;

/// rmtool in a container, which goes on after what it has said.
struct Program {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Program {
    /// Runs a script that waits for its end afterwards.
    fn start(gated: &Gated, bundle: &Bundle, script: &[&str]) -> Self {
        let words = [&["run"], script, &["sleep 1000"]].concat();
        let mut child = gated.start(bundle, &words);
        let lines = BufReader::new(child.stdout.take().expect("it's a pipe")).lines();
        Program { child, lines }
    }

    /// The line that begins so.
    #[track_caller]
    fn line(&mut self, begin: &str) -> String {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        lines.find(|line| line.starts_with(begin)).unwrap_or_else(|| panic!("no line {begin}"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Two containers of one GPU, both root's.
fn two(gated: &Gated) -> (Bundle, Bundle) {
    (gated.sleeping("attacker", 1000), gated.sleeping("victim", 1000))
}

#[test]
fn nobody_takes_a_gpus_access_counters_before_uvm_does() {
    let gated = Gated::new();
    let (attacker, victim) = two(&gated);
    let mut holder = Program::start(&gated, &attacker, &["start", "object 0xc365"]);
    let said = holder.line("object 0xc365");
    let registered = gated.exec(&victim, &["run", "start", "uvm-init", "uvm-register"]);
    assert!(registered.stdout.contains("uvm-register ok"), "{registered}");
    assert_eq!(said, "object 0xc365 status=0x56");
}

#[test]
fn nobody_watches_anothers_context_switches() {
    let gated = Gated::new();
    let (attacker, victim) = two(&gated);
    let script = ["start", "watch-switches 1", "watch-switches 2"];
    let mut watcher = Program::start(&gated, &attacker, &script);
    let said = [watcher.line("watch-switches"), watcher.line("watch-switches")];
    let mut computes = Program::start(&gated, &victim, &["start", "channel"]);
    assert_eq!(computes.line("channel"), "channel ok");
    let state = gated.sim.state();
    let objects = state.clients.iter().flat_map(|client| &client.objects);
    let seen: Vec<u32> = objects.flat_map(|object| object.switches.clone()).collect();
    assert!(seen.is_empty(), "processes are seen: {seen:?}");
    assert_eq!(said, ["watch-switches status=0x56", "watch-switches status=0x56"]);
}

/// The driver finds a client by the handle that the parameters have, whoever's it is.
#[test]
fn nobody_names_anothers_client() {
    let gated = Gated::new();
    let (attacker, victim) = two(&gated);
    let script = ["start", "channel as c", "bind-zcull own c"];
    let mut computes = Program::start(&gated, &victim, &script);
    assert_eq!(computes.line("bind-zcull"), "bind-zcull ok");
    let state = gated.sim.state();
    let of = |client: &ClientState| {
        let mut objects = client.objects.iter();
        let channel = objects.find(|object| object.class == AMPERE_CHANNEL_GPFIFO_A)?;
        Some(format!("bind-zcull {:#x} {:#x}", client.handle, channel.handle))
    };
    let named = state.clients.iter().find_map(of).expect("the victim has a channel");
    let said = gated.exec(&attacker, &["run", "start", &named]);
    assert!(said.stdout.contains("bind-zcull status=0x1b"), "{said}");
}
