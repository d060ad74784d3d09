//! A program's objects: the program makes, names, commands and frees them.

use cgpu_sim::Node;
use cgpu_sim::abi::{
    AMPERE_CHANNEL_GPFIFO_A, NV_ESC_RM_ALLOC, NV_ESC_RM_CONTROL, NV_ESC_RM_DUP_OBJECT,
    NV_ESC_RM_FREE, NV01_MEMORY_LOCAL_USER,
};
use cgpu_sim::bytes::Fields;

use super::program::{Outcome, Why};
use super::{Call, Program};

/// Bytes of NVOS64, and the offsets of the status in NVOS64, NVOS00, NVOS55 and NVOS54 of 535.161.08 (`nvos.h`).
const ALLOC_BYTES: usize = 48;
const ALLOC_STATUS: usize = 40;
const FREE_STATUS: usize = 12;
const DUP_STATUS: usize = 24;
const CONTROL_STATUS: usize = 28;

impl Program<'_> {
    fn call(&self, number: u32, bytes: Vec<u8>, params: Option<(usize, Vec<u8>)>) -> Call {
        Call { number, descriptor: self.descriptor(Node::Control, 0), bytes, params }
    }

    pub(crate) fn make(&self, parent: u32, handle: u32, class: u32, params: &[u8]) -> Outcome {
        let call = self.alloc(self.client(), (parent, handle), class, params);
        self.outcome(&call, ALLOC_STATUS, 8)
    }

    fn alloc(&self, client: u32, (parent, handle): (u32, u32), class: u32, params: &[u8]) -> Call {
        let mut bytes = vec![0; ALLOC_BYTES];
        for (at, word) in [(0, client), (4, parent), (8, handle), (12, class)] {
            bytes.set_u32(at, word);
        }
        let params = (!params.is_empty()).then(|| (16, params.to_vec()));
        self.call(NV_ESC_RM_ALLOC, bytes, params)
    }

    /// Takes `size` bytes of the first GPU, under a handle.
    pub(crate) fn take(&self, handle: u32, size: u64) -> Outcome {
        self.take_below(self.device(), handle, size)
    }

    /// Takes `size` bytes of memory below a device.
    pub(crate) fn take_below(&self, device: u32, handle: u32, size: u64) -> Outcome {
        let mut params = [0; 120];
        params.set_u32(0, 0x6370_6775);
        params.set_u32(24, 1 << 23);
        params.set_u64(64, size);
        self.make(device, handle, NV01_MEMORY_LOCAL_USER, &params)
    }

    /// Takes `size` bytes under a new handle and returns the handle. Fails where the program gets no memory.
    #[track_caller]
    pub(crate) fn takes(&self, size: u64) -> u32 {
        self.take(self.handle(), size).expect("it gets memory")
    }

    /// Asks for a channel of a client, below `parent`. Returns the driver's answer.
    pub(crate) fn channel(&self, client: u32, parent: u32, handle: u32) -> Outcome {
        let call = self.alloc(client, (parent, handle), AMPERE_CHANNEL_GPFIFO_A, &[]);
        self.outcome(&call, ALLOC_STATUS, 8)
    }

    pub(crate) fn free(&self, handle: u32) -> Result<(), Why> {
        self.free_of(self.client(), handle)
    }

    /// Frees a client of the program, with all its objects.
    pub(crate) fn free_client(&self, client: u32) -> Result<(), Why> {
        self.free_of(client, client)
    }

    fn free_of(&self, client: u32, handle: u32) -> Result<(), Why> {
        let mut bytes = vec![0; 16];
        for (at, word) in [(0, client), (4, self.device()), (8, handle)] {
            bytes.set_u32(at, word);
        }
        let call = self.call(NV_ESC_RM_FREE, bytes, None);
        self.outcome(&call, FREE_STATUS, 8).map(drop)
    }

    /// Makes another name of an object, which may belong to another program.
    pub(crate) fn duplicate(&self, handle: u32, source: (u32, u32)) -> Outcome {
        self.duplicate_below(self.device(), handle, source)
    }

    /// Makes another name of an object below `device`.
    pub(crate) fn duplicate_below(
        &self,
        device: u32,
        handle: u32,
        (client, object): (u32, u32),
    ) -> Outcome {
        let mut bytes = vec![0; 28];
        let words = [(0, self.client()), (4, device), (8, handle), (12, client), (16, object)];
        words.iter().for_each(|(at, word)| bytes.set_u32(*at, *word));
        let call = self.call(NV_ESC_RM_DUP_OBJECT, bytes, None);
        self.outcome(&call, DUP_STATUS, 8)
    }

    /// Makes another name of the program's own memory and returns its handle. Fails where the program gets none.
    #[track_caller]
    pub(crate) fn names(&self, object: u32) -> u32 {
        self.duplicate(self.handle(), (self.client(), object)).expect("it gets a name")
    }

    /// Gives a command to an object of the program's client.
    pub(crate) fn control(&self, object: u32, command: u32, params: &[u8]) -> Result<(), Why> {
        let mut bytes = vec![0; 32];
        let size = u32::try_from(params.len()).expect("parameters are short");
        for (at, word) in [(0, self.client()), (4, object), (8, command), (24, size)] {
            bytes.set_u32(at, word);
        }
        let call = self.call(NV_ESC_RM_CONTROL, bytes, Some((16, params.to_vec())));
        self.outcome(&call, CONTROL_STATUS, 8).map(drop)
    }
}
