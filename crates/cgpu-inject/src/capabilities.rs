//! The nodes by which MIG devices are opened: `/dev/nvidia-caps/nvidia-capN`.
//!
//! Owns which capability of the driver a container needs and which node that is: a MIG device takes
//! that of its GPU instance and that of its compute instance together with its GPU's node. A container
//! that configures or watches MIG takes the host's `mig/config` or `mig/monitor`. Must not know quotas.
//! Invariant: a node is given only if the kernel says that it is of this capability.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::container_nodes::{NodeError, Nodes, PathKind, lookup};
use super::node_creation::HostNodes;
use crate::bundle::{Bind, Bundle, BundleError, DeviceNode};
use cgpu_core::plan::{Plan, PlannedGpu};
use cgpu_core::request::MigInstance;

/// What a container may do with MIG.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// Use a GPU instance.
    GpuInstance {
        /// Minor number of the GPU.
        gpu: u32,
        /// The instance's number.
        instance: u32,
    },
    /// Use a compute instance.
    ComputeInstance {
        /// Minor number of the GPU.
        gpu: u32,
        /// The GPU instance's number.
        gpu_instance: u32,
        /// Its own.
        instance: u32,
    },
    /// Make and remove instances.
    Config,
    /// See the instances of all.
    Monitor,
}

