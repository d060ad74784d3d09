//! The keeper's workers: one at a time, a new one when a worker dies or is replaced.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::DupFlags;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use tracing::{debug, error, info, warn};

use crate::events::{Bucket, Event, Kind, Teller};
use crate::gate::passing::{self, Wait};
use crate::gate::settings::Settings;
use crate::gate::wire::{Notice, Order};
use crate::monitor::journal::JOURNAL_BYTES;
use crate::monitor::resident;
use crate::process::ProcessId;

/// The longest notice of a worker, in bytes.
const PACKET_BYTES: usize = 4096;

/// Control connections that wait for a worker at the same time; further ones are closed.
const MOST_CONNECTIONS: usize = 4096;

/// How long the keeper waits after a failed start: the first pause doubles with each failure, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// How long a worker may take to finish its calls before it is killed and replaced. Calls that are in the driver then
/// are in the journal, where the next worker finds them.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a killed worker may take to end. A worker that takes longer has a thread in the driver; none of its
/// threads runs the program's code any more.
const KILL_TIMEOUT: Duration = Duration::from_millis(100);

/// The most workers that the driver keeps from ending, at the same time. Each had a call that hangs, and was replaced
/// or died meanwhile.
const MOST_ENDING: usize = 8;

/// After this many failed starts, the program that the keeper itself was started from is tried: an upgrade may have
/// installed a program that can't run.
const STARTS_BEFORE_FALLBACK: u32 = 3;

/// How many ends of workers are reported at once, and the time in microseconds until one more is.
const END_EVENTS: (u32, u64) = (20, 10_000_000);

/// How long the first worker's start is delayed while nobody needs it: the container is being made meanwhile, and
/// there may be few processors for both.
const FIRST_START_DELAY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Workers {
    program: PathBuf,
    end_events: WorkerEndEvents,
    descriptors: WorkerDescriptors,
    listeners: BTreeMap<u64, OwnedFd>,
    /// Files that workers gave the keeper ([`Notice::Keep`]), by the worker's numbers.
    kept_files: BTreeMap<u64, OwnedFd>,
    next_number: u64,
    worker: Option<WorkerProcess>,
    /// Earlier workers that have not ended yet: nothing can end a thread in the driver. The next worker
    /// completes or undoes its call.
    ending: Vec<Child>,
    /// Failed starts in a row.
    failed_starts: u32,
    not_before: Option<Instant>,
    orders: VecDeque<QueuedOrder>,
    /// The worker's socket has no room for the next order.
    is_socket_full: bool,
}

/// The descriptors 3, 4 and 5 of every worker.
#[derive(Debug)]
struct WorkerDescriptors {
    /// The keeper's end of the worker's socket while a worker runs, the worker's end while it is started.
    socket: OwnedFd,
    _settings: OwnedFd,
    _journal: OwnedFd,
}

/// Reports ends of workers as events, at a limited rate.
#[derive(Debug)]
struct WorkerEndEvents {
    teller: Teller,
    began: Instant,
    told: Bucket,
    left_out: u64,
}

impl WorkerEndEvents {
    /// Reports a worker's end, or counts it: a container that can end a worker could do so for ever.
    fn tell(&mut self, event: Event) {
        let now_us = u64::try_from(self.began.elapsed().as_micros()).unwrap_or(u64::MAX);
        match self.told.take(now_us) {
            true => {
                let left_out = std::mem::take(&mut self.left_out);
                self.teller.tell(Event { left_out, ..event });
            }
            false => self.left_out += 1,
        }
    }
}

/// An order that the worker has not got yet, with the connection that comes with it. Other files are looked up when
/// the order is sent: they are many, and duplicates would be open until then.
type QueuedOrder = (Order, Option<OwnedFd>);

#[derive(Debug)]
struct WorkerProcess {
    child: Child,
    is_ready: bool,
    /// The worker said that the container has called the driver.
    container_called: bool,
    /// Until when the worker may finish; `None` where it was not told to.
    drain_until: Option<Instant>,
    /// Until when the killed worker may take to end; `None` where it was not killed.
    gone_until: Option<Instant>,
}

