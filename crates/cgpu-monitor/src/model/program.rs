//! A program of the container: a process that does nothing, with memory that it shares with the test.
#![allow(unsafe_code, reason = "a process is forked, and memory is shared with it")]

use std::cell::{Cell, RefCell};
use std::os::fd::RawFd;

use cgpu_sim::Node;
use cgpu_sim::abi::{NV01_DEVICE_0, NV01_ROOT_CLIENT, NV20_SUBDEVICE_0};
use cgpu_sim::bytes::Fields;
use memmap2::MmapRaw;
use nix::libc::{self, seccomp_data, seccomp_notif};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::{Call, CallerGets, Fate, ModelFile, World};

/// The number of `ioctl` on x86-64, and that architecture (linux/audit.h).
const IOCTL: i32 = 16;
const X86_64: u32 = 0xc000_003e;

/// Bytes of the shared memory, and the offset of the parameters in it.
const MEMORY_BYTES: usize = 8192;
const PARAMS: usize = 4096;

/// The offset of the byte in the shared memory that says that the program has begun.
const BEGUN: usize = MEMORY_BYTES - 1;

/// The highest descriptor for `close_range`.
const LAST: u32 = u32::MAX;

/// What a program gets of a call.
pub(crate) type Outcome = Result<u32, Why>;

/// Why a program gets nothing of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// The status in the call's struct.
    Status(u32),
    Errno(i32),
    /// The call was interrupted.
    NoAnswer,
}

/// A program of the container.
pub(crate) struct Program<'w> {
    pub(crate) world: &'w World,
    pid: Pid,
    files: RefCell<Vec<(Node, ModelFile)>>,
    memory: MmapRaw,
    client: Cell<u32>,
    /// A device of each GPU.
    devices: RefCell<Vec<u32>>,
    next: Cell<u32>,
    /// The fate of the next call.
    fate: Cell<Fate>,
    is_alive: Cell<bool>,
}

impl<'w> Program<'w> {
    /// Starts a program with a client, and with a device and a subdevice of each GPU.
    pub(crate) fn start(world: &'w World) -> Self {
        let gpus = (0..).zip(0..world.gpus()).map(|(minor, _)| Node::Gpu(minor));
        let nodes: Vec<Node> =
            [Node::Control, Node::Uvm, Node::Uvm].into_iter().chain(gpus).collect();
        let files = nodes.iter().map(|node| (*node, world.driver.open(*node)));
        let files: Vec<(Node, ModelFile)> = files.collect();
        let file = memfd_create("program", MemfdFlags::CLOEXEC).expect("a memory file");
        ftruncate(&file, MEMORY_BYTES as u64).expect("it can be longer");
        let memory = MmapRaw::map_raw(&file).expect("it can be mapped");
        let own = files.iter().map(|(_, file)| file.number());
        let mut own: Vec<RawFd> = own.chain(world.boxes.iter().map(ModelFile::number)).collect();
        own.sort_unstable();
        // SAFETY: the child only makes system calls, and never returns.
        let pid = match unsafe { fork() }.expect("a process") {
            ForkResult::Parent { child } => child,
            ForkResult::Child => begin(&own, memory.as_mut_ptr()),
        };
        let program = Program {
            world,
            pid,
            files: RefCell::new(files),
            memory,
            client: Cell::new(0),
            devices: RefCell::default(),
            next: Cell::new(0xa000_0000),
            fate: Cell::new(Fate::Answered),
            is_alive: Cell::new(true),
        };
        while program.get(BEGUN, 1) == [0] {
            std::thread::yield_now();
        }
        for (node, file) in program.files.borrow().iter() {
            world.driver.number_for(file, *node, program.process());
        }
        program.restart();
        program
    }

    /// Makes another client with devices, and goes on with this client. The old client stays.
    pub(crate) fn restart(&self) {
        self.client.set(0);
        self.client.set(self.make(0, 0, NV01_ROOT_CLIENT, &[]).expect("a client"));
        let devices = (0..).zip(0..self.world.gpus()).map(|(instance, _)| {
            let mut params = [0; 56];
            params.set_u32(0, instance);
            let device = self.make(self.client(), 0, NV01_DEVICE_0, &params).expect("a device");
            self.make(device, 0, NV20_SUBDEVICE_0, &[0; 4]).expect("a subdevice");
            device
        });
        self.devices.replace(devices.collect());
    }

    pub(crate) fn fated(&self, fate: Fate) -> &Self {
        self.fate.set(fate);
        self
    }

    pub(crate) fn client(&self) -> u32 {
        self.client.get()
    }

    pub(crate) fn device_of(&self, gpu: usize) -> u32 {
        self.devices.borrow()[gpu]
    }

    pub(crate) fn device(&self) -> u32 {
        self.device_of(0)
    }

    fn process(&self) -> u32 {
        self.pid.as_raw().cast_unsigned()
    }

