//! What others brought of GPUs into a bundle before cgpu saw it: [`Brought`].
//!
//! Engines bring GPUs by nodes (`--device`, a CDI specification, `--privileged`), by mounts, and by
//! names that NVIDIA's runtime or hook acts on later. Knows how each of them is recognized. Must not
//! know `config.json` (the bundle's reader fills this in) or which GPUs the host has. Invariant: a
//! node that an engine declared together with every device of the host is no GPU in
//! [`Brought::gpus`], for nobody chose it.

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
    /// Whether NVIDIA's hook is in the bundle: it brings the GPUs that a variable names.
    pub nvidia_hook: bool,
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
        self.gpus.retain(|one| !matches!(one.gpu, BroughtName::Minor(_)));
        self.allowed.clear();
        self.mig_nodes.clear();
    }

    /// How much was brought, as a choice of GPUs for a quota. Rules that allow GPUs are none, and are
    /// narrowed as those for every device are; nor are names beside GPUs that a setting lists
    /// (`is_listed`), and they are taken out.
    #[must_use]
    pub(super) fn choice(&self, is_listed: bool) -> Extent {
        let is_choice = |one: &BroughtGpu| !is_listed || matches!(one.gpu, BroughtName::Minor(_));
        if self.gpus.iter().any(is_choice) {
            Extent::Gpus
        } else if self.everything.is_some() || !self.allowed.is_empty() || !self.gpus.is_empty() {
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

    /// The GPUs that a container without a quota has by it. Nodes say more than names, which the
    /// engine has turned into nodes if it knows them.
    #[must_use]
    pub(super) fn usable(&self) -> Vec<BroughtName> {
        let by_nodes = self.gpus.iter().filter(|one| matches!(one.gpu, BroughtName::Minor(_)));
        let mut found: Vec<_> = by_nodes.chain(&self.allowed).map(|one| one.gpu.clone()).collect();
        if found.is_empty() {
            found = self.gpus.iter().map(|one| one.gpu.clone()).collect();
        }
        found
    }

    /// The GPUs that were chosen by bringing them.
    #[must_use]
    pub(super) fn chosen(&self) -> Vec<BroughtName> {
        Brought { gpus: self.gpus.clone(), ..Brought::default() }.usable()
    }

    /// How the GPUs came, as a message has it.
    #[must_use]
    pub(super) fn by(&self) -> String {
        let ways: Vec<&str> =
            self.gpus.iter().chain(&self.allowed).map(|one| one.by.as_str()).collect();
        match (ways.as_slice(), self.everything) {
            ([], Some(everything)) => everything.to_owned(),
            ([], None) => "nothing".to_owned(),
            ([first], _) => (*first).to_owned(),
            ([first, second], _) => format!("{first} and {second}"),
            ([first, rest @ ..], _) => format!("{first} and {} more", rest.len()),
        }
    }
}

impl BroughtGpu {
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
    fn annotations_of_cdi_have_its_prefix_or_one_below_it() {
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

    #[test]
    fn nodes_say_more_than_names_and_rules_are_no_choice() {
        let named = BroughtGpu { gpu: BroughtName::Named("all".into()), by: "x".into() };
        let node = BroughtGpu::node(1, "/dev/nvidia1");
        let brought = |gpus: &[&BroughtGpu], allowed: &[BroughtGpu]| Brought {
            gpus: gpus.iter().map(|one| (*one).clone()).collect(),
            allowed: allowed.to_vec(),
            ..Brought::default()
        };
        let both = brought(&[&named, &node], &[]);
        assert_eq!((both.usable(), both.choice(true)), (vec![BroughtName::Minor(1)], Extent::Gpus));
        let by_name = brought(&[&named], &[]);
        assert_eq!(by_name.usable(), [BroughtName::Named("all".into())]);
        assert_eq!(
            (by_name.choice(false), by_name.choice(true)),
            (Extent::Gpus, Extent::Everything)
        );
        let ruled = brought(&[], &[BroughtGpu::rule(None)]);
        assert_eq!((ruled.choice(false), ruled.extent()), (Extent::Everything, Extent::Gpus));
        assert_eq!(ruled.usable(), [BroughtName::All]);
        assert_eq!(ruled.by(), "the device rule c 195:*");
        let wide = Brought { everything: Some("every device"), ..Brought::default() };
        assert_eq!((wide.choice(false), wide.by()), (Extent::Everything, "every device".into()));
        assert_eq!(Brought::default().choice(false), Extent::Nothing);
    }
}
