//! What a device node is: a GPU's own, a MIG instance's, one of the kernel's graphics, or another.
//!
//! Owns the names and numbers that say so. A node is identified by everything that is known of it, and
//! never by its path alone: a path can be anything, and the number is what the kernel opens.
//! Must not know which GPUs a container has. Pure.

use std::collections::BTreeSet;
use std::path::Path;

use super::spec::Node;
use crate::bundle::plain;
use nvrm::NVIDIA_MAJOR;

/// Major number of the kernel's graphics (`Documentation/admin-guide/devices.txt`).
const DRM_MAJOR: i64 = 226;

/// Minor numbers of GPUs; 254 and 255 are modeset and control.
const GPU_MINORS: std::ops::RangeInclusive<i64> = 0..=253;

/// What a node is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Nature {
    /// Of GPUs, by minor number; of several where what is known of it disagrees.
    Gpu(BTreeSet<i64>),
    /// The right to use a MIG instance.
    Instance,
    /// Of the kernel's graphics.
    Drm,
    Other,
}

/// What `node` is by its paths, by the numbers that it states, and by those that it has.
pub(super) fn nature(node: &Node, seen: Option<(i64, i64)>) -> Nature {
    let stated = (node.major != 0).then_some((node.major, node.minor));
    let numbers = || [stated, seen].into_iter().flatten();
    let paths = [plain(&node.path), plain(node.source())];
    let by_number = numbers()
        .filter(|(major, minor)| *major == NVIDIA_MAJOR && GPU_MINORS.contains(minor))
        .map(|(_, minor)| minor);
    let gpus: BTreeSet<i64> =
        paths.iter().filter_map(|path| gpu_minor(Path::new(&**path))).chain(by_number).collect();
    let lies_in = |name: &str| {
        let parents = || paths.iter().filter_map(|path| Path::new(&**path).parent());
        parents().any(|parent| parent.ends_with(name))
    };
    if !gpus.is_empty() {
        Nature::Gpu(gpus)
    } else if lies_in("nvidia-caps") {
        Nature::Instance
    } else if lies_in("dev/dri") || numbers().any(|(major, _)| major == DRM_MAJOR) {
        Nature::Drm
    } else {
        Nature::Other
    }
}

/// The minor number of the GPU whose node is usually called so.
pub(super) fn gpu_minor(path: &Path) -> Option<i64> {
    let digits = path.file_name()?.to_str()?.strip_prefix("nvidia")?;
    let number = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    // One that no number can hold is of a GPU all the same, and of none that there is.
    number.then(|| digits.parse().unwrap_or(i64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(path: &str, host_path: &str, major: i64, minor: i64) -> Node {
        let (path, host_path) = (path.to_owned(), host_path.to_owned());
        Node { path, host_path, major, minor, ..Node::default() }
    }

    #[test]
    fn node_is_classified_by_all_known_facts() {
        let gpu = |minors: &[i64]| Nature::Gpu(minors.iter().copied().collect());
        for (node, seen, expected) in [
            (node("/dev/nvidia0", "", 0, 0), None, gpu(&[0])),
            (node("/dev/nvidia0", "/run/nvidia/driver/dev/nvidia0", 195, 0), None, gpu(&[0])),
            (node("/dev/nvidia0", "/dev/nvidia1", 0, 0), None, gpu(&[0, 1])),
            (node("/dev/nvidia0", "", 195, 3), None, gpu(&[0, 3])),
            (node("/dev/a", "/dev/./x/../nvidia2", 0, 0), None, gpu(&[2])),
            (node("/dev/a", "/dev/b", 195, 4), None, gpu(&[4])),
            (node("/dev/a", "/dev/b", 0, 0), Some((195, 5)), gpu(&[5])),
            (node("/dev/nvidia99999999999999999999", "", 0, 0), None, gpu(&[i64::MAX])),
            (node("/dev/nvidiactl", "", 195, 255), Some((195, 255)), Nature::Other),
            (node("/dev/nvidia-uvm", "", 510, 0), None, Nature::Other),
            (node("/dev/nvidia-caps/nvidia-cap21", "", 235, 21), None, Nature::Instance),
            (node("/dev/dri/card1", "", 0, 0), None, Nature::Drm),
            (node("/dev/a", "", 0, 0), Some((226, 128)), Nature::Drm),
        ] {
            assert_eq!(nature(&node, seen), expected, "{node:?}");
        }
    }
}