/// Why a container can't have a MIG device.
#[derive(Debug, Error)]
pub enum CapabilityError {
    /// It isn't known which instances it is.
    #[error(
        "MIG device {device}: nothing says which instances it is of; `cgpu gpus --refresh` asks \
         the driver, an inventory file says it by gpu_instance and compute_instance"
    )]
    Unknown {
        /// Its index and UUID.
        device: String,
    },
    /// The driver has no such capability.
    #[error(
        "the driver has no node for {capability}: {} says none; see `nvidia-smi -L` whether the \
         instance is still there, and load the module nvidia with nv_cap_enable_devfs=1",
        file.display()
    )]
    Absent {
        /// What.
        capability: Capability,
        /// The file that should say so.
        file: PathBuf,
    },
    /// Its node isn't there.
    #[error(
        "{} is missing, the node of {capability}; make it with `nvidia-modprobe -f {}`",
        path.display(), file.display()
    )]
    Missing {
        /// What.
        capability: Capability,
        /// The node on the host.
        path: PathBuf,
        /// The file that says so.
        file: PathBuf,
    },
    /// Its node is another's.
    #[error(
        "{} has number {found}, and the node of {capability} has {wanted}; remove it, and make it \
         again with `nvidia-modprobe -f {}`",
        path.display(), file.display()
    )]
    Another {
        /// What.
        capability: Capability,
        /// The node on the host.
        path: PathBuf,
        /// Its minor number.
        found: u64,
        /// That of the capability.
        wanted: u32,
        /// The file that says so.
        file: PathBuf,
    },
    /// A node can't be inspected.
    #[error(transparent)]
    Node(#[from] NodeError),
    #[error(transparent)]
    Bundle(#[from] BundleError),
    /// A container that isn't privileged may do nothing to MIG.
    #[error(
        "{variable}={value} is for privileged containers, and this is none; give it CAP_SYS_ADMIN, \
         or leave the variable out"
    )]
    Unprivileged { variable: &'static str, value: String },
    /// Only `all` can be meant.
    #[error("{variable}={value}: only `all` can be asked for; write that, or leave it out")]
    NotAll { variable: &'static str, value: String },
}

impl Capability {
    /// Its file below the driver's `capabilities`.
    fn file(self) -> String {
        match self {
            Capability::GpuInstance { gpu, instance } => {
                format!("gpu{gpu}/mig/gi{instance}/access")
            }
            Capability::ComputeInstance { gpu, gpu_instance, instance } => {
                format!("gpu{gpu}/mig/gi{gpu_instance}/ci{instance}/access")
            }
            Capability::Config => "mig/config".to_owned(),
            Capability::Monitor => "mig/monitor".to_owned(),
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.file())
    }
}

/// The compute instances of MIG that nodes with these minor numbers open, as the driver says.
#[must_use]
pub fn instances(nodes: &[u32], proc_root: &Path) -> Vec<MigInstance> {
    let text = fs::read_to_string(proc_root.join("driver/nvidia-caps/mig-minors"));
    instances_in(&text.unwrap_or_default(), nodes)
}

/// The same of the driver's text: lines as `gpu0/gi1/ci0/access 13`, where `gpu0` is a minor number.
fn instances_in(text: &str, nodes: &[u32]) -> Vec<MigInstance> {
    let instance = |line: &str| {
        let (capability, node) = line.rsplit_once(' ')?;
        let mut parts = capability.split('/');
        let mut number = |prefix| parts.next()?.strip_prefix(prefix)?.parse().ok();
        let found =
            MigInstance { gpu_minor: number("gpu")?, instances: (number("gi")?, number("ci")?) };
        nodes.contains(&node.trim().parse().ok()?).then_some(found)
    };
    text.lines().filter_map(instance).collect()
}

/// What the MIG devices of `plan` take.
///
/// # Errors
///
/// Where it isn't known which instances one is of.
fn of_devices(plan: &Plan) -> Result<Vec<Capability>, CapabilityError> {
    let mut wanted = Vec::new();
    let with_mig = |gpu: &PlannedGpu| Some((gpu.minor, gpu.given_index(), gpu.mig.clone()?));
    for (gpu, index, mig) in plan.gpus.iter().filter_map(with_mig) {
        let Some((gpu_instance, instance)) = mig.instances else {
            return Err(CapabilityError::Unknown { device: format!("{index} ({})", mig.uuid) });
        };
        for capability in [
            Capability::GpuInstance { gpu, instance: gpu_instance },
            Capability::ComputeInstance { gpu, gpu_instance, instance },
        ] {
            if !wanted.contains(&capability) {
                wanted.push(capability);
            }
        }
    }
    Ok(wanted)
}

/// The variables by which a container asks for MIG itself, as NVIDIA's toolkit has them.
const VARIABLES: [(&str, Capability); 2] = [
    ("NVIDIA_MIG_CONFIG_DEVICES", Capability::Config),
    ("NVIDIA_MIG_MONITOR_DEVICES", Capability::Monitor),
];

/// What variables ask for, as NVIDIA's toolkit allows it: `all`, where `is_privileged`. Pure.
///
/// # Errors
///
/// Where it is none, or wants something else.
fn of_variables(env: &[&str], is_privileged: bool) -> Result<Vec<Capability>, CapabilityError> {
    let mut wanted = Vec::new();
    for (variable, capability) in VARIABLES {
        let mut pairs = env.iter().rev().filter_map(|item| item.split_once('='));
        let Some((_, value)) = pairs.find(|(name, _)| *name == variable) else { continue };
        match value {
            "" => {}
            _ if !is_privileged => {
                return Err(CapabilityError::Unprivileged { variable, value: value.to_owned() });
            }
            "all" => wanted.push(capability),
            _ => return Err(CapabilityError::NotAll { variable, value: value.to_owned() }),
        }
    }
    Ok(wanted)
}

/// The nodes of what `plan` and, where `trusts_env`, the variables of `bundle` take.
///
/// # Errors
///
/// Where one of them isn't there or isn't allowed.
pub fn nodes(
    plan: &Plan,
    bundle: &Bundle,
    trusts_env: bool,
    host: &HostNodes,
) -> Result<Nodes, CapabilityError> {
    let mut wanted = of_devices(plan)?;
    if trusts_env && plan.is_whole() {
        wanted.extend(of_variables(&bundle.env()?, bundle.is_privileged())?);
    }
    let mut nodes = Nodes::default();
    for capability in wanted {
        let file = host.proc_root.join("driver/nvidia/capabilities").join(capability.file());
        let text = fs::read_to_string(&file).unwrap_or_default();
        let Some(number) = device_minor(&text) else {
            return Err(CapabilityError::Absent { capability, file });
        };
        let name = format!("nvidia-caps/nvidia-cap{number}");
        let (source, path) = (host.dev.join(&name), format!("/dev/{name}"));
        match lookup(&source)? {
            PathKind::Device(major, minor) if minor == i64::from(number) => {
                nodes.devices.push(DeviceNode::new(path, major, minor));
            }
            PathKind::Device(_, found) => {
                let found = u64::try_from(found).unwrap_or_default();
                return Err(CapabilityError::Another {
                    capability,
                    path: source,
                    found,
                    wanted: number,
                    file,
                });
            }
            PathKind::File => {
                let source = source.to_string_lossy().into_owned();
                nodes.binds.push(Bind { source, destination: path });
            }
            PathKind::Nothing => {
                return Err(CapabilityError::Missing { capability, path: source, file });
            }
        }
    }
    Ok(nodes)
}

/// The minor number that the text of a capability's file says (`kernel-open/nvidia/nv-caps.c`,
/// `nv_procfs_read_nv_cap`). Pure.
fn device_minor(text: &str) -> Option<u32> {
    let value = |line: &str| line.strip_prefix("DeviceFileMinor:")?.trim().parse().ok();
    text.lines().find_map(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_say_which_instances_they_open() {
        let text = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\n\
                    gpu3/gi2/access 14\ngpu3/gi2/ci1/access 15\nodd\ngpux/gi1/ci0/access 16\n";
        let found = instances_in(text, &[12, 13, 15, 16, 99]);
        let instance = |gpu_minor, instances| MigInstance { gpu_minor, instances };
        assert_eq!(found, [instance(0, (1, 0)), instance(3, (2, 1))]);
        assert_eq!(instances(&[1], Path::new("/nowhere")), []);
    }

    #[test]
    fn a_capabilitys_file_says_its_node() {
        let text = "DeviceFileMinor: 12\nDeviceFileMode: 292\nDeviceFileModify: 1\n";
        assert_eq!(device_minor(text), Some(12));
        for text in ["", "DeviceFileMode: 292\n", "DeviceFileMinor: -1\n", "DeviceFileMinor:"] {
            assert_eq!(device_minor(text), None, "{text:?}");
        }
    }

    /// Control of MIG itself is for privileged containers that ask for `all`.
    #[test]
    fn mig_control_needs_privilege_and_value_all() {
        let asked = |env: &[&str], is_privileged| {
            of_variables(env, is_privileged).map_err(|error| error.to_string())
        };
        let both = ["NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_MIG_MONITOR_DEVICES=all"];
        assert_eq!(asked(&both, true), Ok(vec![Capability::Config, Capability::Monitor]));
        let taken_back = [both[0], "NVIDIA_MIG_CONFIG_DEVICES="];
        for is_privileged in [true, false] {
            assert_eq!(asked(&["A=b", "NVIDIA_MIG_CONFIG_DEVICES"], is_privileged), Ok(vec![]));
            assert_eq!(asked(&taken_back, is_privileged), Ok(vec![]));
        }
        assert_eq!(
            asked(&both[1..], false).unwrap_err(),
            "NVIDIA_MIG_MONITOR_DEVICES=all is for privileged containers, and this is none; give \
             it CAP_SYS_ADMIN, or leave the variable out"
        );
        let one = asked(&["NVIDIA_MIG_CONFIG_DEVICES=0"], true).unwrap_err();
        assert!(one.starts_with("NVIDIA_MIG_CONFIG_DEVICES=0: only `all`"), "{one}");
    }
}
