//! Memory in files: a program exports memory into a file that all programs have, and imports it from there.

use cgpu_sim::abi::{
    NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD,
    NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD,
};
use cgpu_sim::bytes::Fields;

use super::Program;
use super::program::{Outcome, Why};

impl Program<'_> {
    fn box_descriptor(&self, file: usize) -> u32 {
        self.world.boxes[file].number().cast_unsigned()
    }

    /// Exports memory into a file, which keeps the memory alive.
    pub(crate) fn export(&self, memory: u32, file: usize) -> Result<(), Why> {
        let mut params = [0; 24];
        params.set_u32(0, 1);
        params.set_u32(4, self.device());
        params.set_u32(8, self.device());
        params.set_u32(12, memory);
        params.set_u32(16, self.box_descriptor(file));
        self.control(self.client(), NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD, &params)
    }

    /// Exports objects into the places of a file from `first` on. A file without places gets four. Handle 0 is no
    /// memory.
    pub(crate) fn export_list(&self, file: usize, first: u16, objects: &[u32]) -> Result<(), Why> {
        let mut params = [0; 2128];
        params.set_u32(0, self.box_descriptor(file));
        params.set_u32(4, self.device());
        params[8..10].copy_from_slice(&4_u16.to_le_bytes());
        for (object, place) in objects.iter().zip(params[76..2124].chunks_exact_mut(4)) {
            place.set_u32(0, *object);
        }
        let count = u16::try_from(objects.len()).expect("it is short");
        params[2124..2126].copy_from_slice(&count.to_le_bytes());
        params[2126..].copy_from_slice(&first.to_le_bytes());
        self.control(self.client(), NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECTS_TO_FD, &params)
    }

    /// Imports the memory in the first place of a file, under `handle`.
    pub(crate) fn import(&self, handle: u32, file: usize) -> Outcome {
        let mut params = [0; 20];
        params.set_u32(0, self.box_descriptor(file));
        params.set_u32(4, 1);
        params.set_u32(8, self.device());
        params.set_u32(12, self.device());
        params.set_u32(16, handle);
        self.control(self.client(), NV0000_CTRL_CMD_OS_UNIX_IMPORT_OBJECT_FROM_FD, &params)?;
        Ok(self.answered_params(20).u32_at(16))
    }
}
