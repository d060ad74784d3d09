//! Calls to `nvidia-uvm`.
//!
//! UVM keeps memory alive by a duplicate of the kernel's, which no process's figure
//! shows. So what is mapped has to be what was looked at, and the monitor maps it
//! itself. The kernel duplicates for the process that owns the client: the memory is
//! first duplicated into a client of the monitor's, which the caller's object is shared
//! with for as long as that takes, and mapped from there. What is mapped where is entered as
//! UVM keeps it: by file, GPU and addresses, in pieces where mappings were cut.

use std::collections::BTreeSet;
use std::sync::Arc;

use nix::errno::Errno;

use super::books::{BOUNDS, MANAGED};
use super::desk::Copy;
use super::device::{Device, Failure, Rm};
use super::listener::Reply;
use super::mapped::Mapping;
use super::serve::{Case, Over};
use crate::gate::policy::{self, Verdict};
use crate::gate::settings::NodeKind;
use crate::ledger::{Client, Entry, Handle, Span, Tree};
use crate::rm::number::{
    NV_ERR_INSUFFICIENT_RESOURCES, NV_ERR_INVALID_ADDRESS, NV_ERR_INVALID_ARGUMENT,
    NV_ERR_INVALID_DEVICE, NV_ERR_NO_MEMORY, NV_ERR_NOT_SUPPORTED, NV_OK,
    UVM_INIT_FLAGS_DISABLE_HMM, UVM_INITIALIZE, UVM_UNMAP_EXTERNAL,
};
use crate::rm::uvm::{self, Call, Range, Source};
use crate::rm::{Answer, Key, Layout, Meaning};

/// Flags that an initialized file may have: `UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE`
/// is 2.
const FLAGS: [u64; 2] = [UVM_INIT_FLAGS_DISABLE_HMM as u64, UVM_INIT_FLAGS_DISABLE_HMM as u64 | 2];

/// The place of what is kept by a file alone, among its GPUs.
const NO_GPU: u16 = u16::MAX;

