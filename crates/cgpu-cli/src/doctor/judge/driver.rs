//! What the driver's facts mean.
//!
//! Owns the order in which they explain each other: without a module there is nothing to
//! say of nodes. Must not know backends.

use super::super::facts::{BusGpu, Cdi, Driver as Facts, Node, NodeKind, Observed};
use super::{Driver, Error, Finding, Fine, Note, Warning, listed};
use cgpu_host::config::Inject;
use cgpu_inject::requirements::cuda_of;
use nvrm::{Release, Standing as Known, Version};

/// Whether there is anything that a driver is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Loaded,
    /// It isn't, and there is a GPU.
    Wanting,
    /// It isn't, and there is no GPU for it.
    Needless,
}

/// How a host stands with its driver.
pub(super) fn standing(facts: &Facts) -> Standing {
    // A GPU that a virtual machine has is none of this host's.
    let ours = |gpu: &&BusGpu| gpu.driver.as_deref() != Some("vfio-pci");
    match (&facts.banner, facts.on_bus.iter().find(ours)) {
        (Observed::Absent, None) => Standing::Needless,
        (Observed::Absent, Some(_)) => Standing::Wanting,
        _ => Standing::Loaded,
    }
}

pub(super) fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = Vec::new();
    match standing(facts) {
        Standing::Needless => findings.push(no_gpu(facts)),
        Standing::Wanting => findings.push(not_loaded(facts)),
        Standing::Loaded => {
            let (loaded, version) = loaded(facts);
            findings.push(version);
            findings.push(gpus(facts));
            findings.push(modules(facts));
            findings.push(libraries(facts, loaded));
            findings.extend(nodes(&facts.nodes));
        }
    }
    findings.push(files(facts));
    findings
}

fn no_gpu(facts: &Facts) -> Finding {
    let what = match (facts.gpus_from_file, facts.on_bus.is_empty()) {
        (true, _) => "no NVIDIA driver is loaded; the GPUs are those of the inventory file",
        (false, true) => "this host has no NVIDIA GPU and no driver: nothing to share yet",
        (false, false) => "all NVIDIA GPUs of this host are given to virtual machines",
    };
    let found = Finding::new(Driver, "version", Note, what.to_owned());
    match facts.gpus_from_file {
        true => found,
        false => found.remedy(
            "to try cgpu all the same: `make demo`, which simulates one; with a GPU: install \
             NVIDIA's driver",
        ),
    }
}

fn not_loaded(facts: &Facts) -> Finding {
    let gpus: Vec<String> = facts
        .on_bus
        .iter()
        .map(|gpu| match &gpu.driver {
            Some(driver) => format!("{} (held by {driver})", gpu.bus_id),
            None => gpu.bus_id.clone(),
        })
        .collect();
    let what = format!("NVIDIA's driver isn't loaded, and there are GPUs: {}", listed(&gpus));
    let held = facts.on_bus.iter().any(|gpu| gpu.driver.as_deref() == Some("nouveau"));
    let remedy = match held {
        true => "install NVIDIA's driver, which keeps nouveau from loading, and reboot",
        false => "`modprobe nvidia`; where that fails, install the driver, and see `dmesg`",
    };
    Finding::new(Driver, "version", Error, what).of(path(facts)).remedy(remedy)
}

fn path(facts: &Facts) -> String {
    facts.version_path.display().to_string()
}

/// The loaded driver's version, and what is to be said of it.
fn loaded(facts: &Facts) -> (Option<Version>, Finding) {
    let row = |severity, what| Finding::new(Driver, "version", severity, what).of(path(facts));
    let banner = match &facts.banner {
        Observed::Present(banner) => banner,
        Observed::Unreadable(why) => {
            let what = format!("{} can't be read: {why}", path(facts));
            return (None, row(Error, what).remedy("run as root; see `dmesg` of the driver"));
        }
        Observed::Absent => return (None, row(Error, "no driver is loaded".to_owned())),
    };
    let Some(version) = Version::in_banner(banner) else {
        let what = format!("{} has no version in its first line: {banner}", path(facts));
        return (None, row(Error, what).remedy("load a driver that NVIDIA released"));
    };
    let kind = match banner.contains("Open Kernel Module") {
        true => "open modules",
        false => "proprietary modules",
    };
    let cuda = cuda_of(version).map(|cuda| format!(", CUDA {cuda}")).unwrap_or_default();
    let what = format!("{version}, {kind}{cuda}");
    let found = match Release::of(version).map(|release| release.standing()) {
        Err(error) => row(Error, what).remedy(error.to_string()),
        Ok(Known::Checked) => row(Fine, what),
        Ok(other) => row(Note, format!("{what}; {other}")),
    };
    (Some(version), found)
}

