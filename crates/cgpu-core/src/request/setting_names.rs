//! What the things a container can say are called: variables and their annotations.
//!
//! Two families: the neutral names, and those of Alibaba Cloud cGPU, which stay for ever. Names match exactly and never by a prefix: another vendor's product of the same name
//! uses `CGPU0_PRIORITY`, `CGPU_COUNT` and the like.

/// One thing a container can say, and the two places to say it in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// As a variable of `process.env`.
    pub variable: &'static str,
    /// As an annotation of the bundle: `cgpu/memory` of `CGPU_MEMORY`; `aliyun.com/` and the variable's
    /// name without `ALIYUN_COM_`, in lower case, with dashes, of the other family.
    pub annotation: &'static str,
}

/// Memory of the container on each of its GPUs.
pub const MEM_CONTAINER: Name =
    Name { variable: "ALIYUN_COM_GPU_MEM_CONTAINER", annotation: "aliyun.com/gpu-mem-container" };

/// Total memory of each GPU, in the unit of [`MEM_CONTAINER`].
pub const MEM_DEV: Name =
    Name { variable: "ALIYUN_COM_GPU_MEM_DEV", annotation: "aliyun.com/gpu-mem-dev" };

/// The unit of [`MEM_CONTAINER`] where [`MEM_DEV`] is missing.
pub const MEM_UNIT: Name =
    Name { variable: "ALIYUN_COM_GPU_MEM_UNIT", annotation: "aliyun.com/gpu-mem-unit" };

/// The GPUs of the container.
pub const VISIBLE_DEVICES: Name = Name {
    variable: "ALIYUN_COM_GPU_VISIBLE_DEVICES",
    annotation: "aliyun.com/gpu-visible-devices",
};

/// Compute weight.
pub const SCHD_WEIGHT: Name =
    Name { variable: "ALIYUN_COM_GPU_SCHD_WEIGHT", annotation: "aliyun.com/gpu-schd-weight" };

/// Compute priority.
pub const HIGH_PRIO: Name =
    Name { variable: "ALIYUN_COM_GPU_HIGH_PRIO", annotation: "aliyun.com/gpu-high-prio" };

/// Asks for no quota.
pub const DISABLE: Name = Name { variable: "CGPU_DISABLE", annotation: "aliyun.com/cgpu-disable" };

/// Memory on each GPU, as a size or per cent.
pub const MEMORY: Name = Name { variable: "CGPU_MEMORY", annotation: "cgpu/memory" };

/// The GPUs, as docker's `--gpus` has them: names, or how many.
pub const GPUS: Name = Name { variable: "CGPU_GPUS", annotation: "cgpu/gpus" };

/// Compute weight, or per cent of the computing time.
pub const WEIGHT: Name = Name { variable: "CGPU_WEIGHT", annotation: "cgpu/weight" };

/// Compute priority: `high` or `normal`.
pub const PRIORITY: Name = Name { variable: "CGPU_PRIORITY", annotation: "cgpu/priority" };

/// The neutral names.
pub const NEUTRAL: [Name; 4] = [MEMORY, GPUS, WEIGHT, PRIORITY];

/// All names that are both a variable and an annotation.
pub const NAMES: [Name; 11] = [
    MEM_CONTAINER,
    MEM_DEV,
    MEM_UNIT,
    VISIBLE_DEVICES,
    SCHD_WEIGHT,
    HIGH_PRIO,
    DISABLE,
    MEMORY,
    GPUS,
    WEIGHT,
    PRIORITY,
];

/// NVIDIA's own choice of GPUs: a variable only.
pub const NVIDIA_VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

/// NVIDIA's own quota, in MiB on each GPU (driver 615, toolkit 1.20.1): a variable only.
pub const NVIDIA_MEMORY_LIMIT: &str = "NVIDIA_GPU_MEMORY_LIMIT";

/// Memory that NVIDIA's toolkit keeps free for a container, in MiB: no quota.
pub const NVIDIA_MEMORY_REQUEST: &str = "NVIDIA_GPU_MEMORY_REQUEST";

/// What NVIDIA's variables are called in the bundle of a container that we hold to a quota, so that no
/// second hook acts on them. The first counts as NVIDIA's does: a bundle may be made into a container
/// again.
pub const SET_ASIDE: [(&str, &str); 2] = [
    (NVIDIA_MEMORY_LIMIT, "CGPU_NVIDIA_GPU_MEMORY_LIMIT"),
    (NVIDIA_MEMORY_REQUEST, "CGPU_NVIDIA_GPU_MEMORY_REQUEST"),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// An annotation is the variable without its vendor, in lower case, with dashes.
    #[test]
    fn annotation_name_derives_from_the_variables_name() {
        for name in NEUTRAL {
            let bare = name.variable.strip_prefix("CGPU_").unwrap();
            assert_eq!(name.annotation, format!("cgpu/{}", bare.to_ascii_lowercase()));
        }
        for name in NAMES.into_iter().filter(|name| !NEUTRAL.contains(name)) {
            let bare = name.variable.strip_prefix("ALIYUN_COM_").unwrap_or(name.variable);
            let expected = format!("aliyun.com/{}", bare.to_ascii_lowercase().replace('_', "-"));
            assert_eq!(name.annotation, expected);
        }
    }
}
