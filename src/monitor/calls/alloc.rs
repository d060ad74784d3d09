//! Objects that the monitor makes and frees for programs, and the calls that it makes itself.
//!
//! Memory is reserved before the driver is asked, and what it gave is entered after; what
//! is freed is taken out after the driver did it. So the driver never has more than the books, but for
//! what it rounds up: that is looked at once it's entered. Pointers in our copies are ours while the
//! driver has them, and the caller's again when they go back.

use std::time::Instant;

use nix::errno::Errno;

use crate::ledger::{Client, Entry, Handle, LedgerError, Reservation, Usage};
use crate::monitor::caller::call_id::{self, nth_handle};
use crate::monitor::caller::listener::Reply;
use crate::monitor::caller::scratch::Copy;
use crate::monitor::calls::lane::OnLane;
use crate::monitor::calls::serve::{Case, Over};
use crate::monitor::driver::buffer::Buffer;
use crate::monitor::driver::device::Rm;
use crate::monitor::driver::monitor_client::Presence;
use crate::monitor::state::books::Books;
use crate::monitor::state::journal_map::SetAside;
use crate::rm::call::{Alloc, Object};
use crate::rm::memory::{self, Memory, Use, class_use};
#[allow(clippy::wildcard_imports, reason = "a vocabulary, spelt as upstream does")]
use crate::rm::number::*;
use crate::rm::{Answer, Call, Command, Decoded, Key, Layout, Meaning, refuse};

/// How often a handle that is free is looked for, before that is left to the driver after all.
const TRIES: u32 = 4;

/// Pages in which memory is charged at least.
const PAGE_BYTES: u64 = 4096;

/// Bytes of a mask of access rights, `RS_ACCESS_MASK` of rs_access.h.
const RIGHTS_BYTES: usize = 4;

/// Where a call that makes an object has what is needed to make it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ToMake {
    pub(crate) object: Object,
    /// Layout of the handle, which may lie in a part of the struct of its own.
    pub(crate) handle: &'static Layout,
    /// Layout of the status.
    pub(crate) head: &'static Layout,
}

