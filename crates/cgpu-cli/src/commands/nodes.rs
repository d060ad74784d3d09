//! `cgpu nodes`: the driver's device nodes, before the first container or CUDA program needs them.

use std::io::Write;
use std::path::Path;

use anyhow::{Result, bail};

use cgpu::host::{Host, require_root};
use cgpu_inject::device_numbers::Module;
use cgpu_inject::kernel_modules::{gpu_waits_for_driver, load};

/// The kernel itself, whose modules can be loaded.
const KERNELS_OWN: &str = "/proc";

/// Loads the modules that the driver's nodes need, and makes the nodes that are missing.
///
/// # Errors
///
/// If a module isn't loaded, or a node isn't made; the other nodes are.
pub fn run(host: &Host, out: &mut dyn Write) -> Result<()> {
    require_root()?;
    let driver = &host.config.driver;
    let nodes = host.driver_nodes();
    let is_loaded = |module| nodes.major(module).is_some();
    // A driver container loads modules of its own.
    let is_host_s = driver.root == Path::new("/");
    if !is_loaded(Module::Nvidia) {
        let is_kernels = driver.proc_root == Path::new(KERNELS_OWN);
        match is_host_s && is_kernels && gpu_waits_for_driver(Path::new("/sys")) {
            true => load(Module::Nvidia, &driver.proc_root)?,
            false => {
                let why = "NVIDIA's driver isn't loaded, and no GPU waits for the host's";
                writeln!(out, "no node to make: {why}")?;
                return Ok(out.flush()?);
            }
        }
    }
    if !is_loaded(Module::Uvm) && is_host_s {
        load(Module::Uvm, &driver.proc_root)?;
    }
    let mut failed = Vec::new();
    for name in nodes.names() {
        let path = nodes.dev.join(&name);
        if path.exists() {
            continue;
        }
        match nodes.make(&name) {
            Ok(made) => writeln!(out, "{} made: c {}:{}", path.display(), made.major, made.minor)?,
            Err(error) => failed.push(error.to_string()),
        }
    }
    out.flush()?;
    if !failed.is_empty() {
        bail!("{}", failed.join("; "));
    }
    Ok(())
}
