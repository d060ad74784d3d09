//! The resource manager: clients, their objects, and the memory of the GPUs.
//!
//! What the driver holds between calls and the rules it keeps (rs_server.c, rs_client.c,
//! client.c, video_mem.c). It must not know how a call arrives; the few things it asks of
//! the caller come as [`Asker`]. Invariant: what a GPU has in use is the sum of its live
//! memories and managed pages, and a memory lives as long as it is referred to.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Instant;

use crate::abi::*;
use crate::export::Exported;
use crate::fault::Lies;
use crate::object::{
    Allocation, Asker, Client, File, Holder, Made, Memory, Object, Status, Uvm, Wanted,
    is_known_low, is_memory, may_hang_below, number_in,
};
use crate::peak::{CgroupPeaks, Named};
use crate::runlist::Runlist;
use crate::schedule::{Doorbell, Turn};
use crate::spec::Gpu;

/// Bytes of the page that a managed range is committed by.
const MANAGED_PAGE_BYTES: u64 = 4096;

// resserv.h, rs_client.h: where handles that the driver makes begin.
const RS_CLIENT_HANDLE_BASE: u32 = 0xc1d0_0000;
const RS_UNIQUE_HANDLE_BASE: u32 = 0xcaf0_0000;

/// The simulated driver.
#[derive(Debug)]
pub(crate) struct Driver {
    pub(crate) gpus: Vec<Gpu>,
    pub(crate) clients: BTreeMap<u32, Client>,
    pub(crate) memories: HashMap<u64, Memory>,
    /// What a debugger wrote into them, or looked for.
    pub(crate) contents: HashMap<u64, Vec<u8>>,
    /// Files of `nvidia-uvm`.
    pub(crate) uvm: HashMap<File, Uvm>,
    /// The control file registered for a file (`NV_ESC_REGISTER_FD`).
    pub(crate) registered: HashMap<File, File>,
    /// What was exported to open files.
    pub(crate) exports: HashMap<File, Exported>,
    /// `NV_ESC_ALLOC_OS_EVENT`: client, descriptor, file.
    pub(crate) events: Vec<(u32, u32, File)>,
    pub(crate) lies: Lies,
    pub(crate) started: Instant,
    /// Of GPUs that have had work.
    pub(crate) runlists: BTreeMap<usize, Runlist>,
    /// The last doorbell that was rung through a file, and of which GPU.
    pub(crate) doorbells: HashMap<File, (usize, Doorbell)>,
    used: Vec<u64>,
    /// The most that was in use of each GPU.
    peaks: Vec<u64>,
    pub(crate) cgroup_peaks: CgroupPeaks,
    made_clients: u32,
    made_memories: u64,
}

impl Driver {
    pub(crate) fn new(gpus: Vec<Gpu>) -> Self {
        Driver {
            used: vec![0; gpus.len()],
            peaks: vec![0; gpus.len()],
            cgroup_peaks: CgroupPeaks::default(),
            gpus,
            clients: BTreeMap::new(),
            memories: HashMap::new(),
            contents: HashMap::new(),
            uvm: HashMap::new(),
            registered: HashMap::new(),
            exports: HashMap::new(),
            events: Vec::new(),
            lies: Lies::default(),
            started: Instant::now(),
            runlists: BTreeMap::new(),
            doorbells: HashMap::new(),
            made_clients: 0,
            made_memories: 0,
        }
    }

    /// Bytes of a GPU in use.
    pub(crate) fn used_bytes(&self, gpu: usize) -> u64 {
        self.used.get(gpu).copied().unwrap_or(0)
    }

    /// The most bytes of a GPU that were in use.
    pub(crate) fn peak_bytes(&self, gpu: usize) -> u64 {
        self.peaks.get(gpu).copied().unwrap_or(0)
    }

    /// From now on the most is what is in use now.
    pub(crate) fn forget_peaks(&mut self) {
        self.peaks.clone_from(&self.used);
    }

