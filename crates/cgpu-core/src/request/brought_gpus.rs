//! What others brought of GPUs into a bundle before cgpu saw it: [`Brought`].
//!
//! Engines bring GPUs by nodes (`--device`, a CDI specification, `--privileged`), by mounts, and by names that NVIDIA's
//! runtime or hook acts on later. Knows how each of them is recognized. Must not know `config.json` (the bundle's
//! reader fills this in) or which GPUs the host has. Invariant: a node that an engine declared together with every
//! device of the host is no GPU in [`Brought::gpus`], because no setting chose it.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::setting::{Quoted, Setting};

/// What a bundle has of GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Brought {
    /// GPUs that came one by one, in the bundle's order.
    pub gpus: Vec<BroughtGpu>,
    /// GPUs that device rules alone allow, so that a container which may make nodes has them. They
    /// are no choice: under a quota such rules are narrowed.
    pub allowed: Vec<BroughtGpu>,
    /// Minor numbers of the capability nodes of MIG (`/dev/nvidia-caps/nvidia-capN`).
    pub mig_nodes: Vec<u32>,
    /// What these nodes open, as the host's driver says.
    pub mig: Vec<MigInstance>,
    /// How every device of the host came at once, if it did.
    pub everything: Option<&'static str>,
    /// How the driver's files came, if they did.
    pub driver_files: Option<String>,
    /// Whether NVIDIA's hook is in the bundle, or its runtime makes the container: they bring the GPUs
    /// that a variable names.
    pub nvidia_hook: bool,
    /// A hook that brings GPUs and the driver's files by itself, and whatever the variables say.
    pub cli_hook: Option<String>,
    /// How a node came that is no GPU's and takes memory of one, past quotas: of displays, or the kernel's
    /// graphics.
    pub graphics: Option<String>,
    /// Nodes and directories of the kernel's graphics, of whichever vendor.
    pub dri: Vec<DriNode>,
}

/// A node of the kernel's graphics, or a directory of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriNode {
    /// Its path: in the container, or on the host if it is mounted from there.
    pub path: String,
    /// Its minor number, if the bundle says it.
    pub minor: Option<i64>,
}

/// A GPU that came by itself, or a name of GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BroughtGpu {
    /// Which one.
    pub gpu: BroughtName,
    /// How it came, as a message has it: `node /dev/nvidia0`.
    pub by: String,
}

/// How what was brought says which GPU it is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum BroughtName {
    /// The minor number of its node.
    Minor(u32),
    /// NVIDIA's name of it: an index, a UUID or a MIG device.
    Named(String),
    /// Each GPU of the host.
    All,
}

/// A compute instance of MIG.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigInstance {
    /// Minor number of its GPU.
    pub gpu_minor: u32,
    /// The number of its GPU instance, and its own.
    pub instances: (u32, u32),
}

/// How much was brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Extent {
    /// No GPU.
    Nothing,
    /// GPUs one by one.
    Gpus,
    /// Every device of the host, GPUs among them.
    Everything,
}

impl Brought {
    /// Takes out all that came by nodes, mounts of nodes and device rules.
    pub fn forget_nodes(&mut self) {
        self.gpus.retain(|one| !one.is_node());
        self.allowed.clear();
        self.mig_nodes.clear();
        self.dri.clear();
        self.graphics = None;
    }

    /// How much was brought, as a choice of GPUs for a quota. Rules that allow GPUs are none, and are
    /// narrowed as those for every device are.
    #[must_use]
    pub(super) fn choice(&self) -> Extent {
        if !self.gpus.is_empty() {
            Extent::Gpus
        } else if self.everything.is_some() || self.graphics.is_some() || !self.allowed.is_empty() {
            Extent::Everything
        } else {
            Extent::Nothing
        }
    }

    /// How much was brought of what a container without a quota uses.
    #[must_use]
    pub(super) fn extent(&self) -> Extent {
        if !self.gpus.is_empty() || !self.allowed.is_empty() {
            Extent::Gpus
        } else if self.everything.is_some() {
            Extent::Everything
        } else {
            Extent::Nothing
        }
    }

    /// The same, with what takes memory of GPUs and is none.
    #[must_use]
    pub(super) fn extent_of_memory(&self) -> Extent {
        match self.extent() {
            Extent::Nothing if self.graphics.is_some() => Extent::Everything,
            extent => extent,
        }
    }

    /// The GPUs that a container without a quota may have by it: by nodes and rules, and by names, which
    /// the engine has turned into these nodes, or NVIDIA's runtime turns into more.
    #[must_use]
    pub(super) fn usable(&self) -> Vec<BroughtName> {
        let (nodes, names): (Vec<_>, Vec<_>) = self.gpus.iter().partition(|one| one.is_node());
        nodes.into_iter().chain(&self.allowed).chain(names).map(|one| one.gpu.clone()).collect()
    }