impl Case<'_> {
    /// Each asks whether the caller still waits when it has read all it needs.
    pub(crate) fn execute(&mut self, command: &Command, decoded: &Decoded) -> Result<Reply, Over> {
        let Some(layout) = decoded.layout else { return self.execute_plain(command) };
        match decoded.call {
            Call::Alloc(alloc) => self.allocate(command, layout, &alloc),
            Call::AllocMemory { object, .. } => self.allocate_memory(command, layout, object),
            Call::VidHeap { client, parent, function } => {
                self.heap(command, layout, client, parent, function)
            }
            Call::Free(object) => self.free(command, layout, object.client, object.handle),
            Call::Dup { object, source_client, source, .. } => {
                self.duplicate(command, layout, object, (source_client, source))
            }
            Call::Control { .. } => self.control(command, layout, &decoded.call),
            _ => Err(self.answer(Answer::Errno(refuse::EINVAL), None)),
        }
    }

    pub(crate) fn rm(&self) -> Result<Rm<'_>, Over> {
        Ok(Rm { release: &self.parts.state.release, device: self.device()? })
    }

    pub(crate) fn patch(&mut self, layout: &Layout, meaning: Meaning, value: u64) {
        if let Some(patch) = layout.patch(meaning, value) {
            let _ = patch.apply(&mut self.scratch.bytes);
        }
    }

    pub(crate) fn field(&self, layout: &'static Layout, meaning: Meaning) -> Option<u64> {
        layout.view(&self.scratch.bytes).and_then(|view| view.u64(meaning))
    }

    pub(crate) fn status(&self, layout: &'static Layout) -> u32 {
        let status = layout.view(&self.scratch.bytes).and_then(|view| view.u32(Meaning::Status));
        status.unwrap_or(NV_OK)
    }

    /// Memory below what is no GPU of the container's is refused, as the driver does.
    pub(crate) fn on_no_gpu(&mut self, object: Object, layout: &Layout) -> Over {
        let Object { client, parent, .. } = object;
        self.log(&format!("memory below {parent:#x} of client {client:#x}, which is no GPU's"));
        self.answer(Answer::Status(NV_ERR_INVALID_OBJECT_PARENT), Some(layout))
    }

    /// Sets memory aside; where there isn't enough, the driver is asked what there is.
    fn reserve(
        &mut self,
        lane: &mut OnLane<'_>,
        memory: SetAside,
        layout: &Layout,
    ) -> Result<Reservation, Over> {
        let SetAside { gpu, bytes, .. } = memory;
        let mut asked = false;
        loop {
            let mut books = self.parts.state.books();
            // What the worker before set aside for this call is void: the driver gave nothing, or that is
            // freed.
            books.disinherit();
            match books.ledger.reserve(gpu, bytes) {
                Ok(reservation) => {
                    self.slot.set_aside(Some(memory));
                    return Ok(reservation);
                }
                Err(LedgerError::OverQuota { usage, .. })
                    if !asked && bytes <= usage.limit_bytes =>
                {
                    drop(books);
                    asked = true;
                    self.parts.audit.reconcile(lane, self.came);
                }
                Err(LedgerError::OverQuota { usage, .. }) => {
                    drop(books);
                    return Err(self.over_quota(Some(layout), (gpu, bytes), usage));
                }
                Err(error) => {
                    drop(books);
                    self.log(&error.to_string());
                    return Err(self.answer(Answer::Status(NV_ERR_NO_MEMORY), Some(layout)));
                }
            }
        }
    }

    /// Asks the driver to make an object, and tells the handle it got; `None` where it
    /// wasn't made, and the struct says why.
    pub(crate) fn make(&mut self, command: &Command, making: ToMake) -> Result<Option<u32>, Errno> {
        let ToMake { object, handle: place, head } = making;
        let chosen = object.handle != 0;
        let was_there = self.again && self.slot.making().was_there;
        let mut handle = if chosen { object.handle } else { self.next_handle() };
        let known = |case: &Self, handle| {
            let books = case.books();
            let is_group = books.groups.contains(object.client, handle);
            is_group || books.ledger.contains(Client(object.client), Handle(handle))
        };
        for attempt in 0..=TRIES {
            self.patch(place, Meaning::Handle, handle.into());
            self.patch(head, Meaning::Status, NV_OK.into());
            let there = was_there || known(self, handle);
            self.slot.set_executing(call_id::Making::one(object.client, handle, there));
            let Some(device) = &self.device else { return Err(Errno::EBADF) };
            device.call(command, &mut self.scratch.bytes)?;
            match self.status(head) {
                NV_OK => break,
                NV_ERR_INSERT_DUPLICATE_NAME if !chosen && attempt < TRIES => {
                    handle = if attempt + 1 < TRIES { self.next_handle() } else { 0 };
                }
                _ => {
                    self.patch(place, Meaning::Handle, object.handle.into());
                    return Ok(None);
                }
            }
        }
        let made = self.field(place, Meaning::Handle).and_then(|made| u32::try_from(made).ok());
        Ok(Some(made.unwrap_or(handle)).filter(|_| self.status(head) == NV_OK))
    }

    /// The handle of what a worker before may have made for this call, where that is made again.
    fn made_before(&self, object: Object) -> Option<u32> {
        let before = self.slot.making();
        let handle = if object.handle == 0 { before.handle } else { object.handle };
        (self.again && !before.was_there && handle != 0).then_some(handle)
    }

    /// The worker before may have made an object, and even entered it: once more from the start.
    pub(crate) fn start_over(&self, lane: &OnLane<'_>, object: Object) {
        if let Some(handle) = self.made_before(object) {
            self.unmake(lane, object.client, object.parent, handle);
            self.parts.slices.freed_groups(object.client, handle);
        }
    }

    fn next_handle(&self) -> u32 {
        self.next_handles(1)
    }

    /// The first of so many handles; [`nth_handle`] tells the others.
    pub(crate) fn next_handles(&self, count: u32) -> u32 {
        nth_handle(self.parts.state.journal.next_handles(count), 0)
    }

    /// Frees what a call made that isn't given to the caller.
    pub(crate) fn unmake(&self, lane: &OnLane<'_>, client: u32, parent: u32, handle: u32) {
        if let Some(device) = &self.device {
            self.parts.callers.unmake(lane, device, Object { client, parent, handle });
        }
    }

    /// Makes an object, and charges its memory where it takes some: sees that it fits the quota, asks the driver,
    /// and enters what that gave. No other function grants an allocation of the resource manager's.
    ///
    /// `memory` is the GPU and the bytes that are asked for. `given` reads from our copies how much the driver
    /// gave.
    pub(crate) fn charged(
        &mut self,
        lane: &mut OnLane<'_>,
        command: &Command,
        making: ToMake,
        memory: Option<(usize, u64)>,
        given: impl Fn(&Self) -> Option<u64>,
    ) -> Result<Option<Object>, Over> {
        let ToMake { object, head, .. } = making;
        if self.retry.repeats && self.is_there(object) {
            let there = Answer::Status(NV_ERR_INSERT_DUPLICATE_NAME);
            return Err(self.answer(there, Some(head)));
        }
        self.start_over(lane, object);
        let Some((gpu, asked_bytes)) = memory else {
            let made = self.make(command, making);
            let made = made.map_err(|errno| Reply::Errno(errno as i32))?;
            return Ok(made.map(|handle| self.made_without(object, handle)));
        };
        let asked_bytes = asked_bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        let memory = SetAside { gpu, bytes: asked_bytes, client: object.client };
        let reservation = self.reserve(lane, memory, head)?;
        // Others may have been on the lane meanwhile.
        if self.gpu_on(lane, object.client, object.parent) != Some(gpu) {
            self.books().ledger.cancel(reservation);
            self.slot.set_aside(None);
            self.log("memory below an object that was freed, or made anew, meanwhile");
            return Err(self.answer(Answer::Status(NV_ERR_OBJECT_NOT_FOUND), Some(head)));
        }
        let made = self.make(command, making);
        let given_bytes = given(self).unwrap_or(asked_bytes).max(asked_bytes);
        let mut books = self.books();
        books.ledger.cancel(reservation);
        let Ok(Some(handle)) = made else {
            self.slot.set_aside(None);
            return made.map(|_| None).map_err(|errno| Reply::Errno(errno as i32));
        };
        let (client, parent) = (Client(object.client), Handle(object.parent));
        let entry =
            Entry::Commit { gpu, bytes: given_bytes, client, parent, handle: Handle(handle) };
        books.enter(entry);
        self.slot.set_aside(None);
        // The driver rounds up, maybe beyond the quota.
        let is_over = |books: &Books| {
            books.ledger.usage(gpu).is_none_or(|usage| usage.used_bytes > usage.limit_bytes)
        };
        let mut over = is_over(&books);
        let made = books.ledger.serial_of(client, Handle(handle));
        drop(books);
        if over {
            // Or what the driver showed before counts twice.
            self.parts.audit.reconcile(lane, Instant::now());
            over = is_over(&self.books());
        }
        if over {
            // Others may have been on the lane meanwhile, and have freed it.
            if self.books().ledger.serial_of(client, Handle(handle)) == made {
                self.unmake(lane, object.client, object.parent, handle);
            }
            let usage = self.books().ledger.usage(gpu);
            let usage = usage.unwrap_or(Usage { limit_bytes: 0, used_bytes: 0 });
            return Err(self.over_quota(Some(head), (gpu, given_bytes), usage));
        }
        Ok(Some(Object { client: object.client, parent: object.parent, handle }))
    }

    /// Whether an object is there, as the books and the driver say.
    fn is_there(&self, Object { client, handle, .. }: Object) -> bool {
        let release = &self.parts.state.release;
        let known = self.books().ledger.contains(Client(client), Handle(handle));
        let own = self.parts.driver.own_client().filter(|_| known);
        own.is_some_and(|own| own.presence(release, client, handle) == Presence::There)
    }

    /// An object without memory was made.
    fn made_without(&self, object: Object, handle: u32) -> Object {
        let mut books = self.books();
        // What had the handle before is gone.
        if books.ledger.contains(Client(object.client), Handle(handle)) {
            books.note(object.client, object.parent, handle);
        }
        Object { client: object.client, parent: object.parent, handle }
    }

    fn allocate(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        alloc: &Alloc,
    ) -> Result<Reply, Over> {
        let Alloc { object, class, .. } = *alloc;
        let size = memory::params_size(&self.parts.state.release, class, alloc.params_size);
        let size = size.map_err(|refusal| self.refused(&refusal, Some(layout)))?;
        let size = size.filter(|_| alloc.params != 0);
        if let Some(size) = size {
            self.read_params(alloc.params, size)?;
        }
        let mut rights = Buffer::zeroed(RIGHTS_BYTES);
        if alloc.rights != 0 {
            let target = self.target()?;
            target.read(alloc.rights, &mut rights).map_err(|errno| Reply::Errno(errno as i32))?;
        }
        let mut lane = self.begin_on_lane()?;
        self.books().shares(object.client, self.target()?.process);

        let does = class_use(class).does;
        let mut asked: Option<Memory> = None;
        match (does, size) {
            (Use::Takes, None) => {
                return Err(self.answer(Answer::Status(NV_ERR_INVALID_ARGUMENT), Some(layout)));
            }
            (Use::Takes, Some(_)) => {
                let memory = memory::decode(&self.parts.state.release, class, &self.scratch.params);
                asked = Some(memory.map_err(|refusal| self.refused(&refusal, Some(layout)))?);
            }
            _ => {}
        }
        let charge = match asked {
            None => None,
            Some(memory) => match self.gpu_on(&lane, object.client, object.parent) {
                Some(gpu) => Some((gpu, memory.size_bytes)),
                None => return Err(self.on_no_gpu(object, layout)),
            },
        };

        if class == NV_SEMAPHORE_SURFACE && self.is_over_gpu_memory(object.client) {
            return Err(self.answer(Answer::Status(NV_ERR_INVALID_PARAMETER), Some(layout)));
        }
        let group = self.room_for_group(&lane, alloc, layout)?;
        let params = if size.is_some() { self.scratch.params.address() } else { 0 };
        self.patch(layout, Meaning::Params, params);
        let rights_address = if alloc.rights == 0 { 0 } else { rights.address() };
        self.patch(layout, Meaning::Rights, rights_address);
        let making = ToMake { object, handle: layout, head: layout };
        let made = self.charged(&mut lane, command, making, charge, |case| {
            memory::given_bytes(asked?.layout, &case.scratch.params)
        });
        self.patch(layout, Meaning::Params, alloc.params);
        self.patch(layout, Meaning::Rights, alloc.rights);
        let made = made?;
        if size.is_some() && made.is_some() {
            self.write_back(1, alloc.params, Copy::Params);
        }
        if let (Some(gpu), Some(made)) = (group, made) {
            let engine = memory::group_engine(&self.parts.state.release, &self.scratch.params);
            self.enter_group(gpu, object, made.handle, engine);
        }
        if let (NV20_SUBDEVICE_0, Some(made)) = (class, made) {
            self.subdevice_made(&lane, made);
        }
        Ok(self.executed(made))
    }

    /// Whether a surface of semaphores is to lie in memory of a GPU, which it would keep in nobody's
    /// figure. The driver refuses that, too: it has to be the host's (`semsurfConstruct_IMPL`,
    /// sem_surf.c, from 535.43.02 to 595.45.04).
    fn is_over_gpu_memory(&self, client: u32) -> bool {
        let layout = self.parts.state.release.layouts(Key::Class(NV_SEMAPHORE_SURFACE)).first();
        let view = layout.and_then(|layout| layout.view(&self.scratch.params));
        let named = [Meaning::SourceHandle, Meaning::Handle];
        let mut handles = named.into_iter().filter_map(|of| view.and_then(|view| view.u32(of)));
        let ledger = &self.books().ledger;
        handles.any(|handle| {
            ledger.bytes_of(Client(client), Handle(handle)).is_some_and(|bytes| bytes > 0)
        })
    }

    /// A subdevice was made, and so what is above it is a device.
    fn subdevice_made(&self, lane: &OnLane<'_>, made: Object) {
        let Object { client, parent, handle } = made;
        let gpu = self.made_of_gpu(lane, client, handle);
        let mut books = self.books();
        if !books.ledger.contains(Client(client), Handle(parent)) {
            books.note(client, client, parent);
        }
        books.note(client, parent, handle);
        match gpu {
            Some(gpu) => [parent, handle].iter().for_each(|of| books.learn(client, *of, gpu)),
            // Another object of this handle may have been known.
            None => books.unlearn(client, handle),
        }
    }

    /// A call that takes, frees and shows no memory, whose struct has nothing of the caller's.
    fn execute_plain(&mut self, command: &Command) -> Result<Reply, Over> {
        self.still_waits()?;
        self.call(command)?;
        Ok(self.executed(None))
    }

    pub(crate) fn call(&mut self, command: &Command) -> Result<(), Over> {
        let Some(device) = &self.device else { return Err(Reply::Errno(Errno::EBADF as i32)) };
        let called = device.call(command, &mut self.scratch.bytes);
        called.map_err(|errno| Reply::Errno(errno as i32))
    }

    pub(crate) fn free(
        &mut self,
        command: &Command,
        layout: &'static Layout,
        client: u32,
        handle: u32,
    ) -> Result<Reply, Over> {
        let lane = self.begin_on_lane()?;
        let (of, object) = (Client(client), Handle(handle));
        let process = self.target()?.process;
        let mut books = self.books();
        books.shares(client, process);
        let is_memory = books.ledger.charge_of(of, object).is_some();
        drop(books);
        self.slot.set_executing(call_id::Making::one(client, handle, true));
        let called = self.call(command);
        let mut status = self.status(layout);
        // A client that is gone is no client.
        let is_client = handle == client;
        let is_gone = match status {
            NV_ERR_OBJECT_NOT_FOUND => true,
            NV_ERR_INVALID_CLIENT | NV_ERR_INVALID_OBJECT_HANDLE => is_client,
            _ => false,
        };
        let is_ours = self.again && is_gone && (!is_client || self.is_no_client(client));
        if is_ours || self.retry.repeats && is_gone {
            // It was this call that freed it, when it was made before.
            self.patch(layout, Meaning::Status, NV_OK.into());
        }
        if is_ours {
            // And the worker before didn't come to enter that.
            status = NV_OK;
        }
        called?;
        if status == NV_OK {
            let mut books = self.books();
            books.enter(Entry::Free { client: of, handle: object });
            if !is_memory {
                books.unlearn_freed(client);
            }
            drop(books);
            self.parts.slices.freed_groups(client, handle);
            self.parts.stakes.free_stakes(&lane);
        }
        drop(lane);
        Ok(self.executed(None))
    }

    /// Whether the driver has no such client: by another's file it's told so of any.
    fn is_no_client(&self, client: u32) -> bool {
        let release = &self.parts.state.release;
        let own = self.parts.driver.own_client();
        own.filter(|own| own.can_tell(release))
            .is_some_and(|own| own.presence(release, client, client) == Presence::NoClient)
    }
}
