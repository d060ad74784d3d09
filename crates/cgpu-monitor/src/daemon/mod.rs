//! The monitor's process: it begins, answers the driver calls of one container, is updated, and ends with the
//! container.
//!
//! [`decide`](crate::decide) decides how a call is handled. The threads:
//!
//! | name | does |
//! |---|---|
//! | (the first) | takes listeners and questions, waits for the container's first call, and for its end |
//! | `audit` | asks driver and kernel what the container has ([`audit_thread`]) |
//! | `end`, `control` | for a while: limit the container's end, answer a question |
//!
//! From the container's first call on ([`CallService`](crate::calls::CallService)):
//!
//! | name | does |
//! |---|---|
//! | `calls`, several | each has a queue of listeners and serves their calls, others wait |
//! | `mappings` | checks what processes have mapped of nvidia-uvm ([`uvm`](crate::uvm)) |
//! | `shares`, `shares heard` | set slices, and wait for changes ([`compute`](crate::compute)) |
//! | `turns` | takes the container off its GPUs and back, if it has turns |
//!
//! If the process ends before its container, the container's driver calls fail from then on: its listeners are closed.

mod audit_thread;
mod container_end;
mod control_socket;
mod deny_list;
mod peer;
mod resident;
mod runtimes;
mod service;
mod startup;
mod status;
mod update;

pub use crate::caller::check_sizes;
pub use crate::driver::{Amount, Unanswered, examine, try_slice};
pub use crate::node::Failure;
pub use crate::processes::end_if_taken;
#[cfg(test)]
pub(crate) use service::{RetainedFiles, Service};
#[cfg(test)]
pub(crate) use update::retained_descriptors;

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use runtimes::Runtimes;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::set_name;
use startup::Confinement;
use tracing::warn;
use update::Requests;

use crate::caller::{Interrupted, Listener, Listeners};
use crate::calls::CallThreads;
use crate::compute::end_turns;
use crate::gate::launch::{self, MonitorDir};
use crate::gate::settings::Settings;
use crate::gate::wire::Answer;
use crate::gate::{inherited, own_cgroup};
use crate::snapshot::{CounterValues, FileNumbers, Record, Snapshot};
use crate::sync::ChangeFlag;
use cgpu_host::events::Event;
use cgpu_host::process::ProcessId;
#[cfg(not(test))]
use service::{RetainedFiles, Service};

/// How long the start of the service is delayed while nothing needs it: the container is being created meanwhile, and
/// there may be few processors for both.
const FIRST_DELAY: Duration = Duration::from_millis(50);

/// How often the monitor checks without being woken: a launcher that has no pidfd, and whether the container has ended.
const TICK: Duration = Duration::from_millis(100);

/// How soon it is checked again whether calls have their threads, if the first call hangs or a thread can't be started.
const THREADS: Duration = Duration::from_millis(20);

/// How long the monitor may search what is left of a container after a request to end: longer than the search takes.
const LAST_AUDIT_TIMEOUT: Duration = Duration::from_secs(12);

/// How many seconds a monitor with a fault may take to report it.
const LAST_WORDS_S: u32 = 2;

/// How long after a request to end the monitor may still deregister the container. Later, the sender of the request has
/// deregistered it, and the name may belong to another container.
const DEREGISTER_TIMEOUT: Duration = Duration::from_millis(100);

/// A container that is gone, and is to be deregistered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gone {
    pub id: String,
    /// Its runtime's root.
    pub root: String,
    /// The configuration that it was made with; `None` for the default one.
    pub config: Option<PathBuf>,
}

