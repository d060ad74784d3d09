//! The keeper's workers: one at a time, a new one when a worker dies or is replaced.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use crate::events::{Bucket, Event, Kind, Teller};
use crate::gate::passing::{self, Wait};
use crate::gate::settings::Settings;
use crate::gate::wire::Notice;
use crate::monitor::keeper::orders::Orders;
use crate::monitor::keeper::worker_process::{WorkerDescriptors, WorkerProcess};
use crate::monitor::keeper::worker_starts::WorkerStarts;
use crate::monitor::resident;
use crate::monitor::worker::Former;

/// The longest notice of a worker, in bytes.
const PACKET_BYTES: usize = 4096;

/// How long a worker may take to finish its calls before it is killed and replaced. Calls that are in the driver then
/// are in the journal, where the next worker finds them.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a killed worker may take to end. A worker that takes longer has a thread in the driver; none of its
/// threads runs the program's code any more.
const KILL_TIMEOUT: Duration = Duration::from_millis(100);

/// The most workers that the driver keeps from ending, at the same time. Each had a call that hangs, and was replaced
/// or died meanwhile.
const MOST_ENDING: usize = 8;

/// How many ends of workers are reported at once, and the time in microseconds until one more is.
const END_EVENTS: (u32, u64) = (20, 10_000_000);

/// The keeper's workers.
#[derive(Debug)]
pub(crate) struct Workers {
    program: PathBuf,
    end_events: WorkerEndEvents,
    descriptors: WorkerDescriptors,
    orders: Orders,
    starts: WorkerStarts,
    worker: Option<WorkerProcess>,
    /// How the last worker ended.
    former: Former,
    /// Earlier workers that have not ended yet: nothing can end a thread in the driver. The next worker
    /// completes or undoes its call.
    ending: Vec<Child>,
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

impl Workers {
    /// Starts no worker yet. A worker finds `descriptors` as its descriptors 3, 4 and 5.
    pub(crate) fn new(
        settings: &Settings,
        settings_file: &File,
        descriptors: [OwnedFd; 3],
    ) -> io::Result<Self> {
        Ok(Workers {
            program: settings.monitor.clone(),
            end_events: WorkerEndEvents {
                teller: settings.teller(),
                began: Instant::now(),
                told: Bucket::new(END_EVENTS.0, END_EVENTS.1),
                left_out: 0,
            },
            descriptors: WorkerDescriptors::new(settings_file, descriptors)?,
            orders: Orders::default(),
            starts: WorkerStarts::new(Instant::now()),
            worker: None,
            former: Former::Ended,
            ending: Vec::new(),
        })
    }

    /// The listeners that are served.
    pub(crate) fn listeners(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.orders.listeners()
    }

    /// Lets the first worker start without the delay: something needs it.
    pub(crate) fn start_without_delay(&mut self) {
        self.starts.end_first_delay();
    }

    /// Whether the worker said that the container has called the driver.
    pub(crate) fn container_called(&self) -> bool {
        self.worker.as_ref().is_some_and(|worker| worker.container_called)
    }

    /// Whether any listener is served.
    pub(crate) fn has_listeners(&self) -> bool {
        self.orders.listeners().next().is_some()
    }

    /// The worker's socket; `None` where there is no worker.
    pub(crate) fn socket(&self) -> Option<BorrowedFd<'_>> {
        self.worker.as_ref().map(|_| self.descriptors.socket.as_fd())
    }

    /// Whether orders are to be sent as soon as the worker's socket has room.
    pub(crate) fn waits_for_room(&self) -> bool {
        self.orders.is_socket_full && self.takes_orders()
    }

    /// Whether the worker still gets orders. A worker that is to finish gets the orders up to
    /// [`Order::Drain`](crate::gate::wire::Order::Drain).
    fn takes_orders(&self) -> bool {
        let Some(worker) = &self.worker else { return false };
        worker.drain_until.is_none() || self.orders.have_drain()
    }

    /// Whether the keeper has to look again without being woken.
    pub(crate) fn needs_ticks(&self) -> bool {
        let is_draining = self.worker.as_ref().is_some_and(|worker| worker.drain_until.is_some());
        self.worker.is_none() || is_draining || self.orders.are_waiting()
    }

    /// Whether the driver keeps so many workers from ending that no other is started.
    fn has_too_many_ending(&self) -> bool {
        self.ending.len() >= MOST_ENDING
    }

