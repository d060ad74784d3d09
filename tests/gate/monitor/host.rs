//! A simulated driver, a monitor, and programs under the filter.
#![allow(unsafe_code, reason = "a child installs a filter and inherits descriptors")]

use std::fs::{self, File};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use cgpu_host::process::ProcessId;
use cgpu_host::registry::share::{self, Share};
use cgpu_monitor::gate::client::AskError;
use cgpu_monitor::gate::entry::{LISTENER_SENT, LISTENER_TAKEN};
use cgpu_monitor::gate::launch::MonitorDir;
use cgpu_monitor::gate::settings::{Gpu, Identity, Managed, Node, NodeKind, Settings};
use cgpu_monitor::gate::upgrade::{UpgradeError, upgrade};
use cgpu_monitor::gate::wire::{Answer, Question, Status};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    recvmsg, sendmsg, socketpair,
};
use nix::unistd::Pid;
use serde_json::Value;

use crate::monitor::filter;
use crate::support::timeout;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const TOTAL: u64 = 4096 * MIB;
pub(crate) const QUOTA: u64 = 1024 * MIB;

/// Descriptors that a monitor has at most, where a test says so.
pub(crate) const DESCRIPTORS: u64 = 1024;

/// A program of this workspace that isn't this package's.
pub(crate) fn program(name: &str) -> PathBuf {
    // To measure, as the benches do.
    if let Some(place) = std::env::var_os("CGPU_BIN_DIR") {
        return PathBuf::from(place).join(name);
    }
    let exe = std::env::current_exe().expect("a test has a file");
    let place = exe.parent().and_then(Path::parent).expect("in target/debug/deps");
    let path = place.join(name);
    assert!(path.exists(), "{} is missing; cargo build --workspace --bins", path.display());
    path
}

/// The simulated driver.
pub(crate) struct Sim {
    child: Child,
    dir: tempfile::TempDir,
}

impl Sim {
    pub(crate) fn new(driver: &str) -> Self {
        let dir = tempfile::tempdir().expect("a directory can be made");
        let mut command = Command::new(program("cgpu-sim"));
        command.arg("--dir").arg(dir.path()).args(["--gpu", "4096MiB", "--gpu", "4096MiB"]);
        command.args(["--driver", driver]).stdout(Stdio::piped());
        let mut child = spawn_with_us(&mut command);
        let mut line = String::new();
        let said = child.stdout.take().expect("it's a pipe");
        BufReader::new(said).read_line(&mut line).expect("it says something");
        assert_eq!(line, "ready\n");
        Sim { child, dir }
    }

    pub(crate) fn dev(&self) -> PathBuf {
        self.dir.path().join("dev")
    }

    pub(crate) fn state(&self) -> Value {
        let text = fs::read(self.dir.path().join("sim/state")).expect("it reports its state");
        serde_json::from_slice(&text).expect("of one moment")
    }

    pub(crate) fn used(&self, gpu: usize) -> u64 {
        self.state()["gpus"][gpu]["used_bytes"].as_u64().expect("it is a number")
    }

    pub(crate) fn uuid(&self, gpu: usize) -> String {
        self.state()["gpus"][gpu]["uuid"].as_str().expect("it is a text").to_owned()
    }

    pub(crate) fn fault(&self, line: &str) {
        fs::write(self.dir.path().join("sim/faults"), format!("{line}\n")).expect("a fault");
    }
}

impl Drop for Sim {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.dir.path()).status();
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a container is of, and its host.
struct Kind<'a> {
    driver: &'a str,
    managed: Managed,
    wait_killable: bool,
    spares_host: bool,
    thread_pidfds: bool,
    gpus: usize,
    /// Whether it follows what is said of its share.
    shares: bool,
    /// What its own processes may take, in thousandths of a processor.
    processor_limit: Option<u64>,
}

impl Default for Kind<'_> {
    fn default() -> Self {
        Kind {
            driver: "535.161.08",
            managed: Managed::Refuse,
            wait_killable: true,
            spares_host: false,
            thread_pidfds: true,
            gpus: 1,
            shares: false,
            processor_limit: None,
        }
    }
}

pub(crate) struct Monitor {
    pub(crate) sim: Sim,
    /// The pid of the monitor's process.
    pid: u32,
    /// Keeps the monitor from ending between two programs.
    _runtime: UnixStream,
    pub(crate) wait_killable: bool,
    log: tempfile::NamedTempFile,
    /// The directory of all monitors' state, and this one's directory in it.
    state: tempfile::TempDir,
    place: MonitorDir,
}