/// Serves a container until it is gone. Returns the container if it is to be deregistered.
///
/// # Errors
///
/// If the monitor can't begin, or can't go on: the container's driver calls fail from then on.
pub fn serve() -> io::Result<Option<Gone>> {
    launch::detach()?;
    startup::share_heap();
    let [entry, control, settings_socket] = inherited::take_descriptors()?;
    inherited::close_other_descriptors();
    // Meanwhile the launcher finds out the settings.
    startup::avoid_oom_killer();
    let limit_error = startup::raise_descriptor_limit();
    let own = ProcessId::own();
    let Some(settings_file) = launch::receive_settings(&settings_socket)? else { return Ok(None) };
    drop(settings_socket);
    let mut settings = Settings::read(&settings_file).map_err(io::Error::other)?;
    drop(settings_file);
    settings.started_in = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let remaining = own_cgroup::leave_pod(&settings);
    cgpu_host::log::init_of(&settings.log, &settings.id);
    if let Some(own) = own {
        MonitorDir::at(&settings.place).write_process(own);
    }
    startup::report(remaining, limit_error);
    report_losses(&settings, || {
        let runtimes = Runtimes::new(Some(settings.launcher), Vec::new(), false);
        let sockets = (entry, control);
        Daemon::new(settings.clone(), sockets, runtimes)?.run()
    })
}

/// Goes on with a container after an update: the snapshot is in the descriptor of this number. Returns as [`serve`]
/// does.
///
/// # Errors
///
/// As [`serve`].
pub fn resume(number: &str) -> io::Result<Option<Gone>> {
    startup::share_heap();
    inherited::occupy_program()?;
    // An execution by a descriptor names the thread after its number.
    let _ = set_name(c"cgpu-monitor");
    let number = number.parse().map_err(io::Error::other)?;
    // SAFETY: this process has just begun, and owns no descriptor yet.
    #[allow(unsafe_code, reason = "the number of a descriptor is in the program's arguments")]
    let mut file = File::from(unsafe { inherited::take(number) }?);
    let snapshot = update::read_snapshot(&mut file)?;
    drop(file);
    cgpu_host::log::init_of(&snapshot.settings.log, &snapshot.settings.id);
    let settings = snapshot.settings.clone();
    report_losses(&settings, || {
        let daemon = Daemon::resume(snapshot)?;
        settings.sink().report(Event::monitor_replaced());
        daemon.run()
    })
}

/// Sees that this version can go on with the snapshot on standard input.
///
/// # Errors
///
/// If it can't: why.
pub fn check() -> io::Result<()> {
    let file = io::stdin().as_fd().try_clone_to_owned()?;
    let snapshot = update::read_snapshot(&mut File::from(file))?;
    service::check(snapshot)
}

/// Runs `work`. If it fails or panics, an event says that the monitor is lost, and why.
fn report_losses<T>(settings: &Settings, work: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let (sink, place) = (settings.sink(), MonitorDir::at(&settings.place));
    let report = move |why: String| {
        if place.mark_lost() {
            sink.report(Event::monitor_lost(&why));
        }
    };
    let report = Arc::new(report);
    let reported = Arc::clone(&report);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        // If the panic came while this thread held the log's lock, reporting never returns: SIGALRM ends the process.
        nix::unistd::alarm::set(LAST_WORDS_S);
        reported(format!("it has a fault: {panic}"));
        before(panic);
        // A thread that panics takes the process along: calls would wait for it.
        std::process::abort();
    }));
    work().inspect_err(|error| report(error.to_string()))
}

#[derive(Debug)]
struct Daemon {
    settings: Settings,
    entry: UnixListener,
    control: UnixListener,
    signals: SignalFd,
    /// Set by other threads to wake the first one.
    wake: Arc<ChangeFlag>,
    runtimes: Runtimes,
    listeners: Arc<Listeners>,
    next_listener: u64,
    requests: Arc<Requests>,
    /// `None` until something needs it.
    service: Option<Service>,
    /// When the service is started even if nothing needs it.
    serves_at: Instant,
    end_requested: Option<Instant>,
}

/// Why the first thread woke up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wakeup {
    Signals,
    Runtime,
    Question,
    /// Another thread wants something, or the status has changed.
    Thread,
    Connection(usize),
    Launcher,
    /// A call waits at a listener.
    Call,
    /// The last process behind the listener with this number has ended.
    HungUp(u64),
}

