//! The text of an instance's `meminfo`: how much of its quota is in use.
//!
//! Must not know files. Invariant: a line it does not know makes the whole unknown,
//! because a figure that is too low would be believed.

/// Bytes in use: the sum over processes, or what is not free where no process is
/// listed; `None` where the text says neither.
pub(super) fn used_bytes(text: &str, limit_bytes: u64) -> Option<u64> {
    let mut free = None;
    let mut used: Option<u64> = None;
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        match line.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["Free:", bytes] => free = Some(bytes.parse::<u64>().ok()?),
            ["PID:", pid, "Mem:", bytes] => {
                pid.parse::<u32>().ok()?;
                used = Some(used.unwrap_or(0).checked_add(bytes.parse().ok()?)?);
            }
            _ => return None,
        }
    }
    used.or_else(|| limit_bytes.checked_sub(free?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sums_processes_or_takes_what_is_not_free() {
        assert_eq!(used_bytes("Free: 70\nPID: 1 Mem: 10\nPID: 2 Mem: 20\n", 100), Some(30));
        assert_eq!(used_bytes("Free: 70\n", 100), Some(30));
        assert_eq!(used_bytes("Free: 70", 100), Some(30));
        assert_eq!(used_bytes("  Free:   70 \n\n", 100), Some(30));
        assert_eq!(used_bytes("PID: 1 Mem: 10\n", 100), Some(10));
    }

    #[test]
    fn what_it_can_not_parse_is_unknown() {
        let texts = [
            "",
            "\n",
            "Free: 101\n",
            "Free: -1\n",
            "Free: 1 MiB\n",
            "Free: 70\nPID: 1 Mem: lots\n",
            "Free: 70\nPID: one Mem: 10\n",
            "Free: 70\nTotal: 100\n",
            "PID: 1 Mem: 18446744073709551615\nPID: 2 Mem: 1\n",
        ];
        for text in texts {
            assert_eq!(used_bytes(text, 100), None, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn never_panics(text in "\\PC*", limit_bytes: u64) {
            let _ = used_bytes(&text, limit_bytes);
        }
    }
}
