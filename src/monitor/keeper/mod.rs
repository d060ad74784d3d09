//! The keeper: holds what must not be lost, and ensures that there is a worker.
//!
//! A listener that is closed can't be opened again, and the calls behind it fail from then on. So the keeper, which
//! reads nothing of the container, takes the listeners from the runtime, keeps them with the journal, and gives them
//! to each worker. The keeper ends when the container is gone, and then becomes the hook that deregisters the
//! container. It must not know the meaning of a call or of the journal.

mod container;
mod orders;
mod worker_process;
mod worker_starts;
mod workers;

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tracing::warn;

use self::container::Container;
use self::workers::Workers;
use crate::gate::inherited;
use crate::gate::launch::{self, MonitorDir};
use crate::gate::settings::Settings;
use crate::monitor::peer;
use crate::process::ProcessId;

/// How often the keeper looks without being woken: at a launcher that has no pidfd, and for a worker that has to be
/// started again later.
const TICK_MS: i64 = 100;

/// How often the keeper looks whether the worker has ended unnoticed, because one of its calls hangs in the driver.
/// As long as the container has called nothing, nobody needs the worker.
const WORKER_CHECK_MS: i64 = 4000;

/// How long the worker may search what is left of a container after a request to end: longer than the search takes.
const LAST_AUDIT_TIMEOUT: Duration = Duration::from_secs(12);

/// How long after a request to end the keeper may still deregister the container. Later, the sender of the request
/// has deregistered it, and the name may belong to another container.
const DEREGISTER_TIMEOUT: Duration = Duration::from_millis(100);

/// Runs the keeper of a container until the container is gone.
///
/// # Errors
///
/// Where the keeper can't begin, or the hook that it becomes in the end can't be executed.
pub fn main() -> io::Result<()> {
    launch::detach()?;
    let descriptors = inherited::take_descriptors()?;
    inherited::close_other_descriptors();
    // A worker gets the numbers 3, 4 and 5, so the keeper duplicates its own descriptors to other numbers.
    let [listener, control, settings_socket] = &descriptors;
    let listener = UnixListener::from(duplicate_descriptor(listener)?);
    let control = UnixListener::from(duplicate_descriptor(control)?);
    let settings_socket = duplicate_descriptor(settings_socket)?;
    // Meanwhile the launcher finds out the settings.
    let remaining_controllers = leave_pod_cgroups();
    let limit_error = raise_descriptor_limit();
    let own = ProcessId::own();
    let Some(settings_file) = launch::receive_settings(&settings_socket)? else { return Ok(()) };
    drop(settings_socket);
    let settings = Settings::read(&settings_file).map_err(io::Error::other)?;
    crate::log::init_of(&settings.log, &settings.id);
    if let Some(own) = own {
        let file = MonitorDir::at(&settings.place).keeper_file();
        let _ = fs::write(file, format!("{} {}\n", own.pid, own.start_ticks));
    }
    for controllers in remaining_controllers {
        warn!(
            controllers,
            "the monitor stays in the container's cgroups, and is paid for there; let root write \
             /sys/fs/cgroup"
        );
    }
    if let Err((error, most)) = limit_error {
        warn!(
            %error,
            most,
            "few descriptors: few processes and exports can be kept account of; raise the engine's \
             limit of open files (LimitNOFILE)"
        );
    }
    let deregister_hook = settings.farewell.clone();
    let workers = Workers::new(&settings, &settings_file, descriptors)?;
    drop(settings_file);
    let mut keeper = Keeper {
        workers,
        container: Container::new(settings.launcher),
        signals: signals()?,
        listener,
        control,
        settings,
        end_requested: None,
        container_called: false,
    };
    keeper.serve()?;
    let Keeper { workers, settings, end_requested, .. } = keeper;
    drop(workers);
    if end_requested.is_some_and(|since| since.elapsed() >= DEREGISTER_TIMEOUT) {
        return Ok(());
    }
    run_deregister_hook(&deregister_hook, &settings)
}

/// Duplicates a descriptor to the lowest free number; a worker's exec closes the duplicate. The first two get the
/// numbers of standard input and output, so that no descriptor for a worker gets one of these numbers.
fn duplicate_descriptor(descriptor: &OwnedFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(descriptor, 0)?)
}