impl Daemon {
    fn new(
        settings: Settings,
        (entry, control): (OwnedFd, OwnedFd),
        runtimes: Runtimes,
    ) -> io::Result<Self> {
        let wake = Arc::new(ChangeFlag::new()?);
        let (entry, control) = (UnixListener::from(entry), UnixListener::from(control));
        entry.set_nonblocking(true)?;
        control.set_nonblocking(true)?;
        Ok(Daemon {
            settings,
            entry,
            control,
            signals: signals()?,
            runtimes,
            listeners: Arc::new(Listeners::new()?),
            next_listener: 0,
            requests: Arc::new(Requests::new(Arc::clone(&wake))),
            wake,
            service: None,
            serves_at: Instant::now() + FIRST_DELAY,
            end_requested: None,
        })
    }

    /// Goes on where the snapshot was made, and says so to the process that asked for the update.
    fn resume(snapshot: Snapshot) -> io::Result<Self> {
        let taken = Taken::of(&snapshot)?;
        let Snapshot { settings, updates, records, counters, .. } = snapshot;
        let Taken { sockets, asker, runtimes, listeners, retained } = taken;
        let runtimes = Runtimes::new(snapshot.launcher, runtimes, snapshot.had_listener);
        let mut daemon = Daemon::new(settings.clone(), sockets, runtimes)?;
        daemon.next_listener = snapshot.next_listener;
        startup::drop_privileges(Confinement::Lasts)?;
        for (number, listener) in listeners {
            daemon.listeners.add(Listener::new(number, listener));
        }
        let service = daemon.new_service(settings, (records, counters, updates))?;
        service.resume(retained)?;
        service.start()?;
        daemon.service = Some(service);
        update::answer(&asker, &Answer::Done);
        Ok(daemon)
    }

    fn new_service(
        &self,
        settings: Settings,
        known: (Vec<Record>, CounterValues, u64),
    ) -> io::Result<Service> {
        Service::new(settings, known, &self.listeners, &self.wake)
    }

    /// Starts the service if it isn't yet.
    fn service(&mut self) -> io::Result<&Service> {
        let service = match self.service.take() {
            Some(service) => service,
            None => {
                check_sizes()?;
                startup::drop_privileges(Confinement::Begins)?;
                let known = (Vec::new(), CounterValues::default(), 0);
                let service = self.new_service(self.settings.clone(), known)?;
                service.start()?;
                service
            }
        };
        Ok(self.service.insert(service))
    }

    /// Serves until the container is gone.
    fn run(mut self) -> io::Result<Option<Gone>> {
        loop {
            if self.service.is_none() && Instant::now() >= self.serves_at {
                self.service()?;
            }
            let wakeups = self.wait();
            // The first call's thread starts the others itself, once it has answered.
            let is_first_call = wakeups.contains(&Wakeup::Call);
            for wakeup in wakeups {
                self.handle(wakeup)?;
            }
            if let Some(service) = &self.service {
                service.status_writer.write_if_due();
                if matches!(service.calls.call_threads(), CallThreads::Starting(_))
                    && !is_first_call
                {
                    service.calls.start_missing_threads();
                }
            }
            self.runtimes.update();
            if let Some(since) = self.end_requested {
                if !self.has_processes() || since.elapsed() >= LAST_AUDIT_TIMEOUT {
                    return Ok(self.end());
                }
            } else if self.runtimes.check_gone(self.has_processes()) {
                return Ok(self.end());
            }
        }
    }

    /// Whether the container has processes behind a listener, or isn't known to have left nothing.
    fn has_processes(&self) -> bool {
        let is_ending = self.service.as_ref().is_some_and(|of| of.container_end.is_in_progress());
        is_ending || !self.listeners.is_empty()
    }

    /// Closes the sockets and brings back what is off a GPU. Returns the container if it is to be deregistered.
    fn end(self) -> Option<Gone> {
        let Daemon { settings, entry, control, service, end_requested, .. } = self;
        drop((entry, control));
        if let Some(service) = service {
            end_turns(&service.monitor);
        }
        let is_late = end_requested.is_some_and(|since| since.elapsed() >= DEREGISTER_TIMEOUT);
        // Those of monitors that have ended. This one's own goes with the next one, or by `cgpu gc`.
        own_cgroup::remove_unused(|_| false);
        let Settings { id, root, config, .. } = settings;
        (!is_late).then_some(Gone { id, root, config })
    }

