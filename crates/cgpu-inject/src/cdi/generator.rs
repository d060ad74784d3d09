//! A specification of this host's GPUs, for engines that read such.
//!
//! Owns what it says: a device for each GPU by its index and by its UUID, and `all`; in common
//! the control nodes and the driver's files. Nodes are named without numbers, so that an engine
//! looks at the node when it makes a container, and the file outlives a reboot. Links can't be
//! made by a specification without a program to call, nor a linker's cache, so a library is
//! mounted by the names that linkers ask for, where linkers of every distribution look. The same host gives the same text. Must not know where the files were found. Pure.

use std::collections::BTreeSet;
use std::path::Path;

use thiserror::Error;

use super::dirs::KIND;
use super::merger::MOUNT_OPTIONS;
use super::spec::{Device, Edits, Mount, Node, Specification};
use super::validation::{self, Invalid};
use crate::Nodes;
use crate::driver::{Capability, Driver, DriverFile, Use, Width};
use cgpu_core::gpu::{Gpu, GpuState, Inventory};
use cgpu_core::request::setting_names::NVIDIA_VISIBLE_DEVICES;

/// What a socket of a daemon is mounted with; one that is read-only can be connected to.
const SOCKET_OPTIONS: [&str; 6] = ["ro", "nosuid", "nodev", "rbind", "rprivate", "noexec"];

/// Why there is nothing to write.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum GenerateError {
    /// No GPU can be a device.
    #[error("no GPU of this host can be a CDI device{}; `cgpu gpus` lists them", listed(left_out))]
    NoGpu {
        /// Why each can't.
        left_out: Vec<String>,
    },
    /// An engine takes devices only.
    #[error("{path} is no character device, so no engine could give it to a container by CDI")]
    NotADevice {
        /// The node.
        path: String,
    },
    /// The GPUs have names that CDI doesn't allow.
    #[error("this host can't be described by CDI")]
    Invalid(#[from] Invalid),
}

fn listed(left_out: &[String]) -> String {
    if left_out.is_empty() { String::new() } else { format!(" ({})", left_out.join("; ")) }
}

/// A specification, and what isn't in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    pub spec: Specification,
    /// The GPUs that aren't in it, with the reason.
    pub left_out: Vec<String>,
}

/// What isn't a device, and why; nothing where `gpu` is one.
fn objection(gpu: &Gpu) -> Option<String> {
    match gpu.state {
        GpuState::Lost => Some(format!("GPU {} ({}) is lost", gpu.index, gpu.uuid)),
        GpuState::Ok if gpu.mig_enabled => Some(format!(
            "GPU {} ({}) is split by MIG, whose devices `nvidia-ctk cdi generate` can describe",
            gpu.index, gpu.uuid
        )),
        GpuState::Ok => None,
    }
}

/// The GPUs that can be devices.
pub fn usable(inventory: &Inventory) -> impl Iterator<Item = &Gpu> {
    inventory.gpus().iter().filter(|gpu| objection(gpu).is_none())
}

/// The specification of `inventory`'s GPUs, whose `nodes` are in the host's `dev`, with the files
/// of `driver` that containers with `capabilities` get.
///
/// # Errors
///
/// Where no GPU can be a device, or a node is none.
pub fn generate(
    inventory: &Inventory,
    nodes: &Nodes,
    dev: &Path,
    driver: &Driver,
    capabilities: &[Capability],
) -> Result<Generated, GenerateError> {
    let left_out: Vec<String> = inventory.gpus().iter().filter_map(objection).collect();
    if let Some(bind) = nodes.binds.first() {
        return Err(GenerateError::NotADevice { path: bind.source.clone() });
    }
    let gpu_node = |gpu: &Gpu| node(&format!("/dev/nvidia{}", gpu.minor), dev);
    let device = |name: String, device_nodes: Vec<Node>| {
        let container_edits = Edits { device_nodes, ..Edits::default() };
        Device { name, container_edits, ..Device::default() }
    };
    let gpus: Vec<&Gpu> = usable(inventory).collect();
    if gpus.is_empty() {
        return Err(GenerateError::NoGpu { left_out });
    }
    let by_index = gpus.iter().map(|gpu| device(gpu.index.to_string(), vec![gpu_node(gpu)]));
    let by_uuid = gpus.iter().map(|gpu| device(gpu.uuid.clone(), vec![gpu_node(gpu)]));
    let all = device("all".to_owned(), gpus.iter().map(|gpu| gpu_node(gpu)).collect());
    let own: BTreeSet<String> =
        gpus.iter().map(|gpu| format!("/dev/nvidia{}", gpu.minor)).collect();
    let controls = nodes.devices.iter().filter(|device| !own.contains(&device.path));
    let common = Edits {
        // As NVIDIA's generator has it: its runtime, where it is called besides, has nothing to do.
        env: vec![format!("{NVIDIA_VISIBLE_DEVICES}=void")],
        device_nodes: controls.map(|device| node(&device.path, dev)).collect(),
        mounts: mounts(driver, capabilities),
        ..Edits::default()
    };
    let mut spec = Specification {
        kind: KIND.to_owned(),
        devices: by_index.chain(by_uuid).chain([all]).collect(),
        container_edits: common,
        ..Specification::default()
    };
    spec.cdi_version = validation::minimum_version(&spec).to_owned();
    validation::validate(&spec)?;
    Ok(Generated { spec, left_out })
}

