//! A program of the container: a process that does nothing, and memory that it has in common with the test.
#![allow(unsafe_code, reason = "a process is forked, and memory is shared with it")]

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use cgpu_sim::Node;
use cgpu_sim::abi::{
    AMPERE_CHANNEL_GPFIFO_A, NV_ESC_RM_ALLOC, NV_ESC_RM_DUP_OBJECT, NV_ESC_RM_FREE, NV01_DEVICE_0,
    NV01_MEMORY_LOCAL_USER, NV01_ROOT_CLIENT, NV20_SUBDEVICE_0,
};
use cgpu_sim::bytes::Fields;
use memmap2::MmapRaw;
use nix::libc::{self, seccomp_data, seccomp_notif};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{Call, CallerGets, Fate, ModelDriver, World};

/// `ioctl` of x86-64, and its architecture (linux/audit.h).
const IOCTL: i32 = 16;
const X86_64: u32 = 0xc000_003e;

/// Bytes of the memory in common, and where parameters begin.
const MEMORY_BYTES: usize = 8192;
const PARAMS: usize = 4096;

/// Where structs of 535.161.08 have their status (`nvos.h`): NVOS64, NVOS00 and NVOS55.
const ALLOC_BYTES: usize = 48;
const ALLOC_STATUS: usize = 40;
const FREE_STATUS: usize = 12;
const DUP_STATUS: usize = 24;

/// What a call came to, for its program.
pub(crate) type Outcome = Result<u32, Why>;

/// Why a program has nothing of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// The struct's status.
    Status(u32),
    /// The error number.
    Errno(i32),
    /// It was interrupted.
    NoAnswer,
}

/// One of them.
pub(crate) struct Program {
    pid: Pid,
    control: OwnedFd,
    _gpu: OwnedFd,
    memory: MmapRaw,
    pub(crate) client: u32,
    pub(crate) device: u32,
    next: Cell<u32>,
    is_alive: Cell<bool>,
}

impl Program {
    /// Starts one with a client, and a device and a subdevice of the GPU.
    pub(crate) fn start(world: &mut World) -> Self {
        let (control, gpu) = (world.driver.open(Node::Control), world.driver.open(Node::Gpu(0)));
        let file = memfd_create("program", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&file, MEMORY_BYTES as u64).expect("it can be longer");
        let memory = MmapRaw::map_raw(&file).expect("it can be mapped");
        // SAFETY: the child makes system calls alone, and never returns.
        let pid = match unsafe { fork() }.expect("a process") {
            ForkResult::Parent { child } => child,
            ForkResult::Child => loop {
                // SAFETY: take numbers only. Nobody else would end it, were this process killed.
                unsafe {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::pause();
                }
            },
        };
        let (next, is_alive) = (Cell::new(0xcaf0_0000), Cell::new(true));
        let mut program =
            Program { pid, control, _gpu: gpu, memory, client: 0, device: 0, next, is_alive };
        let process = pid.as_raw().cast_unsigned();
        world.driver.number_of(program.control.as_fd(), Node::Control, process);
        world.driver.number_of(program._gpu.as_fd(), Node::Gpu(0), process);
        program.client = program.make(world, 0, 0, NV01_ROOT_CLIENT, &[]).expect("a client");
        program.device =
            program.make(world, program.client, 0, NV01_DEVICE_0, &[0; 56]).expect("a device");
        let subdevice = program.make(world, program.device, 0, NV20_SUBDEVICE_0, &[0; 4]);
        subdevice.expect("a subdevice");
        program
    }

