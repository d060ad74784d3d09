//! A simulated driver, a worker with what a keeper holds for it, and programs under the
//! filter.
#![allow(unsafe_code, reason = "a child installs a filter and inherits descriptors")]

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Write};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use cgpu::gate::settings::{Gpu, Identity, Managed, Node, NodeKind, Settings};
use cgpu::gate::wire::{Answer, Notice, Order, Question, Status};
use cgpu::monitor::journal::JOURNAL_BYTES;
use cgpu::process::ProcessId;
use cgpu::registry::share::{self, Share};
use nix::libc;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    recvmsg, sendmsg, socketpair,
};
use serde_json::Value;

use crate::filter;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const TOTAL: u64 = 4096 * MIB;
pub(crate) const QUOTA: u64 = 1024 * MIB;

/// Descriptors that a worker has at most, where a test says so.
pub(crate) const DESCRIPTORS: u64 = 1024;

/// Longer than an attack takes on an emulated processor that others keep busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(600);

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
        let text = fs::read(self.dir.path().join("sim/state")).expect("it tells its state");
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
        }
    }
}

type Kept = BTreeMap<u64, OwnedFd>;

/// A worker, its socket, and who hears what it says there.
struct Worker {
    child: Child,
    socket: Arc<OwnedFd>,
    ear: JoinHandle<()>,
}

/// A container's monitor, but for its keeper, which this is.
pub(crate) struct Monitor {
    pub(crate) sim: Sim,
    settings: File,
    journal: OwnedFd,
    listeners: Mutex<Vec<(u64, OwnedFd)>>,
    /// Files that a worker has had kept, by its numbers.
    kept: Arc<Mutex<Kept>>,
    worker: Mutex<Option<Worker>>,
    pub(crate) wait_killable: bool,
    /// Whether the worker has pidfds of threads, as since Linux 6.9.
    thread_pidfds: bool,
    log: tempfile::NamedTempFile,
    /// What its workers leave of themselves.
    place: tempfile::TempDir,
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

