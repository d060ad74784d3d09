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
fn container_cannot_take_access_counters_before_uvm() {
    let gated = Gated::new();
    let (attacker, victim) = two(&gated);
    let mut holder = Program::start(&gated, &attacker, &["start", "object 0xc365"]);
    let said = holder.line("object 0xc365");
    let registered = gated.exec(&victim, &["run", "start", "uvm-init", "uvm-register"]);
    assert!(registered.stdout.contains("uvm-register ok"), "{registered}");
    assert_eq!(said, "object 0xc365 status=0x56");
}

#[test]
fn container_cannot_watch_anothers_context_switches() {
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

/// The driver finds a client by the handle that the parameters have, whichever process it belongs to.
#[test]
fn container_cannot_name_anothers_client() {
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

/// The log's line of it, once.
#[track_caller]
fn reported(gated: &Gated, what: &str) {
    let log = gated.host.log();
    assert_eq!(log.matches(what).count(), 1, "{what}:\n{log}");
}

/// The driver makes them for anybody, and no workload was seen to ask for them.
#[test]
fn container_cannot_change_the_gpu_for_all() {
    let gated = Gated::new();
    let container = gated.sleeping("app", 1000);
    // FIFO_SET_CHANNEL_PROPERTIES, FIFO_OBJSCHED_SET_STATE, BUS_FREEZE_PEX_COUNTERS, and two of
    // which nothing was said: RC_DISABLE_WATCHDOG and FLA_RANGE.
    let withheld =
        [("device", "0x80170f"), ("subdevice", "0x20801121"), ("subdevice", "0x20801815")];
    let unknown = [("subdevice", "0x2080220a"), ("subdevice", "0x20803501")];
    let all = || withheld.iter().chain(&unknown);
    let lines: Vec<String> =
        all().map(|(object, command)| format!("control {object} {command} 8")).collect();
    let lines: Vec<&str> = lines.iter().map(String::as_str).collect();
    // A display's class, and one that a later GPU may have.
    let classes = ["object 0xc770", "object 0xdfc0"];
    let twice = [&["run", "start"], &lines[..], &classes, &lines, &classes].concat();
    let said = gated.exec(&container, &twice);
    let asked = gated.sim.state().calls;
    for (_, command) in all() {
        assert_eq!(
            asked.get(&format!("control:{command}")),
            None,
            "the driver was asked: {asked:?}"
        );
        let refused = format!("control {command} status=0x56\n");
        assert_eq!(said.stdout.matches(&refused).count(), 2, "{said}");
    }
    for class in ["0xc770", "0xdfc0"] {
        assert_eq!(asked.get(&format!("alloc:{class}")), None, "the driver was asked: {asked:?}");
        assert!(said.stdout.contains(&format!("object {class} status=0x22\n")), "{said}");
        reported(
            &gated,
            &format!("class {class} is unknown to cgpu: please report (512 bytes, by rmtool)"),
        );
    }
    for (_, command) in unknown {
        let of = "of class 0x2080 is unknown to cgpu: please report (8 bytes, by rmtool)";
        reported(&gated, &format!("driver 535.161.08: control {command} {of}"));
    }
    reported(&gated, "control 0x0080170f: changes the GPU for all who use it");
}
