//! What the things a container can say are called: variables and their annotations.
//!
//! Names match exactly and never by a prefix: another vendor's product of the same name
//! uses `CGPU0_PRIORITY`, `CGPU_COUNT` and the like.

/// One thing a container can say, and the two places to say it in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Name {
    /// As a variable of `process.env`.
    pub variable: &'static str,
    /// As an annotation of the bundle: `aliyun.com/` and the variable's name without
    /// `ALIYUN_COM_`, in lower case, with dashes.
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

/// All names that are both a variable and an annotation.
pub const NAMES: [Name; 7] =
    [MEM_CONTAINER, MEM_DEV, MEM_UNIT, VISIBLE_DEVICES, SCHD_WEIGHT, HIGH_PRIO, DISABLE];

/// NVIDIA's own choice of GPUs: a variable only.
pub const NVIDIA_VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_annotation_is_the_variable_without_its_vendor_in_lower_case_with_dashes() {
        for name in NAMES {
            let bare = name.variable.strip_prefix("ALIYUN_COM_").unwrap_or(name.variable);
            let expected = format!("aliyun.com/{}", bare.to_ascii_lowercase().replace('_', "-"));
            assert_eq!(name.annotation, expected);
        }
    }
}
