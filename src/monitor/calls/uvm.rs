//! Calls to `nvidia-uvm`.
//!
//! UVM keeps memory alive by a duplicate of the kernel's, which no process's figure
//! shows. So what is mapped has to be what was looked at, and the monitor maps it
//! itself. The kernel duplicates for the process that owns the client: the memory is
//! first duplicated into a client of the monitor's, which the caller's object is shared
//! with for as long as that takes, and mapped from there. What is mapped where is entered as
//! UVM keeps it: by file, GPU and addresses, in pieces where mappings were cut. So are ranges that
//! the driver was had to make, which aren't managed memory where they're mapped.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;

use nix::errno::Errno;

use crate::events::Event;
use crate::gate::settings::{Managed, NodeKind};
use crate::ledger::{Client, Entry, Handle, Span, Tree};
use crate::monitor::caller::call_id::Making;
use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::calls::lane::OnLane;
use crate::monitor::calls::policy::{self, Verdict};
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::driver::device::{Device, Failure, Rm};
use crate::monitor::driver::stakes::Source as Staked;
use crate::monitor::state::books::BOUNDS;
use crate::monitor::state::space::Space;
use crate::monitor::uvm::files::UvmFile;
use crate::monitor::uvm::ranges::{PAGE_BYTES, Ranges};
use crate::monitor::worker::log_limit::News;
use crate::rm::number::{
    NV_ERR_ILLEGAL_ACTION, NV_ERR_INSUFFICIENT_RESOURCES, NV_ERR_INVALID_ADDRESS,
    NV_ERR_INVALID_ARGUMENT, NV_ERR_INVALID_DEVICE, NV_ERR_NOT_SUPPORTED,
    NV_ERR_UVM_ADDRESS_IN_USE, NV_OK, UVM_INIT_FLAGS_DISABLE_HMM,
    UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE,
};
use crate::rm::uvm::{self, Call, Range, Source};
use crate::rm::{Answer, Layout, Meaning};

/// Flags that an initialized file may have. HMM is off, or the host's memory would move to the GPU
/// by itself.
const ALONE: u64 = UVM_INIT_FLAGS_DISABLE_HMM as u64;

/// The same for several processes: the managed memory of one that ends stays until the file is
/// closed, and no mapping shows it (`uvm_vm_close_managed`, `uvm.c`).
const SHARED: u64 = ALONE | UVM_INIT_FLAGS_MULTI_PROCESS_SHARING_MODE as u64;

/// The place of what is kept by a file alone, among its GPUs.
const NO_GPU: u16 = u16::MAX;

