//! `cgpu cdi`: writes a CDI specification of this host, and lists those that there are.

use std::fs::{self, DirBuilder};
use std::io::Write;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;

use super::table::{aligned, printable};
use super::{Format, Output};
use crate::nvml::probe;
use cgpu::host::Host;
use cgpu_core::gpu::Inventory;
use cgpu_core::plan::{Kind, Plan, PlannedGpu};
use cgpu_host::atomic_file::replace;
use cgpu_host::inventory::cached;
use cgpu_inject::cdi::generator::{Generated, generate, usable};
use cgpu_inject::cdi::{DeviceState, HostFacts, Specifications, State, yaml};
use cgpu_inject::driver::{Capability, Driver};
use cgpu_inject::driver_search::{self, FindError};
use cgpu_inject::root::Root;
use cgpu_inject::{Missing, native, nodes};

/// What to do with specifications.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Write a specification of this host's GPUs, for engines that read such.
    Generate(Generate),
    /// List the devices of the specifications that there are, and whether they are stale.
    List(List),
}

/// What to write, and where.
#[derive(Debug, Args)]
pub struct Generate {
    /// The file, as /etc/cdi/nvidia.yaml; without it, standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Its form [default: what the file's name ends in, else yaml].
    #[arg(long, value_enum)]
    format: Option<SpecificationFormat>,
    /// Whose files of the driver: compute, compat32, graphics, utility, video, display, ngx.
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "all")]
    capabilities: Vec<String>,
}

/// Which specifications to list, and how.
#[derive(Debug, Args)]
pub struct List {
    /// A directory of specifications [default: driver.cdi_dirs]; the last has precedence.
    #[arg(long, value_name = "DIR")]
    spec_dir: Vec<PathBuf>,
    /// How to print.
    #[command(flatten)]
    output: Output,
}

/// How a specification is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SpecificationFormat {
    /// What most are.
    Yaml,
    /// For programs.
    Json,
}

/// Does what `verb` says.
///
/// # Errors
///
/// Where the GPUs or their nodes can't be had, or the file can't be written.
pub fn run(host: &Host, verb: &Verb, out: &mut dyn Write) -> Result<()> {
    match verb {
        Verb::Generate(how) => write(host, how, out),
        Verb::List(how) => list(host, how, out),
    }
}

fn write(host: &Host, how: &Generate, out: &mut dyn Write) -> Result<()> {
    let format = format(how)?;
    let capabilities = capabilities(&how.capabilities)?;
    let Generated { spec, left_out } = described(host, &capabilities)?;
    let text = match format {
        SpecificationFormat::Yaml => yaml::document(&spec)?,
        SpecificationFormat::Json => format!("{}\n", serde_json::to_string_pretty(&spec)?),
    };
    match &how.output {
        None => out.write_all(text.as_bytes())?,
        Some(file) => write_file(file, &text)
            .with_context(|| format!("can't write {}; run as root", file.display()))?,
    }
    for reason in left_out {
        // The specification is right without it; the user should know all the same.
        let _ = writeln!(std::io::stderr(), "cgpu: left out: {}", printable(&reason));
    }
    Ok(out.flush()?)
}

fn format(how: &Generate) -> Result<SpecificationFormat> {
    let ending = how.output.as_deref().map(|file| file.extension().unwrap_or_default());
    let named = match ending.map(|ending| ending.to_str()) {
        None => None,
        Some(Some("yaml")) => Some(SpecificationFormat::Yaml),
        Some(Some("json")) => Some(SpecificationFormat::Json),
        Some(_) => bail!(
            "{}: engines read files that end in .yaml or .json only; name it so",
            how.output.as_deref().unwrap_or(Path::new("")).display()
        ),
    };
    Ok(how.format.or(named).unwrap_or(SpecificationFormat::Yaml))
}

fn capabilities(names: &[String]) -> Result<Vec<Capability>> {
    let mut capabilities = Vec::new();
    for name in names {
        match Capability::ALL.iter().find(|known| known.name() == name) {
            Some(known) => capabilities.push(*known),
            None if name == "all" => capabilities.extend(Capability::ALL),
            None => {
                let known: Vec<_> = Capability::ALL.iter().map(|known| known.name()).collect();
                bail!("--capabilities {name:?}: it must be all, or of {}", known.join(", "));
            }
        }
    }
    Ok(capabilities)
}

