//! What serves a container: its monitor, the threads that answer calls, the audit, and the status.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use crate::audit::resume_export;
use crate::caller::Listeners;
use crate::calls::CallService;
use crate::daemon::audit_thread::AuditThread;
use crate::daemon::container_end::ContainerEnd;
use crate::daemon::control_socket;
use crate::daemon::resident;
use crate::daemon::status::StatusWriter;
use crate::daemon::update::Requests;
use crate::driver::{MonitorClient, resume_client};
use crate::gate::settings::Settings;
use crate::node::Device;
use crate::shared::Monitor;
use crate::snapshot::{
    ClientDescriptors, CounterValues, FileNumbers, Record, RetainedReply, Snapshot,
};
use crate::sync::{ChangeFlag, spawn};
use crate::uvm::resume_file;
use cgpu_host::process::ProcessId;

/// Connections that are answered at the same time.
const CONNECTIONS: usize = 8;

/// What serves a container.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) monitor: Arc<Monitor>,
    pub(crate) calls: Arc<CallService>,
    pub(crate) container_end: Arc<ContainerEnd>,
    pub(crate) status_writer: Arc<StatusWriter>,
    connections: Arc<()>,
}

/// What a monitor had open before an update.
#[derive(Debug, Default)]
pub(crate) struct RetainedFiles {
    /// Files that memory was exported to, by number.
    exports: Vec<(u64, OwnedFd)>,
    /// Files of nvidia-uvm, by number.
    uvm_files: Vec<(u32, OwnedFd)>,
    client: Option<RetainedClient>,
    /// Replies that wait for their threads, with the files by which they are undone.
    replies: Vec<(RetainedReply, Option<OwnedFd>)>,
    /// Threads, and the fingerprints of their last answers.
    answered: Vec<(ProcessId, u64)>,
}

/// The monitor's client of the driver.
#[derive(Debug)]
struct RetainedClient {
    client: u32,
    control: OwnedFd,
    /// The open nodes of GPUs.
    gpu_files: Vec<OwnedFd>,
    /// The handles of device and subdevice, by the container's GPUs.
    gpus: Vec<Option<(u32, u32)>>,
}

impl RetainedFiles {
    /// Takes what a snapshot names; `take` makes a number an open file.
    pub(crate) fn take(
        snapshot: &Snapshot,
        take: impl Fn(&i32) -> io::Result<OwnedFd>,
    ) -> io::Result<Self> {
        let FileNumbers { exports, uvm_files, .. } = &snapshot.descriptors;
        let export = |(number, file): &(u64, i32)| Ok((*number, take(file)?));
        let uvm_file = |(number, file): &(u32, i32)| Ok((*number, take(file)?));
        let client = |of: &ClientDescriptors| {
            io::Result::Ok(RetainedClient {
                client: of.client,
                control: take(&of.control)?,
                gpu_files: of.gpu_files.iter().map(&take).collect::<io::Result<_>>()?,
                gpus: of.gpus.clone(),
            })
        };
        let reply = |of: &RetainedReply| Ok((of.clone(), of.file.as_ref().map(&take).transpose()?));
        Ok(RetainedFiles {
            exports: exports.iter().map(export).collect::<io::Result<_>>()?,
            uvm_files: uvm_files.iter().map(uvm_file).collect::<io::Result<_>>()?,
            client: snapshot.descriptors.client.as_ref().map(client).transpose()?,
            replies: snapshot.replies.iter().map(reply).collect::<io::Result<_>>()?,
            answered: snapshot.answered.clone(),
        })
    }
}

/// Sees that a service can go on with a snapshot.
pub(super) fn check(snapshot: Snapshot) -> io::Result<()> {
    let Snapshot { settings, records, counters, updates, .. } = snapshot;
    let wake = Arc::new(ChangeFlag::new()?);
    Monitor::open(settings, records, &counters, updates, wake).map(drop)
}

impl Service {
    /// A service of a container. `known` are the records and counters of a snapshot, and how often the program was
    /// replaced. `wake` wakes the first thread.
    pub(crate) fn new(
        settings: Settings,
        (records, counters, updates): (Vec<Record>, CounterValues, u64),
        listeners: &Arc<Listeners>,
        wake: &Arc<ChangeFlag>,
    ) -> io::Result<Self> {
        let monitor = Monitor::open(settings, records, &counters, updates, Arc::clone(wake))?;
        let monitor = Arc::new(monitor);
        let calls = Arc::new(CallService::new(Arc::clone(&monitor), Arc::clone(listeners)));
        let status_writer = Arc::new(StatusWriter::new(Arc::clone(&monitor), Arc::clone(&calls)));
        let container_end = Arc::new(ContainerEnd::new(
            Arc::clone(&monitor),
            Arc::clone(listeners),
            Arc::clone(wake),
            Arc::clone(&status_writer),
        ));
        Ok(Service { monitor, calls, container_end, status_writer, connections: Arc::new(()) })
    }

    /// Goes on with files from before an update. Fails if the driver no longer answers the monitor's client.
    pub(crate) fn resume(&self, files: RetainedFiles) -> io::Result<()> {
        let monitor = &*self.monitor;
        let device = |file| Device::of(&monitor.settings.nodes, file);
        if let Some(RetainedClient { client, control, gpu_files, gpus }) = files.client {
            let control = device(control);
            let control =
                control.ok_or_else(|| io::Error::other("the monitor's client has no file"))?;
            let client = MonitorClient::of((control, client), (gpus, gpu_files), &monitor.release);
            resume_client(monitor, client)?;
        }
        files.exports.into_iter().for_each(|(number, file)| resume_export(monitor, number, file));
        files.uvm_files.into_iter().for_each(|(number, file)| resume_file(monitor, number, file));
        if let Some(calls) = &monitor.interrupted {
            for (reply, file) in files.replies {
                calls.resume(reply, file.and_then(device));
            }
            calls.resume_answered(files.answered);
        }
        Ok(())
    }

    /// Starts the threads that the container needs by now, and writes the status.
    pub(crate) fn start(&self) -> io::Result<()> {
        AuditThread::start(Arc::clone(&self.monitor), Arc::clone(&self.container_end))?;
        self.status_writer.write_now();
        resident::give_back_startup_code();
        resident::give_back_heap();
        if self.calls.was_called() {
            self.calls.start_missing_threads();
        }
        Ok(())
    }

    /// Answers the questions of a connection, in a thread of its own. Closes it if too many are answered already.
    pub(crate) fn answer_questions(&self, connection: UnixStream, updates: &Arc<Requests>) {
        let open = Arc::clone(&self.connections);
        // The service itself has one more.
        if Arc::strong_count(&open) > CONNECTIONS + 1 {
            return;
        }
        let (monitor, writer) = (Arc::clone(&self.monitor), Arc::clone(&self.status_writer));
        let updates = Arc::clone(updates);
        let _ = spawn("control", move || {
            control_socket::answer_questions(&monitor, &writer, &updates, connection.into());
            drop(open);
        });
    }
}