fn node(path: &str, dev: &Path) -> Node {
    let source = dev.join(path.trim_start_matches("/dev/"));
    let host_path = if source == Path::new(path) {
        String::new()
    } else {
        source.to_string_lossy().into_owned()
    };
    Node { path: path.to_owned(), host_path, ..Node::default() }
}

fn mounts(driver: &Driver, capabilities: &[Capability]) -> Vec<Mount> {
    let mut taken = BTreeSet::new();
    let files = driver.files_for(capabilities);
    let places = files.flat_map(|file| places(file).into_iter().map(move |place| (file, place)));
    places
        .filter(|(_, place)| taken.insert(place.clone()))
        .map(|(file, container_path)| Mount {
            host_path: file.source.clone(),
            container_path,
            options: options(&file.used_as).iter().map(ToString::to_string).collect(),
            kind: String::new(),
        })
        .collect()
}

/// The system directories of dynamic linkers, of Debian's kind and of Red Hat's: an image's own
/// can't be asked by a specification.
fn system_directories(width: Width) -> &'static [&'static str] {
    match (width, cfg!(target_arch = "aarch64")) {
        (Width::Native, false) => &["/usr/lib/x86_64-linux-gnu", "/usr/lib64"],
        (Width::Native, true) => &["/usr/lib/aarch64-linux-gnu", "/usr/lib64"],
        (Width::Compat32, false) => &["/usr/lib/i386-linux-gnu", "/usr/lib"],
        (Width::Compat32, true) => &["/usr/lib/arm-linux-gnueabihf", "/usr/lib"],
    }
}

/// Where a file is in a container: at its place, or, of a library, where linkers look for it, by
/// the names that they look for.
fn places(file: &DriverFile) -> Vec<String> {
    let Use::Library { names, width } = &file.used_as else { return vec![file.path.clone()] };
    let own = file.path.rsplit('/').next().unwrap_or_default();
    // Programs are linked against a name without version; only CUDA's is looked for at run time.
    let asked = |name: &&str| !name.ends_with(".so") || *name == "libcuda.so";
    let mut asked: Vec<&str> = names.iter().map(String::as_str).filter(asked).collect();
    if asked.iter().all(|name| name.ends_with(".so")) {
        asked.push(own);
    }
    let directories = system_directories(*width).iter();
    directories.flat_map(|dir| asked.iter().map(move |name| format!("{dir}/{name}"))).collect()
}