    fn wait(&self) -> Vec<Wakeup> {
        let listeners = self.listeners.all();
        let mut events = vec![(Wakeup::Signals, self.signals.as_fd())];
        if self.end_requested.is_none() {
            events.push((Wakeup::Runtime, self.entry.as_fd()));
            events.push((Wakeup::Question, self.control.as_fd()));
        }
        let connections = self.runtimes.connections();
        events.extend(connections.map(|(at, socket)| (Wakeup::Connection(at), socket)));
        events.extend(self.runtimes.launcher().map(|launcher| (Wakeup::Launcher, launcher)));
        events.push((Wakeup::Thread, self.wake.descriptor()));
        let mut timeout = self.timeout();
        let due = self.service.as_ref().and_then(|service| service.status_writer.due_in());
        timeout = timeout.into_iter().chain(due).min();
        events.extend(listeners.iter().map(|of| (Wakeup::HungUp(of.number()), of.descriptor())));
        // Poll always reports a hang-up. Once there are threads for calls, they receive the calls.
        let calls = if self.has_call_threads() { PollFlags::empty() } else { PollFlags::IN };
        let flags =
            |wakeup| if matches!(wakeup, Wakeup::HungUp(_)) { calls } else { PollFlags::IN };
        let polled =
            events.iter().map(|(wakeup, of)| PollFd::from_borrowed_fd(*of, flags(*wakeup)));
        let mut polled: Vec<PollFd<'_>> = polled.collect();
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            // For want of memory, or of descriptors by a limit that is lower now: this is tried again.
            Err(_) => std::thread::sleep(TICK),
        }
        let happened: Vec<PollFlags> = polled.iter().map(PollFd::revents).collect();
        let woken = events.iter().zip(happened).filter(|(_, happened)| !happened.is_empty());
        let woken = woken.map(|((wakeup, _), happened)| match wakeup {
            Wakeup::HungUp(_) if happened == PollFlags::IN => Wakeup::Call,
            wakeup => *wakeup,
        });
        woken.collect()
    }

    /// How long the first thread may wait at most; `None` if nothing is due by itself.
    fn timeout(&self) -> Option<Duration> {
        let checks = self.runtimes.needs_ticks() || self.end_requested.is_some();
        let starts = match self.service.as_ref().map(|service| service.calls.call_threads()) {
            None => Some(self.serves_at.saturating_duration_since(Instant::now())),
            Some(CallThreads::Starting(_)) => Some(THREADS),
            Some(CallThreads::Unneeded | CallThreads::Started) => None,
        };
        starts.into_iter().chain(checks.then_some(TICK)).min()
    }

    fn has_call_threads(&self) -> bool {
        let threads = self.service.as_ref().map(|service| service.calls.call_threads());
        threads.is_some_and(|threads| threads != CallThreads::Unneeded)
    }

    fn handle(&mut self, wakeup: Wakeup) -> io::Result<()> {
        match wakeup {
            Wakeup::Signals => {
                if self.signals.read_signal()?.is_some() {
                    self.end_requested.get_or_insert_with(Instant::now);
                }
            }
            Wakeup::Runtime => self.accept_runtimes(),
            Wakeup::Question => self.accept_questions()?,
            Wakeup::Thread => {
                self.wake.take();
                if let Some(asker) = self.requests.take() {
                    self.update(&asker);
                }
            }
            Wakeup::Connection(at) => {
                if let Some(listener) = self.runtimes.receive_listener(at) {
                    self.listeners.add(Listener::new(self.next_listener, listener));
                    self.next_listener += 1;
                    if let Some(service) = &self.service {
                        service.calls.serve_new_listener();
                    }
                    self.runtimes.acknowledge(at);
                }
            }
            Wakeup::Launcher => self.runtimes.set_launcher_ended(),
            Wakeup::Call => {
                if !self.has_call_threads() {
                    self.service()?.calls.start_first_thread();
                }
            }
            Wakeup::HungUp(number) => self.service()?.container_end.end_listener(number),
        }
        Ok(())
    }

    fn accept_runtimes(&mut self) {
        while let Ok((stream, _)) = self.entry.accept() {
            let Settings { state_dir, started_in, .. } = &self.settings;
            if peer::may_change(&stream, (state_dir, started_in)).is_ok() {
                self.runtimes.add_connection(stream.into());
            }
        }
    }

    fn accept_questions(&mut self) -> io::Result<()> {
        let requests = Arc::clone(&self.requests);
        while let Ok((stream, _)) = self.control.accept() {
            self.service()?.answer_questions(stream, &requests);
        }
        Ok(())
    }

    /// Has another program go on with this process. Returns if this program goes on.
    fn update(&self, asker: &UnixStream) {
        let Some(service) = &self.service else { return };
        let work = &service.monitor.work;
        let refused = if self.end_requested.is_some() || service.container_end.is_in_progress() {
            io::Error::other("the container is ending")
        } else if !work.pause(update::PAUSE, || self.listeners.wake()) {
            io::Error::other("a driver call of the container, or about it, hangs; try again later")
        } else {
            let refused = update::hand_over(asker, &self.snapshot(service, asker));
            work.resume();
            match refused {
                Err(error) => error,
                Ok(never) => match never {},
            }
        };
        warn!(error = %refused, "the monitor isn't updated");
        update::answer(asker, &Answer::Refused { reason: refused.to_string() });
    }

    fn snapshot(&self, service: &Service, asker: &UnixStream) -> Snapshot {
        let monitor = &service.monitor;
        let interrupted = monitor.interrupted.as_ref();
        let (replies, answered) = interrupted.map(Interrupted::records).unwrap_or_default();
        let listeners = self.listeners.all();
        let listener = |of: &Arc<Listener>| (of.number(), of.descriptor().as_raw_fd());
        let descriptors = FileNumbers {
            entry: self.entry.as_raw_fd(),
            control: self.control.as_raw_fd(),
            asker: asker.as_raw_fd(),
            runtimes: self.runtimes.connections().map(|(_, socket)| socket.as_raw_fd()).collect(),
            listeners: listeners.iter().map(listener).collect(),
            ..FileNumbers::default()
        };
        Snapshot {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            settings: self.settings.clone(),
            updates: monitor.updates + 1,
            records: monitor.state().records(),
            counters: monitor.counters.values(),
            replies,
            answered,
            descriptors: update::retained_descriptors(monitor, descriptors),
            launcher: self.runtimes.launcher_process(),
            had_listener: self.runtimes.had_listener(),
            next_listener: self.next_listener,
        }
    }
}

