//! What must not stay in a recording: addresses of the process, and names of the machine.
//!
//! Pure. An address keeps what calls are decided by: whether it is 0, where in its page it lies, and
//! whether it is the same as another.

use std::collections::BTreeMap;

/// Where renamed pages begin: in the half of the addresses that a process has.
const FIRST_PAGE: u64 = 0x1000_0000;

const PAGE_BITS: u32 = 12;

/// Where the kernel begins to place by chance what a process maps. Below lie programs that aren't
/// position independent, and what CUDA maps where it wants: so does any pair of small numbers.
const FIRST_ADDRESS: u64 = 1 << 46;

/// What user space can have of addresses on x86-64 and aarch64.
const LAST_ADDRESS: u64 = (1 << 47) - 1;

/// Renames addresses, and hides names.
#[derive(Debug, Default)]
pub struct Scrubber {
    pages: BTreeMap<u64, u64>,
    hidden: Vec<Vec<u8>>,
}

impl Scrubber {
    /// Hides each of these texts; those that are UUIDs as bytes, too.
    #[must_use]
    pub fn hiding(texts: &[String]) -> Self {
        let mut hidden = Vec::new();
        for text in texts.iter().filter(|text| text.len() >= 4) {
            hidden.push(text.clone().into_bytes());
            let digits: String = text.trim_start_matches("GPU-").replace('-', "");
            if digits.len() == 32 {
                let pairs = (0..16).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16));
                hidden.extend(pairs.collect::<Result<Vec<u8>, _>>());
            }
        }
        Scrubber { pages: BTreeMap::new(), hidden }
    }

    /// What an address is called. What is no address of a process stays.
    pub fn address(&mut self, address: u64, is_address: impl Fn(u64) -> bool) -> u64 {
        if !(FIRST_ADDRESS..=LAST_ADDRESS).contains(&address) || !is_address(address) {
            return address;
        }
        let next = FIRST_PAGE + self.pages.len() as u64;
        let page = *self.pages.entry(address >> PAGE_BITS).or_insert(next);
        page << PAGE_BITS | address & ((1 << PAGE_BITS) - 1)
    }

    /// Renames every aligned word that is an address, and hides what is hidden.
    pub fn bytes(&mut self, bytes: &mut [u8], is_address: impl Fn(u64) -> bool) {
        for word in bytes.chunks_exact_mut(8) {
            let value = u64::from_le_bytes(word.try_into().unwrap_or_default());
            word.copy_from_slice(&self.address(value, &is_address).to_le_bytes());
        }
        for hidden in &self.hidden {
            for at in 0..bytes.len().saturating_sub(hidden.len() - 1) {
                if bytes[at..].starts_with(hidden) {
                    bytes[at..at + hidden.len()].fill(b'x');
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_address(value: u64) -> bool {
        value >= 0x7f00_0000_0000
    }

    #[test]
    fn scrubbed_address_retains_page_offset_and_equality() {
        let mut scrubber = Scrubber::default();
        let [one, same, next] = [0x7f12_3456_7010, 0x7f12_3456_7018, 0x7f12_3456_8010]
            .map(|address| scrubber.address(address, is_address));
        assert_eq!((one & 0xfff, same & 0xfff, next & 0xfff), (0x10, 0x18, 0x10));
        assert_eq!(one >> 12, same >> 12);
        assert_ne!(one >> 12, next >> 12);
        assert_eq!(scrubber.address(0x7f12_3456_7010, is_address), one);
        // Of a control of a device and its flags, and of a list of one entry.
        for plain in [0, 5, 0x80_0292, 0x16_0000_0003, u64::MAX] {
            assert_eq!(scrubber.address(plain, |_| true), plain);
        }
    }

    #[test]
    fn scrubbing_removes_addresses_and_names_not_numbers() {
        let texts = ["GPU-00112233-4455-6677-8899-aabbccddeeff".to_owned(), "myhost".to_owned()];
        let mut scrubber = Scrubber::hiding(&texts);
        let mut bytes = [7_u64, 0x7f12_3456_7010].map(u64::to_le_bytes).concat();
        bytes.extend_from_slice(b"__myhost");
        bytes.extend((0..16_u8).map(|at| at * 0x11));
        bytes.extend_from_slice(texts[0].as_bytes());
        let before = bytes.clone();
        scrubber.bytes(&mut bytes, is_address);
        assert_eq!(bytes[..8], before[..8]);
        assert_ne!(bytes[8..16], before[8..16]);
        assert_eq!(&bytes[16..24], b"__xxxxxx");
        assert!(bytes[24..].iter().all(|byte| *byte == b'x'));
    }
}