    /// The GPUs that were chosen by bringing them. Nodes say more than names, which are taken out of a
    /// bundle with a quota.
    #[must_use]
    pub(super) fn chosen(&self) -> Vec<BroughtName> {
        let has_nodes = self.gpus.iter().any(BroughtGpu::is_node);
        let chosen = self.gpus.iter().filter(|one| one.is_node() || !has_nodes);
        chosen.map(|one| one.gpu.clone()).collect()
    }

    /// How the GPUs came, as a message has it.
    #[must_use]
    pub(super) fn by(&self) -> String {
        let ways: Vec<&str> =
            self.gpus.iter().chain(&self.allowed).map(|one| one.by.as_str()).collect();
        let other = self.everything.or(self.graphics.as_deref());
        match (ways.as_slice(), other) {
            ([], Some(other)) => other.to_owned(),
            ([], None) => "nothing".to_owned(),
            ([first], _) => (*first).to_owned(),
            ([first, second], _) => format!("{first} and {second}"),
            ([first, rest @ ..], _) => format!("{first} and {} more", rest.len()),
        }
    }
}

impl BroughtGpu {
    fn is_node(&self) -> bool {
        matches!(self.gpu, BroughtName::Minor(_))
    }

    /// The GPU whose node has that minor number and that path in the container.
    #[must_use]
    pub fn node(minor: u32, path: &str) -> Self {
        BroughtGpu { gpu: BroughtName::Minor(minor), by: format!("node {}", Quoted(path)) }
    }

    /// What a mount from `source` to `destination` brings.
    #[must_use]
    pub fn mount(gpu: BroughtName, source: &str, destination: &str) -> Self {
        let shown = if source.is_empty() { destination } else { source };
        BroughtGpu { gpu, by: format!("the mount of {}", Quoted(shown)) }
    }

    /// What a device rule allows; `minor` is `None` if it allows all of NVIDIA's.
    #[must_use]
    pub fn rule(minor: Option<u32>) -> Self {
        let gpu = minor.map_or(BroughtName::All, BroughtName::Minor);
        let shown = minor.map_or("*".to_owned(), |minor| minor.to_string());
        BroughtGpu { gpu, by: format!("the device rule c 195:{shown}") }
    }

    /// What the annotation `key` asks an engine or NVIDIA's runtime for, by CDI's names of devices
    /// (`nvidia.com/gpu=0`, a comma list); devices that are no GPUs of NVIDIA's are left out.
    pub fn of_annotation<'a>(key: &'a str, value: &'a str) -> impl Iterator<Item = Self> + 'a {
        let names = value.split(',').filter_map(|item| cdi_gpu(item.trim()));
        names.map(move |gpu| BroughtGpu { gpu, by: format!("the annotation {}", Quoted(key)) })
    }
}

/// The GPUs that a hook brings by calling NVIDIA's `nvidia-container-cli` with `args`, as containerd's
/// `ctr run --gpus` has it (`contrib/nvidia`); `None` if the hook calls something else. `hook` is what a
/// message calls it.
#[must_use]
pub fn by_cli_hook(hook: &str, args: &[&str]) -> Option<Vec<BroughtGpu>> {
    let is_cli = |word: &&str| word.rsplit('/').next() == Some("nvidia-container-cli");
    if !is_cli(&hook) && !args.iter().any(is_cli) {
        return None;
    }
    let mut values = Vec::new();
    for (at, word) in args.iter().enumerate() {
        match word.split_once('=') {
            Some(("--device", value)) => values.push(value),
            None if matches!(*word, "--device" | "-d") => values.extend(args.get(at + 1)),
            _ => {}
        }
    }
    let gpus = values.iter().flat_map(|value| value.split(',')).filter_map(nvidia_gpu);
    let by = format!("the hook {}", Quoted(hook));
    Some(gpus.map(|gpu| BroughtGpu { gpu, by: by.clone() }).collect())
}

/// What NVIDIA's hook brings into a container with this value of `NVIDIA_VISIBLE_DEVICES`; `setting` is
/// what a message says of it.
pub(super) fn by_nvidias_hook(value: &str, setting: &Setting) -> Vec<BroughtGpu> {
    let gpu = |item: &str| match item.contains(['=', '/']) {
        true => cdi_gpu(item),
        false => nvidia_gpu(item),
    };
    let gpus = value.split(',').filter_map(|item| gpu(item.trim()));
    gpus.map(|gpu| BroughtGpu { gpu, by: format!("NVIDIA's hook ({setting})") }).collect()
}

