//! Calls to `nvidia-uvm`.
//!
//! UVM keeps memory alive by a duplicate of the kernel's, which no process's figure
//! shows. So what is mapped has to be what was looked at, and the monitor maps it
//! itself. The kernel duplicates for the process that owns the client: the memory is
//! first duplicated into a client of the monitor's, which the caller's object is shared
//! with for as long as that takes, and mapped from there.

use nix::errno::Errno;

use super::books::MANAGED;
use super::device::{Device, Failure, Rm};
use super::listener::Reply;
use super::serve::{Case, Copy, Over};
use crate::gate::policy::{self, Verdict};
use crate::gate::settings::NodeKind;
use crate::ledger::{Client, Entry, Handle, Hold, LedgerError};
use crate::rm::number::{
    NV_ERR_INSUFFICIENT_RESOURCES, NV_ERR_INVALID_ARGUMENT, NV_ERR_NO_MEMORY, NV_ERR_NOT_SUPPORTED,
    NV_OK, UVM_INIT_FLAGS_DISABLE_HMM, UVM_INITIALIZE,
};
use crate::rm::uvm::{self, Call, Range, Source};
use crate::rm::{Answer, Key, Layout, Meaning};

/// Flags that an initialized file may have: `UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE`
/// is 2.
const FLAGS: [u64; 2] = [UVM_INIT_FLAGS_DISABLE_HMM as u64, UVM_INIT_FLAGS_DISABLE_HMM as u64 | 2];