impl<'a> Case<'a> {
    pub(crate) fn uvm(&mut self, request: u64, argument: u64) -> Result<Reply, Over> {
        let release = &self.parts.state.release;
        let number = uvm::number(request);
        let size = uvm::params_size(release, number);
        let size = size.map_err(|refusal| self.refused(&refusal, None))?;
        self.read_struct(argument, size)?;
        let decoded = uvm::decode(release, number, &self.scratch.bytes);
        let decoded = decoded.map_err(|refusal| self.refused(&refusal, None))?;
        self.still_waits()?;
        if size > 0 {
            self.write_back(0, argument, Copy::Struct);
        }
        let pass = match policy::judge_uvm(&decoded.call) {
            Verdict::Refuse(answer) => return Err(self.answer(answer, decoded.layout)),
            Verdict::Continue(pass) => Some(pass),
            Verdict::Execute => {
                self.said = decoded.layout.map(|head| (head, done_already(&decoded.call)));
                self.wait_for_turn()?;
                None
            }
        };
        let Some(layout) = decoded.layout else {
            return Ok(pass.map_or(Reply::Errno(Errno::EINVAL as i32), |pass| self.continued(pass)));
        };
        match (decoded.call, pass) {
            (Call::Initialize { flags }, Some(pass)) => {
                self.initialize(layout, argument, flags, pass)
            }
            (_, Some(pass)) => Ok(self.continued(pass)),
            // Before anything can be on a GPU by it, its file is kept.
            (Call::RegisterGpu { partition, .. }, _) => {
                let control = match partition.descriptor {
                    0.. => self.control_file(partition.descriptor).ok().flatten(),
                    _ => None,
                };
                self.on_lane_with_file(layout, |case, _, file| {
                    case.register(number, layout, file, (partition.descriptor, control.as_ref()))
                })
            }
            (Call::MapExternal { range, memory, .. }, _) => {
                let gpus = self.mapping_gpus(layout)?;
                let span = self.span(layout, range)?;
                let control = self.control_file(memory.descriptor)?;
                self.on_lane_with_file(layout, |case, lane, UvmFile { number: file, .. }| {
                    let tree = |gpu: &u16| Tree { file: *file, gpu: *gpu };
                    let trees = gpus.iter().map(tree).collect();
                    case.map_in(lane, (number, layout), &trees, span, (memory, control.as_ref()))
                })
            }
            (Call::AllocDeviceP2p { range, memory, .. }, _) => {
                let span = self.span(layout, range)?;
                let control = self.control_file(memory.descriptor)?;
                self.make_range(layout, range, |case, lane, file| {
                    let trees = BTreeSet::from([Tree { file, gpu: NO_GPU }]);
                    case.map_in(lane, (number, layout), &trees, span, (memory, control.as_ref()))
                })
            }
            (Call::AllocSemaphorePool(range), _) => self.make_range(layout, range, |case, _, _| {
                case.ask(number)?;
                Ok(case.executed(None))
            }),
            (Call::UnmapExternal { range, uuid }, _) => self.unmap(number, layout, uuid, range),
            (Call::UnregisterGpu { uuid } | Call::UnregisterVaSpace { uuid }, _) => {
                self.unregister(number, layout, uuid)
            }
            (Call::Free { base, length }, _) => self.free_range(number, layout, base, length),
            _ => Err(self.answer(Answer::Status(NV_ERR_NOT_SUPPORTED), Some(layout))),
        }
    }

    /// The driver's file that a descriptor of the caller's is, if it's one of `nvidiactl`: as it was before
    /// the call came onto the lane, since what else it is may take its time to be closed.
    fn control_file(&self, descriptor: i32) -> Result<Option<Device>, Over> {
        let file = self.target()?.duplicate(descriptor);
        let file = file.map_err(|errno| Reply::Errno(errno as i32))?;
        let device = Device::of(&self.parts.state.settings.nodes, file).ok();
        self.still_waits()?;
        Ok(device.filter(|device| device.kind == NodeKind::Control))
    }

    pub(crate) fn ask(&mut self, number: u32) -> Result<(), Over> {
        let Some(device) = &self.device else { return Err(Reply::Errno(Errno::EBADF as i32)) };
        let asked = device.call_uvm(&self.parts.state.release, number, &mut self.scratch.bytes);
        asked.map_err(|errno| Reply::Errno(errno as i32))?;
        if self.scratch.bytes.was_exceeded()
            && self.parts.state.log.limit.allows_news(News::Uvm(number))
        {
            let driver = self.parts.state.release.version();
            let container = self.parts.state.settings.short_id.as_str();
            tracing::warn!(container, number, %driver, "UVM's struct is larger than the one known");
        }
        Ok(())
    }

    fn uvm_status(&self, layout: &'static Layout) -> u32 {
        let view = layout.view(&self.scratch.bytes);
        view.and_then(|view| view.u32(Meaning::Status)).unwrap_or(NV_OK)
    }

    /// A GPU is registered only where the file's flags are such as may be: initializing with others
    /// than it has fails. And where its maker lives, with whom it ends, which is entered before.
    fn register(
        &mut self,
        number: u32,
        layout: &'static Layout,
        file: &UvmFile,
        (descriptor, control): (i32, Option<&Device>),
    ) -> Result<Reply, Over> {
        if !self.is_initialized(layout)? {
            return Err(self.answer(Answer::Status(NV_ERR_ILLEGAL_ACTION), Some(layout)));
        }
        let is_alone = self.parts.uvm.has_flags(self.device()?, ALONE);
        if !is_alone {
            self.judge_flags(layout)?;
        } else if !self.parts.uvm.may_have_gpu(file) {
            return Err(self.orphaned(layout));
        }
        let number_of = control.map_or(-1, Device::descriptor);
        self.patch(layout, Meaning::Descriptor, u64::from(number_of.cast_unsigned()));
        // The GPU's node must be open in the process that asks (`osIsGpuAccessible`, nv_gpu_ops.c).
        let own = self.parts.driver.own_client();
        let asked = self.ask(number);
        drop(own);
        self.patch(layout, Meaning::Descriptor, u64::from(descriptor.cast_unsigned()));
        asked?;
        if self.again && self.was_done_already() {
            // By the worker before.
            self.patch(layout, Meaning::Status, NV_OK.into());
        }
        // What was no memory of a GPU's may become such.
        self.parts.mappings.spaces.look_at_all();
        if is_alone && self.uvm_status(layout) == NV_OK && self.parts.uvm.is_orphaned(file) {
            self.parts.uvm.unregister_gpus(self.device()?);
            return Err(self.orphaned(layout));
        }
        Ok(self.executed(None))
    }