/// The descriptors of a snapshot, owned.
struct Taken {
    sockets: (OwnedFd, OwnedFd),
    asker: UnixStream,
    runtimes: Vec<OwnedFd>,
    listeners: Vec<(u64, OwnedFd)>,
    retained: RetainedFiles,
}

impl Taken {
    /// Takes them. Fails if one isn't open, or is named twice.
    fn of(snapshot: &Snapshot) -> io::Result<Self> {
        let mut all: Vec<i32> = snapshot.descriptors().collect();
        all.sort_unstable();
        if all.windows(2).any(|pair| pair.first() == pair.last()) {
            return Err(io::Error::other("the snapshot names a descriptor twice"));
        }
        // SAFETY: this process has just begun and owns none of them, and each number is taken once.
        #[allow(unsafe_code, reason = "the numbers of descriptors are in the snapshot")]
        let take = |number: &i32| unsafe { inherited::take(*number) };
        let of = &snapshot.descriptors;
        Ok(Taken {
            sockets: (take(&of.entry)?, take(&of.control)?),
            asker: take(&of.asker)?.into(),
            runtimes: of.runtimes.iter().map(take).collect::<io::Result<_>>()?,
            listeners: of
                .listeners
                .iter()
                .map(|(number, file)| Ok((*number, take(file)?)))
                .collect::<io::Result<_>>()?,
            retained: RetainedFiles::take(snapshot, take)?,
        })
    }
}

/// Signals that the first thread reads as events: requests to end.
fn signals() -> io::Result<SignalFd> {
    let mut mask = SigSet::empty();
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        mask.add(signal);
    }
    mask.thread_block()?;
    Ok(SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?)
}
