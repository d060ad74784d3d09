//! Fields of the driver's structs: little endian, by offset.
//!
//! A field that lies outside reads as zero and is not written: the sizes are checked
//! before, where the driver checks them.

/// Reading and writing of fields.
pub trait Fields {
    fn u32_at(&self, offset: usize) -> u32;
    fn u64_at(&self, offset: usize) -> u64;
    fn set_u32(&mut self, offset: usize, value: u32);
    fn set_u64(&mut self, offset: usize, value: u64);
}

impl Fields for [u8] {
    fn u32_at(&self, offset: usize) -> u32 {
        let field = self.get(offset..).and_then(|rest| rest.first_chunk());
        field.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    fn u64_at(&self, offset: usize) -> u64 {
        let field = self.get(offset..).and_then(|rest| rest.first_chunk());
        field.map_or(0, |bytes| u64::from_le_bytes(*bytes))
    }

    fn set_u32(&mut self, offset: usize, value: u32) {
        if let Some(field) = self.get_mut(offset..offset + 4) {
            field.copy_from_slice(&value.to_le_bytes());
        }
    }

    fn set_u64(&mut self, offset: usize, value: u64) {
        if let Some(field) = self.get_mut(offset..offset + 8) {
            field.copy_from_slice(&value.to_le_bytes());
        }
    }
}