fn node(kind: NodeKind, path: PathBuf) -> Node {
    let metadata = fs::metadata(&path).expect("the node is there");
    let identity = if metadata.file_type().is_char_device() {
        Identity::Device(metadata.rdev())
    } else {
        Identity::File { device: metadata.dev(), inode: metadata.ino() }
    };
    Node { kind, path, identity }
}

impl Monitor {
    pub(crate) fn new() -> Self {
        Self::made(&Kind::default())
    }

    /// One whose programs, which have the host's mounts, are the runtime's hooks.
    pub(crate) fn of_hooks() -> Self {
        Self::made(&Kind { spares_host: true, ..Kind::default() })
    }

    /// One on a kernel before 6.9.
    pub(crate) fn without_thread_pidfds() -> Self {
        Self::made(&Kind { thread_pidfds: false, ..Kind::default() })
    }

    /// One of another driver.
    pub(crate) fn of_driver(driver: &str) -> Self {
        Self::made(&Kind { driver, ..Kind::default() })
    }

    /// One of a container with two GPUs.
    pub(crate) fn of_two_gpus() -> Self {
        Self::made(&Kind { gpus: 2, ..Kind::default() })
    }

    /// One of such a container where managed memory is charged.
    pub(crate) fn charging_on_two_gpus() -> Self {
        Self::made(&Kind { gpus: 2, managed: Managed::Charge, ..Kind::default() })
    }

    pub(crate) fn with(managed: Managed, wait_killable: bool) -> Self {
        Self::made(&Kind { managed, wait_killable, ..Kind::default() })
    }

    /// One of a container that may take so many thousandths of a processor.
    pub(crate) fn limited(processor_limit: u64) -> Self {
        Self::made(&Kind { processor_limit: Some(processor_limit), ..Kind::default() })
    }

    /// One that follows its share.
    pub(crate) fn sharing() -> Self {
        Self::made(&Kind { shares: true, ..Kind::default() })
    }

    /// Says what the container has of its first GPU's computing time, together with others; nothing
    /// if no monitor sets slices.
    pub(crate) fn share(&self, share: Option<&Share>) {
        let uuid = self.sim.uuid(0);
        share::write(self.state.path(), &uuid, share).expect("it can be written");
    }

    fn made(kind: &Kind<'_>) -> Self {
        let Kind { driver, managed, wait_killable, spares_host, thread_pidfds, gpus, .. } = *kind;
        let Kind { shares, processor_limit, .. } = *kind;
        let sim = Sim::new(driver);
        let dev = sim.dev();
        let log = tempfile::NamedTempFile::new().expect("a log can be made");
        let state = tempfile::tempdir().expect("a directory can be made");
        let place = MonitorDir::of(state.path(), "test00000000");
        fs::create_dir_all(place.dir()).expect("a directory can be made");
        fs::create_dir(share::dir(state.path())).expect("a directory can be made");
        let settings = Settings {
            id: "test".into(),
            short_id: "test00000000".into(),
            name: None,
            root: String::new(),
            state_dir: if shares { state.path().into() } else { "".into() },
            bundle: "/nowhere".into(),
            place: place.dir().into(),
            driver: driver.into(),
            managed,
            channel_groups: 256,
            gpus: (0..gpus)
                .map(|gpu| Gpu {
                    index: gpu.try_into().unwrap(),
                    uuid: sim.uuid(gpu),
                    minor: gpu.try_into().unwrap(),
                    limit_bytes: QUOTA,
                })
                .collect(),
            nodes: [
                node(NodeKind::Control, dev.join("nvidiactl")),
                node(NodeKind::Uvm, dev.join("nvidia-uvm")),
            ]
            .into_iter()
            .chain((0..gpus).map(|gpu| node(NodeKind::Gpu(gpu), dev.join(format!("nvidia{gpu}")))))
            .collect(),
            config: None,
            processor_limit,
            processor_shares: None,
            started_in: String::new(),
            launcher: ProcessId::own().expect("/proc is mounted"),
            state_file: None,
            spares_host,
            interruptible: !wait_killable,
            log: log.path().to_string_lossy().into_owned(),
        };
        let file = File::from(memfd_create(c"settings", MFdFlags::empty()).expect("a memfd"));
        settings.write(&file).expect("settings can be written");
        start(&place, &file, thread_pidfds);
        until("it is there", || matches!(place.process(), Ok(Some(_))));
        let pid = place.process().expect("it can be read").expect("it lives").pid.cast_unsigned();
        let runtime = UnixStream::connect(place.entry()).expect("it listens");
        let monitor = Monitor { sim, pid, _runtime: runtime, wait_killable, log, state, place };
        monitor.status();
        monitor
    }

