//! From chosen devices to the edits of a bundle.
//!
//! Owns what of a specification reaches a container: its common edits once, then each device's,
//! in their order; what comes later takes the place of what is there under the same name, path or
//! place, as in the reference implementation. What does not reach it, because a quota would not
//! hold or is ours to say:
//!
//! - nodes of GPUs that weren't chosen, wherever they are declared or mounted from;
//! - nodes of the kernel's graphics (`/dev/dri`): memory that nvidia-drm gives out passes the
//!   driver's boundary where it isn't counted;
//! - `NVIDIA_VISIBLE_DEVICES`: NVIDIA's generator says `void`, and we say which GPUs.
//!
//! What we can't do (block devices, file systems, network interfaces, resctrl) refuses the specification: it is
//! there on purpose. A container's cgroup allows reading and writing, whatever `permissions` say:
//! no container needs `m` (`mknod`) for nodes that are there. Must not know the host. Pure.

use std::borrow::Cow;
use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::Hash;
use std::path::{Path, PathBuf};

use thiserror::Error;

use super::device_choice::Part;
use super::node_kind::{Nature, gpu_minor, nature};
use super::spec::{self, Edits, Hook, Mount, Node};
use super::validation::stage;
use crate::bundle::{self, Bind, DeviceNode, HookCall, leads_to_mps, plain};
use cgpu_core::request::setting_names::NVIDIA_VISIBLE_DEVICES;

/// What a mount has that states no options: of a driver's files, a container writes none.
pub(super) const MOUNT_OPTIONS: [&str; 5] = ["ro", "nosuid", "nodev", "rbind", "rprivate"];

/// The `PATH` of a hook that has none.
const HOOK_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What a specification asks for and we can't do.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{} asks for {what}, which cgpu cannot give", file.display())]
pub struct Unsupported {
    pub file: PathBuf,
    pub what: String,
}

/// What of a specification doesn't reach the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    pub file: PathBuf,
    /// The node or the mount's source.
    pub path: String,
    pub why: Why,
}

/// Why something doesn't reach a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// It is of a GPU that isn't the container's.
    OtherGpu,
    /// Of the kernel's graphics. NVIDIA's generator lists these for every GPU.
    Drm,
    /// It would bring nodes along, of whatever.
    Devices,
    /// It leads to the MPS daemon.
    Mps,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let why = match self.why {
            Why::OtherGpu => "it is of a GPU that isn't this container's",
            Why::Drm => "memory of nvidia-drm is not under a quota",
            Why::Devices => "device nodes come by name only",
            Why::Mps => "the MPS server allocates for its clients, past their quotas",
        };
        write!(f, "{} of {} is left out: {why}", self.path, self.file.display())
    }
}

/// Something, and the file that asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Given<'a, T> {
    pub(super) file: &'a Path,
    pub(super) item: &'a T,
}

/// What chosen devices come to, before the host was inspected.
#[derive(Debug, Default)]
pub(super) struct Collected<'a> {
    nodes: Named<Cow<'a, str>, Given<'a, Node>>,
    mounts: Named<Cow<'a, str>, Given<'a, Mount>>,
    hooks: Vec<Given<'a, Hook>>,
    env: Named<&'a str, (&'a str, &'a str)>,
    gids: Named<u32, u32>,
    gpus: BTreeSet<i64>,
    left_out: Vec<LeftOut>,
}

/// A node as it is on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HostNode {
    /// A character device.
    Device { major: i64, minor: i64, mode: u32 },
    /// A file, where the driver is served otherwise.
    File,
}

/// A list in which what comes later takes the place of what stands there under its name.
#[derive(Debug)]
struct Named<N, T> {
    items: Vec<T>,
    places: HashMap<N, usize>,
}

impl<N, T> Default for Named<N, T> {
    fn default() -> Self {
        Named { items: Vec::new(), places: HashMap::new() }
    }
}

impl<N: Eq + Hash, T> Named<N, T> {
    fn put(&mut self, name: N, item: T) {
        match self.places.entry(name) {
            Entry::Occupied(place) => self.items[*place.get()] = item,
            Entry::Vacant(place) => {
                place.insert(self.items.len());
                self.items.push(item);
            }
        }
    }
}