    fn count(&mut self, gpu: usize, bytes: u64) -> Result<(), Status> {
        let used = self.used.get_mut(gpu).ok_or(NV_ERR_INVALID_DEVICE)?;
        *used += bytes;
        if let Some(peak) = self.peaks.get_mut(gpu) {
            *peak = (*peak).max(*used);
        }
        Ok(())
    }

    /// Bytes of a GPU that are free.
    pub(crate) fn free_bytes(&self, gpu: usize) -> u64 {
        let given = |gpu: &Gpu| gpu.memory_bytes.saturating_sub(gpu.reserved_bytes);
        let total = self.gpus.get(gpu).map_or(0, given);
        total.saturating_sub(self.used_bytes(gpu))
    }

    /// Bytes of managed memory; all of it is on GPU 0.
    pub(crate) fn managed_bytes(&self) -> u64 {
        self.uvm.values().map(|uvm| uvm.managed.len() as u64 * MANAGED_PAGE_BYTES).sum()
    }

    /// The client, if it may be used through that file: strict client validation
    /// (`rmclientValidate_IMPL`, client.c). `unknown` is what the call answers where there
    /// is no such client.
    pub(crate) fn client(
        &self,
        handle: u32,
        file: File,
        unknown: Status,
    ) -> Result<&Client, Status> {
        let client = self.clients.get(&handle).ok_or(unknown)?;
        if client.file == file { Ok(client) } else { Err(NV_ERR_INVALID_CLIENT) }
    }

    fn client_mut(&mut self, handle: u32, file: File) -> Result<&mut Client, Status> {
        self.client(handle, file, NV_ERR_INVALID_OBJECT_HANDLE)?;
        self.clients.get_mut(&handle).ok_or(NV_ERR_INVALID_OBJECT_HANDLE)
    }

    /// `NV_ESC_RM_ALLOC` of a client: `serverAllocClient`.
    pub(crate) fn make_client(&mut self, asker: &Asker<'_>, handle: u32) -> Result<u32, Status> {
        let handle = if handle == 0 {
            loop {
                self.made_clients = (self.made_clients + 1) & 0xf_ffff;
                let next = RS_CLIENT_HANDLE_BASE + self.made_clients;
                if !self.clients.contains_key(&next) {
                    break next;
                }
            }
        } else if self.clients.contains_key(&handle) {
            return Err(NV_ERR_INSERT_DUPLICATE_NAME);
        } else {
            handle
        };
        let client = Client {
            file: asker.file,
            process: asker.caller.process(),
            user: asker.caller.user(),
            numbers: asker.caller.numbers(),
            cgroup: asker.caller.cgroup(),
            objects: BTreeMap::new(),
            lost: Vec::new(),
            made: 0,
        };
        self.cgroup_peaks.add_client(handle, &client.cgroup);
        self.clients.insert(handle, client);
        Ok(handle)
    }

    /// The handle a new object gets: `clientValidateNewResourceHandle_IMPL`.
    fn new_handle(&mut self, client: u32, file: File, handle: u32) -> Result<u32, Status> {
        let entry = self.client_mut(client, file)?;
        if handle == 0 {
            loop {
                entry.made = (entry.made + 1) & 0xf_ffff;
                let next = RS_UNIQUE_HANDLE_BASE + entry.made - 1;
                if !entry.objects.contains_key(&next) {
                    return Ok(next);
                }
            }
        }
        if handle == client {
            Err(NV_ERR_INVALID_OBJECT_HANDLE)
        } else if entry.objects.contains_key(&handle) {
            Err(NV_ERR_INSERT_DUPLICATE_NAME)
        } else {
            Ok(handle)
        }
    }