    /// Has the installed program go on in the monitor, as soon as no call hangs. A busy host may keep the monitor from
    /// its answer for longer than the client waits.
    pub(crate) fn update(&self) {
        until("it is updated", || match self.ask_for_update() {
            Ok(()) => true,
            Err(UpgradeError::Refused { .. } | UpgradeError::Ask(AskError::Silent { .. })) => false,
            other => panic!("{other:?}"),
        });
        assert_eq!(self.status().pid, self.pid);
    }

    /// Has the installed program go on in the monitor. `false` if the monitor refuses.
    pub(crate) fn try_update(&self) -> bool {
        match self.ask_for_update() {
            Ok(()) => true,
            Err(UpgradeError::Refused { .. }) => false,
            other => panic!("{other:?}"),
        }
    }

    fn ask_for_update(&self) -> Result<(), UpgradeError> {
        let all = upgrade(self.state.path(), &program("cgpu-monitor")).expect("it is installed");
        let [only] = <[_; 1]>::try_from(all).unwrap_or_else(|all| panic!("{all:?}"));
        only.versions.map(|versions| assert!(versions.is_some(), "no program is put in its place"))
    }

    pub(crate) fn signal(&self, signal: Signal) -> nix::Result<()> {
        kill(Pid::from_raw(self.pid.cast_signed()), signal)
    }

    /// Kills the monitor, and doesn't wait for its end, which the driver may hold up.
    pub(crate) fn kill(&self) {
        self.signal(Signal::SIGKILL).expect("it can be killed");
    }

