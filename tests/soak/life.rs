//! The life of a container, from what it asks for to the moment when no program knows it any more.

use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Soak;
use crate::engine::{Ask, Handle, Went, went};
use crate::fleet::Life;
use crate::gated::{NO_MEMORY, RMTOOL};
use crate::kill::{has_words, is_reported_lost, kill_if, kill_monitor, kill_with, monitor};
use crate::support::{
    Outcome, Running, cgroup_members, run_with_timeout, start, timeout, wait_until,
};
use crate::tally::Kind;

/// How long an engine may take to know a container no more, restarts of dockerd included.
const REMOVING: Duration = Duration::from_secs(120);

/// How long a program in a container may take: longer than any of them, and the machine is busy.
const RUNNING: Duration = Duration::from_secs(90);

/// How long processes may take to be gone that were killed.
const DYING: Duration = Duration::from_secs(5);

/// A container that lives.
struct Container<'a> {
    soak: &'a Soak,
    handle: Handle,
    id: String,
    ask: Ask,
    choices: fastrand::Rng,
    /// Whether its calls may fail by what was killed, and with that its programs.
    is_disturbed: bool,
    /// Programs whose clients go on.
    programs: Vec<Running>,
}

/// Makes containers, one after the other, until the soak ends.
pub(crate) fn lead_many(soak: &Soak, worker: u64) {
    let mut choices = soak.choices(worker);
    let mut number = 0;
    while soak.goes_on() {
        number += 1;
        // What one draws depends on what happens; what the next does mustn't.
        let own = choices.fork();
        let name = format!("w{worker}-{number}");
        soak.guarded(&format!("worker {worker}, container {number}"), || lead(soak, &name, own));
    }
}

/// A program of rmtool's that wants up to half more than the quota, or more than there is. What it
/// has it keeps for longer than the driver isn't polled.
fn program(choices: &mut fastrand::Rng, ask: &Ask) -> Vec<String> {
    let gpus: Vec<_> = ask.0.iter().collect();
    let (gpu, quota) = gpus[choices.usize(..gpus.len())];
    let size = if choices.u8(..6) == 0 { 99_999 } else { choices.u64(1..=quota * 3 / 2) };
    let tool = format!("{RMTOOL} --gpu {gpu}");
    let retained = |what: String| vec!["sh".into(), "-c".into(), what];
    match choices.u8(..5) {
        0 => retained(format!("{tool} fill")),
        1 => retained(format!("{tool} storm {}", choices.u8(2..5))),
        2 => retained(format!("{tool} hold {size}MiB & sleep 0.1; kill $!; wait $!; :")),
        _ => retained(format!("{tool} demo {size}MiB --hold & sleep 0.1; kill $!; wait $!; :")),
    }
}

/// What a container's first process is.
fn first_program(choices: &mut fastrand::Rng, ask: &Ask) -> Vec<String> {
    match choices.u8(..3) {
        0 => vec!["sleep".into(), "1000".into()],
        1 => {
            let mut words = program(choices, ask);
            let what = words.pop().unwrap_or_default();
            words.push(format!("while :; do {what}; sleep 0.3; done"));
            words
        }
        _ => {
            let (gpu, quota) = ask.0.iter().next().expect("it asks for a GPU");
            let size = choices.u64(1..=quota * 3 / 2);
            let words =
                [RMTOOL, "--gpu", &gpu.to_string(), "demo", &format!("{size}MiB"), "--hold"];
            words.map(str::to_owned).into()
        }
    }
}

fn lead(soak: &Soak, name: &str, mut choices: fastrand::Rng) {
    let ask = Ask::choose(&mut choices);
    let words = first_program(&mut choices, &ask);
    let by_docker = choices.bool();
    let Some((handle, id)) = Handle::prepare(soak, by_docker, name, &ask, &words) else { return };
    let engine = if by_docker { "docker" } else { "cgpu-runtime" };
    soak.fleet.add(&id, format!("{name} by {engine}"), ask.bytes());
    soak.fleet.report(&id, soak.tally.now_ms(), &format!("prepared: {words:?}"));
    let (is_disturbed, programs) = (false, Vec::new());
    let mut container = Container { soak, handle, id, ask, choices, is_disturbed, programs };
    let made = container.create(by_docker);
    if made {
        // Many are short: what goes wrong between creators and collectors does so at the ends.
        let events = if container.choices.bool() { 1 } else { container.choices.u8(..8) };
        for _ in 0..events {
            if !soak.goes_on() {
                break;
            }
            container.happen();
        }
    }
    container.end();
}