    /// `NV_ESC_RM_ALLOC` of an object: `serverAllocResource`, `clientAllocResource`.
    pub(crate) fn allocate(
        &mut self,
        asker: &Asker<'_>,
        asked: Allocation,
        wanted: Wanted,
    ) -> Result<Made, Status> {
        let client = self.client(asked.client, asker.file, NV_ERR_INVALID_OBJECT_HANDLE)?;
        let parent = client.objects.get(&asked.parent);
        let above = parent.and_then(|parent| parent.gpu);
        if parent.is_none() && asked.parent != asked.client {
            return Err(NV_ERR_INVALID_OBJECT_PARENT);
        }
        let parent_class = parent.map_or(NV01_ROOT_CLIENT, |parent| parent.class);
        let on_device = parent_class == NV01_DEVICE_0 || parent_class == NV20_SUBDEVICE_0;
        // Who may be whose child is in resource_list.h; memory wants a device above.
        let misplaced = match asked.class {
            class if class <= 0xff && !is_known_low(class) => return Err(NV_ERR_INVALID_CLASS),
            NV01_DEVICE_0 => parent.is_some(),
            NV20_SUBDEVICE_0 => parent_class != NV01_DEVICE_0,
            NV01_EVENT
            | NV01_EVENT_OS_EVENT
            | NV01_EVENT_KERNEL_CALLBACK
            | NV01_EVENT_KERNEL_CALLBACK_EX
            | NV01_MEMORY_DEVICELESS => false,
            class if is_memory(class) => !on_device,
            NV_EVENT_BUFFER => parent.is_some(),
            class => class > 0xff && above.is_none(),
        };
        if misplaced {
            return Err(NV_ERR_INVALID_OBJECT_PARENT);
        }
        // clientValidateNewResourceHandle_IMPL, before anything is made.
        if client.objects.contains_key(&asked.handle) {
            return Err(NV_ERR_INSERT_DUPLICATE_NAME);
        }
        let gpu = match asked.class {
            NV01_DEVICE_0 => Some(self.open_device(asker, wanted.instance)?),
            NV20_SUBDEVICE_0 if wanted.instance != 0 => return Err(NV_ERR_INVALID_CLASS),
            // subdeviceConstruct_IMPL: of each GPU a device has one.
            NV20_SUBDEVICE_0 if client.subdevice(asked.parent).is_some() => {
                return Err(NV_ERR_INSUFFICIENT_RESOURCES);
            }
            _ => above,
        };
        // accesscntrConstruct_IMPL (access_cntr_buffer.c): a GPU has one, whichever client has it.
        if asked.class == ACCESS_COUNTER_NOTIFY_BUFFER
            && (self.has_access_counters(gpu) || self.is_registered(gpu))
        {
            return Err(NV_ERR_INVALID_STATE);
        }
        let privileged = matches!(
            asked.class,
            NV01_MEMORY_LOCAL_PHYSICAL
                | NV01_MEMORY_LIST_SYSTEM
                | NV01_MEMORY_LIST_FBMEM
                | NV01_MEMORY_LIST_OBJECT
        );
        if privileged && !asker.caller.is_administrator() {
            return Err(NV_ERR_INSUFFICIENT_PERMISSIONS);
        }
        let handle = self.new_handle(asked.client, asker.file, asked.handle)?;
        let memory = match (asked.class, gpu) {
            (NV01_MEMORY_LOCAL_USER | NV_MEMORY_EXTENDED_USER, Some(gpu)) => {
                let holder = Holder::Object(asked.client, handle);
                Some(self.take(gpu, wanted.bytes, wanted.page_bytes, holder)?)
            }
            // `kchangrpapiConstruct_IMPL` and `kchannelConstruct_IMPL`: context buffers, of the group
            // that it is, or that a channel has which is in none.
            (_, Some(gpu)) if self.lies.group_bytes > 0 && self.has_group(&asked) => {
                let holder = Holder::Object(asked.client, handle);
                Some(self.take(gpu, self.lies.group_bytes, 1, holder)?)
            }
            (NV_MEMORY_FABRIC, _) if wanted.source != 0 => {
                let client = self.client(asked.client, asker.file, NV_ERR_INVALID_CLIENT)?;
                let source = client.objects.get(&wanted.source).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
                let memory = source.memory.ok_or(NV_ERR_INVALID_ARGUMENT)?;
                let source = Holder::Object(asked.client, wanted.source);
                self.refer(memory, Holder::Object(asked.client, handle), Some(source));
                Some(memory)
            }
            _ => None,
        };
        let object = Object {
            parent: asked.parent,
            class: asked.class,
            gpu,
            memory,
            shared: false,
            turn: Turn::of(asked.class),
            switches_of: None,
        };
        let bytes = memory.and_then(|id| self.memories.get(&id)).map_or(0, |memory| memory.bytes);
        self.insert(asked.client, handle, object);
        Ok(Made { handle, bytes, offset: memory.unwrap_or(0) << 21 })
    }