    /// Its notification of a call, which is in its memory from now on.
    pub(crate) fn notice(&self, id: u64, call: &Call) -> seccomp_notif {
        let mut bytes = call.bytes.clone();
        if let Some((at, params)) = &call.params {
            let address = self.memory.as_mut_ptr().addr() + PARAMS;
            bytes.set_u64(*at, address as u64);
            self.put(PARAMS, params);
        }
        self.put(0, &bytes);
        let descriptor = self.control.as_raw_fd().cast_unsigned().into();
        let args =
            [descriptor, request(call).into(), self.memory.as_mut_ptr().addr() as u64, 0, 0, 0];
        let data = seccomp_data { nr: IOCTL, arch: X86_64, instruction_pointer: 0, args };
        seccomp_notif { id, pid: self.pid.as_raw().cast_unsigned(), flags: 0, data }
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= MEMORY_BYTES);
        // SAFETY: within the mapping, which this alone and the worker use, in turn.
        unsafe { self.memory.as_mut_ptr().add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    fn get(&self, at: usize, count: usize) -> Vec<u8> {
        assert!(at + count <= MEMORY_BYTES);
        let mut bytes = vec![0; count];
        // SAFETY: as in `put`.
        unsafe { self.memory.as_mut_ptr().add(at).copy_to(bytes.as_mut_ptr(), count) };
        bytes
    }

    /// It makes the call itself.
    pub(crate) fn makes(&self, driver: &ModelDriver, call: &Call) {
        let mut bytes = self.get(0, call.bytes.len());
        let tid = self.pid.as_raw().cast_unsigned();
        let number = driver.number_of(self.control.as_fd(), Node::Control, tid);
        let done = driver.sim.ioctl((Node::Control, number), tid, request(call), &mut bytes);
        done.expect("the call is one");
        self.put(0, &bytes);
    }

    /// A handle that it hasn't used.
    pub(crate) fn handle(&self) -> u32 {
        self.next.set(self.next.get() + 1);
        self.next.get()
    }

    fn outcome(
        &self,
        world: &mut World,
        call: &Call,
        (fate, status): (Fate, usize),
        made: usize,
    ) -> Outcome {
        match world.ioctl(self, call, fate) {
            CallerGets::Errno(errno) => return Err(Why::Errno(errno)),
            CallerGets::Nothing => return Err(Why::NoAnswer),
            CallerGets::Done | CallerGets::Continue => {}
        }
        let bytes = self.get(0, call.bytes.len());
        match bytes.u32_at(status) {
            0 => Ok(bytes.u32_at(made)),
            status => Err(Why::Status(status)),
        }
    }

    /// Makes an object.
    fn make(
        &self,
        world: &mut World,
        parent: u32,
        handle: u32,
        class: u32,
        params: &[u8],
    ) -> Outcome {
        let call = self.alloc(parent, handle, class, params);
        self.outcome(world, &call, (Fate::Answered, ALLOC_STATUS), 8)
    }

    fn alloc(&self, parent: u32, handle: u32, class: u32, params: &[u8]) -> Call {
        let mut bytes = vec![0; ALLOC_BYTES];
        bytes.set_u32(0, self.client);
        bytes.set_u32(4, parent);
        bytes.set_u32(8, handle);
        bytes.set_u32(12, class);
        let params = (!params.is_empty()).then(|| (16, params.to_vec()));
        Call { number: NV_ESC_RM_ALLOC, bytes, params }
    }

    /// Takes memory under a handle.
    pub(crate) fn take(&self, world: &mut World, handle: u32, size: u64, fate: Fate) -> Outcome {
        let mut params = [0; 120];
        params.set_u32(0, 0x6370_6775);
        params.set_u32(24, 1 << 23);
        params.set_u64(64, size);
        let call = self.alloc(self.device, handle, NV01_MEMORY_LOCAL_USER, &params);
        self.outcome(world, &call, (fate, ALLOC_STATUS), 8)
    }

    /// Asks for a channel of a client, below a handle; what the driver says to it.
    pub(crate) fn channel(
        &self,
        world: &mut World,
        client: u32,
        parent: u32,
        handle: u32,
    ) -> Outcome {
        let mut call = self.alloc(parent, handle, AMPERE_CHANNEL_GPFIFO_A, &[]);
        call.bytes.set_u32(0, client);
        self.outcome(world, &call, (Fate::Answered, ALLOC_STATUS), 8)
    }

    /// Frees an object.
    pub(crate) fn free(&self, world: &mut World, handle: u32, fate: Fate) -> Result<(), Why> {
        let mut bytes = vec![0; 16];
        bytes.set_u32(0, self.client);
        bytes.set_u32(4, self.device);
        bytes.set_u32(8, handle);
        let call = Call { number: NV_ESC_RM_FREE, bytes, params: None };
        self.outcome(world, &call, (fate, FREE_STATUS), 8).map(drop)
    }

    /// Makes another name of an object, which may be another program's.
    pub(crate) fn duplicate(
        &self,
        world: &mut World,
        handle: u32,
        (of, object): (u32, u32),
        fate: Fate,
    ) -> Outcome {
        let mut bytes = vec![0; 28];
        for (at, word) in [(0, self.client), (4, self.device), (8, handle), (12, of), (16, object)]
        {
            bytes.set_u32(at, word);
        }
        let call = Call { number: NV_ESC_RM_DUP_OBJECT, bytes, params: None };
        self.outcome(world, &call, (fate, DUP_STATUS), 8)
    }

    /// It is killed: the kernel closes its files.
    pub(crate) fn die(&self, world: &World) {
        self.end();
        world.driver.close_all_of(self.pid.as_raw().cast_unsigned());
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.is_alive.get()
    }

    fn end(&self) {
        if self.is_alive.replace(false) {
            kill(self.pid, Signal::SIGKILL).expect("it is ours");
            waitpid(self.pid, None).expect("it ends");
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        self.end();
    }
}

/// `_IOWR('F', number, size)`.
fn request(call: &Call) -> u32 {
    let size = u32::try_from(call.bytes.len()).expect("structs are short");
    0xc000_4600 | call.number | size << 16
}
