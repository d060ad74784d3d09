//! The simulated driver without its files: for tests that hand over calls themselves. Needs no root.

use std::cell::Cell;

use crate::abi::Version;
use crate::caller::Caller;
use crate::escape::{self, Call};
use crate::fault::Fault;
use crate::object::Nodes;
use crate::shared::Shared;
use crate::spec::{Gpu, GpuSpec};
use crate::state::State;
use crate::tree::Device;
use crate::uvm;

/// A driver whose files somebody else has.
#[derive(Debug)]
pub struct InMemory {
    sim: Shared,
}

/// What a file of its was opened as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Node {
    /// `nvidiactl`.
    Control,
    /// `nvidiaN`.
    Gpu(u32),
    /// `nvidia-uvm`.
    Uvm,
}

/// Which of the driver's files a thread's descriptor is: its number, by the thread's and the descriptor's.
pub type FindFile = fn(u32, u32) -> Option<u64>;

impl InMemory {
    /// One of that version and with these GPUs. `nodes` are the files that stand for `nvidiaN`: their
    /// `st_dev`, and their inodes by N. Descriptors in structs are looked up by `find`.
    #[must_use]
    pub fn new(
        driver: Version,
        gpus: Vec<GpuSpec>,
        nodes: (u64, Vec<u64>),
        find: FindFile,
    ) -> Self {
        let gpus = (0_u8..).zip(gpus).map(|(index, spec)| Gpu::new(index, spec)).collect();
        let sim = Shared::new(driver, gpus);
        sim.set_nodes(Nodes { device: nodes.0, gpus: nodes.1 });
        sim.set_find_file(find);
        InMemory { sim }
    }

    /// Opens a node, as a process does; the file's number.
    #[must_use]
    pub fn open(&self, node: Node, process: u32) -> u64 {
        self.sim.open(device(node), process)
    }

    /// The last descriptor of a file went.
    pub fn close(&self, file: u64) {
        self.sim.close(file);
    }

    /// A thread's ioctl on a file, but for those of `nvidia-uvm`, with the struct that it copied in.
    ///
    /// # Errors
    ///
    /// The error number.
    pub fn ioctl(
        &self,
        (node, file): (Node, u64),
        tid: u32,
        request: u32,
        bytes: &mut [u8],
    ) -> Result<(), i32> {
        escape::ioctl(&self.call((node, file), tid), request & 0xff, bytes)
    }

    /// A thread's ioctl on a file of `nvidia-uvm`, with the address of the struct in the thread's memory.
    ///
    /// # Errors
    ///
    /// The error number.
    pub fn uvm(&self, file: u64, tid: u32, number: u32, address: u64) -> Result<(), i32> {
        uvm::ioctl(&self.call((Node::Uvm, file), tid), number, address)
    }

    fn call(&self, (node, file): (Node, u64), tid: u32) -> Call<'_> {
        let (caller, device) = (Caller::new(tid), device(node));
        Call { sim: &self.sim, caller, device, file, late: Cell::default() }
    }

    /// What it holds now.
    #[must_use]
    pub fn state(&self) -> State {
        State::of(&self.sim)
    }

    /// Puts a fault in, or takes all back.
    pub fn fault(&self, fault: Fault) {
        self.sim.add(fault);
    }
}

fn device(node: Node) -> Device {
    match node {
        Node::Control => Device::Control,
        Node::Gpu(minor) => Device::Gpu(minor),
        Node::Uvm => Device::Uvm,
    }
}