    /// Whether an object is a channel group, or a channel that gets one of its own.
    fn has_group(&self, asked: &Allocation) -> bool {
        let above = self.clients.get(&asked.client).and_then(|of| of.objects.get(&asked.parent));
        let is_in_group = above.is_some_and(|above| above.class == KEPLER_CHANNEL_GROUP_A);
        asked.class == KEPLER_CHANNEL_GROUP_A
            || CHANNEL_CLASSES.contains(&asked.class) && !is_in_group
    }

    /// Whether a client has the access counters of that GPU.
    pub(crate) fn has_access_counters(&self, gpu: Option<usize>) -> bool {
        let objects = self.clients.values().flat_map(|client| client.objects.values());
        let mut counters = objects.filter(|object| object.class == ACCESS_COUNTER_NOTIFY_BUFFER);
        counters.any(|object| object.gpu == gpu)
    }

    /// Whether nvidia-uvm has that GPU, for whichever of its files: its first registers it with the
    /// driver (`add_gpu`, uvm_gpu.c).
    pub(crate) fn is_registered(&self, gpu: Option<usize>) -> bool {
        let uuid = gpu.and_then(|gpu| self.gpus.get(gpu)).map(|gpu| gpu.uuid);
        uuid.is_some_and(|uuid| self.uvm.values().any(|uvm| uvm.gpus.contains(&uuid)))
    }

    /// `deviceConstruct` (device.c): the GPU's node must be open in the calling process,
    /// whatever file the call is made through.
    fn open_device(&self, asker: &Asker<'_>, instance: u32) -> Result<usize, Status> {
        let gpu = usize::try_from(instance).map_err(|_| NV_ERR_INVALID_CLASS)?;
        self.accessible(asker, gpu)?;
        Ok(gpu)
    }

    /// `osIsGpuAccessible`: whether the calling process has the GPU's node open.
    pub(crate) fn accessible(&self, asker: &Asker<'_>, gpu: usize) -> Result<(), Status> {
        let inode = asker.nodes.gpus.get(gpu).ok_or(NV_ERR_INVALID_CLASS)?;
        match asker.caller.has_open(asker.nodes.device, *inode) {
            true => Ok(()),
            false => Err(NV_ERR_INSUFFICIENT_PERMISSIONS),
        }
    }

    /// Takes memory of a GPU, rounded up to its pages.
    fn take(
        &mut self,
        gpu: usize,
        bytes: u64,
        page_bytes: u64,
        holder: Holder,
    ) -> Result<u64, Status> {
        // stdmemValidateParams, heap and PMA: nothing is no allocation.
        if bytes == 0 {
            return Err(NV_ERR_INVALID_ARGUMENT);
        }
        let page = page_bytes.max(self.lies.round_bytes).max(1);
        let bytes = bytes.checked_next_multiple_of(page).ok_or(NV_ERR_NO_MEMORY)?;
        if bytes > self.free_bytes(gpu) {
            return Err(NV_ERR_NO_MEMORY);
        }
        self.count(gpu, bytes)?;
        self.made_memories += 1;
        self.memories.insert(self.made_memories, Memory { gpu, bytes, holders: Vec::new() });
        self.refer(self.made_memories, holder, None);
        Ok(self.made_memories)
    }

    /// Somebody has it, too, by a duplicate of another's.
    pub(crate) fn refer(&mut self, memory: u64, holder: Holder, of: Option<Holder>) {
        let Some(Memory { gpu, bytes, holders: all }) = self.memories.get_mut(&memory) else {
            return;
        };
        let source = of.and_then(|of| all.iter().position(|holder| *holder == of));
        all.insert(source.map_or(all.len(), |source| source + 1), holder);
        if let Holder::Object(client, _) = holder {
            self.cgroup_peaks.add_name(client, Named { memory, gpu: *gpu, bytes: *bytes });
        }
    }