    pub(crate) fn is_alive(&self) -> bool {
        matches!(self.place.process(), Ok(Some(_)))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// Lets the monitor have descriptors up to that number, and no more than its first limit.
    pub(crate) fn limit_descriptors(&self, most: u64) {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: DESCRIPTORS };
        let pid = self.pid.cast_signed();
        // SAFETY: reads the struct, and has nowhere to write the old one.
        let set = unsafe {
            libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut())
        };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }

    pub(crate) fn ask(&self, question: &Question) -> Answer {
        let stream = UnixStream::connect(self.place.control()).expect("it listens");
        let mut text = serde_json::to_vec(question).unwrap();
        text.push(b'\n');
        (&stream).write_all(&text).expect("it listens");
        let mut line = String::new();
        stream.set_read_timeout(Some(timeout())).unwrap();
        BufReader::new(stream).read_line(&mut line).expect("it answers");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{line:?}: {error}"))
    }

    pub(crate) fn status(&self) -> Status {
        match self.ask(&Question::Status) {
            Answer::Status(status) => *status,
            other => panic!("{other:?}"),
        }
    }

    /// The slices of all channel groups that there are, in order.
    pub(crate) fn slices(&self) -> Vec<u64> {
        const GROUP: u64 = 0xa06c;
        let state = self.sim.state();
        let clients = state["clients"].as_array().expect("a list").iter();
        let objects = clients.flat_map(|client| client["objects"].as_array().expect("a list"));
        let groups = objects.filter(|object| object["class"] == GROUP);
        let mut slices: Vec<u64> =
            groups.map(|group| group["timeslice_us"].as_u64().expect("a number")).collect();
        slices.sort_unstable();
        slices
    }

    /// Of all channels that there are: whether each is off the GPU.
    pub(crate) fn channels_off(&self) -> Vec<bool> {
        const CHANNEL: u64 = 0xc56f;
        let state = self.sim.state();
        let clients = state["clients"].as_array().expect("a list").iter();
        let objects = clients.flat_map(|client| client["objects"].as_array().expect("a list"));
        let channels = objects.filter(|object| object["class"] == CHANNEL);
        channels.map(|channel| channel["disabled"].as_bool().expect("a flag")).collect()
    }

    /// What the monitor has logged.
    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log.path()).expect("the log is a text")
    }

    pub(crate) fn used(&self) -> u64 {
        self.status().gpus[0].used_bytes
    }

    /// Starts a program under the filter.
    pub(crate) fn spawn(&self, arguments: &[&str]) -> Child {
        self.spawn_as(
            Command::new(program("rmtool")).args(["--dev"]).arg(self.sim.dev()).args(arguments),
        )
    }

    pub(crate) fn spawn_as(&self, command: &mut Command) -> Child {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        let program =
            cgpu_monitor::gate::filter::program(cgpu_monitor::gate::filter::Machine::HERE);
        let wait_killable = self.wait_killable;
        let socket = theirs.as_raw_fd();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: the child has one thread; what it calls allocates little, before its exec.
        unsafe {
            command.pre_exec(move || {
                let listener = filter::install(&program, wait_killable)?.into_raw_fd();
                give(socket, b"x", listener)?;
                libc::close(listener);
                die_with_parent();
                Ok(())
            });
        }
        let child = command.spawn().expect("the program starts");
        drop(theirs);
        let listener = take(&ours);
        let entry = UnixStream::connect(self.place.entry()).expect("it listens");
        give(entry.as_raw_fd(), LISTENER_SENT, listener.as_raw_fd()).expect("it takes listeners");
        let mut taken = [0; LISTENER_TAKEN.len()];
        (&entry).read_exact(&mut taken).expect("it has taken it");
        child
    }

    /// Runs a program under the filter to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> ProgramOutput {
        let output = wait(self.spawn(arguments));
        ProgramOutput::of(&output)
    }

    /// Starts a program whose output is discarded: of others', what a pipe doesn't hold keeps them
    /// from going on.
    pub(crate) fn sibling(&self, lines: &str) -> Child {
        let mut child = self.spawn(&script(lines));
        let mut said = child.stdout.take().expect("it's a pipe");
        std::thread::spawn(move || std::io::copy(&mut said, &mut std::io::sink()));
        child
    }

    /// Waits until the monitor says that so much is used.
    #[track_caller]
    pub(crate) fn wait_for(&self, bytes: u64) {
        self.wait_within(bytes..=bytes);
    }

    /// Waits until the monitor says that as much is used as it may be.
    #[track_caller]
    pub(crate) fn wait_within(&self, bytes: RangeInclusive<u64>) {
        let begun = Instant::now();
        while !bytes.contains(&self.used()) {
            let used = self.used();
            assert!(begun.elapsed() < timeout(), "{used} are used, not {bytes:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // A monitor in a call that hangs can't be killed.
        let _ = fs::write(self.sim.dir.path().join("sim/faults"), "clear\n");
        let _ = self.signal(Signal::SIGKILL);
        let begun = Instant::now();
        while self.is_alive() && begun.elapsed() < timeout() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Starts a monitor, as a launcher does. It detaches itself from this process.
fn start(place: &MonitorDir, settings: &File, thread_pidfds: bool) {
    let entry = UnixListener::bind(place.entry()).expect("a socket");
    let control = UnixListener::bind(place.control()).expect("a socket");
    let (ours, theirs) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .expect("a pair of sockets");
    let mut command = Command::new(program("cgpu-monitor"));
    command.arg("serve").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let inherited = [entry.as_raw_fd(), control.as_raw_fd(), theirs.as_raw_fd()];
    // SAFETY: between fork and exec only dup2, fcntl and prctl are called, which are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            let high = inherited.map(|fd| libc::fcntl(fd, libc::F_DUPFD, 100));
            for (to, from) in (3..).zip(high) {
                libc::dup2(from, to);
            }
            if !thread_pidfds {
                let flag = libc::O_EXCL.cast_unsigned(); // PIDFD_THREAD
                filter::forget_flag(libc::SYS_pidfd_open, flag)?;
            }
            Ok(())
        });
    }
    assert!(command.status().expect("a monitor starts").success());
    drop(theirs);
    give(ours.as_raw_fd(), b"{}", settings.as_raw_fd()).expect("it waits for its settings");
}

/// Starts a program that ends with us.
pub(crate) fn spawn_with_us(command: &mut Command) -> Child {
    // SAFETY: takes numbers only, and is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            die_with_parent();
            Ok(())
        });
    }
    command.spawn().expect("the program starts")
}