fn options(used_as: &Use) -> &'static [&'static str] {
    match used_as {
        Use::Socket => &SOCKET_OPTIONS,
        Use::Library { .. } | Use::Program | Use::Data => &MOUNT_OPTIONS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bundle::{Bind, DeviceNode};
    use crate::cdi::parser::{Form, parse};
    use crate::cdi::yaml;

    fn inventory(gpus: &str) -> Inventory {
        Inventory::new(serde_json::from_str(gpus).unwrap()).unwrap()
    }

    fn two() -> Inventory {
        inventory(
            r#"[{"index":0,"uuid":"GPU-a","minor":1,"memory_mib":1},
                {"index":1,"uuid":"GPU-b","minor":0,"memory_mib":1},
                {"index":2,"uuid":"GPU-c","minor":2,"memory_mib":1,"mig_enabled":true},
                {"index":3,"uuid":"GPU-d","minor":3,"memory_mib":1,"state":"lost"}]"#,
        )
    }

    fn nodes(names: &[&str]) -> Nodes {
        let device = |name: &&str| DeviceNode::new(format!("/dev/{name}"), 195, 0);
        Nodes { devices: names.iter().map(device).collect(), ..Nodes::default() }
    }

    fn file(path: &str, used_as: Use, capability: Capability) -> DriverFile {
        let source = format!("/drv{path}");
        DriverFile { source, path: path.into(), used_as, capabilities: vec![capability] }
    }

    fn driver() -> Driver {
        let names = vec!["libcuda.so.1".to_owned(), "libcuda.so".to_owned()];
        let library = Use::Library { names, width: Width::Native };
        Driver {
            version: "535.247.01".into(),
            files: vec![
                file("/usr/bin/nvidia-smi", Use::Program, Capability::Utility),
                file("/usr/lib/libcuda.so.535.247.01", library, Capability::Compute),
                file("/run/nvidia-persistenced/socket", Use::Socket, Capability::Compute),
            ],
        }
    }

    const NODES: [&str; 4] = ["nvidiactl", "nvidia-uvm", "nvidia1", "nvidia0"];

    fn generated(root: &str, capabilities: &[Capability]) -> Generated {
        generate(&two(), &nodes(&NODES), &Path::new(root).join("dev"), &driver(), capabilities)
            .unwrap()
    }

    #[test]
    fn a_host_is_described_in_a_stable_order() {
        let made = generated("/", &[Capability::Compute]);
        let text = yaml::document(&made.spec).unwrap();
        let expected = "---
cdiVersion: \"0.5.0\"
kind: nvidia.com/gpu
devices:
  - name: \"0\"
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia1
  - name: \"1\"
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia0
  - name: GPU-a
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia1
  - name: GPU-b
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia0
  - name: all
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia1
        - path: /dev/nvidia0
containerEdits:
  env:
    - NVIDIA_VISIBLE_DEVICES=void
  deviceNodes:
    - path: /dev/nvidiactl
    - path: /dev/nvidia-uvm
  mounts:
    - hostPath: /drv/usr/lib/libcuda.so.535.247.01
      containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.1
      options:
        - ro
        - nosuid
        - nodev
        - rbind
        - rprivate
    - hostPath: /drv/usr/lib/libcuda.so.535.247.01
      containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so
      options:
        - ro
        - nosuid
        - nodev
        - rbind
        - rprivate
    - hostPath: /drv/usr/lib/libcuda.so.535.247.01
      containerPath: /usr/lib64/libcuda.so.1
      options:
        - ro
        - nosuid
        - nodev
        - rbind
        - rprivate
    - hostPath: /drv/usr/lib/libcuda.so.535.247.01
      containerPath: /usr/lib64/libcuda.so
      options:
        - ro
        - nosuid
        - nodev
        - rbind
        - rprivate
    - hostPath: /drv/run/nvidia-persistenced/socket
      containerPath: /run/nvidia-persistenced/socket
      options:
        - ro
        - nosuid
        - nodev
        - rbind
        - rprivate
        - noexec
";
        assert_eq!(text, expected);
        assert_eq!(parse(text.as_bytes(), Form::Yaml).unwrap(), made.spec);
        assert_eq!(
            made.left_out,
            [
                "GPU 2 (GPU-c) is split by MIG, whose devices `nvidia-ctk cdi generate` can describe",
                "GPU 3 (GPU-d) is lost",
            ]
        );
    }

    #[test]
    fn capabilities_choose_files_and_root_chooses_nodes() {
        let made = generated("/run/nvidia/driver", &[Capability::Utility]);
        let mounts = &made.spec.container_edits.mounts;
        let places: Vec<_> = mounts.iter().map(|mount| mount.container_path.as_str()).collect();
        assert_eq!(places, ["/usr/bin/nvidia-smi"]);
        let node = &made.spec.devices[0].container_edits.device_nodes[0];
        assert_eq!(
            (node.path.as_str(), node.host_path.as_str()),
            ("/dev/nvidia1", "/run/nvidia/driver/dev/nvidia1")
        );
    }

    #[test]
    fn what_no_engine_could_use_is_not_written() {
        let lost = inventory(r#"[{"index":0,"uuid":"GPU-a","memory_mib":0,"state":"lost"}]"#);
        let generate = |inventory: &Inventory, nodes: &Nodes| {
            generate(inventory, nodes, Path::new("/dev"), &driver(), Capability::ALL)
                .map(|_| ())
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            generate(&lost, &nodes(&NODES)).unwrap_err(),
            "no GPU of this host can be a CDI device (GPU 0 (GPU-a) is lost); `cgpu gpus` lists them"
        );
        let bind = Bind { source: "/sim/nvidia0".into(), destination: "/dev/nvidia0".into() };
        let served = Nodes { binds: vec![bind], ..Nodes::default() };
        assert_eq!(
            generate(&two(), &served).unwrap_err(),
            "/sim/nvidia0 is no character device, so no engine could give it to a container by CDI"
        );
    }
}