/// The prefix of annotations of CDI (Container Device Interface, "Annotations"). NVIDIA's runtime takes
/// others as well, by its `annotation-prefixes`; NVIDIA's GPU Operator sets `nvidia.cdi.k8s.io/`.
const CDI_ANNOTATION: &str = "cdi.k8s.io";

/// Whether an annotation of that name asks for devices by CDI's names.
#[must_use]
pub fn is_cdi_annotation(key: &str) -> bool {
    let before = key.split_once('/').and_then(|(prefix, _)| prefix.strip_suffix(CDI_ANNOTATION));
    before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// Below this directory of a container NVIDIA's toolkit is asked for devices by the names of mounts
/// (`accept-nvidia-visible-devices-as-volume-mounts`).
pub const DEVICE_MOUNTS: &str = "/var/run/nvidia-container-devices";

/// The GPU that a mount at `destination` asks NVIDIA's toolkit for; `None` if it asks for none.
#[must_use]
pub fn device_mount(destination: &str) -> Option<BroughtName> {
    let name = destination.strip_prefix(DEVICE_MOUNTS)?.strip_prefix('/')?;
    match name.split_once('/') {
        None => nvidia_gpu(name),
        // cdi/VENDOR/CLASS/NAME
        Some(("cdi", device)) => {
            // Or VENDOR/CLASS=NAME.
            let (kind, name) = device.split_once('=').or_else(|| device.rsplit_once('/'))?;
            cdi_gpu(&format!("{kind}={name}"))
        }
        // imex/CHANNEL is no GPU.
        Some(_) => None,
    }
}

/// The GPU that CDI's name of a device means; `None` if it is no GPU of NVIDIA's.
pub(super) fn cdi_gpu(device: &str) -> Option<BroughtName> {
    let (kind, name) = device.split_once('=')?;
    let (vendor, class) = kind.split_once('/')?;
    let is_nvidias = vendor == "nvidia.com" || vendor.ends_with(".nvidia.com");
    // NVIDIA's DRA driver names what it prepared for a claim; its name is no GPU's that we know.
    let is_gpu = matches!(class, "gpu" | "mig" | "claim");
    if is_nvidias && is_gpu { nvidia_gpu(name) } else { None }
}

/// The GPU that a name of NVIDIA's generators means: `all`, an index, a UUID, `gpu0`, `mig0:1`
/// (nvidia-ctk, `--device-name-strategy`). Any other name is one of a specification that we don't
/// know; it stays as it is.
fn nvidia_gpu(name: &str) -> Option<BroughtName> {
    let numbered = |prefix: &str| {
        let rest = name.strip_prefix(prefix)?;
        rest.starts_with(|c: char| c.is_ascii_digit()).then(|| rest.to_owned())
    };
    match name {
        "all" => Some(BroughtName::All),
        "none" | "void" | "" => None,
        _ => {
            let bare = numbered("gpu").or_else(|| numbered("mig"));
            Some(BroughtName::Named(bare.unwrap_or_else(|| name.to_owned())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(name: &str) -> Option<BroughtName> {
        Some(BroughtName::Named(name.to_owned()))
    }

    #[test]
    fn names_of_cdi_are_those_of_nvidias_gpus() {
        for (device, gpu) in [
            ("nvidia.com/gpu=0", named("0")),
            ("nvidia.com/gpu=GPU-a", named("GPU-a")),
            ("nvidia.com/gpu=all", Some(BroughtName::All)),
            ("nvidia.com/gpu=gpu3", named("3")),
            ("nvidia.com/gpu=mig0:1", named("0:1")),
            ("nvidia.com/gpu=0:1", named("0:1")),
            ("k8s.device-plugin.nvidia.com/gpu=GPU-a", named("GPU-a")),
            ("management.nvidia.com/gpu=all", Some(BroughtName::All)),
            ("nvidia.com/gpu=none", None),
            ("nvidia.com/gds=all", None),
            ("k8s.gpu.nvidia.com/claim=a-0", named("a-0")),
            ("nvidia.com/imex-channel=0", None),
            ("amd.com/gpu=0", None),
            ("notnvidia.com/gpu=0", None),
            ("nvidia.com/gpu", None),
            ("0", None),
            ("=", None),
        ] {
            assert_eq!(cdi_gpu(device), gpu, "{device}");
        }
    }

    #[test]
    fn mounts_ask_nvidias_toolkit_by_their_names() {
        for (path, gpu) in [
            ("/var/run/nvidia-container-devices/all", Some(BroughtName::All)),
            ("/var/run/nvidia-container-devices/GPU-a", named("GPU-a")),
            ("/var/run/nvidia-container-devices/1", named("1")),
            ("/var/run/nvidia-container-devices/cdi/nvidia.com/gpu/0", named("0")),
            ("/var/run/nvidia-container-devices/cdi/nvidia.com/gpu=0", named("0")),
            ("/var/run/nvidia-container-devices/imex/0", None),
            ("/var/run/nvidia-container-devices", None),
            ("/var/run/nvidia-container-devices2/0", None),
            ("/var/run", None),
        ] {
            assert_eq!(device_mount(path), gpu, "{path}");
        }
    }

    #[test]
    fn containerd_hook_brings_gpus_of_its_cli_arguments() {
        let of = |args: &[&str]| {
            let gpus = by_cli_hook("/usr/bin/containerd", args)?;
            Some(gpus.into_iter().map(|one| one.gpu).collect::<Vec<_>>())
        };
        let named = |names: &[&str]| {
            Some(names.iter().map(|name| BroughtName::Named((*name).into())).collect::<Vec<_>>())
        };
        let cli = ["containerd", "oci-hook", "--", "/usr/bin/nvidia-container-cli", "configure"];
        let with = |more: &[&'static str]| [cli.as_slice(), more].concat();
        assert_eq!(
            of(&with(&["--device=0,GPU-a", "--device=2", "--pid={{pid}}"])),
            named(&["0", "GPU-a", "2"])
        );
        assert_eq!(of(&with(&["--device", "1", "-d", "3"])), named(&["1", "3"]));
        assert_eq!(of(&with(&["--device=all"])), Some(vec![BroughtName::All]));
        assert_eq!(of(&with(&["--device"])), named(&[]));
        assert_eq!(of(&["containerd", "oci-hook", "--", "/bin/true", "--device=0"]), None);
        assert!(by_cli_hook("/usr/bin/nvidia-container-cli", &[]).is_some());
    }

    #[test]
    fn cdi_annotation_has_the_prefix_or_a_subdomain() {
        for (key, is_one) in [
            ("cdi.k8s.io/x", true),
            ("nvidia.cdi.k8s.io/x", true),
            ("notcdi.k8s.io/x", false),
            ("cdi.k8s.io", false),
            ("x/cdi.k8s.io/y", false),
        ] {
            assert_eq!(is_cdi_annotation(key), is_one, "{key}");
        }
    }

    #[test]
    fn an_annotation_lists_devices_of_several_vendors() {
        let value = "nvidia.com/gpu=0, vendor.com/nic=eth0,nvidia.com/gpu=1";
        let found: Vec<_> = BroughtGpu::of_annotation("cdi.k8s.io/x", value).collect();
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].gpu, BroughtName::Named("1".into()));
        assert_eq!(found[0].by, "the annotation cdi.k8s.io/x");
    }

    /// Device nodes say more than names, and device rules are no choice of GPUs.
    #[test]
    fn nodes_override_names_and_rules_are_no_choice() {
        let named = BroughtGpu { gpu: BroughtName::Named("all".into()), by: "x".into() };
        let node = BroughtGpu::node(1, "/dev/nvidia1");
        let brought = |gpus: &[&BroughtGpu], allowed: &[BroughtGpu]| Brought {
            gpus: gpus.iter().map(|one| (*one).clone()).collect(),
            allowed: allowed.to_vec(),
            ..Brought::default()
        };
        let both = brought(&[&named, &node], &[]);
        assert_eq!((both.chosen(), both.choice()), (vec![BroughtName::Minor(1)], Extent::Gpus));
        assert_eq!(both.usable(), [BroughtName::Minor(1), BroughtName::Named("all".into())]);
        let by_name = brought(&[&named], &[]);
        assert_eq!(by_name.usable(), [BroughtName::Named("all".into())]);
        assert_eq!(by_name.choice(), Extent::Gpus);
        let ruled = brought(&[], &[BroughtGpu::rule(None)]);
        assert_eq!((ruled.choice(), ruled.extent()), (Extent::Everything, Extent::Gpus));
        assert_eq!(ruled.usable(), [BroughtName::All]);
        assert_eq!(ruled.by(), "the device rule c 195:*");
        let wide = Brought { everything: Some("every device"), ..Brought::default() };
        assert_eq!((wide.choice(), wide.by()), (Extent::Everything, "every device".into()));
        let graphics = Brought { graphics: Some("node /dev/x".into()), ..Brought::default() };
        assert_eq!((graphics.choice(), graphics.extent()), (Extent::Everything, Extent::Nothing));
        assert_eq!(graphics.by(), "node /dev/x");
        assert_eq!(Brought::default().choice(), Extent::Nothing);
    }
}