impl<'a> Collected<'a> {
    /// What `parts` come to for a container whose GPUs have these minor numbers.
    ///
    /// # Errors
    ///
    /// Where they ask for what we can't do.
    pub(super) fn of(
        parts: &[Part<'a>],
        gpus: impl IntoIterator<Item = i64>,
    ) -> Result<Self, Unsupported> {
        let mut all = Self { gpus: gpus.into_iter().collect(), ..Self::default() };
        for part in parts {
            all.add(part.file, &part.spec.container_edits, Scope::Common)?;
            for device in &part.devices {
                all.add(part.file, &device.container_edits, Scope::Device)?;
            }
        }
        // Each was there when it was chosen; another may have taken its place.
        let given = |minor: &i64| {
            let is = |node: &Given<'_, Node>| matches!(nature(node.item, None), Nature::Gpu(minors) if minors.contains(minor));
            all.nodes.items.iter().any(is)
        };
        match parts.first() {
            Some(part) if !all.gpus.iter().all(given) => Err(Unsupported {
                file: part.file.to_owned(),
                what: "two nodes at one path".to_owned(),
            }),
            _ => Ok(all),
        }
    }

    /// The nodes, in their order.
    pub(super) fn nodes(&self) -> &[Given<'a, Node>] {
        &self.nodes.items
    }

    /// The mounts, in their order.
    pub(super) fn mounts(&self) -> &[Given<'a, Mount>] {
        &self.mounts.items
    }

    /// The hooks, in their order.
    pub(super) fn hooks(&self) -> &[Given<'a, Hook>] {
        &self.hooks
    }

    fn add(&mut self, file: &'a Path, edits: &'a Edits, scope: Scope) -> Result<(), Unsupported> {
        possible(edits).map_err(|what| Unsupported { file: file.to_owned(), what })?;
        for variable in &edits.env {
            let Some((name, value)) = variable.split_once('=') else { continue };
            if name != NVIDIA_VISIBLE_DEVICES {
                self.env.put(name, (name, value));
            }
        }
        for item in &edits.device_nodes {
            match self.objection(&nature(item, None), scope) {
                Some(why) => self.leave_out(file, &item.path, why),
                None => self.nodes.put(plain(&item.path), Given { file, item }),
            }
        }
        for item in &edits.mounts {
            match self.brings_devices(item) {
                Some(why) => self.leave_out(file, &item.host_path, why),
                None => self.mounts.put(plain(&item.container_path), Given { file, item }),
            }
        }
        for item in &edits.hooks {
            if self.hooks.iter().all(|hook| hook.item != item) {
                self.hooks.push(Given { file, item });
            }
        }
        for gid in edits.additional_gids.iter().filter(|gid| **gid != 0) {
            self.gids.put(*gid, *gid);
        }
        Ok(())
    }

    fn leave_out(&mut self, file: &Path, path: &str, why: Why) {
        let left_out = LeftOut { file: file.to_owned(), path: path.to_owned(), why };
        if !self.left_out.contains(&left_out) {
            self.left_out.push(left_out);
        }
    }

    /// What speaks against a node of that nature.
    fn objection(&self, nature: &Nature, scope: Scope) -> Option<Why> {
        match nature {
            Nature::Gpu(gpus) => (!gpus.is_subset(&self.gpus)).then_some(Why::OtherGpu),
            Nature::Instance => (scope == Scope::Common).then_some(Why::OtherGpu),
            Nature::Drm => Some(Why::Drm),
            Nature::Other => None,
        }
    }

    /// What speaks against a mount whose source or destination is among device nodes.
    fn brings_devices(&self, mount: &Mount) -> Option<Why> {
        let (source, destination) = (plain(&mount.host_path), plain(&mount.container_path));
        let (source, destination) = (Path::new(&*source), Path::new(&*destination));
        if let Some(minor) = gpu_minor(source) {
            return Some(if self.gpus.contains(&minor) { Why::Devices } else { Why::OtherGpu });
        }
        if [source, destination].iter().any(|path| leads_to_mps(path)) {
            return Some(Why::Mps);
        }
        // A container that sees all of /proc writes to what is masked below it.
        let wide = source == Path::new("/") || source == Path::new("/proc");
        let among = wide || [source, destination].iter().any(|path| path.starts_with("/dev"));
        among.then_some(Why::Devices)
    }

    /// The edits, where the nodes are as `seen`, in their order; and what is left out.
    pub(super) fn edits(mut self, seen: &[HostNode]) -> (bundle::Edits, Vec<LeftOut>) {
        let mut edits = bundle::Edits::default();
        let nodes = std::mem::take(&mut self.nodes.items);
        for (Given { file, item }, seen) in nodes.into_iter().zip(seen) {
            let HostNode::Device { major, minor, mode } = *seen else {
                let (source, destination) = (item.source().to_owned(), item.path.clone());
                edits.binds.push(Bind { source, destination });
                continue;
            };
            // Now that its number is known; whose instance it is was settled by its name.
            if let Some(why) = self.objection(&nature(item, Some((major, minor))), Scope::Device) {
                self.leave_out(file, &item.path, why);
                continue;
            }
            let (uid, gid) = (item.uid.unwrap_or(0), item.gid.unwrap_or(0));
            let mode = item.file_mode.unwrap_or(mode) & 0o777;
            edits.devices.push(DeviceNode {
                mode,
                uid,
                gid,
                ..DeviceNode::new(item.path.clone(), major, minor)
            });
        }
        let variable = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        edits.env = self.env.items.iter().map(variable).collect();
        edits.mounts = self.mounts.items.iter().map(|mount| driver_mount(mount.item)).collect();
        edits.gids = self.gids.items;
        edits.driver_hooks = self.hooks.iter().filter_map(|hook| call(hook.item)).collect();
        (edits, self.left_out)
    }
}

/// Where edits stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    /// Every container gets them that has any of the devices.
    Common,
    /// A container that has the device gets them.
    Device,
}