/// UVM's smallest pages.
const PAGE_BYTES: u64 = 4096;

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
                let gpus = self.mapping_gpus(layout)?;
                self.map_memory(number, layout, &gpus, range, memory)
            }
            (Call::AllocDeviceP2p { range, memory, .. }, _) => {
                self.announced(layout, process, range)?;
                let done = self.map_memory(number, layout, &[NO_GPU], range, memory);
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
            (Call::UnmapExternal { range, uuid }, _) => {
                self.unmap(number, layout, uuid, pages(range))
            }
            (Call::UnregisterGpu { uuid } | Call::UnregisterVaSpace { uuid }, _) => {
                self.unmap(number, layout, uuid, Some(Span::ALL))
            }
            (Call::Free { base, length }, _) => self.free_range(number, layout, base, length),
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

    /// The GPUs that a mapping is for.
    fn mapping_gpus(&mut self, layout: &'static Layout) -> Result<Vec<u16>, Over> {
        let Some(uuids) = uvm::mapping_gpus(layout, &self.desk.bytes) else {
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout)));
        };
        // No other can be registered.
        let gpus: Option<Vec<u16>> = uuids.into_iter().map(|uuid| self.gpu_of(uuid)).collect();
        gpus.ok_or_else(|| self.answer(Answer::Status(NV_ERR_INVALID_DEVICE), Some(layout)))
    }

    /// Maps memory, which that keeps alive, in the trees of a file that these GPUs have.
    fn map_memory(
        &mut self,
        number: u32,
        layout: &'static Layout,
        gpus: &[u16],
        range: Range,
        memory: Source,
    ) -> Result<Reply, Over> {
        let Some(span) = pages(range) else {
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_ADDRESS), Some(layout)));
        };
        let process = self.target()?.process;
        self.books().shares(memory.client, process);
        loop {
            let file = self.kept(layout)?;
            if let Some(_turn) = file.turn() {
                let trees = gpus.iter().map(|gpu| Tree { file: file.number, gpu: *gpu });
                return self.map_in(number, layout, &trees.collect(), span, memory);
            }
        }
    }

    /// The call's file, kept from now on.
    fn kept(&mut self, layout: &'static Layout) -> Result<Arc<Mapping>, Over> {
        let seen = (self.target()?.pid.cast_unsigned(), self.descriptor());
        if let Some(file) = self.shared.keep_mapped(self.device()?, seen) {
            return Ok(file);
        }
        self.log("more files of nvidia-uvm than can be kept account of");
        Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)))
    }

    /// Enters what may be mapped before the driver is asked, beside what is: where it fails
    /// midway, or this worker does, either may be there.
    fn map_in(
        &mut self,
        number: u32,
        layout: &'static Layout,
        trees: &BTreeSet<Tree>,
        span: Span,
        memory: Source,
    ) -> Result<Reply, Over> {
        let object = (Client(memory.client), Handle(memory.handle));
        let mut books = self.shared.books_to_begin(self.slot);
        let charge = books.ledger.charge_of(object.0, object.1);
        if charge.is_some() && books.ledger.size().holds + trees.len() > BOUNDS.holds {
            drop(books);
            self.log("more mappings than can be kept account of");
            return Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)));
        }
        let mut fresh = Vec::new();
        for tree in trees.iter().copied() {
            let Some(charge) = charge else { break };
            if !books.ledger.is_mapped(tree, span.first, charge) {
                fresh.push((tree, charge));
            }
            books.enter(Entry::Map { tree, span, charge });
        }
        books.begin();
        drop(books);
        let status = self.map_from_own(number, layout, memory, charge.is_some());
        let mut books = self.books();
        if status == Ok(NV_OK) {
            // Another thread may have freed it meanwhile, and have other memory of the same handle.
            let now = books.ledger.charge_of(object.0, object.1);
            for tree in trees.iter().copied() {
                match charge {
                    Some(charge) => books.enter(Entry::MapAlone { tree, span, charge }),
                    None => books.unmapped(tree, span),
                }
                if let Some(charge) = now.filter(|now| Some(*now) != charge) {
                    books.enter(Entry::Map { tree, span, charge });
                }
            }
        } else {
            for (tree, charge) in fresh {
                books.enter(Entry::Unmake { tree, first: span.first, charge });
            }
        }
        books.end();
        drop(books);
        self.patch(layout, Meaning::Status, status?.into());
        Ok(self.executed(None))
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

    /// Asks for what ends mappings, and enters what it ended if it was done.
    fn end_mappings(
        &mut self,
        number: u32,
        layout: &'static Layout,
        enter: impl FnOnce(&mut Self, u32),
    ) -> Result<Reply, Over> {
        let file = self.shared.mapped.find(self.device()?);
        // One that was let go meanwhile has nothing that we know of.
        let turn = file.as_ref().and_then(|file| Some((file.number, file.turn()?)));
        self.ask(number)?;
        if let Some((file, _)) = turn.as_ref().filter(|_| self.uvm_status(layout) == NV_OK) {
            enter(self, *file);
        }
        Ok(self.executed(None))
    }

    fn gpu_of(&self, uuid: [u8; 16]) -> Option<u16> {
        let gpu = self.shared.uuids.iter().position(|of| *of == uuid)?;
        u16::try_from(gpu).ok()
    }

    /// A GPU's mappings end within a span.
    fn unmap(
        &mut self,
        number: u32,
        layout: &'static Layout,
        uuid: [u8; 16],
        span: Option<Span>,
    ) -> Result<Reply, Over> {
        self.end_mappings(number, layout, |case, file| {
            if let (Some(gpu), Some(span)) = (case.gpu_of(uuid), span) {
                case.books().unmapped(Tree { file, gpu }, span);
            }
        })
    }

    /// A range ends that begins at `base`, with all that is mapped there.
    fn free_range(
        &mut self,
        number: u32,
        layout: &'static Layout,
        base: u64,
        length: Option<u64>,
    ) -> Result<Reply, Over> {
        let process = self.target()?.process.0;
        let done = self.end_mappings(number, layout, |case, file| {
            let pieces: Vec<(Tree, Span)> = {
                let books = case.books();
                let pieces = books.ledger.pieces(file).map(|(tree, span, _)| (tree, span));
                pieces.filter(|(_, span)| span.last >= base).collect()
            };
            let own = Tree { file, gpu: NO_GPU };
            let of_range = pieces.iter().find(|(tree, span)| *tree == own && span.first == base);
            if let Some((tree, span)) = of_range {
                return case.books().unmapped(*tree, *span);
            }
            // The driver frees no range of which this isn't the length.
            let known = length.map(|length| Span::of(base, length));
            let ended = known.unwrap_or_else(|| case.ended_from(base, &pieces));
            if let Some(ended) = ended {
                let trees: BTreeSet<Tree> = pieces.iter().map(|(tree, _)| *tree).collect();
                let mut books = case.books();
                for tree in trees.into_iter().filter(|tree| *tree != own) {
                    books.unmapped(tree, ended);
                }
            }
        })?;
        if self.uvm_status(layout) == NV_OK {
            self.books().withdraw(process, base);
        }
        Ok(done)
    }

    /// How far a range went that began at `base` and is freed, as far as there are pieces of
    /// it: the first one behind that is still in a range ends it.
    ///
    /// To unmap from a GPU that there is none of is refused for the address where there is no
    /// range, and otherwise for the GPU (`uvm_map_external.c`, `uvm_unmap_external`).
    fn ended_from(&self, base: u64, pieces: &[(Tree, Span)]) -> Option<Span> {
        let layout = self.shared.release.layouts(Key::Uvm(UVM_UNMAP_EXTERNAL)).first()?;
        let device = self.device().ok()?;
        let inside = pieces.iter().filter(|(tree, span)| tree.gpu != NO_GPU && span.first >= base);
        let mut spans: Vec<Span> = inside.map(|(_, span)| *span).collect();
        spans.sort_unstable_by_key(|span| (span.first, span.last));
        let mut last = None;
        for span in spans {
            if last.is_some_and(|last| span.first <= last) {
                last = last.max(Some(span.last));
                continue;
            }
            let mut bytes = vec![0; layout.size()];
            let fields = [(Meaning::Base, span.first), (Meaning::Length, PAGE_BYTES)];
            let filled = fields.into_iter().all(|(meaning, value)| {
                layout.patch(meaning, value).is_some_and(|patch| patch.apply(&mut bytes))
            });
            if !filled || !uvm::set_uuid(layout, &mut bytes, [0xff; 16]) {
                break;
            }
            device.call_uvm(UVM_UNMAP_EXTERNAL, &mut bytes).ok()?;
            if layout.view(&bytes)?.u32(Meaning::Status) != Some(NV_ERR_INVALID_ADDRESS) {
                break;
            }
            last = Some(span.last);
        }
        last.map(|last| Span { first: base, last })
    }
}

/// What the driver takes for a range: whole pages (`uvm_api_range_invalid_4k`).
fn pages(range: Range) -> Option<Span> {
    let is_whole = (range.base | range.length).is_multiple_of(PAGE_BYTES);
    Span::of(range.base, range.length).filter(|_| is_whole)
}