    /// Somebody has it no more. Of the kernel's own, which are alike, the last.
    pub(crate) fn unrefer(&mut self, id: u64, holder: Holder) {
        let Some(memory) = self.memories.get_mut(&id) else { return };
        if let Some(at) = memory.holders.iter().rposition(|of| *of == holder) {
            memory.holders.remove(at);
            if let Holder::Object(client, _) = holder {
                let named = Named { memory: id, gpu: memory.gpu, bytes: memory.bytes };
                self.cgroup_peaks.remove_name(client, named);
            }
        }
        if memory.holders.is_empty() {
            let (gpu, bytes) = (memory.gpu, memory.bytes);
            self.memories.remove(&id);
            self.contents.remove(&id);
            if let Some(used) = self.used.get_mut(gpu) {
                *used -= bytes;
            }
        }
    }

    /// `NV_ESC_RM_FREE`: an object with all below it, or a client. With `lose`, memory
    /// stays in use until the client goes.
    pub(crate) fn free(
        &mut self,
        file: File,
        client: u32,
        handle: u32,
        lose: bool,
    ) -> Result<(), Status> {
        self.client(client, file, NV_ERR_INVALID_OBJECT_HANDLE)?;
        if handle == client {
            self.drop_client(client);
            return Ok(());
        }
        let entry = self.client_mut(client, file)?;
        if !entry.objects.contains_key(&handle) {
            return Err(NV_ERR_OBJECT_NOT_FOUND);
        }
        let mut doomed = vec![handle];
        let mut at = 0;
        while let Some(parent) = doomed.get(at).copied() {
            let children = entry.objects.iter().filter(|(_, object)| object.parent == parent);
            doomed.extend(children.map(|(handle, _)| *handle));
            at += 1;
        }
        let gone = self.reschedule(|driver| {
            let objects = driver.clients.get_mut(&client).map(|entry| &mut entry.objects);
            let gone = objects.into_iter().flat_map(|objects| {
                doomed.iter().filter_map(|handle| Some((*handle, objects.remove(handle)?)))
            });
            gone.collect::<Vec<_>>()
        });
        let memories: Vec<(u32, u64)> =
            gone.into_iter().filter_map(|(of, object)| Some((of, object.memory?))).collect();
        let entry = self.client_mut(client, file)?;
        if lose {
            entry.lost.extend(memories.iter().map(|(_, memory)| *memory));
        }
        for (handle, memory) in memories {
            if lose {
                self.refer(memory, Holder::Kernel, None);
            }
            self.unrefer(memory, Holder::Object(client, handle));
        }
        Ok(())
    }

    fn drop_client(&mut self, handle: u32) {
        let removed = self.reschedule(|driver| driver.clients.remove(&handle));
        let Some(client) = removed else { return };
        self.events.retain(|(client, ..)| *client != handle);
        for (object, of) in &client.objects {
            if let Some(memory) = of.memory {
                self.unrefer(memory, Holder::Object(handle, *object));
            }
        }
        client.lost.iter().for_each(|memory| self.unrefer(*memory, Holder::Kernel));
        self.cgroup_peaks.remove_client(handle);
    }

    /// The size of memory.
    pub(crate) fn memory_bytes(&self, memory: u64) -> Option<u64> {
        self.memories.get(&memory).map(|memory| memory.bytes)
    }

