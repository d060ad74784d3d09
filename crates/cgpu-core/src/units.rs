//! MiB, the unit people see, against bytes, the unit we count in.
//!
//! A MiB is 2²⁰ bytes. It exists at the edges only: environment variables,
//! configuration, inventory files and output. Everything between is bytes.

/// Bytes in one MiB.
pub const MIB: u64 = 1 << 20;

/// Bytes in `mib` MiB, or `None` where that is no `u64`.
#[must_use]
pub fn mib_to_bytes(mib: u64) -> Option<u64> {
    mib.checked_mul(MIB)
}

/// MiB in `bytes`, rounded down.
#[must_use]
pub fn bytes_to_mib(bytes: u64) -> u64 {
    bytes / MIB
}

/// The MiB that `text` says: `4096`, `4096MiB` or `4GiB`; `None` where it says none.
#[must_use]
pub fn mib_said(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, factor) = match text.strip_suffix("GiB") {
        Some(number) => (number, 1024),
        None => (text.strip_suffix("MiB").unwrap_or(text), 1),
    };
    let number = number.trim_end();
    let is_plain = number.bytes().all(|byte| byte.is_ascii_digit());
    number.parse::<u64>().ok().filter(|_| is_plain)?.checked_mul(factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn size_is_a_number_of_mib_or_gib() {
        let all = [("4096", 4096), ("4GiB", 4096), (" 3 MiB\n", 3), ("0MiB", 0)];
        for (text, mib) in all {
            assert_eq!(mib_said(text), Some(mib), "{text}");
        }
        for text in ["", "GiB", "4GB", "4G", "-1", "+1", "1.5GiB", "18446744073709551615GiB"] {
            assert_eq!(mib_said(text), None, "{text}");
        }
    }

    #[test]
    fn mib_count_beyond_u64_bytes_is_invalid() {
        assert_eq!(mib_to_bytes(16130), Some(16130 * 1024 * 1024));
        assert_eq!(mib_to_bytes(u64::MAX / MIB + 1), None);
        assert_eq!(bytes_to_mib(MIB - 1), 0);
    }
}