impl Workers {
    /// Starts no worker yet. A worker finds `descriptors` as its descriptors 3, 4 and 5.
    pub(crate) fn new(
        settings: &Settings,
        settings_file: &File,
        descriptors: [OwnedFd; 3],
    ) -> io::Result<Self> {
        let journal = memfd_create("cgpu-journal", MemfdFlags::CLOEXEC)?;
        ftruncate(&journal, JOURNAL_BYTES as u64)?;
        let [mut socket, mut settings_copy, mut journal_copy] = descriptors;
        rustix::io::dup2(File::open("/dev/null")?, &mut socket)?;
        rustix::io::dup2(settings_file, &mut settings_copy)?;
        rustix::io::dup2(&journal, &mut journal_copy)?;
        Ok(Workers {
            program: settings.monitor.clone(),
            end_events: WorkerEndEvents {
                teller: settings.teller(),
                began: Instant::now(),
                told: Bucket::new(END_EVENTS.0, END_EVENTS.1),
                left_out: 0,
            },
            descriptors: WorkerDescriptors {
                socket,
                _settings: settings_copy,
                _journal: journal_copy,
            },
            listeners: BTreeMap::new(),
            kept_files: BTreeMap::new(),
            next_number: 0,
            worker: None,
            ending: Vec::new(),
            failed_starts: 0,
            not_before: Some(Instant::now() + FIRST_START_DELAY),
            orders: VecDeque::new(),
            is_socket_full: false,
        })
    }