/// What of `edits` we can't do.
fn possible(edits: &Edits) -> Result<(), String> {
    if let Some(device) = edits.net_devices.first() {
        return Err(format!("network interface {}", device.host_interface_name));
    }
    if edits.intel_rdt.is_some() {
        return Err("intelRdt".to_owned());
    }
    // One of devtmpfs brings every node, one of procfs a tree in which nothing is masked.
    let kind = |mount: &&Mount| !matches!(mount.kind.as_str(), "" | "bind" | "none" | "tmpfs");
    if let Some(mount) = edits.mounts.iter().find(kind) {
        return Err(format!("a mount of type {} at {}", mount.kind, mount.container_path));
    }
    let other = |node: &&Node| !matches!(node.kind.as_str(), "" | "c" | "u");
    match edits.device_nodes.iter().find(other) {
        Some(node) => Err(format!("{}, which is no character device", node.path)),
        None => Ok(()),
    }
}

/// Whether what is mounted is the host's to change: its programs and libraries, which root in a
/// container could write to, and sockets, whose owner and mode it could change; a read-only one
/// can be connected to all the same.
fn is_host_s(mount: &Mount) -> bool {
    let path = plain(&mount.host_path);
    let path = Path::new(&*path);
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let installed = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc", "/opt"];
    mount.is_bind()
        && (name == "socket"
            || name.contains(".so.")
            || name.ends_with(".so")
            || installed.iter().any(|root| path.starts_with(root)))
}

fn driver_mount(mount: &Mount) -> bundle::Mount {
    let mut options = mount.options.clone();
    if options.is_empty() {
        options = MOUNT_OPTIONS.map(String::from).to_vec();
    } else if mount.is_bind() && !mount.says_bind() {
        // Without it there is nothing that a runtime could mount.
        options.push("rbind".to_owned());
    }
    if is_host_s(mount) {
        options.retain(|option| option != "rw");
        if !options.iter().any(|option| option == "ro") {
            options.push("ro".to_owned());
        }
    }
    bundle::Mount {
        source: mount.host_path.clone(),
        destination: mount.container_path.clone(),
        kind: mount.kind.clone(),
        options,
    }
}

fn call(hook: &spec::Hook) -> Option<HookCall> {
    let mut env = hook.env.clone();
    if env.iter().all(|variable| !variable.starts_with("PATH=")) {
        env.push(HOOK_PATH.to_owned());
    }
    let args = if hook.args.is_empty() { vec![hook.path.clone()] } else { hook.args.clone() };
    Some(HookCall {
        stage: stage(&hook.hook_name)?,
        path: PathBuf::from(&hook.path),
        args,
        env,
        timeout_s: hook.timeout,
    })
}