/// The specification of this host.
fn described(host: &Host, capabilities: &[Capability]) -> Result<Generated> {
    let settings = host.inventory_settings();
    let inventory = match cached(&settings)? {
        Some(inventory) => inventory,
        None => probe(&settings)?,
    };
    let host_nodes = host.driver_nodes();
    let nodes = nodes(&everything(&inventory), &inventory, &host_nodes, Missing::Make)?;
    let (driver, without) = driver(host)?;
    let mut generated = generate(&inventory, &nodes, &host_nodes.dev, &driver, capabilities)?;
    generated.left_out.extend(without);
    Ok(generated)
}

/// A plan of every GPU that can be a device, for the sake of its node.
fn everything(inventory: &Inventory) -> Plan {
    let gpus = usable(inventory).map(|gpu| PlannedGpu {
        index: gpu.index,
        uuid: gpu.uuid.clone(),
        minor: gpu.minor,
        memory_total_bytes: gpu.memory_bytes,
        memory_reserved_bytes: gpu.reserved_bytes,
        memory_limit_bytes: None,
        mig: None,
    });
    Plan {
        backend: Kind::None,
        gpus: gpus.collect(),
        weight: 1,
        high_priority: false,
        caveats: cgpu_core::plan::Caveats::default(),
    }
}

/// The driver's files; where there are none, the image is to bring them, and that is said.
fn driver(host: &Host) -> Result<(Driver, Option<String>)> {
    let path = &host.config.driver.root;
    let root =
        Root::open(path).with_context(|| format!("can't open driver.root {}", path.display()))?;
    let kernel = native::kernel_version(&host.config.driver.proc_root);
    match driver_search::driver(&root, kernel.map(|version| version.to_string()).as_deref()) {
        Ok(mut driver) => {
            driver.files.extend(driver_search::sockets(&root));
            Ok((driver, None))
        }
        Err(error @ FindError::Nothing { .. }) => Ok((Driver::default(), Some(error.to_string()))),
        Err(error) => Err(error.into()),
    }
}

/// Writes for all users to read, atomically; the directory is made if it is missing.
fn write_file(file: &Path, text: &str) -> std::io::Result<()> {
    if let Some(directory) = file.parent().filter(|directory| !directory.as_os_str().is_empty()) {
        DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    }
    // Through a link, the file that it leads to: renaming would put the link away.
    let file = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
    replace(&file, text.as_bytes(), 0o644)
}

fn list(host: &Host, how: &List, out: &mut dyn Write) -> Result<()> {
    let directories = match how.spec_dir.as_slice() {
        [] => host.config.driver.cdi_dirs.clone(),
        given => given.to_vec(),
    };
    // A listing leaves no cache behind.
    let specifications = Specifications::load(&directories, None);
    let devices = specifications.devices(&HostFacts::read(&host.config.driver.proc_root));
    match how.output.format {
        Format::Text => {
            out.write_all(table(&devices).as_bytes())?;
            for (file, why) in specifications.unusable() {
                let file = printable(&file.display().to_string());
                writeln!(out, "{file} can't be used: {}", printable(why))?;
            }
        }
        Format::Json => {
            let devices: Vec<_> = devices
                .iter()
                .map(|device| {
                    let (state, why) = state(&device.state);
                    json!({"name": device.name, "file": device.file, "state": state, "why": why})
                })
                .collect();
            let unusable: Vec<_> = specifications
                .unusable()
                .map(|(file, why)| json!({"file": file, "why": why}))
                .collect();
            let all = json!({"devices": devices, "unusable": unusable});
            serde_json::to_writer_pretty(&mut *out, &all)?;
            writeln!(out)?;
        }
    }
    Ok(out.flush()?)
}

/// A word for programs, and what is behind it.
fn state(state: &State) -> (&'static str, Option<String>) {
    match state {
        State::Ok => ("ok", None),
        State::Overridden(by) => ("overridden", Some(format!("by {}", by.display()))),
        State::Conflict(with) => ("conflict", Some(format!("with {}", with.display()))),
        State::Stale(why) => ("stale", Some(why.clone())),
        State::Unsupported(why) => ("unsupported", Some(why.clone())),
    }
}

fn table(devices: &[DeviceState]) -> String {
    let mut rows = vec![["DEVICE", "FILE", "STATE", ""].map(str::to_owned)];
    for device in devices {
        let (state, why) = state(&device.state);
        rows.push([
            printable(&device.name),
            printable(&device.file.display().to_string()),
            state.to_owned(),
            printable(&why.unwrap_or_default()),
        ]);
    }
    aligned(&rows, &[])
}