    /// `NV_ESC_RM_DUP_OBJECT`. The source's client need not belong to the file, but to the
    /// destination's process, unless the object is shared (RS_SHARE_TYPE_PID,
    /// `cliresShareCallback_IMPL`).
    pub(crate) fn duplicate(
        &mut self,
        asker: &Asker<'_>,
        asked: Allocation,
        source_client: u32,
        source: u32,
    ) -> Result<u32, Status> {
        let client = self.client(asked.client, asker.file, NV_ERR_INVALID_OBJECT_HANDLE)?;
        let process = client.process;
        let parent = client.objects.get(&asked.parent);
        if parent.is_none() && asked.parent != asked.client {
            return Err(NV_ERR_INVALID_OBJECT_PARENT);
        }
        let gpu = parent.and_then(|parent| parent.gpu);
        let from = self.clients.get(&source_client).ok_or(NV_ERR_INVALID_OBJECT_HANDLE)?;
        let object = from.objects.get(&source).ok_or(NV_ERR_OBJECT_NOT_FOUND)?.clone();
        if from.process != process && !object.shared {
            return Err(NV_ERR_INSUFFICIENT_PERMISSIONS);
        }
        // "Parent type mismatch between Src and Dst objects", mem.c.
        let is_of_another_kind = is_memory(object.class)
            && from.is_subdevice(object.parent) != client.is_subdevice(asked.parent);
        if is_of_another_kind || !may_hang_below(object.class, object.gpu, gpu) {
            return Err(NV_ERR_INVALID_OBJECT_PARENT);
        }
        let handle = self.new_handle(asked.client, asker.file, asked.handle)?;
        if let Some(memory) = object.memory {
            let of = Holder::Object(source_client, source);
            self.refer(memory, Holder::Object(asked.client, handle), Some(of));
        }
        let copy = Object { parent: asked.parent, gpu, switches_of: None, ..object };
        self.client_mut(asked.client, asker.file)?.objects.insert(handle, copy);
        Ok(handle)
    }

    /// A new object that duplicates one that a file has, of that GPU and with that memory.
    pub(crate) fn adopt(
        &mut self,
        asker: &Asker<'_>,
        asked: Allocation,
        of: Option<usize>,
        memory: Option<u64>,
    ) -> Result<u32, Status> {
        let client = self.client(asked.client, asker.file, NV_ERR_INVALID_CLIENT)?;
        let parent = client.objects.get(&asked.parent);
        if parent.is_none() && asked.parent != asked.client {
            return Err(NV_ERR_INVALID_OBJECT_PARENT);
        }
        let gpu = parent.and_then(|parent| parent.gpu);
        if !may_hang_below(asked.class, of, gpu) {
            return Err(NV_ERR_INVALID_OBJECT_PARENT);
        }
        let handle = self.new_handle(asked.client, asker.file, asked.handle)?;
        if let Some(memory) = memory {
            let holder = Holder::Object(asked.client, handle);
            self.refer(memory, holder, Some(Holder::Kernel));
        }
        let object = Object {
            parent: asked.parent,
            class: asked.class,
            gpu,
            memory,
            shared: false,
            turn: Turn::of(asked.class),
            switches_of: None,
        };
        self.insert(asked.client, handle, object);
        Ok(handle)
    }

    fn insert(&mut self, client: u32, handle: u32, object: Object) {
        self.reschedule(|driver| {
            if let Some(entry) = driver.clients.get_mut(&client) {
                entry.objects.insert(handle, object);
            }
        });
    }

    /// Memory that another part of the kernel duplicates for the calling process
    /// (nv_gpu_ops.c with NV04_DUP_HANDLE_FLAGS_REJECT_KERNEL_DUP_PRIVILEGE): the client
    /// must be that process's; through which file it came isn't asked.
    pub(crate) fn kernel_duplicate(
        &mut self,
        process: u32,
        client: u32,
        handle: u32,
    ) -> Result<u64, Status> {
        let from = self.clients.get(&client).ok_or(NV_ERR_INVALID_OBJECT_HANDLE)?;
        let object = from.objects.get(&handle).ok_or(NV_ERR_OBJECT_NOT_FOUND)?;
        if from.process != process && !object.shared {
            return Err(NV_ERR_INSUFFICIENT_PERMISSIONS);
        }
        let memory = object.memory.ok_or(NV_ERR_INVALID_OBJECT)?;
        self.refer(memory, Holder::Kernel, Some(Holder::Object(client, handle)));
        Ok(memory)
    }

