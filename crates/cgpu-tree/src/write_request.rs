//! What a write means: [`WriteRequest`]. Pure.

use cgpu_core::plan::{Change, GpuChange};
use cgpu_core::units::MIB;

use crate::node::Node;

/// What a write to a file requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum WriteRequest {
    /// A change to the GPU with that index.
    Gpu(u32, GpuChange),
    /// So many MiB for containers that name GPUs and ask for no quota.
    DefaultMemory(u64),
    /// A change to the container with that short id.
    Container(String, Change),
    /// An instance of a container on a GPU.
    Create(u32, String),
    /// None of it any more, on any GPU.
    Destroy(String),
    /// The monitor that is installed now for every container.
    Upgrade,
}

/// Why a write requests nothing possible.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Senseless {
    /// Nothing can be written there.
    ReadOnly,
    /// What was written is no value of the file; why, in a sentence.
    Invalid(String),
}

/// What `bytes` written to the file of `node` request.
///
/// # Errors
///
/// If they request nothing possible.
pub(crate) fn request(node: &Node, bytes: &[u8]) -> Result<WriteRequest, Senseless> {
    let invalid = |why: &str| Senseless::Invalid(why.to_owned());
    let text = std::str::from_utf8(bytes).map_err(|_| invalid("it is no text"))?;
    let value = text.trim();
    match node {
        Node::RootFile("inst_ctl") => instance(text).ok_or_else(|| {
            invalid("write a GPU's digit, or - to destroy, and the 12 characters of an id")
        }),
        Node::RootFile("upgrade") if value == "1" => Ok(WriteRequest::Upgrade),
        Node::RootFile("upgrade") => Err(invalid("write 1")),
        Node::RootFile("default_memsize") => {
            // A part of a MiB is no quota, and nothing is an unlimited GPU.
            let bytes = value.parse::<u64>().ok().filter(|bytes| *bytes == 0 || *bytes >= MIB);
            let bytes = bytes.ok_or_else(|| {
                invalid("write a number of bytes, 1 MiB or more, or 0 for whole GPUs")
            })?;
            Ok(WriteRequest::DefaultMemory(bytes / MIB))
        }
        Node::GpuFile(gpu, key @ ("policy" | "max_inst" | "prio_ratio")) => {
            let change = GpuChange::read(key, value);
            let change = change.map_err(|error| Senseless::Invalid(error.to_string()))?;
            Ok(WriteRequest::Gpu(*gpu, change))
        }
        Node::ContainerFile(gpu, id, "memsize") => {
            // Quotas are whole numbers of MiB.
            let bytes = value.parse::<u64>().ok().map(|bytes| bytes / MIB * MIB);
            let bytes = bytes.filter(|bytes| *bytes > 0);
            let bytes =
                bytes.ok_or_else(|| invalid("a quota is a number of bytes, 1 MiB or more"))?;
            Ok(WriteRequest::Container(id.clone(), Change::MemoryLimit { gpu_index: *gpu, bytes }))
        }
        Node::ContainerFile(_, id, "weight") => {
            let weight = value.parse().ok().filter(|weight| (1..=25).contains(weight));
            let weight = weight.ok_or_else(|| invalid("a weight is a number from 1 to 25"))?;
            Ok(WriteRequest::Container(id.clone(), Change::Weight(weight)))
        }
        Node::ContainerFile(_, id, "highprio") => match value {
            "0" | "1" => {
                Ok(WriteRequest::Container(id.clone(), Change::HighPriority(value == "1")))
            }
            _ => Err(invalid("write 0 or 1")),
        },
        _ => Err(Senseless::ReadOnly),
    }
}

/// What a write of 13 bytes to `inst_ctl` requests; a newline behind them does no harm.
fn instance(text: &str) -> Option<WriteRequest> {
    let text = text.strip_suffix('\n').unwrap_or(text);
    if text.len() != 13 || !text.is_ascii() {
        return None;
    }
    let (command, id) = text.split_at(1);
    match command {
        "-" => Some(WriteRequest::Destroy(id.to_owned())),
        digit => Some(WriteRequest::Create(digit.parse().ok()?, id.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ID: &str = "012b2edccd7a";

    fn file(name: &'static str) -> Node {
        Node::ContainerFile(1, ID.to_owned(), name)
    }

    #[test]
    fn a_write_is_a_number_within_its_bounds() {
        assert_eq!(
            request(&Node::GpuFile(0, "policy"), b"2\n"),
            Ok(WriteRequest::Gpu(0, GpuChange::Policy(2)))
        );
        let quota = Change::MemoryLimit { gpu_index: 1, bytes: 1 << 30 };
        for text in ["1073741824\n", "1074790399"] {
            let wished = request(&file("memsize"), text.as_bytes());
            assert_eq!(wished, Ok(WriteRequest::Container(ID.into(), quota)), "{text}");
        }
        assert_eq!(
            request(&file("weight"), b"4"),
            Ok(WriteRequest::Container(ID.into(), Change::Weight(4)))
        );
        let high = WriteRequest::Container(ID.into(), Change::HighPriority(true));
        assert_eq!(request(&file("highprio"), b"1\n"), Ok(high));
        assert_eq!(request(&Node::RootFile("upgrade"), b"1\n"), Ok(WriteRequest::Upgrade));
        for (node, bytes) in [
            (Node::GpuFile(0, "policy"), &b"6"[..]),
            (Node::GpuFile(0, "policy"), b""),
            (Node::GpuFile(0, "max_inst"), b"0"),
            (Node::GpuFile(0, "prio_ratio"), b"100"),
            (file("memsize"), b"0"),
            (file("memsize"), b"1048575"),
            (file("memsize"), b"-1"),
            (file("memsize"), b"4GiB"),
            (file("weight"), b"26"),
            (file("highprio"), b"2"),
            (Node::RootFile("upgrade"), b"2"),
            (file("weight"), b"\xff"),
        ] {
            assert!(
                matches!(request(&node, bytes), Err(Senseless::Invalid(_))),
                "{node:?} {bytes:?}"
            );
        }
        for node in [file("id"), file("meminfo"), Node::RootFile("version"), Node::GpuFile(0, "x")]
        {
            assert_eq!(request(&node, b"1"), Err(Senseless::ReadOnly), "{node:?}");
        }
    }

    #[test]
    fn instances_are_made_and_destroyed_by_thirteen_bytes() {
        let control = |text: &str| request(&Node::RootFile("inst_ctl"), text.as_bytes());
        assert_eq!(control("0012b2edccd7a"), Ok(WriteRequest::Create(0, ID.into())));
        assert_eq!(control("-012b2edccd7a\n"), Ok(WriteRequest::Destroy(ID.into())));
        for text in ["", "0", "012b2edccd7a", "00012b2edccd7a", "x012b2edccd7a", "0ä12b2edccd7"] {
            assert!(matches!(control(text), Err(Senseless::Invalid(_))), "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_break_it(bytes: Vec<u8>) {
            for node in [Node::RootFile("inst_ctl"), Node::GpuFile(0, "policy"), file("memsize")] {
                let _ = request(&node, &bytes);
            }
        }
    }
}
