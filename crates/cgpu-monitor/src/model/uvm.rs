//! A program's files of `nvidia-uvm`: GPUs, ranges, and memory that is mapped there.

use cgpu_sim::Node;
use cgpu_sim::abi::{
    Abi, FERMI_VASPACE_A, UVM_CREATE_EXTERNAL_RANGE, UVM_FREE, UVM_GPU_MAPPING_ATTRIBUTES_BYTES,
    UVM_INITIALIZE, UVM_MAP_EXTERNAL_ALLOCATION, UVM_MM_INITIALIZE, UVM_REGISTER_GPU,
    UVM_REGISTER_GPU_VASPACE, UVM_UNMAP_EXTERNAL, UVM_UNREGISTER_GPU, UVM_UNREGISTER_GPU_VASPACE,
};
use cgpu_sim::bytes::Fields;

use super::program::Why;
use super::{Call, DRIVER, Program};

fn abi() -> Abi {
    Abi::of(&DRIVER.parse().expect("a version"))
}

impl Program<'_> {
    /// Makes a UVM call on the program's file `nth` (0 or 1). The struct ends with the status.
    fn uvm_by(&self, nth: usize, number: u32, fill: impl FnOnce(&mut [u8])) -> Result<(), Why> {
        let (size, status) = abi().uvm(number).expect("it is a call");
        let mut bytes = vec![0; size];
        fill(&mut bytes);
        let descriptor = self.descriptor(Node::Uvm, nth);
        let call = Call { number, descriptor, bytes, params: None };
        self.outcome(&call, status, status).map(drop)
    }

    fn uvm(&self, number: u32, fill: impl FnOnce(&mut [u8])) -> Result<(), Why> {
        self.uvm_by(0, number, fill)
    }

    /// Initializes the first file. The second file keeps the program's memory for the first one.
    pub(crate) fn start_uvm(&self) -> Result<(), Why> {
        self.uvm(UVM_INITIALIZE, |_| {})?;
        let file = self.descriptor(Node::Uvm, 0).cast_unsigned();
        self.uvm_by(1, UVM_MM_INITIALIZE, |bytes| bytes.set_u32(0, file))
    }

    /// Registers a GPU and an address space of it.
    pub(crate) fn register(&self, gpu: usize) -> Result<(), Why> {
        self.register_gpu(gpu)?;
        let mut params = [0; 48];
        // NV_VASPACE_ALLOCATION_FLAGS_IS_EXTERNALLY_OWNED
        params.set_u32(4, 1 << 3);
        let space = self.make(self.device_of(gpu), self.handle(), FERMI_VASPACE_A, &params)?;
        let control = self.descriptor(Node::Control, 0).cast_unsigned();
        self.uvm(UVM_REGISTER_GPU_VASPACE, |bytes| {
            bytes[..16].copy_from_slice(&self.world.uuid_of(gpu));
            bytes.set_u32(16, control);
            bytes.set_u32(20, self.client());
            bytes.set_u32(24, space);
        })
    }

    /// Registers a GPU without an address space.
    pub(crate) fn register_gpu(&self, gpu: usize) -> Result<(), Why> {
        let control = self.descriptor(Node::Control, 0).cast_unsigned();
        self.uvm(UVM_REGISTER_GPU, |bytes| {
            bytes[..16].copy_from_slice(&self.world.uuid_of(gpu));
            bytes.set_u32(24, control);
            bytes.set_u32(28, self.client());
        })
    }

    /// Makes a range for memory.
    pub(crate) fn range(&self, base: u64, bytes: u64) -> Result<(), Why> {
        self.uvm(UVM_CREATE_EXTERNAL_RANGE, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
        })
    }

    /// Maps memory for GPUs in a range.
    pub(crate) fn map(
        &self,
        gpus: &[usize],
        base: u64,
        bytes: u64,
        memory: u32,
    ) -> Result<(), Why> {
        let tail = abi().uvm_map_external_tail();
        let control = self.descriptor(Node::Control, 0).cast_unsigned();
        self.uvm(UVM_MAP_EXTERNAL_ALLOCATION, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
            for (at, gpu) in gpus.iter().enumerate() {
                let at = 24 + at * UVM_GPU_MAPPING_ATTRIBUTES_BYTES;
                params[at..at + 16].copy_from_slice(&self.world.uuid_of(*gpu));
            }
            params.set_u64(tail, gpus.len() as u64);
            params.set_u32(tail + 8, control);
            params.set_u32(tail + 12, self.client());
            params.set_u32(tail + 16, memory);
        })
    }

    /// Unmaps what a GPU has mapped there.
    pub(crate) fn unmap(&self, gpu: usize, base: u64, bytes: u64) -> Result<(), Why> {
        self.uvm(UVM_UNMAP_EXTERNAL, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
            params[16..32].copy_from_slice(&self.world.uuid_of(gpu));
        })
    }

    /// Frees a range, with what is mapped in it.
    pub(crate) fn free_range(&self, base: u64, bytes: u64) -> Result<(), Why> {
        self.uvm(UVM_FREE, |params| {
            params.set_u64(0, base);
            params.set_u64(8, bytes);
        })
    }

    /// Ends a GPU's mappings together with its address space.
    pub(crate) fn unregister_space(&self, gpu: usize) -> Result<(), Why> {
        let uuid = self.world.uuid_of(gpu);
        self.uvm(UVM_UNREGISTER_GPU_VASPACE, |params| params[..16].copy_from_slice(&uuid))
    }

    /// Ends a GPU's mappings together with its registration.
    pub(crate) fn unregister_gpu(&self, gpu: usize) -> Result<(), Why> {
        let uuid = self.world.uuid_of(gpu);
        self.uvm(UVM_UNREGISTER_GPU, |params| params[..16].copy_from_slice(&uuid))
    }
}