impl Container<'_> {
    fn report(&self, what: &str) {
        self.soak.fleet.report(&self.id, self.soak.tally.now_ms(), what);
    }

    /// Somebody was killed.
    fn killed(&self, who: &'static str) {
        self.soak.tally.count("kills", who);
        self.report(&format!("killed {who}"));
    }

    /// Has it made and started; whether it runs.
    fn create(&mut self, by_docker: bool) -> bool {
        let group = if by_docker { "creates by docker" } else { "creates by cgpu-runtime" };
        let mut command = self.handle.create(self.soak);
        self.report("create");
        let deaths = self.soak.engines.deaths();
        let running = start(&mut command);
        let (running, was_killed) = match self.choices.u8(..4) {
            0 if by_docker => self.kill_of_docker(running),
            0 => self.kill_of_runtime(running),
            _ => (running, false),
        };
        let outcome = running.end(timeout());
        self.report(&format!("create ended: {}", outcome.status));
        let how = went(&outcome);
        let kind = match how {
            Went::Well => "ok",
            Went::Refused => "refused",
            _ if was_killed => "killed",
            Went::Away => "away",
            Went::Wrong if by_docker && self.soak.engines.deaths() != deaths => "away",
            Went::Wrong => {
                self.soak.tally.wonder(format!("{} {outcome}", self.id));
                "failed"
            }
        };
        self.soak.tally.count(group, kind);
        if how != Went::Well {
            return false;
        }
        if !by_docker {
            self.publish();
            if self.choices.u8(..10) == 0 {
                self.kill_init();
                return false;
            }
            let started = run_with_timeout(&mut self.handle.start(self.soak), timeout());
            self.report(&format!("start ended: {}", started.status));
            if !started.status.success() {
                self.soak.tally.wonder(format!("{} {started}", self.id));
                return false;
            }
            return true;
        }
        self.publish();
        true
    }

    /// From now on it has to have its record.
    fn publish(&self) {
        let first = self.handle.first(self.soak).and_then(Life::of);
        if let Some(member) = self.soak.fleet.all().get_mut(&self.id) {
            member.first = first;
        }
        self.report(&format!("lives as {:?}", first.map(|first| first.pid)));
    }

    /// SIGKILL of the process that makes it, whatever it is by then, or of `runc init` below it.
    fn kill_of_runtime(&mut self, mut running: Running) -> (Running, bool) {
        let until = Instant::now() + Duration::from_micros(self.choices.u64(..120_000));
        let init = self.choices.u8(..3) == 0;
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
        if running.has_ended() {
            return (running, false);
        }
        if init {
            let was = self.kill_init();
            return (running, was);
        }
        running.kill();
        self.killed("runtime");
        (running, true)
    }

    /// The same by docker, or of its shim: each is looked for until it's there.
    fn kill_of_docker(&mut self, mut running: Running) -> (Running, bool) {
        let whom = self.choices.u8(..3);
        let later = Duration::from_micros(self.choices.u64(..60_000));
        let until = Instant::now() + Duration::from_secs(2);
        let id = self.id.clone();
        while Instant::now() < until && !running.has_ended() {
            let (who, was) = match whom {
                0 => (
                    "runtime",
                    self.after(later, "cgpu-runtime", &id) || self.after(later, "runc", &id),
                ),
                1 => ("shim", self.after(later, "containerd-shim-runc-v2", &id)),
                _ => ("runc init", self.kill_init()),
            };
            if was {
                if whom != 2 {
                    self.killed(who);
                }
                return (running, true);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        (running, false)
    }

    /// Kills a program that has this id on its command line, a little after it is there.
    fn after(&self, later: Duration, program: &str, id: &str) -> bool {
        let there = procfs::process::all_processes().expect("/proc can be read").flatten();
        let mut there = there.filter(|process| {
            let line = process.cmdline().unwrap_or_default();
            line.first().is_some_and(|path| path.ends_with(program)) && has_words(process, &[id])
        });
        if there.next().is_none() {
            return false;
        }
        std::thread::sleep(later);
        kill_with(program, &[id])
    }

    /// Kills what will be its first process, while it is the runtime's.
    fn kill_init(&self) -> bool {
        let members = cgroup_members(&self.handle.cgroup(self.soak));
        let was = members
            .into_iter()
            .any(|pid| kill_if(pid, |process| has_words(process, &["runc", "init"])));
        if was {
            self.killed("runc init");
        }
        was
    }

    /// One thing that happens to a container that runs.
    fn happen(&mut self) {
        match self.choices.u8(..20) {
            0..=9 => self.exec(),
            10..=13 => self.exec_and_kill_client(),
            14..=15 => self.kill_monitor(),
            16 => {
                // One whose container ends meanwhile isn't updated, and says so.
                let _ = self.soak.gated.host.cgpu(&["upgrade-monitors"]);
                self.soak.tally.count("upgrades", "done");
            }
            _ => self.soak.nap(Duration::from_millis(self.choices.u64(..300))),
        }
    }

    /// Kills its monitor: from then on its driver calls fail, and an event reports it.
    fn kill_monitor(&mut self) {
        self.is_disturbed = true;
        if !kill_monitor(monitor(self.soak, &self.id)) {
            return;
        }
        self.killed("monitor");
        // `cgpu gc` runs all the time.
        let is_reported = wait_until(REMOVING, || is_reported_lost(self.soak, &self.id));
        let kind = if is_reported { "reported" } else { "not reported" };
        self.soak.tally.count("containers closed", kind);
        if !is_reported {
            let story = self.soak.fleet.story(&self.id);
            let what = format!("the lost monitor of {} is not reported\n    {story}", self.id);
            self.soak.tally.find(Kind::Broken, what);
        }
    }

    /// A program in it, to its end.
    fn exec(&mut self) {
        let words = program(&mut self.choices, &self.ask);
        self.report(&format!("exec {words:?}"));
        let deaths = self.soak.engines.deaths();
        let mut running = start(&mut self.handle.exec(self.soak, &words));
        let until = Instant::now() + RUNNING;
        while !running.has_ended() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        if !running.has_ended() {
            let (state, story) = (self.processes(), self.soak.fleet.story(&self.id));
            let what =
                format!("a program hangs: {words:?}\n    {}\n    {story}", state.join("\n    "));
            self.soak.tally.find(Kind::Broken, what);
            running.kill();
        }
        let outcome = running.end(timeout());
        self.ended(&words, &outcome, deaths);
    }

    /// What its processes and those of its monitor are doing, each with what it waits for.
    fn processes(&self) -> Vec<String> {
        let monitor = monitor(self.soak, &self.id);
        let mut members = cgroup_members(&self.handle.cgroup(self.soak));
        members.sort_unstable();
        members.dedup();
        let shown = members.into_iter().chain(monitor).map(|pid| {
            let read = |name: &str| {
                let text = std::fs::read_to_string(format!("/proc/{pid}/{name}"));
                text.unwrap_or_default().replace('\0', " ").trim().to_owned()
            };
            let status = read("status");
            let state = status.lines().find(|line| line.starts_with("State")).unwrap_or("gone");
            format!("{pid} {}: {state}, {} in {}", read("cmdline"), read("syscall"), read("wchan"))
        });
        let monitors = format!("monitor {monitor:?}");
        shown.chain([monitors]).collect()
    }

    /// A program in it whose client is killed; the program may go on.
    fn exec_and_kill_client(&mut self) {
        let words = program(&mut self.choices, &self.ask);
        self.report(&format!("exec {words:?}, to be killed"));
        let deaths = self.soak.engines.deaths();
        let mut running = start(&mut self.handle.exec(self.soak, &words));
        let later = Duration::from_micros(self.choices.u64(..200_000));
        std::thread::sleep(later);
        if running.has_ended() {
            let outcome = running.end(timeout());
            return self.ended(&words, &outcome, deaths);
        }
        running.kill();
        self.killed("client of an exec");
        self.soak.tally.count("execs", "killed");
        // Ended or not, it is reaped in the end.
        self.programs.push(running);
    }

    fn ended(&self, words: &[String], outcome: &Outcome, deaths: u64) {
        self.report(&format!("exec ended: {}", outcome.status));
        self.check(words, outcome);
        let lives = || self.soak.fleet.living().contains_key(&self.id);
        let is_refused =
            [&outcome.stdout, &outcome.stderr].iter().any(|text| text.contains(NO_MEMORY));
        let kind = match went(outcome) {
            Went::Well | Went::Wrong if is_refused => "refused",
            Went::Well => "ok",
            Went::Away => "away",
            // A client of docker's says nothing where dockerd goes while it waits.
            _ if self.soak.engines.deaths() != deaths => "away",
            _ if self.is_disturbed || !lives() => "disturbed",
            _ => {
                self.soak.tally.wonder(format!("{} {outcome}", self.soak.fleet.story(&self.id)));
                "failed"
            }
        };
        self.soak.tally.count("execs", kind);
    }

    /// What a program says that it got is no more than the quota, too: so nothing is missed that
    /// is held for less than the driver isn't polled.
    fn check(&self, words: &[String], outcome: &Outcome) {
        let text = outcome.stdout.split_whitespace().collect::<Vec<_>>();
        let bytes =
            text.iter().filter_map(|word| word.strip_prefix("got_bytes=")?.parse::<u64>().ok());
        let shown = text.windows(2).filter(|pair| pair[0] == "allocated");
        let shown = shown.filter_map(|pair| Some(pair[1].parse::<u64>().ok()? << 20));
        let Some(most) = bytes.chain(shown).max() else { return };
        let line = words.join(" ");
        let gpu = line
            .split("--gpu ")
            .nth(1)
            .and_then(|rest| rest.split(' ').next()?.parse::<usize>().ok());
        let quota = gpu.and_then(|gpu| self.ask.bytes().get(&gpu).copied()).unwrap_or(0);
        if most > quota && self.soak.fleet.mark(&self.id) {
            let what =
                format!("{most} of {quota} bytes, {outcome}; {}", self.soak.fleet.story(&self.id));
            self.soak.tally.find(Kind::OverQuota, what);
        }
    }

    /// Its end, of several kinds, and until no program knows it.
    fn end(mut self) {
        let by_docker = matches!(self.handle, Handle::Docker(_));
        match self.choices.u8(..8) {
            0 => {
                let first = self.soak.fleet.all().get(&self.id).and_then(|member| member.first);
                if let Some(first) = first.filter(|first| first.goes_on())
                    && kill(Pid::from_raw(first.pid), Signal::SIGKILL).is_ok()
                {
                    self.killed("first process");
                }
            }
            1 if by_docker && kill_with("containerd-shim-runc-v2", &[&self.id]) => {
                self.killed("shim")
            }
            2 => {
                let mut removing = start(&mut self.handle.remove(self.soak));
                let later = Duration::from_micros(self.choices.u64(..100_000));
                std::thread::sleep(later);
                if !removing.has_ended() {
                    removing.kill();
                    self.killed("remover");
                }
                let _ = removing.end(timeout());
            }
            _ => {}
        }
        self.remove();
        for mut program in std::mem::take(&mut self.programs) {
            program.kill();
            let _ = program.end(timeout());
        }
    }

    fn remove(&self) {
        self.report("remove");
        let until = Instant::now() + REMOVING;
        let mut said = None;
        while self.handle.is_gone(self.soak) != Some(true) {
            assert!(
                Instant::now() < until,
                "{} can't be removed: {said:?}",
                self.soak.fleet.story(&self.id)
            );
            said = Some(run_with_timeout(&mut self.handle.remove(self.soak), timeout()));
            std::thread::sleep(Duration::from_millis(20));
        }
        self.soak.fleet.end(&self.id);
        // What a runtime or a dockerd that was killed forgot: an engine that finds such, kills it.
        let members = || cgroup_members(&self.handle.cgroup(self.soak));
        wait_until(DYING, || members().is_empty());
        for pid in members() {
            if kill_if(pid, |_| true) {
                self.killed("forgotten process");
            }
        }
        self.report("removed");
        if let Handle::Runc(bundle) = &self.handle {
            std::fs::remove_dir_all(&bundle.directory).expect("it is ours");
        }
    }
}