    /// The program's descriptor of a node; `nth` chooses among several, from 0 on.
    pub(crate) fn descriptor(&self, node: Node, nth: usize) -> RawFd {
        let files = self.files.borrow();
        let mut all = files.iter().filter(|(known, _)| *known == node);
        all.nth(nth).expect("it has one").1.number()
    }

    /// The notification of a call. Stores the call in the shared memory.
    pub(crate) fn notice(&self, id: u64, call: &Call) -> seccomp_notif {
        let mut bytes = call.bytes.clone();
        if let Some((at, params)) = &call.params {
            let address = self.memory.as_mut_ptr().addr() + PARAMS;
            bytes.set_u64(*at, address as u64);
            self.put(PARAMS, params);
        }
        self.put(0, &bytes);
        let descriptor = call.descriptor.cast_unsigned().into();
        let args = [
            descriptor,
            self.request(call).into(),
            self.memory.as_mut_ptr().addr() as u64,
            0,
            0,
            0,
        ];
        let data = seccomp_data { nr: IOCTL, arch: X86_64, instruction_pointer: 0, args };
        seccomp_notif { id, pid: self.process(), flags: 0, data }
    }

    fn is_of_uvm(&self, call: &Call) -> bool {
        let files = self.files.borrow();
        files.iter().any(|(node, file)| *node == Node::Uvm && file.number() == call.descriptor)
    }

    /// The request: UVM's number alone, or `_IOWR('F', number, size)`.
    fn request(&self, call: &Call) -> u32 {
        if self.is_of_uvm(call) {
            return call.number;
        }
        let size = u32::try_from(call.bytes.len()).expect("structs are short");
        0xc000_4600 | call.number | size << 16
    }

    fn put(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= MEMORY_BYTES);
        // SAFETY: within the mapping, which only this function and the monitor use, in turn.
        unsafe { self.memory.as_mut_ptr().add(at).copy_from(bytes.as_ptr(), bytes.len()) };
    }

    pub(crate) fn get(&self, at: usize, count: usize) -> Vec<u8> {
        assert!(at + count <= MEMORY_BYTES);
        let mut bytes = vec![0; count];
        // SAFETY: as in `put`.
        unsafe { self.memory.as_mut_ptr().add(at).copy_to(bytes.as_mut_ptr(), count) };
        bytes
    }

    /// The parameters of the last call as the driver wrote them.
    pub(crate) fn answered_params(&self, count: usize) -> Vec<u8> {
        self.get(PARAMS, count)
    }

    /// Makes a call that was passed through, as the program itself would.
    pub(crate) fn makes(&self, call: &Call) {
        let files = self.files.borrow();
        let file = files.iter().find(|(_, file)| file.number() == call.descriptor);
        let (node, file) = file.expect("it is one of its own");
        let (driver, process) = (&self.world.driver, self.process());
        let number = driver.number_for(file, *node, process);
        if *node == Node::Uvm {
            let address = self.memory.as_mut_ptr().addr() as u64;
            driver.sim.uvm(number, process, call.number, address).expect("the call is one");
            return;
        }
        let mut bytes = self.get(0, call.bytes.len());
        let done = driver.sim.ioctl((*node, number), process, self.request(call), &mut bytes);
        done.expect("the call is one");
        self.put(0, &bytes);
    }

    /// A handle that the program has not used.
    pub(crate) fn handle(&self) -> u32 {
        self.next.set(self.next.get() + 1);
        self.next.get()
    }

    /// Makes a call whose struct has its status at `status`. Returns the word at `made` where the call was made.
    pub(crate) fn outcome(&self, call: &Call, status: usize, made: usize) -> Outcome {
        match self.world.ioctl(self, call, self.fate.replace(Fate::Answered)) {
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

    /// Kills the program: the kernel closes its files.
    pub(crate) fn die(&self) {
        self.end();
        self.world.driver.close_unused();
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.is_alive.get()
    }

    fn end(&self) {
        if self.is_alive.replace(false) {
            kill(self.pid, Signal::SIGKILL).expect("it is ours");
            waitpid(self.pid, None).expect("it ends");
            self.files.take();
        }
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// The program after its fork: it keeps only its own descriptors, and waits for its end.
fn begin(own: &[RawFd], memory: *mut u8) -> ! {
    let mut from = 0;
    // SAFETY: system calls that take numbers, and a write to a byte of the shared memory. `PR_SET_PDEATHSIG`: no other
    // process would end this one if its parent were killed.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        for fd in own {
            let fd = fd.cast_unsigned();
            if fd > from {
                libc::syscall(libc::SYS_close_range, from, fd - 1, 0);
            }
            from = fd + 1;
        }
        libc::syscall(libc::SYS_close_range, from, LAST, 0);
        memory.add(BEGUN).write_volatile(1);
        loop {
            libc::pause();
        }
    }
}