fn gpus(facts: &Facts) -> Finding {
    let row = |severity, what| Finding::new(Driver, "gpus", severity, what);
    match &facts.gpus {
        // It says itself what to do.
        Err(why) if facts.gpus_from_file => row(Error, why.clone()),
        Err(why) => row(Error, why.clone()).remedy("run as root; see `dmesg` of the driver"),
        Ok(gpus) if facts.gpus_from_file => {
            let what = format!("{} in the inventory file; `cgpu gpus` lists them", gpus.len());
            match gpus.is_empty() {
                true => row(Error, what).remedy("list the GPUs there: [inventory] path"),
                false => row(Fine, what),
            }
        }
        Ok(gpus) if gpus.is_empty() => {
            let what = "the driver has no GPU".to_owned();
            row(Error, what).remedy("see `dmesg | grep NVRM` for why it took none, and `lspci`")
        }
        Ok(gpus) => {
            let (count, on_bus) = (gpus.len(), facts.on_bus.len());
            let what = format!("{count} with the driver; `cgpu gpus` lists them");
            match on_bus > count {
                true => row(Warning, format!("{what}; {on_bus} on the PCI bus"))
                    .remedy("see `dmesg | grep NVRM` for why it didn't take the others"),
                false => row(Fine, what),
            }
        }
    }
}

fn modules(facts: &Facts) -> Finding {
    let row = |severity, what| Finding::new(Driver, "modules", severity, what);
    let names = |loaded: bool| -> Vec<String> {
        let of = facts.modules.iter().filter(|(_, is)| *is == loaded);
        of.map(|(name, _)| (*name).to_owned()).collect()
    };
    let (there, missing) = (names(true), names(false));
    let lacks = |name: &str| missing.iter().any(|module| module == name);
    if there.is_empty() {
        // A driver that reports its version and has no modules, as under gVisor.
        return row(Note, "none in /sys/module, though the driver answers".to_owned());
    }
    if lacks("nvidia_uvm") {
        let what =
            format!("nvidia_uvm isn't loaded, which CUDA needs; there is {}", listed(&there));
        return row(Error, what).of("nvidia_uvm").remedy(at_every_boot("cgpu nodes"));
    }
    let graphics = match missing.is_empty() {
        true => String::new(),
        false => format!("; without {} (graphics only)", listed(&missing)),
    };
    row(Fine, format!("{}{graphics}", listed(&there)))
}

fn libraries(facts: &Facts, loaded: Option<Version>) -> Finding {
    let row = |severity, what| Finding::new(Driver, "libraries", severity, what);
    let root = facts.root.display();
    let Some(library) = &facts.library else {
        let what = format!("no libcuda.so or libnvidia-ml.so of a driver under {root}");
        if facts.made_up {
            return row(Note, format!("{what}, as of a simulated one")).of(root.to_string());
        }
        return row(Warning, what).of(root.to_string()).remedy(
            "install the driver's libraries, of the loaded version, or set [driver] root to where \
             they are: `cgpu gpus` asks them",
        );
    };
    let (version, path) = (library.version, library.path.display());
    match loaded {
        Some(module) if module != version => {
            let what = format!(
                "{version} ({path}), and the loaded module is {module}: NVML says \"Driver/library \
                 version mismatch\""
            );
            row(Error, what).of(path.to_string()).remedy(
                "the driver was updated while loaded: reboot, or unload and load its modules",
            )
        }
        _ => row(Fine, format!("{version} ({path})")).of(path.to_string()),
    }
}

/// How to have `command` run now and when the host starts.
fn at_every_boot(command: &str) -> String {
    format!("`{command}`, and for every boot `systemctl enable cgpu-nodes`")
}

/// A row for each node that is wrong, and one for the others.
fn nodes(nodes: &[Node]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let (mut good, mut files) = (Vec::new(), Vec::new());
    for node in nodes {
        let path = node.path.display().to_string();
        let row = |severity, what| Finding::new(Driver, "nodes", severity, what).of(path.clone());
        match &node.seen {
            Observed::Present(NodeKind::File) => files.push(path),
            Observed::Present(NodeKind::Device(major, minor)) => {
                let wanted = (node.major.unwrap_or(*major), node.minor);
                if (*major, *minor) == wanted {
                    good.push(path);
                    continue;
                }
                let what = format!(
                    "{path} is device {major}:{minor}, and the kernel's is {}:{}",
                    wanted.0, wanted.1
                );
                findings.push(row(Error, what).remedy(format!("`rm {path}; {}`", node.made_by)));
            }
            Observed::Absent if node.needed && node.is_made_on_demand => {
                let what = format!("{path} is missing; the next container with a GPU makes it");
                findings.push(row(Note, what).remedy(at_every_boot(&node.made_by)));
            }
            Observed::Absent if node.needed => {
                let what = format!("{path} is missing");
                findings.push(row(Error, what).remedy(at_every_boot(&node.made_by)));
            }
            Observed::Absent => {}
            Observed::Unreadable(why) => findings.push(
                row(Error, format!("{path} can't be looked at: {why}")).remedy("run as root"),
            ),
        }
    }
    if !files.is_empty() {
        let what = format!("no device but a file, bound into containers: {}", listed(&files));
        findings.push(Finding::new(Driver, "nodes", Note, what));
    }
    if !good.is_empty() {
        findings.push(Finding::new(Driver, "nodes", Fine, listed(&good)));
    }
    findings
}