impl Case<'_> {
    pub(super) fn uvm(&mut self, request: u64, argument: u64) -> Result<Reply, Over> {
        let release = &self.shared.release;
        let number = uvm::number(request);
        let size = uvm::params_size(release, number);
        let size = size.map_err(|refusal| self.refused(&refusal, None))?;
        self.read_struct(argument, size)?;
        let decoded = uvm::decode(release, number, &self.desk.bytes);
        let decoded = decoded.map_err(|refusal| self.refused(&refusal, None))?;
        self.still_waits()?;
        if size > 0 {
            self.write_back(0, argument, Copy::Struct);
        }
        let process = self.target()?.process.0;
        let pass = match policy::judge_uvm(&decoded.call) {
            Verdict::Refuse(answer) => return Err(self.answer(answer, decoded.layout)),
            Verdict::Continue(pass) => Some(pass),
            Verdict::Execute => {
                self.only_once()?;
                None
            }
        };
        let Some(layout) = decoded.layout else {
            return Ok(pass.map_or(Reply::Errno(Errno::EINVAL as i32), |pass| self.continued(pass)));
        };
        match (decoded.call, pass) {
            (Call::Initialize { flags }, Some(pass)) => {
                self.initialize(layout, argument, flags)?;
                Ok(self.continued(pass))
            }
            (_, Some(pass)) => Ok(self.continued(pass)),
            (Call::RegisterGpu { partition, .. }, _) => {
                self.register(number, layout, partition.descriptor)
            }
            (Call::MapExternal { range, memory, .. }, _) => {
                self.map_memory(number, layout, process, range, memory)
            }
            (Call::AllocDeviceP2p { range, memory, .. }, _) => {
                self.announced(layout, process, range)?;
                let done = self.map_memory(number, layout, process, range, memory);
                self.withdrawn_unless_ok(layout, process, range);
                done
            }
            (Call::AllocSemaphorePool(range), _) => {
                self.announced(layout, process, range)?;
                let done = self.ask(number);
                self.withdrawn_unless_ok(layout, process, range);
                done?;
                Ok(self.executed(None))
            }
            (Call::UnmapExternal(range), _) => self.unmap(number, layout, process, range, None),
            (Call::Free { base, length }, _) => {
                let length = length.unwrap_or(0);
                self.unmap(number, layout, process, Range { base, length }, Some(base))
            }
            _ => Err(self.answer(Answer::Status(NV_ERR_NOT_SUPPORTED), Some(layout))),
        }
    }

    fn ask(&mut self, number: u32) -> Result<(), Over> {
        let Some(device) = &self.device else { return Err(Reply::Errno(Errno::EBADF as i32)) };
        let asked = device.call_uvm(number, &mut self.desk.bytes);
        asked.map_err(|errno| Reply::Errno(errno as i32))
    }

    fn uvm_status(&self, layout: &'static Layout) -> u32 {
        let view = layout.view(&self.desk.bytes);
        view.and_then(|view| view.u32(Meaning::Status)).unwrap_or(NV_OK)
    }

    /// HMM is off in what the caller is about to ask; [`Case::register`] looks again.
    fn initialize(
        &mut self,
        layout: &'static Layout,
        address: u64,
        flags: u64,
    ) -> Result<(), Over> {
        let place = self.device()?.place;
        if !self.books().saw_node(place) {
            self.log("more nodes of nvidia-uvm than can be kept account of");
            return Err(self.answer(Answer::Status(NV_ERR_NO_MEMORY), Some(layout)));
        }
        if let Some(patch) = uvm::without_hmm(layout, flags) {
            let _ = patch.apply(&mut self.desk.bytes);
        }
        let written = self.target()?.write(&[Some((address, &self.desk.bytes))]);
        written.map_err(|errno| Reply::Errno(errno as i32))
    }

    /// A GPU is registered only where HMM is off: initializing with other flags than a file
    /// has fails.
    fn register(
        &mut self,
        number: u32,
        layout: &'static Layout,
        descriptor: i32,
    ) -> Result<Reply, Over> {
        let target = self.target()?;
        let control = if descriptor < 0 { None } else { target.duplicate(descriptor).ok() };
        let ours = control.map(|file| Device::of(&self.shared.settings.nodes, file));
        let ours = ours.and_then(Result::ok).filter(|device| device.kind == NodeKind::Control);
        let number_of = ours.as_ref().map_or(-1, Device::descriptor);
        self.patch(layout, Meaning::Descriptor, u64::from(number_of.cast_unsigned()));
        // The GPU's node must be open in the process that asks (`osIsGpuAccessible`, nv_gpu_ops.c).
        let own = self.shared.auditor.own(self.shared);
        let asked = self.ask(number);
        drop(own);
        self.patch(layout, Meaning::Descriptor, u64::from(descriptor.cast_unsigned()));
        asked?;
        if self.uvm_status(layout) == NV_OK && !self.is_without_hmm()? {
            self.log("nvidia-uvm was initialized with HMM all the same");
            self.shared.kill(self.target()?.process);
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout)));
        }
        Ok(self.executed(None))
    }

    fn is_without_hmm(&self) -> Result<bool, Over> {
        let layout = self.shared.release.layouts(Key::Uvm(UVM_INITIALIZE)).first();
        let Some(layout) = layout else { return Ok(false) };
        let device = self.device()?;
        Ok(FLAGS.into_iter().any(|flags| {
            let mut bytes = vec![0; layout.size()];
            let patch = layout.patch(Meaning::Flags, flags);
            let patched = patch.is_some_and(|patch| patch.apply(&mut bytes));
            let done = device.call_uvm(UVM_INITIALIZE, &mut bytes);
            let status = layout.view(&bytes).and_then(|view| view.u32(Meaning::Status));
            patched && done.is_ok() && status == Some(NV_OK)
        }))
    }

    fn announced(&mut self, layout: &'static Layout, space: u64, range: Range) -> Result<(), Over> {
        let fits = range.base & MANAGED == 0 && range.length > 0;
        if fits && self.books().announce(space, range.base, range.length) {
            return Ok(());
        }
        Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)))
    }

    fn withdrawn_unless_ok(&mut self, layout: &'static Layout, space: u64, range: Range) {
        if self.uvm_status(layout) != NV_OK {
            self.books().withdraw(space, range.base);
        }
    }

    /// Maps memory, which that keeps alive.
    fn map_memory(
        &mut self,
        number: u32,
        layout: &'static Layout,
        space: u64,
        range: Range,
        memory: Source,
    ) -> Result<Reply, Over> {
        let process = self.target()?.process;
        let (client, handle) = (Client(memory.client), Handle(memory.handle));
        let hold = Hold::Underway(self.shared.memory.next_hold());
        let mut books = self.books();
        books.shares(memory.client, process);
        let held = books.ledger.hold(hold, client, handle);
        books.ledger.release(hold);
        if held == Err(LedgerError::Full) {
            drop(books);
            self.log("more mappings than can be kept account of");
            return Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)));
        }
        if held.is_ok() {
            books.enter(Entry::Hold { hold, client, handle });
        }
        books.begin();
        drop(books);
        let status = self.map_from_own(number, layout, memory, held.is_ok());
        let mut books = self.books();
        if held.is_ok() {
            if status == Ok(NV_OK) {
                books.enter(Entry::Settle {
                    from: hold,
                    to: Hold::Mapping { space, base: range.base },
                });
            } else {
                books.enter(Entry::Release { hold });
            }
        }
        books.end();
        drop(books);
        match status {
            Ok(status) => {
                self.patch(layout, Meaning::Status, status.into());
                Ok(self.executed(None))
            }
            Err(over) => Err(over),
        }
    }

    /// Maps from a client of our own; the status. What isn't known can't be memory of a GPU, or the
    /// mapping would keep what nobody was charged for.
    fn map_from_own(
        &mut self,
        number: u32,
        layout: &'static Layout,
        memory: Source,
        is_known: bool,
    ) -> Result<u32, Over> {
        let file = self.target()?.duplicate(memory.descriptor);
        let file = file.map_err(|errno| Reply::Errno(errno as i32))?;
        let control = Device::of(&self.shared.settings.nodes, file).ok();
        let control = control.filter(|device| device.kind == NodeKind::Control);
        let (Some(control), Some(own)) = (control, self.shared.auditor.own(self.shared)) else {
            return Ok(NV_ERR_INVALID_ARGUMENT);
        };
        self.still_waits()?;
        let theirs = Rm { release: &self.shared.release, device: &control };
        let duplicate = match own.borrow(&theirs, memory.client, memory.handle) {
            Ok(duplicate) => duplicate,
            Err(Failure::Status(status)) => return Ok(status),
            Err(Failure::Errno(errno)) => return Err(Reply::Errno(errno as i32)),
        };
        let ours = Rm { release: &self.shared.release, device: &own.control };
        if !is_known && ours.is_gpu_memory(own.client, duplicate) {
            own.give_back(&self.shared.release, duplicate);
            self.log("memory to be mapped that was taken past the monitor");
            return Ok(NV_ERR_NOT_SUPPORTED);
        }
        let descriptor = u64::from(own.control.descriptor().cast_unsigned());
        self.patch(layout, Meaning::Descriptor, descriptor);
        self.patch(layout, Meaning::Client, own.client.into());
        self.patch(layout, Meaning::Handle, duplicate.into());
        let asked = self.ask(number);
        own.give_back(&self.shared.release, duplicate);
        let descriptor = u64::from(memory.descriptor.cast_unsigned());
        self.patch(layout, Meaning::Descriptor, descriptor);
        self.patch(layout, Meaning::Client, memory.client.into());
        self.patch(layout, Meaning::Handle, memory.handle.into());
        asked?;
        Ok(self.uvm_status(layout))
    }

    /// Mappings end, and with `freed` the range that begins there.
    fn unmap(
        &mut self,
        number: u32,
        layout: &'static Layout,
        space: u64,
        range: Range,
        freed: Option<u64>,
    ) -> Result<Reply, Over> {
        // Mapped anew meanwhile by another thread, they are not what was unmapped.
        let before = self.books().ledger.mappings(space, range.base, range.length);
        self.ask(number)?;
        if self.uvm_status(layout) == NV_OK {
            let mut books = self.books();
            for (base, charge) in before {
                let hold = Hold::Mapping { space, base };
                if books.ledger.held_by(hold) == Some(charge) {
                    books.enter(Entry::Release { hold });
                }
            }
            if let Some(base) = freed {
                books.withdraw(space, base);
            }
        }
        Ok(self.executed(None))
    }
}