/// A test that fails leaves no process behind.
fn die_with_parent() {
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Waits for a program's end; what hangs fails.
pub(crate) fn wait(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().expect("it can be waited for").is_none() {
        if begun.elapsed() > timeout() {
            let _ = child.kill();
            let output = child.wait_with_output().expect("it ends");
            panic!("it hangs: {}", String::from_utf8_lossy(&output.stdout));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    child.wait_with_output().expect("it ended")
}

/// What a program said.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    pub(crate) text: String,
    pub(crate) success: bool,
}

impl ProgramOutput {
    pub(crate) fn of(output: &Output) -> Self {
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        ProgramOutput { text, success: output.status.success() }
    }

    #[track_caller]
    pub(crate) fn must(&self, part: &str) -> &Self {
        assert!(self.text.contains(part), "no {part:?} in {}", self.text);
        self
    }

    /// The number after `key=`, wherever it stands last.
    #[track_caller]
    pub(crate) fn number(&self, key: &str) -> u64 {
        let key = format!("{key}=");
        let found = self.text.split_whitespace().rev().find_map(|word| word.strip_prefix(&key));
        let found = found.unwrap_or_else(|| panic!("no {key} in {}", self.text));
        found.parse().expect("it is a number")
    }
}

fn give(socket: RawFd, words: &[u8], descriptor: RawFd) -> std::io::Result<()> {
    let rights = [ControlMessage::ScmRights(&[descriptor])];
    sendmsg::<UnixAddr>(socket, &[IoSlice::new(words)], &rights, MsgFlags::empty(), None)?;
    Ok(())
}

fn take(socket: &UnixStream) -> OwnedFd {
    let mut bytes = [0; 8];
    let mut space = nix::cmsg_space!(RawFd);
    let mut into = [IoSliceMut::new(&mut bytes)];
    let message = recvmsg::<UnixAddr>(
        socket.as_raw_fd(),
        &mut into,
        Some(&mut space),
        MsgFlags::MSG_CMSG_CLOEXEC,
    )
    .expect("the child sends its listener");
    let mut found = None;
    for control in message.cmsgs().expect("the buffer is large enough") {
        if let ControlMessageOwned::ScmRights(descriptors) = control {
            found = descriptors.first().copied();
        }
    }
    // SAFETY: `recvmsg` has just made it.
    unsafe { OwnedFd::from_raw_fd(found.expect("a descriptor came along")) }
}

/// A program in the middle of its script.
#[derive(Debug)]
pub(crate) struct Halfway {
    child: Child,
    go: String,
    _dir: tempfile::TempDir,
}

impl Halfway {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it go on.
    pub(crate) fn go(&self) {
        std::fs::write(&self.go, "").expect("its directory is there");
    }

    /// Its end.
    pub(crate) fn end(self) -> ProgramOutput {
        ProgramOutput::of(&wait(self.child))
    }

    pub(crate) fn kill(self) {
        end(self.child);
    }

    /// Lets it go on to its end.
    pub(crate) fn go_on(self) -> ProgramOutput {
        self.go();
        self.end()
    }
}

impl Monitor {
    /// Runs lines until those that are `after` something that the test does.
    #[track_caller]
    pub(crate) fn halfway(&self, before: &str, after: &str) -> Halfway {
        let dir = tempfile::tempdir().expect("a directory");
        let (ready, go) = (path(&dir, "ready"), path(&dir, "go"));
        let lines = format!("{before}\ntouch {ready}\nwait {go}\n{after}");
        let child = self.spawn(&script(&lines));
        until("it is ready", || Path::new(&ready).exists());
        Halfway { child, go, _dir: dir }
    }
}

/// The lines of a script, as rmtool takes them.
pub(crate) fn script(lines: &str) -> Vec<&str> {
    std::iter::once("run").chain(lines.lines()).collect()
}

/// Waits for what must come soon.
#[track_caller]
pub(crate) fn until(what: &str, done: impl Fn() -> bool) {
    let begun = Instant::now();
    while !done() {
        assert!(begun.elapsed() < timeout(), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

pub(crate) fn end(mut child: Child) {
    let _ = child.kill();
    wait(child);
}

/// A name in a directory, as scripts have it.
pub(crate) fn path(dir: &tempfile::TempDir, name: &str) -> String {
    dir.path().join(name).display().to_string()
}