    /// One on a kernel before 5.19.
    pub(crate) fn on_an_old_kernel() -> Self {
        Self::made(&Kind { wait_killable: false, thread_pidfds: false, ..Kind::default() })
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

    /// One that follows its share.
    pub(crate) fn sharing() -> Self {
        Self::made(&Kind { shares: true, ..Kind::default() })
    }

    /// Says what the container has of its first GPU's computing time, and others beside it; nothing
    /// where nobody sets slices.
    pub(crate) fn share(&self, share: Option<&Share>) {
        let uuid = self.sim.uuid(0);
        share::write(self.place.path(), &uuid, share).expect("it can be written");
    }

    fn made(kind: &Kind<'_>) -> Self {
        let Kind { driver, managed, wait_killable, spares_host, thread_pidfds, gpus, shares } =
            *kind;
        let sim = Sim::new(driver);
        let dev = sim.dev();
        let log = tempfile::NamedTempFile::new().expect("a log can be made");
        let place = tempfile::tempdir().expect("a directory can be made");
        fs::create_dir(share::dir(place.path())).expect("a directory can be made");
        let settings = Settings {
            id: "test".into(),
            short_id: "test00000000".into(),
            name: None,
            root: String::new(),
            state_dir: if shares { place.path().into() } else { "".into() },
            bundle: "/nowhere".into(),
            place: place.path().into(),
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
            monitor: "cgpu-monitor".into(),
            farewell: Vec::new(),
            launcher: ProcessId::own().expect("/proc is mounted"),
            state_file: None,
            spares_host,
            interruptible: !wait_killable,
            log: log.path().to_string_lossy().into_owned(),
        };
        let file = File::from(memfd_create(c"settings", MFdFlags::empty()).expect("a memfd"));
        settings.write(&file).expect("settings can be written");
        let journal = memfd_create(c"journal", MFdFlags::empty()).expect("a memfd");
        nix::unistd::ftruncate(&journal, JOURNAL_BYTES as i64).expect("it can be so long");
        let monitor = Monitor {
            sim,
            settings: file,
            journal,
            listeners: Mutex::new(Vec::new()),
            kept: Arc::default(),
            worker: Mutex::new(None),
            wait_killable,
            thread_pidfds,
            log,
            place,
        };
        monitor.start();
        monitor
    }

    /// Starts a worker in the place of the one before.
    pub(crate) fn start(&self) {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
                .expect("a pair of sockets");
        let mut command = Command::new(program("cgpu-monitor"));
        command.arg("work");
        let inherited = [theirs.as_raw_fd(), self.settings.as_raw_fd(), self.journal.as_raw_fd()];
        let thread_pidfds = self.thread_pidfds;
        // SAFETY: between fork and exec only dup2, fcntl and prctl are called, which are
        // async-signal-safe.
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
                die_with_parent();
                Ok(())
            });
        }
        let child = command.spawn().expect("a worker starts");
        drop(theirs);
        let mut worker = self.worker();
        for (number, listener) in self.listeners.lock().unwrap().iter() {
            order(&ours, Order::Listener { number: *number }, Some(listener));
        }
        for (number, file) in self.kept.lock().unwrap().iter() {
            order(&ours, Order::Kept { number: *number }, Some(file));
        }
        order(&ours, Order::Begin, None);
        let socket = Arc::new(ours);
        let (heard, kept) = (Arc::clone(&socket), Arc::clone(&self.kept));
        let (ready, is_ready) = std::sync::mpsc::channel();
        let ear = std::thread::spawn(move || hear(&heard, &kept, &ready));
        is_ready.recv_timeout(PATIENCE).expect("it's ready");
        *worker = Some(Worker { child, socket, ear });
    }

    /// Kills the worker and starts another.
    pub(crate) fn replace(&self) {
        self.kill();
        self.start();
    }

    fn worker(&self) -> MutexGuard<'_, Option<Worker>> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn kill(&self) {
        let mut worker = self.worker().take().expect("there is one");
        worker.child.kill().expect("it can be killed");
        worker.child.wait().expect("it ends");
        worker.ear.join().expect("it heard all");
    }

    /// Kills the worker and starts another, though the driver may keep a thread of the one before:
    /// so the keeper does.
    pub(crate) fn abandon(&self) -> Child {
        let killed = self.send_kill();
        std::thread::sleep(Duration::from_millis(10));
        self.start();
        killed
    }

    /// Kills the worker without waiting for its end, which the driver may hold up.
    pub(crate) fn send_kill(&self) -> Child {
        let mut worker = self.worker().take().expect("there is one");
        worker.child.kill().expect("it can be killed");
        worker.child
    }

    pub(crate) fn drain(&self) -> bool {
        let mut worker = self.worker().take().expect("there is one");
        order(&worker.socket, Order::Drain, None);
        let ended = worker.child.wait().expect("it ends").success();
        worker.ear.join().expect("it heard all");
        ended
    }

    pub(crate) fn worker_pid(&self) -> u32 {
        self.worker().as_ref().expect("there is one").child.id()
    }

    /// Lets the worker have descriptors up to that number, and no more than its first limit.
    pub(crate) fn limit_descriptors(&self, most: u64) {
        let limit = libc::rlimit { rlim_cur: most, rlim_max: DESCRIPTORS };
        let pid = self.worker_pid().cast_signed();
        // SAFETY: reads the struct, and has nowhere to write the old one.
        let set = unsafe {
            libc::prlimit(pid, libc::RLIMIT_NOFILE, &raw const limit, std::ptr::null_mut())
        };
        assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
    }

    fn order(&self, what: Order, descriptor: Option<&OwnedFd>) {
        order(&self.worker().as_ref().expect("there is one").socket, what, descriptor);
    }

    pub(crate) fn ask(&self, question: &Question) -> Answer {
        let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
        self.order(Order::Control, Some(&theirs.into()));
        let mut text = serde_json::to_vec(question).unwrap();
        text.push(b'\n');
        (&ours).write_all(&text).expect("it listens");
        let mut line = String::new();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        BufReader::new(ours).read_line(&mut line).expect("it answers");
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

    /// What the worker has logged.
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
        let program = cgpu::gate::filter::program(cgpu::gate::filter::Machine::HERE);
        let wait_killable = self.wait_killable;
        let socket = theirs.as_raw_fd();
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        // SAFETY: the child has one thread; what it calls allocates little, before its exec.
        unsafe {
            command.pre_exec(move || {
                let listener = filter::install(&program, wait_killable)?.into_raw_fd();
                give(socket, listener)?;
                libc::close(listener);
                die_with_parent();
                Ok(())
            });
        }
        let child = command.spawn().expect("the program starts");
        drop(theirs);
        let listener = take(&ours);
        let mut listeners = self.listeners.lock().unwrap();
        let number = listeners.last().map_or(1, |(number, _)| number + 1);
        if self.worker().is_some() {
            self.order(Order::Listener { number }, Some(&listener));
        }
        listeners.push((number, listener));
        child
    }

    /// Runs a program under the filter to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Said {
        let output = wait(self.spawn(arguments));
        Said::of(&output)
    }

    /// Starts a program whose output nobody wants: of others', what a pipe doesn't hold keeps them
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
            assert!(begun.elapsed() < PATIENCE, "{used} are used, not {bytes:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // A worker in a call that hangs can't be killed.
        let _ = fs::write(self.sim.dir.path().join("sim/faults"), "clear\n");
        if let Some(mut worker) = self.worker().take() {
            let _ = worker.child.kill();
            let _ = worker.child.wait();
        }
    }
}