    /// The listeners that are served.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.listeners.values().map(AsFd::as_fd)
    }

    /// Lets the first worker start without the delay: something needs it.
    pub(crate) fn start_without_delay(&mut self) {
        if self.failed_starts == 0 {
            self.not_before = None;
        }
    }

    /// Whether the worker said that the container has called the driver.
    pub(crate) fn container_called(&self) -> bool {
        self.worker.as_ref().is_some_and(|worker| worker.container_called)
    }

    /// Whether any listener is served.
    pub(crate) fn has_listeners(&self) -> bool {
        !self.listeners.is_empty()
    }

    /// The worker's socket; `None` where there is no worker.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.worker.as_ref().map(|_| self.descriptors.socket.as_fd())
    }

    /// Whether orders are to be sent as soon as the worker's socket has room.
    pub(crate) fn waits_for_room(&self) -> bool {
        self.is_socket_full && self.takes_orders()
    }

    /// Whether the worker still gets orders. A worker that is to finish gets the orders up to [`Order::Drain`].
    fn takes_orders(&self) -> bool {
        let Some(worker) = &self.worker else { return false };
        let is_drain = |(order, _): &QueuedOrder| matches!(order, Order::Drain);
        worker.drain_until.is_none() || self.orders.iter().any(is_drain)
    }

    /// Whether the keeper has to look again without being woken.
    pub(crate) fn needs_ticks(&self) -> bool {
        let is_draining = self.worker.as_ref().is_some_and(|worker| worker.drain_until.is_some());
        self.worker.is_none() || is_draining || !self.orders.is_empty()
    }

    /// Whether the driver keeps so many workers from ending that no other is started.
    fn has_too_many_ending(&self) -> bool {
        self.ending.len() >= MOST_ENDING
    }

    /// Keeps a listener, and gives it to the worker.
    pub(crate) fn add_listener(&mut self, listener: OwnedFd) {
        let number = self.next_number;
        self.next_number += 1;
        self.listeners.insert(number, listener);
        self.queue_order(Order::Listener { number });
    }

    /// Gives a control connection to the worker, or to the next one where the worker is finishing.
    pub(crate) fn add_connection(&mut self, connection: OwnedFd) {
        let is_connection = |(order, _): &&QueuedOrder| matches!(order, Order::Control);
        if self.orders.iter().filter(is_connection).count() < MOST_CONNECTIONS {
            self.orders.push_back((Order::Control, Some(connection)));
        }
        self.send_orders();
    }

    fn queue_order(&mut self, order: Order) {
        self.orders.push_back((order, None));
        self.send_orders();
    }

    /// Sends the worker the orders that wait, as far as its socket has room.
    fn send_orders(&mut self) {
        self.is_socket_full = false;
        while self.takes_orders()
            && let Some((order, connection)) = self.orders.front()
        {
            let file = match order {
                Order::Listener { number } => self.listeners.get(number),
                Order::Kept { number } => self.kept_files.get(number),
                Order::Control => connection.as_ref(),
                Order::Begin | Order::Drain => None,
            };
            let is_gone = file.is_none() && !matches!(order, Order::Begin | Order::Drain);
            let text = serde_json::to_vec(order).expect("an order is plain data");
            let file = file.map(AsFd::as_fd);
            if !is_gone
                && let Err(errno) =
                    passing::send(&self.descriptors.socket, &text, file, Wait::Never)
            {
                // The socket has no room, or there is no worker: the next round sends it, or the next worker gets it.
                self.is_socket_full = errno == rustix::io::Errno::AGAIN;
                return;
            }
            self.orders.pop_front();
        }
    }

    /// Starts a worker where there is none, and ends a worker that takes too long to finish.
    pub(crate) fn ensure_worker(&mut self) {
        let now = Instant::now();
        self.end_worker(now);
        if self.worker.is_some() {
            return self.send_orders();
        }
        if self.not_before.is_some_and(|then| now < then) || self.has_too_many_ending() {
            return;
        }
        match self.start_worker() {
            Ok(worker) => {
                self.worker = Some(worker);
                self.send_first_orders();
            }
            Err(error) => {
                error!(%error, "cannot start a worker: the container's driver calls wait");
                self.delay_next_start();
            }
        }
    }

    /// Ends a worker that takes too long to finish, and notices a worker that has ended.
    ///
    /// The worker's socket and SIGCHLD report the end of its last thread only. A driver call keeps its thread from
    /// being killed, and that thread keeps all descriptors open. So the keeper looks at the first thread's
    /// state.
    fn end_worker(&mut self, now: Instant) {
        let Some(worker) = &mut self.worker else { return };
        let late = worker.drain_until.is_some_and(|until| now >= until);
        if late && worker.gone_until.is_none() {
            info!("the worker has not finished in time, and is replaced");
            let _ = worker.child.kill(); // fails where it has ended
            worker.gone_until = Some(now + KILL_TIMEOUT);
        }
        let keeps = worker.gone_until.is_none_or(|until| now < until);
        if keeps && !is_over(&worker.child) {
            return;
        }
        let _ = worker.child.kill(); // fails where it has ended
        // The notices that the worker sent before its end.
        self.receive_notices();
        self.handle_worker_end();
    }

    fn delay_next_start(&mut self) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.failed_starts.min(10)).min(LONGEST_PAUSE);
        self.failed_starts = self.failed_starts.saturating_add(1);
        self.not_before = Some(Instant::now() + pause);
    }

    fn start_worker(&mut self) -> io::Result<WorkerProcess> {
        let (keeper_end, worker_end) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::io::dup2(worker_end, &mut self.descriptors.socket)?;
        let uses_installed = self.failed_starts < STARTS_BEFORE_FALLBACK;
        let program: &Path =
            if uses_installed { &self.program } else { Path::new("/proc/self/exe") };
        let child = Command::new(program)
            .arg("work")
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        // Closes the worker's end in this process: where no worker has it, the socket is closed.
        rustix::io::dup3(keeper_end, &mut self.descriptors.socket, DupFlags::CLOEXEC)?;
        Ok(WorkerProcess {
            child: child?,
            is_ready: false,
            container_called: false,
            drain_until: None,
            gone_until: None,
        })
    }

    /// Gives a new worker all listeners and kept files, and then lets it begin.
    fn send_first_orders(&mut self) {
        let listeners = self.listeners.keys().map(|number| Order::Listener { number: *number });
        let kept_files = self.kept_files.keys().map(|number| Order::Kept { number: *number });
        let orders = listeners.chain(kept_files).chain([Order::Begin]).map(|order| (order, None));
        let waiting = std::mem::take(&mut self.orders);
        // Old connections stay. Listeners are among the new orders, and other old orders were for the last worker.
        let fresh = waiting.into_iter().filter(|(order, _)| matches!(order, Order::Control));
        self.orders = orders.chain(fresh).collect();
        self.send_orders();
    }

    /// Reads the worker's notices.
    pub(crate) fn receive_notices(&mut self) {
        let mut buffer = [0; PACKET_BYTES];
        while let Some(worker) = &mut self.worker {
            let received = passing::receive(&self.descriptors.socket, &mut buffer, Wait::Never);
            let (length, descriptor) = match received {
                Ok((length @ 1.., descriptor)) => (length, descriptor),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                // The worker has ended with unread orders. Its earlier notices can still be read.
                Err(rustix::io::Errno::CONNRESET) => continue,
                // The worker has closed its end. SIGCHLD may come a moment later, and until then the socket would
                // wake the keeper.
                Ok(_) | Err(_) => {
                    let _ = worker.child.kill(); // fails where it has ended
                    return self.handle_worker_end();
                }
            };
            match serde_json::from_slice(buffer.get(..length).unwrap_or_default()) {
                Ok(Notice::Ready) => {
                    worker.is_ready = true;
                    resident::give_back_startup_code();
                    resident::give_back_heap();
                    self.failed_starts = 0;
                    self.not_before = None;
                }
                Ok(Notice::Called) => worker.container_called = true,
                Ok(Notice::Gone { number }) => {
                    self.listeners.remove(&number);
                }
                Ok(Notice::Keep { number }) => {
                    self.kept_files.extend(descriptor.map(|file| (number, file)));
                }
                Ok(Notice::LetGo { number }) => {
                    self.kept_files.remove(&number);
                }
                Err(error) => warn!(%error, "a worker's notice is not understood"),
            }
        }
    }

    /// Handles SIGCHLD: a child has ended.
    pub(crate) fn reap(&mut self) {
        self.ending.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        if let Some(worker) = &mut self.worker
            && !matches!(worker.child.try_wait(), Ok(None))
        {
            // The worker's last notices: a file that only the keeper holds is memory that only the keeper knows of.
            self.receive_notices();
            self.handle_worker_end();
        }
    }

    fn handle_worker_end(&mut self) {
        let Some(mut worker) = self.worker.take() else { return };
        self.close_worker_socket();
        let status = worker.child.try_wait();
        let worker_pid = worker.child.id();
        if matches!(status, Ok(None)) {
            let pid = worker_pid;
            self.ending.push(worker.child);
            if self.has_too_many_ending() {
                error!(
                    pid,
                    "driver calls of many workers hang: the container's wait for one of them"
                );
            }
        }
        match (worker.is_ready, worker.drain_until) {
            (true, Some(_)) => {
                let why = "the worker has finished; another takes its place";
                self.end_events.tell(Event::new(Kind::MonitorReplaced).because(why));
            }
            (true, None) => {
                let pid = worker_pid.cast_signed();
                let status = status.ok().flatten().map(|status| status.to_string());
                self.end_events.tell(Event { pid: Some(pid), status, ..Event::worker_gone() });
            }
            (false, _) => {
                error!(?status, "a worker could not begin");
                self.delay_next_start();
            }
        }
    }

    /// Closes the keeper's end of the worker's socket; `/dev/null` keeps the number 3 occupied.
    fn close_worker_socket(&mut self) {
        let closed = File::open("/dev/null")
            .and_then(|null| Ok(rustix::io::dup2(null, &mut self.descriptors.socket)?));
        if let Err(error) = closed {
            // The next worker's socket replaces it.
            debug!(%error, "a worker's socket stays open");
        }
    }

    /// Lets the worker finish, and then starts a worker of the program that is installed now.
    pub(crate) fn replace_worker(&mut self) {
        // The driver may keep this worker from ending, too, and with MOST_ENDING of them no other worker is started. So
        // this worker stays: it still has threads for calls while others hang.
        if self.ending.len() + 1 >= MOST_ENDING {
            return error!(
                "driver calls of many workers hang: this one stays until one of them ends"
            );
        }
        self.failed_starts = 0;
        if let Some(worker) = self.worker.as_mut().filter(|worker| worker.drain_until.is_none()) {
            worker.drain_until = Some(Instant::now() + DRAIN_TIMEOUT);
            self.queue_order(Order::Drain);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        let _ = worker.child.kill(); // fails where it has ended
        // Where the driver has a thread of the worker, the process that inherits the worker sees its end.
        let until = Instant::now() + KILL_TIMEOUT;
        while matches!(worker.child.try_wait(), Ok(None))
            && !is_over(&worker.child)
            && Instant::now() < until
        {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Whether the first thread of an unreaped child has ended. All threads are ending then: the first one returns from
/// `main`, or is killed with the others. The state in `/proc/PID/stat` tells, behind the name in parentheses
/// (proc_pid_stat(5)).
fn is_over(child: &Child) -> bool {
    matches!(ProcessId::stat(child.id().cast_signed()), Ok(Some(stat)) if ['Z', 'X'].contains(&stat.state))
}