/// Signals that the keeper reads as events.
fn signals() -> io::Result<SignalFd> {
    let mut mask = SigSet::empty();
    for signal in [Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT] {
        mask.add(signal);
    }
    mask.thread_block()?;
    Ok(SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}

/// Leaves the cgroups of a pod (kubepods, libpod), where the engine has put its helpers there: the pod's end, memory
/// limit or freezer would hit the keeper, too. Also takes the keeper out of the OOM killer's choice. Returns the
/// controllers whose cgroup the host does not let the keeper leave.
fn leave_pod_cgroups() -> Vec<String> {
    let _ = fs::write("/proc/self/oom_score_adj", "-999");
    let text = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let pod_lines =
        text.lines().filter(|line| line.contains("kubepods") || line.contains("libpod"));
    // cgroups(7): HIERARCHY:CONTROLLERS:PATH. In version 2, CONTROLLERS is empty.
    let controllers = pod_lines.map(|line| line.split(':').nth(1).unwrap_or_default());
    let stays = |controllers: &&str| match controllers.strip_prefix("name=").unwrap_or(controllers)
    {
        "" => !["/sys/fs/cgroup", "/sys/fs/cgroup/unified"].iter().any(|root| {
            let own = Path::new(root).join("cgpu");
            Path::new(root).join("cgroup.procs").exists()
                && (own.is_dir() || fs::create_dir(&own).is_ok())
                && fs::write(own.join("cgroup.procs"), "0").is_ok()
        }),
        name => {
            let root = Path::new("/sys/fs/cgroup").join(name);
            fs::write(root.join("cgroup.procs"), "0").is_err()
        }
    };
    controllers.filter(stays).map(str::to_owned).collect()
}

/// The most descriptors that a monitor needs: three for each of at most 4096 known processes, a few hundred for
/// threads that called lately, 4096 exports, and 1024 files of UVM.
const DESCRIPTORS: u64 = 18 << 10;

/// Raises the limit of open files of the keeper and its workers to [`DESCRIPTORS`], or as far as the host permits:
/// engines start programs with a low default limit, or a lower one. Fails where the limit stays below [`DESCRIPTORS`]:
/// the error, and the limit.
fn raise_descriptor_limit() -> Result<(), (rustix::io::Errno, u64)> {
    let limit = getrlimit(Resource::Nofile);
    // `None` is no limit.
    let all = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let enough = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
    let wanted = if limit.maximum.is_some_and(|most| most < DESCRIPTORS) { enough } else { all };
    setrlimit(Resource::Nofile, wanted)
        .or_else(|error| setrlimit(Resource::Nofile, all).and(Err(error)))
        .map_err(|error| (error, limit.maximum.unwrap_or(u64::MAX)))
}

#[derive(Debug)]
struct Keeper {
    workers: Workers,
    container: Container,
    signals: SignalFd,
    listener: UnixListener,
    control: UnixListener,
    settings: Settings,
    /// Since when the end is requested. Only the worker goes on, and searches what is left of the container.
    end_requested: Option<Instant>,
    /// The container has called the driver: the worker said so, or a call waited for the worker. From then on no call
    /// wakes the keeper.
    container_called: bool,
}

/// Why the keeper woke up.
enum Wakeup {
    Signals,
    Runtime,
    Question,
    Worker,
    Connection(usize),
    Launcher,
    /// A call waits, and no earlier call of the container is known.
    Call,
}

impl Keeper {
    /// Serves until the container is gone.
    fn serve(&mut self) -> io::Result<()> {
        self.listener.set_nonblocking(true)?;
        self.control.set_nonblocking(true)?;
        loop {
            self.workers.ensure_worker();
            for wakeup in self.wait()? {
                match wakeup {
                    Wakeup::Signals => self.handle_signals()?,
                    Wakeup::Runtime => self.accept_runtimes(),
                    Wakeup::Question => self.accept_control(),
                    Wakeup::Worker => self.workers.receive_notices(),
                    Wakeup::Connection(at) => {
                        if let Some(listener) = self.container.receive_listener(at) {
                            self.workers.add_listener(listener);
                            self.container.acknowledge(at);
                        }
                    }
                    Wakeup::Launcher => {
                        self.container.set_launcher_ended();
                        self.workers.start_without_delay();
                    }
                    Wakeup::Call => {
                        self.container_called = true;
                        self.workers.start_without_delay();
                    }
                }
            }
            self.container_called |= self.workers.container_called();
            self.container.update();
            if let Some(since) = self.end_requested {
                if !self.workers.has_listeners() || since.elapsed() >= LAST_AUDIT_TIMEOUT {
                    return Ok(());
                }
                continue;
            }
            if self.container.check_gone(self.workers.has_listeners()) {
                return Ok(());
            }
        }
    }

    fn wait(&self) -> io::Result<Vec<Wakeup>> {
        let mut events = vec![(Wakeup::Signals, self.signals.as_fd())];
        if self.end_requested.is_none() {
            events.push((Wakeup::Runtime, self.listener.as_fd()));
            events.push((Wakeup::Question, self.control.as_fd()));
        }
        if let Some(socket) = self.workers.socket() {
            events.push((Wakeup::Worker, socket));
        }
        if !self.container_called {
            events.extend(self.workers.listeners().map(|listener| (Wakeup::Call, listener)));
        }
        let connections = self.container.connections();
        events.extend(connections.map(|(at, socket)| (Wakeup::Connection(at), socket)));
        events.extend(self.container.launcher().map(|launcher| (Wakeup::Launcher, launcher)));
        // Wakes up when the worker's socket has room for the orders that wait.
        let room = if self.workers.waits_for_room() { PollFlags::OUT } else { PollFlags::empty() };
        let flags = |wakeup: &Wakeup| match wakeup {
            Wakeup::Worker => PollFlags::IN | room,
            _ => PollFlags::IN,
        };
        let polled = events.iter().map(|(wakeup, fd)| PollFd::from_borrowed_fd(*fd, flags(wakeup)));
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        let timeout_ms = match self.needs_ticks() {
            true => Some(TICK_MS),
            false => self.container_called.then_some(WORKER_CHECK_MS),
        };
        let timeout =
            timeout_ms.map(|ms| Timespec { tv_sec: ms / 1000, tv_nsec: ms % 1000 * 1_000_000 });
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        let ready: Vec<bool> = polled.iter().map(|one| !one.revents().is_empty()).collect();
        let events = events.into_iter().zip(ready);
        Ok(events.filter(|(_, ready)| *ready).map(|((wakeup, _), _)| wakeup).collect())
    }

    fn needs_ticks(&self) -> bool {
        self.workers.needs_ticks() || self.container.needs_ticks() || self.end_requested.is_some()
    }

    fn handle_signals(&mut self) -> io::Result<()> {
        while let Some(signal) = self.signals.read_signal()? {
            match i32::try_from(signal.ssi_signo).ok().and_then(|s| Signal::try_from(s).ok()) {
                Some(Signal::SIGCHLD) => self.workers.reap(),
                Some(Signal::SIGHUP) => self.workers.replace_worker(),
                _ => drop(self.end_requested.get_or_insert_with(Instant::now)),
            }
        }
        Ok(())
    }

    fn accept_runtimes(&mut self) {
        while let Ok((stream, _)) = self.listener.accept() {
            if peer::may_change(&stream, &self.settings.state_dir).is_ok() {
                self.container.add_connection(stream.into());
            }
        }
    }

    fn accept_control(&mut self) {
        while let Ok((stream, _)) = self.control.accept() {
            self.workers.start_without_delay();
            self.workers.add_connection(stream.into());
        }
    }
}

/// Executes the hook that deregisters the container, in this process.
fn run_deregister_hook(words: &[String], settings: &Settings) -> io::Result<()> {
    let [program, arguments @ ..] = words else { return Ok(()) };
    let state = serde_json::json!({
        "ociVersion": "1.0.2", "id": settings.id, "status": "stopped", "pid": 0,
        "bundle": settings.bundle,
    });
    // A pipe holds more bytes than the state has.
    let (read, write) = io::pipe()?;
    let text = state.to_string();
    io::Write::write_all(&mut &write, text.as_bytes())?;
    drop(write);
    SigSet::all().thread_unblock()?;
    let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let mut command = Command::new(program);
    command.args(arguments).env_clear().env("PATH", path);
    Err(command.stdin(read).stdout(Stdio::null()).exec())
}