    /// A page of `nvidia-uvm` is touched: managed memory, unless it lies in a range that
    /// was announced. Whether memory is free isn't asked: the driver would evict.
    pub(crate) fn touch(&mut self, file: File, process: u32, offset: u64, len: u64) {
        let Some(uvm) = self.uvm.get_mut(&file).filter(|uvm| !uvm.has_lost) else { return };
        let mut fresh = 0;
        let mut page = offset & !(MANAGED_PAGE_BYTES - 1);
        while page < offset.saturating_add(len) {
            let below = uvm.ranges.range(..=page).next_back();
            let announced = below.is_some_and(|(base, (bytes, _))| page - base < *bytes);
            if !announced && uvm.managed.insert(page, process).is_none() {
                fresh += MANAGED_PAGE_BYTES;
            }
            page += MANAGED_PAGE_BYTES;
        }
        let _ = self.count(0, fresh); // there is one
    }

    /// The last descriptor of a file is closed: all its clients go with it
    /// (`rm_cleanup_file_private`), and what a file of UVM holds.
    pub(crate) fn close(&mut self, file: File) {
        let clients = self.clients.iter().filter(|(_, client)| client.file == file);
        for client in clients.map(|(handle, _)| *handle).collect::<Vec<_>>() {
            self.drop_client(client);
        }
        self.registered.remove(&file);
        self.doorbells.remove(&file);
        self.events.retain(|(_, _, owner)| *owner != file);
        self.forget_exports(file);
        let Some(uvm) = self.uvm.remove(&file) else { return };
        uvm.memories().for_each(|memory| self.unrefer(memory, Holder::Kernel));
        self.forget_managed(uvm.managed.len());
    }

    /// So many managed pages aren't on the GPU any more.
    pub(crate) fn forget_managed(&mut self, pages: usize) {
        if let Some(used) = self.used.first_mut() {
            *used -= pages as u64 * MANAGED_PAGE_BYTES;
        }
    }

    /// From where to where a file has managed pages.
    pub(crate) fn managed_pages(&self, file: File) -> Option<(u64, u64)> {
        let managed = &self.uvm.get(&file)?.managed;
        let (first, last) = (managed.first_key_value()?, managed.last_key_value()?);
        Some((*first.0, last.0 + MANAGED_PAGE_BYTES))
    }

    /// Processes with a client on the GPU that has an object for which `counts` holds:
    /// `gpuGetProcWithObject_IMPL` (gpu_rmapi.c), as the namespace numbers them.
    pub(crate) fn processes(
        &self,
        gpu: usize,
        namespace: u64,
        counts: impl Fn(&Client, &Object) -> bool,
    ) -> BTreeSet<u32> {
        let with = self.clients.values().filter(|client| {
            let opened = |object: &Object| object.class == NV01_DEVICE_0 && object.gpu == Some(gpu);
            client.objects.values().any(opened)
                && client
                    .objects
                    .values()
                    .any(|object| object.gpu == Some(gpu) && counts(client, object))
        });
        with.filter_map(|client| number_in(&client.numbers, namespace)).collect()
    }

    /// Private, shared and owned, shared and duplicated bytes of a process on a GPU:
    /// `_gpuCollectMemInfo` (gpu_rmapi.c).
    pub(crate) fn process_bytes(&self, gpu: usize, namespace: u64, number: u32) -> [u64; 3] {
        let mut bytes = [0; 3];
        for (name, client) in &self.clients {
            // First what is quick to see: there may be 10,000 clients that have nothing.
            if client.objects.is_empty() || number_in(&client.numbers, namespace) != Some(number) {
                continue;
            }
            // `_checkVidmemClassValidity`, and memory below that GPU's device alone.
            let shown = client.objects.iter().filter(|(_, object)| {
                object.gpu == Some(gpu) && object.class == NV01_MEMORY_LOCAL_USER
            });
            for (handle, object) in shown {
                let Some(memory) = object.memory.and_then(|id| self.memories.get(&id)) else {
                    continue;
                };
                let [private, owned, duped] = &mut bytes;
                let is_owner = memory.holders.first() == Some(&Holder::Object(*name, *handle));
                *match (memory.holders.len(), is_owner) {
                    (1, _) => private,
                    (_, true) => owned,
                    (_, false) => duped,
                } += memory.bytes;
            }
        }
        bytes
    }
}