/// Takes note of what a worker has to say until its end.
fn hear(socket: &OwnedFd, kept: &Mutex<Kept>, ready: &std::sync::mpsc::Sender<()>) {
    let mut bytes = [0; 256];
    let mut space = nix::cmsg_space!(RawFd);
    loop {
        let mut into = [IoSliceMut::new(&mut bytes)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let heard = recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut into, Some(&mut space), flags);
        let Ok(heard) = heard else { return };
        let file = heard.cmsgs().expect("there is room").find_map(|control| match control {
            ControlMessageOwned::ScmRights(files) => files.first().map(|file| {
                // SAFETY: `recvmsg` has just made it.
                unsafe { OwnedFd::from_raw_fd(*file) }
            }),
            _ => None,
        });
        let length = heard.bytes;
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        match serde_json::from_slice(&bytes[..length]) {
            Ok(Notice::Keep { number }) => drop(kept.insert(number, file.expect("a file"))),
            Ok(Notice::LetGo { number }) => drop(kept.remove(&number)),
            Ok(Notice::Ready) => drop(ready.send(())),
            Ok(Notice::Called | Notice::Gone { .. }) => {}
            Err(_) => return,
        }
    }
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

/// A test that fails leaves nobody behind.
fn die_with_parent() {
    // SAFETY: takes numbers only.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Waits for a program's end; what hangs fails.
pub(crate) fn wait(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().expect("it can be waited for").is_none() {
        if begun.elapsed() > PATIENCE {
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
pub(crate) struct Said {
    pub(crate) text: String,
    pub(crate) success: bool,
}

impl Said {
    pub(crate) fn of(output: &Output) -> Self {
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        Said { text, success: output.status.success() }
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

fn order(socket: &OwnedFd, what: Order, descriptor: Option<&OwnedFd>) {
    let text = serde_json::to_vec(&what).unwrap();
    let descriptors: Vec<RawFd> = descriptor.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&descriptors)];
    let control = if descriptors.is_empty() { &rights[..0] } else { &rights[..] };
    let text = [IoSlice::new(&text)];
    sendmsg::<UnixAddr>(socket.as_raw_fd(), &text, control, MsgFlags::MSG_NOSIGNAL, None)
        .expect("the worker listens");
}

fn give(socket: RawFd, descriptor: RawFd) -> std::io::Result<()> {
    let rights = [ControlMessage::ScmRights(&[descriptor])];
    sendmsg::<UnixAddr>(socket, &[IoSlice::new(b"x")], &rights, MsgFlags::empty(), None)?;
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
    for control in message.cmsgs().expect("there is room") {
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
    /// Its number.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it go on.
    pub(crate) fn go(&self) {
        std::fs::write(&self.go, "").expect("its directory is there");
    }

    /// Its end.
    pub(crate) fn end(self) -> Said {
        Said::of(&wait(self.child))
    }

    pub(crate) fn kill(self) {
        end(self.child);
    }

    /// Lets it go on to its end.
    pub(crate) fn go_on(self) -> Said {
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
        assert!(begun.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Kills a program.
pub(crate) fn end(mut child: Child) {
    let _ = child.kill();
    wait(child);
}

/// A name in a directory, as scripts have it.
pub(crate) fn path(dir: &tempfile::TempDir, name: &str) -> String {
    dir.path().join(name).display().to_string()
}
