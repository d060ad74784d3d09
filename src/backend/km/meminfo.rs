//! The text of an instance's `meminfo`: how much of its quota is in use.
//!
//! Must not know files. Invariant: a line it does not know makes the whole unknown,
//! because a value that is too low would be believed.

/// What a `meminfo` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Use {
    /// Bytes in use: the sum over processes, or what is not free where no process is listed.
    pub(super) bytes: u64,
    /// Each process and its bytes.
    pub(super) processes: Vec<(i32, u64)>,
}

/// What `text` says of a quota of `limit_bytes`; `None` where it can't be understood.
pub(super) fn read(text: &str, limit_bytes: u64) -> Option<Use> {
    let mut free = None;
    let mut processes = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        match line.split_whitespace().collect::<Vec<_>>().as_slice() {
            ["Free:", bytes] => free = Some(bytes.parse::<u64>().ok()?),
            ["PID:", pid, "Mem:", bytes] => {
                let pid = pid.parse::<u32>().ok()?.try_into().ok()?;
                processes.push((pid, bytes.parse::<u64>().ok()?));
            }
            _ => return None,
        }
    }
    let sum = processes.iter().try_fold(0u64, |sum, (_, bytes)| sum.checked_add(*bytes))?;
    let bytes = if processes.is_empty() { limit_bytes.checked_sub(free?)? } else { sum };
    Some(Use { bytes, processes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn used_bytes(text: &str, limit_bytes: u64) -> Option<u64> {
        read(text, limit_bytes).map(|found| found.bytes)
    }

    #[test]
    fn sums_processes_or_takes_what_is_not_free() {
        assert_eq!(used_bytes("Free: 70\nPID: 1 Mem: 10\nPID: 2 Mem: 20\n", 100), Some(30));
        assert_eq!(used_bytes("Free: 70\n", 100), Some(30));
        assert_eq!(used_bytes("Free: 70", 100), Some(30));
        assert_eq!(used_bytes("  Free:   70 \n\n", 100), Some(30));
        assert_eq!(used_bytes("PID: 1 Mem: 10\n", 100), Some(10));
        let two = read("Free: 70\nPID: 1 Mem: 10\nPID: 2 Mem: 20\n", 100).unwrap();
        assert_eq!(two.processes, [(1, 10), (2, 20)]);
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
