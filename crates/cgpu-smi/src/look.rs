//! Looks once, or again and again, and prints what was asked for.

use std::env;
use std::io::{self, IsTerminal, Write};
use std::thread;
use std::time::SystemTime;

use anyhow::{Result, bail};
use cgpu::host::Host;
use cgpu_cli::view::{Driver, Processes, Snapshot, collect};
use cgpu_host::registry::RegistryError;
use ratatui::crossterm::terminal;

use crate::args::{Args, Format};
use crate::cells::Signs;
use crate::choose::chosen;
use crate::history::History;
use crate::print::{Colours, print};
use crate::query::{self, Style, container_fields, gpu_fields};
use crate::sheet::{Look, sheet};
use crate::socket;
use crate::watch;

/// The columns of a page that no terminal shows, where `COLUMNS` doesn't say.
const WIDTH: usize = 120;

/// Does what the command line asks for.
///
/// # Errors
///
/// Where the host can't be looked at, or what was asked for isn't there.
pub fn run(args: &Args) -> Result<()> {
    if is_help(&args.query_gpu) {
        return Ok(io::stdout().write_all(query::help(&gpu_fields()).as_bytes())?);
    }
    if is_help(&args.query_container) {
        return Ok(io::stdout().write_all(query::help(&container_fields()).as_bytes())?);
    }
    check_format(args)?;
    let host = Host::load(args.config.as_deref().map(AsRef::as_ref))?;
    let driver = (!args.no_nvml).then(|| Driver::new(host.config.driver.root.clone()));
    let processes =
        match args.processes || args.serve || args.watch || args.query || args.has(Format::Json) {
            true => Processes::Named,
            false => Processes::Numbered,
        };
    let mut eyes = Eyes { host, driver, processes, ids: args.id.clone() };
    if args.serve {
        let view = eyes.host.config.view.clone();
        return socket::serve(&view, move || eyes.look());
    }
    if args.watch {
        return watch::run(eyes, args);
    }
    loop {
        let snapshot = eyes.look()?;
        show(&snapshot, args, &mut io::stdout().lock())?;
        match args.r#loop {
            Some(pause) => thread::sleep(pause),
            None => return Ok(()),
        }
    }
}

/// Who looks, and at what.
#[derive(Debug)]
pub(crate) struct Eyes {
    host: Host,
    driver: Option<Driver>,
    processes: Processes,
    /// The GPUs that are looked at; all where there are none.
    ids: Vec<String>,
}

impl Eyes {
    /// What there is now: what we see ourselves, or what root's service tells somebody else.
    ///
    /// # Errors
    ///
    /// Where the host can't be looked at, or has no such GPU.
    pub(crate) fn look(&mut self) -> Result<Snapshot> {
        let found = match collect(&self.host.chosen_anew(), self.processes, self.driver.as_mut()) {
            Err(RegistryError::NotRoot { .. }) => socket::ask(&self.host.config.view.socket)?,
            found => found?,
        };
        Ok(chosen(found, &self.ids)?)
    }

    /// The same without asking NVIDIA's driver, which may take long.
    ///
    /// # Errors
    ///
    /// As [`look`](Self::look).
    pub(crate) fn glance(&mut self) -> Result<Snapshot> {
        let driver = self.driver.take();
        let found = self.look();
        self.driver = driver;
        found
    }
}

fn is_help(fields: &[String]) -> bool {
    matches!(fields, [only] if only == "help")
}

/// Refuses formats that what was asked for doesn't have.
fn check_format(args: &Args) -> Result<()> {
    let is_query = !args.query_gpu.is_empty() || !args.query_container.is_empty();
    let json = args.has(Format::Json);
    if json && (args.format.len() > 1 || is_query || args.query || args.list_gpus || args.watch) {
        bail!("--format=json prints all that is known; leave the other options out");
    }
    if !json && !args.format.is_empty() && !is_query {
        bail!("--format=csv is for --query-gpu and --query-container; name one of them");
    }
    Ok(())
}

/// Prints `snapshot` as the command line has it.
fn show(snapshot: &Snapshot, args: &Args, out: &mut dyn Write) -> Result<()> {
    let style = Style { header: !args.has(Format::Noheader), units: !args.has(Format::Nounits) };
    let text = if args.has(Format::Json) {
        serde_json::to_string_pretty(snapshot)? + "\n"
    } else if args.list_gpus {
        list(snapshot)
    } else if args.query {
        query::all(snapshot, &now())
    } else if !args.query_gpu.is_empty() {
        query::gpus(snapshot, &args.query_gpu, style)?
    } else if !args.query_container.is_empty() {
        query::containers(snapshot, &args.query_container, style)?
    } else {
        return page(snapshot, args, out);
    };
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// The GPUs as `nvidia-smi -L` lists them.
fn list(snapshot: &Snapshot) -> String {
    let line = |gpu: &cgpu_cli::view::GpuFigures| {
        let name = if gpu.name.is_empty() { "unknown" } else { &gpu.name };
        let text = format!("GPU {}: {name} (UUID: {})", gpu.index, gpu.uuid);
        cgpu_cli::commands::table::printable(&text) + "\n"
    };
    snapshot.gpus.iter().map(line).collect()
}

fn page(snapshot: &Snapshot, args: &Args, out: &mut dyn Write) -> Result<()> {
    let is_terminal = io::stdout().is_terminal();
    let size = if is_terminal { terminal::size().ok() } else { None };
    let told = || env::var("COLUMNS").ok()?.parse().ok();
    let look = Look {
        width: size.map(|(columns, _)| usize::from(columns)).or_else(told).unwrap_or(WIDTH),
        signs: signs(),
        time: &now(),
        processes: args.processes,
        marked: None,
        history: &History::default(),
    };
    let colours = Colours::wanted(is_terminal, env::var_os("NO_COLOR").as_deref());
    Ok(print(&sheet(snapshot, &look).lines, colours, out)?)
}

/// What this terminal shows.
pub(crate) fn signs() -> Signs {
    let [all, ctype, lang] = ["LC_ALL", "LC_CTYPE", "LANG"].map(|name| env::var(name).ok());
    Signs::of_locale([all.as_deref(), ctype.as_deref(), lang.as_deref()])
}

/// The time, to the second, in UTC.
pub(crate) fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