/// What writes a specification.
const WRITE_CDI: &str = "`cgpu cdi generate --output /etc/cdi/nvidia.yaml`";

/// Why a container creation finds GPUs in no specification.
fn refused(cdi: &Cdi) -> String {
    match cdi.refused.as_slice() {
        [] => String::new(),
        [why] => why.clone(),
        [why, others @ ..] => format!("{why} (and so for {} more)", others.len()),
    }
}

/// How the driver's files come into containers.
fn files(facts: &Facts) -> Finding {
    let row = |severity, what| Finding::new(Driver, "files", severity, what);
    let library = facts.library.as_ref().map(|library| library.version.to_string());
    let without = "containers get device nodes only";
    let needless = standing(facts) == Standing::Needless || facts.made_up;
    let missing = |what: String, remedy: &str| match needless {
        true => row(Note, what),
        false => row(Error, what).remedy(remedy),
    };
    match (&facts.files.inject, &facts.files.cdi, &facts.files.nvidia_runtime) {
        (Inject::NvidiaRuntime, _, Some((name, None))) => {
            row(Error, format!("inject is nvidia-runtime, and there is no program {name}"))
                .of(name.clone())
                .remedy("install NVIDIA's container toolkit, or set [driver] inject = \"auto\"")
        }
        (Inject::NvidiaRuntime, _, runtime) => {
            let file = runtime.as_ref().and_then(|(_, file)| file.as_ref());
            let file = file.map(|file| file.display().to_string()).unwrap_or_default();
            row(Fine, format!("nvidia-runtime (configured): {file}")).of(file)
        }
        (Inject::Off, ..) => row(Fine, format!("off (configured): {without}")),
        (Inject::Cdi, Some(cdi), _) if cdi.usable == 0 => missing(
            match &cdi.trouble {
                Some(why) => format!("inject is cdi, and no device is usable: {why}"),
                None => "inject is cdi, and there is no specification of NVIDIA's".to_owned(),
            },
            WRITE_CDI,
        ),
        (Inject::Cdi, Some(cdi), _) if !cdi.refused.is_empty() => {
            missing(format!("inject is cdi, and {}", refused(cdi)), WRITE_CDI)
        }
        (Inject::Auto, Some(cdi), _) if cdi.served > 0 && !cdi.refused.is_empty() => {
            let all = cdi.served + cdi.refused.len();
            let what = format!(
                "cdi (auto) for {} of {all} GPUs, else native: {}",
                cdi.served,
                refused(cdi)
            );
            row(Warning, what).remedy(WRITE_CDI)
        }
        (Inject::Auto | Inject::Cdi, Some(cdi), _) if cdi.usable > 0 && cdi.refused.is_empty() => {
            let why = if facts.files.inject == Inject::Auto { "auto" } else { "configured" };
            let what = format!("cdi ({why}): {} devices; `cgpu cdi list` shows them", cdi.usable);
            match &cdi.trouble {
                Some(trouble) => row(Warning, format!("{what}; {trouble}"))
                    .remedy("`cgpu cdi list` shows which; write the file again, or remove it"),
                None => row(Fine, what),
            }
        }
        (Inject::Auto, cdi, _) => {
            let trouble = cdi.as_ref().and_then(|cdi| match cdi.refused.is_empty() {
                true => cdi.trouble.clone(),
                false => Some(refused(cdi)),
            });
            match (library, trouble) {
                (Some(version), None) => {
                    row(Fine, format!("native (auto: no CDI specification): {version}"))
                }
                (Some(version), Some(why)) => {
                    row(Warning, format!("native (auto: CDI is of no use): {version}; {why}"))
                        .remedy("`cgpu cdi generate --output FILE` writes it again; or remove it")
                }
                (None, why) => {
                    let why = why.map(|why| format!("; {why}")).unwrap_or_default();
                    let what = format!("neither CDI nor libraries{why}: {without}");
                    match needless {
                        true => row(Note, what),
                        false => row(Warning, what).remedy(
                            "install the driver's libraries, or set [driver] root to where they are",
                        ),
                    }
                }
            }
        }
        (Inject::Native | Inject::Cdi, ..) => match library {
            Some(version) => row(Fine, format!("native (configured): {version}")),
            None => missing(
                "inject is native, and there are no libraries of a driver".to_owned(),
                "install the driver's libraries, or set [driver] root to where they are",
            ),
        },
    }
}