    /// Keeps a listener, and gives it to the worker.
    pub(crate) fn add_listener(&mut self, listener: OwnedFd) {
        self.orders.add_listener(listener);
        self.send_orders();
    }

    /// Gives a control connection to the worker, or to the next one where the worker is finishing.
    pub(crate) fn add_connection(&mut self, connection: OwnedFd) {
        self.orders.add_connection(connection);
        self.send_orders();
    }

    /// Sends the worker the orders that wait, as far as its socket has room.
    fn send_orders(&mut self) {
        while self.takes_orders() && self.orders.send_next(&self.descriptors.socket) {}
    }

    /// Starts a worker where there is none, and ends a worker that takes too long to finish.
    pub(crate) fn ensure_worker(&mut self) {
        let now = Instant::now();
        self.end_worker(now);
        if self.worker.is_some() {
            return self.send_orders();
        }
        if !self.starts.are_due(now) || self.has_too_many_ending() {
            return;
        }
        let program: &Path = match self.starts.uses_installed() {
            true => &self.program,
            false => Path::new("/proc/self/exe"),
        };
        match WorkerProcess::start(program, &mut self.descriptors, self.former) {
            Ok(worker) => {
                self.worker = Some(worker);
                self.orders.restart();
                self.send_orders();
            }
            Err(error) => {
                error!(%error, "cannot start a worker: the container's driver calls wait");
                self.starts.note_failed(Instant::now());
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
            worker.kill();
            worker.gone_until = Some(now + KILL_TIMEOUT);
        }
        let keeps = worker.gone_until.is_none_or(|until| now < until);
        if keeps && !worker.is_over() {
            return;
        }
        worker.kill();
        // The notices that the worker sent before its end.
        self.receive_notices();
        self.handle_worker_end();
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
                    worker.kill();
                    return self.handle_worker_end();
                }
            };
            match serde_json::from_slice(buffer.get(..length).unwrap_or_default()) {
                Ok(Notice::Ready) => {
                    worker.is_ready = true;
                    resident::give_back_startup_code();
                    resident::give_back_heap();
                    self.starts.note_begun(Instant::now());
                }
                Ok(Notice::Called) => worker.container_called = true,
                Ok(Notice::Gone { number }) => self.orders.remove_listener(number),
                Ok(Notice::Keep { number }) => {
                    if let Some(file) = descriptor {
                        self.orders.keep_file(number, file);
                    }
                }
                Ok(Notice::LetGo { number }) => self.orders.let_go_of_file(number),
                Err(error) => warn!(%error, "a worker's notice is not understood"),
            }
        }
    }

    /// Handles SIGCHLD: a child has ended.
    pub(crate) fn reap(&mut self) {
        self.ending.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        if let Some(worker) = &mut self.worker
            && worker.try_reap()
        {
            // The worker's last notices: a file that only the keeper holds is memory that only the keeper knows of.
            self.receive_notices();
            self.handle_worker_end();
        }
    }

    fn handle_worker_end(&mut self) {
        let Some(mut worker) = self.worker.take() else { return };
        self.descriptors.close_socket();
        let status = worker.exit_status();
        let worker_pid = worker.child.id();
        self.former = match &status {
            Some(status) if worker.is_ready && worker.drain_until.is_none() => {
                Former::of_status(*status)
            }
            _ => Former::Ended,
        };
        if status.is_none() {
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
                let status = status.map(|status| status.to_string());
                self.starts.note_ended(Instant::now(), self.former);
                self.end_events.tell(Event { pid: Some(pid), status, ..Event::worker_gone() });
            }
            (false, _) => {
                error!(?status, "a worker could not begin");
                self.starts.note_failed(Instant::now());
            }
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
        self.starts.forget_failures();
        if let Some(worker) = self.worker.as_mut().filter(|worker| worker.drain_until.is_none()) {
            worker.drain_until = Some(Instant::now() + DRAIN_TIMEOUT);
            self.orders.add_drain();
            self.send_orders();
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let Some(worker) = &mut self.worker else { return };
        worker.kill();
        // Where the driver has a thread of the worker, the process that inherits the worker sees its end.
        let until = Instant::now() + KILL_TIMEOUT;
        while !worker.try_reap() && !worker.is_over() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