    fn orphaned(&mut self, layout: &'static Layout) -> Over {
        self.log("a file of nvidia-uvm whose maker is over, or unknown");
        self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout))
    }

    /// Whether a file may have a GPU that isn't of one memory without HMM.
    fn judge_flags(&mut self, layout: &'static Layout) -> Result<(), Over> {
        let is_shared = self.parts.uvm.has_flags(self.device()?, SHARED);
        if is_shared && self.parts.state.settings.managed == Managed::Refuse {
            return Ok(());
        }
        if is_shared {
            self.log("a file of nvidia-uvm for several processes, where managed memory is charged");
        } else {
            self.log("nvidia-uvm was initialized with HMM all the same");
            self.parts.processes.kill(self.target()?.process, Event::killed_past_the_monitor());
        }
        Err(self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout)))
    }

    /// Has the driver make a range, and remembers it before its caller hears of it.
    fn make_range(
        &mut self,
        layout: &'static Layout,
        range: Range,
        make: impl FnOnce(&mut Self, &OnLane<'_>, u32) -> Result<Reply, Over>,
    ) -> Result<Reply, Over> {
        self.on_lane_with_file(layout, |case, lane, UvmFile { number: file, .. }| {
            let file = *file;
            let space = Space::File(file);
            let room = case.parts.uvm.has_room_for_range();
            if !room || !case.books().has_room_for(space, range.base, range.length) {
                case.log("more ranges than can be kept account of");
                return Err(
                    case.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout))
                );
            }
            let known = case.books().range(space, range.base);
            let known = known == Some((range.base, range.length));
            let ranges = Ranges::of(&case.parts.state.release, case.device()?);
            if case.again && !known && ranges.is_external(range.base) == Some(false) {
                // The worker before may have made it: once more from the start.
                ranges.free(range);
            }
            let done = make(case, lane, file)?;
            if case.again && known && case.was_done_already() {
                case.patch(layout, Meaning::Status, NV_OK.into());
            }
            if case.uvm_status(layout) == NV_OK {
                case.books().announce(space, range.base, range.length);
            }
            Ok(done)
        })
    }

    /// Ranges of a file that aren't there any more are forgotten.
    fn withdraw_gone(&self, file: u32) {
        let Ok(device) = self.device() else { return };
        let known = self.books().ranges_of(Space::File(file));
        for (base, length) in known {
            if Ranges::of(&self.parts.state.release, device).is_whole(Range { base, length })
                == Some(false)
            {
                self.books().withdraw(Space::File(file), base);
            }
        }
    }

    /// The GPUs that a mapping is for.
    fn mapping_gpus(&mut self, layout: &'static Layout) -> Result<Vec<u16>, Over> {
        let Some(uuids) = uvm::mapping_gpus(layout, &self.scratch.bytes) else {
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout)));
        };
        // No other can be registered.
        let gpus: Option<Vec<u16>> = uuids.into_iter().map(|uuid| self.gpu_of(uuid)).collect();
        gpus.ok_or_else(|| self.answer(Answer::Status(NV_ERR_INVALID_DEVICE), Some(layout)))
    }

    /// The pages of a range.
    fn span(&mut self, layout: &'static Layout, range: Range) -> Result<Span, Over> {
        let span = pages(range);
        span.ok_or_else(|| self.answer(Answer::Status(NV_ERR_INVALID_ADDRESS), Some(layout)))
    }

    /// The driver is asked from here on, for nothing that has a handle.
    fn on_lane_for_uvm(&mut self) -> Result<OnLane<'a>, Over> {
        let lane = self.take_lane()?;
        self.slot.set_executing(Making::one(0, 0, true));
        Ok(lane)
    }

    /// Does what changes the call's file, which is kept from now on.
    fn on_lane_with_file<T>(
        &mut self,
        layout: &'static Layout,
        change: impl FnOnce(&mut Self, &OnLane<'_>, &UvmFile) -> Result<T, Over>,
    ) -> Result<T, Over> {
        loop {
            let file = self.kept(layout)?;
            let lane = self.on_lane_for_uvm()?;
            if !file.is_let_go() {
                self.not_condemned(&file, layout)?;
                return change(self, &lane, &file);
            }
        }
    }

    fn not_condemned(&mut self, file: &UvmFile, layout: &'static Layout) -> Result<(), Over> {
        if !file.is_condemned() {
            return Ok(());
        }
        self.log("a file of nvidia-uvm that had managed memory, or whose maker is over");
        Err(self.answer(Answer::Status(NV_ERR_INVALID_DEVICE), Some(layout)))
    }

    /// The call's file, kept from now on.
    pub(crate) fn kept(&mut self, layout: &'static Layout) -> Result<Arc<UvmFile>, Over> {
        let seen = (self.target()?.tid.cast_unsigned(), self.descriptor());
        if let Some(file) = self.parts.uvm.keep_mapped(self.device()?, seen) {
            return Ok(file);
        }
        self.log("more files of nvidia-uvm than can be kept account of");
        Err(self.answer(Answer::Status(NV_ERR_INSUFFICIENT_RESOURCES), Some(layout)))
    }

    /// Enters what may be mapped before the driver is asked, beside what is: where it fails
    /// midway, or this worker does, either may be there.
    fn map_in(
        &mut self,
        lane: &OnLane<'_>,
        (number, layout): (u32, &'static Layout),
        trees: &BTreeSet<Tree>,
        span: Span,
        (memory, control): (Source, Option<&Device>),
    ) -> Result<Reply, Over> {
        let object = (Client(memory.client), Handle(memory.handle));
        let process = self.target()?.process;
        self.books().shares(memory.client, process);
        let mut books = self.books();
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
        drop(books);
        let status = match control {
            Some(control) => self.map_from_own(lane, (number, layout), (memory, control), charge),
            None => Ok(NV_ERR_INVALID_ARGUMENT),
        };
        let mut books = self.books();
        if status == Ok(NV_OK) {
            for tree in trees.iter().copied() {
                match charge {
                    Some(charge) => books.enter(Entry::MapAlone { tree, span, charge }),
                    None => books.unmapped(tree, span),
                }
            }
        } else {
            for (tree, charge) in fresh {
                books.enter(Entry::Unmake { tree, first: span.first, charge });
            }
        }
        drop(books);
        self.parts.stakes.free_stakes(lane);
        self.patch(layout, Meaning::Status, status?.into());
        Ok(self.executed(None))
    }

    /// Maps from a client of our own; the status. What isn't known can't be memory of a GPU, or the
    /// mapping would keep what nobody was charged for.
    fn map_from_own(
        &mut self,
        _: &OnLane<'_>,
        (number, layout): (u32, &'static Layout),
        (memory, control): (Source, &Device),
        charge: Option<u64>,
    ) -> Result<u32, Over> {
        let Some(own) = self.parts.driver.kept_client() else {
            return Ok(NV_ERR_INVALID_ARGUMENT);
        };
        let theirs = Rm { release: &self.parts.state.release, device: control };
        let object = (Client(memory.client), Handle(memory.handle));
        let gpu = self.books().ledger.memory_of(object.0, object.1).map(|(gpu, _)| gpu);
        let duplicate = match own.borrow(&theirs, (memory.client, memory.handle), gpu) {
            Ok(duplicate) => duplicate,
            Err(Failure::Status(status)) => return Ok(status),
            Err(Failure::Errno(errno)) => return Err(Reply::Errno(errno as i32)),
        };
        let ours = Rm { release: &self.parts.state.release, device: &own.control };
        let weighs =
            self.books().ledger.bytes_of(object.0, object.1).is_some_and(|bytes| bytes > 0);
        // What weighs nothing, as memory of the host, is judged by what it is.
        let weighs = weighs && charge.is_some();
        let charged = self.books().ledger.memory_of(object.0, object.1);
        let is_more = |(_, bytes)| ours.is_more_than(own.client, duplicate, bytes);
        if weighs && charged.is_none_or(is_more)
            || !weighs && ours.is_gpu_memory(own.client, duplicate)
        {
            own.give_back(&self.parts.state.release, duplicate);
            self.log("memory to be mapped that was taken past the monitor");
            return Ok(NV_ERR_NOT_SUPPORTED);
        }
        let source = match charge.filter(|_| weighs) {
            Some(charge) => self.parts.stakes.stake_mappings(&own, charge, duplicate),
            None => Staked { handle: duplicate, stays: false },
        };
        let descriptor = u64::from(own.control.descriptor().cast_unsigned());
        self.patch(layout, Meaning::Descriptor, descriptor);
        self.patch(layout, Meaning::Client, own.client.into());
        self.patch(layout, Meaning::Handle, source.handle.into());
        let asked = self.ask(number);
        if !source.stays {
            own.give_back(&self.parts.state.release, source.handle);
        }
        let descriptor = u64::from(memory.descriptor.cast_unsigned());
        self.patch(layout, Meaning::Descriptor, descriptor);
        self.patch(layout, Meaning::Client, memory.client.into());
        self.patch(layout, Meaning::Handle, memory.handle.into());
        asked?;
        Ok(self.uvm_status(layout))
    }

    /// Asks for what ends mappings, and enters what it ended if it was done: by the call, or by the
    /// worker before, as `was_done` tells.
    fn end_mappings(
        &mut self,
        number: u32,
        layout: &'static Layout,
        was_done: impl FnOnce(&Self, Option<u32>) -> bool,
        enter: impl FnOnce(&Self, u32),
    ) -> Result<Reply, Over> {
        let lane = self.on_lane_for_uvm()?;
        let file = self.parts.uvm.files.find(self.device()?);
        file.iter().try_for_each(|file| self.not_condemned(file, layout))?;
        let known = file.map(|file| file.number);
        self.ask(number)?;
        if self.again && self.was_done_already() && was_done(self, known) {
            self.patch(layout, Meaning::Status, NV_OK.into());
        }
        // What a larger struct says in our status's place isn't its status.
        let is_done = self.uvm_status(layout) == NV_OK && !self.scratch.bytes.was_exceeded();
        if let Some(file) = known.filter(|_| is_done) {
            enter(self, file);
        }
        self.parts.stakes.free_stakes(&lane);
        drop(lane);
        Ok(self.executed(None))
    }

    fn gpu_of(&self, uuid: [u8; 16]) -> Option<u16> {
        let gpu = self.parts.state.uuids.iter().position(|of| *of == uuid)?;
        u16::try_from(gpu).ok()
    }

    /// All of a GPU's mappings end; one that isn't registered has none.
    fn unregister(
        &mut self,
        number: u32,
        layout: &'static Layout,
        uuid: [u8; 16],
    ) -> Result<Reply, Over> {
        self.end_mappings(
            number,
            layout,
            |_, _| true,
            |case, file| {
                if let Some(gpu) = case.gpu_of(uuid) {
                    case.books().unmapped(Tree { file, gpu }, Span::ALL);
                }
                // Pools go with the GPU that they were made for, where that is confidential.
                case.withdraw_gone(file);
            },
        )
    }

    /// A GPU's mappings end within a range.
    fn unmap(
        &mut self,
        number: u32,
        layout: &'static Layout,
        uuid: [u8; 16],
        range: Range,
    ) -> Result<Reply, Over> {
        self.end_mappings(
            number,
            layout,
            |_, _| false,
            |case, file| {
                if let (Some(gpu), Some(span)) = (case.gpu_of(uuid), pages(range)) {
                    case.books().unmapped(Tree { file, gpu }, span);
                }
            },
        )
    }

    /// A range ends that begins at `base`, with all that is mapped there.
    fn free_range(
        &mut self,
        number: u32,
        layout: &'static Layout,
        base: u64,
        length: Option<u64>,
    ) -> Result<Reply, Over> {
        let was_freed = Cell::new(false);
        self.end_mappings(
            number,
            layout,
            |case, file| {
                was_freed.set(case.was_freed(file, base, length));
                was_freed.get()
            },
            |case, file| {
                // Of one that the worker before had freed, whatever its length was said to be,
                // what is still there stays.
                case.enter_freed(file, base, length.filter(|_| !was_freed.get()));
                case.books().withdraw(Space::File(file), base);
            },
        )
    }

    /// Enters that a range is freed, which has that length where it's known.
    fn enter_freed(&self, file: u32, base: u64, length: Option<u64>) {
        let pieces: Vec<(Tree, Span)> = {
            let books = self.books();
            let pieces = books.ledger.pieces(file).map(|(tree, span, _)| (tree, span));
            pieces.filter(|(_, span)| span.last >= base).collect()
        };
        let own = Tree { file, gpu: NO_GPU };
        let of_range = pieces.iter().find(|(tree, span)| *tree == own && span.first == base);
        if let Some((tree, span)) = of_range {
            return self.books().unmapped(*tree, *span);
        }
        // The driver frees no range of which this isn't the length.
        let known = length.map(|length| Span::of(base, length));
        let ended = known.unwrap_or_else(|| self.ended_from(base, &pieces));
        if let Some(ended) = ended {
            let trees: BTreeSet<Tree> = pieces.iter().map(|(tree, _)| *tree).collect();
            let mut books = self.books();
            for tree in trees.into_iter().filter(|tree| *tree != own) {
                books.unmapped(tree, ended);
            }
        }
    }

    /// Whether a range that the driver doesn't know is one that the worker before had it free: one
    /// that it had made with that length, or none that begins there any more.
    fn was_freed(&self, file: Option<u32>, base: u64, length: Option<u64>) -> bool {
        let made = file.and_then(|file| self.books().range(Space::File(file), base));
        match made.filter(|(first, _)| *first == base) {
            Some((_, bytes)) => length.is_none_or(|length| length == bytes),
            None => self.is_in_range(base) == Some(false),
        }
    }

    /// How far a range went that began at `base` and is freed, as far as there are pieces of
    /// it: the first one behind that is still in a range ends it.
    fn ended_from(&self, base: u64, pieces: &[(Tree, Span)]) -> Option<Span> {
        let inside = pieces.iter().filter(|(tree, span)| tree.gpu != NO_GPU && span.first >= base);
        let mut spans: Vec<Span> = inside.map(|(_, span)| *span).collect();
        spans.sort_unstable_by_key(|span| (span.first, span.last));
        let mut last: Option<u64> = None;
        let mut probed = None;
        for span in spans {
            // A piece may go beyond the range that it's in, where the driver refused that.
            if probed != Some(span.first) && self.is_in_range(span.first)? {
                last = last.map(|last| last.min(span.first - 1));
                break;
            }
            probed = Some(span.first);
            last = last.max(Some(span.last));
        }
        last.map(|last| Span { first: base, last })
    }

    fn is_in_range(&self, address: u64) -> Option<bool> {
        Ranges::of(&self.parts.state.release, self.device().ok()?).is_external(address)
    }
}

/// What UVM says of a call that has been done: of a range that is gone or there, of a GPU that is
/// registered or not (`uvm_va_space.c`). What else it maps once more.
fn done_already(call: &Call) -> &'static [u32] {
    match call {
        Call::Free { .. } => &[NV_ERR_INVALID_ADDRESS],
        Call::AllocSemaphorePool(_) | Call::AllocDeviceP2p { .. } => &[NV_ERR_UVM_ADDRESS_IN_USE],
        Call::RegisterGpu { .. } | Call::UnregisterGpu { .. } | Call::UnregisterVaSpace { .. } => {
            &[NV_ERR_INVALID_DEVICE]
        }
        _ => &[],
    }
}

/// What the driver takes for a range: whole pages (`uvm_api_range_invalid_4k`).
fn pages(range: Range) -> Option<Span> {
    let is_whole = (range.base | range.length).is_multiple_of(PAGE_BYTES);
    Span::of(range.base, range.length).filter(|_| is_whole)
}
