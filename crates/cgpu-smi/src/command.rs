//! What the command line asks for: prints once, again and again, or shows it full screen.

use std::env;
use std::io::{self, IsTerminal, Write};
use std::thread;

use anyhow::{Result, bail};
use cgpu::host::Host;
use cgpu_cli::view::{Driver, Processes, Snapshot};
use ratatui::crossterm::terminal;

use crate::args::{Args, Format};
use crate::collector::Collector;
use crate::environment::{now, signs};
use crate::history::History;
use crate::printer::{Colours, print};
use crate::query::{self, Style, container_fields, gpu_fields};
use crate::sheet::{PageStyle, sheet};
use crate::socket;
use crate::watch;

/// The columns of a page that no terminal shows, where `COLUMNS` doesn't say.
const WIDTH: usize = 120;

/// Does what the command line asks for.
///
/// # Errors
///
/// If the host can't be read, or what was asked for isn't there.
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
    let mut collector = Collector { host, driver, processes, ids: args.id.clone() };
    if args.serve {
        let view = collector.host.config.view.clone();
        return socket::serve(&view, move || collector.collect());
    }
    if args.watch {
        return watch::run(collector, args);
    }
    loop {
        let snapshot = collector.collect()?;
        show(&snapshot, args, &mut io::stdout().lock())?;
        match args.r#loop {
            Some(pause) => thread::sleep(pause),
            None => return Ok(()),
        }
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
    let line = |gpu: &cgpu_cli::view::GpuView| {
        let name = if gpu.name.is_empty() { "unknown" } else { &gpu.name };
        let text = format!("GPU {}: {name} (UUID: {})", gpu.index, gpu.uuid);
        cgpu_cli::commands::table::printable(&text) + "\n"
    };
    snapshot.gpus.iter().map(line).collect()
}

fn page(snapshot: &Snapshot, args: &Args, out: &mut dyn Write) -> Result<()> {
    let is_terminal = io::stdout().is_terminal();
    let size = if is_terminal { terminal::size().ok() } else { None };
    let reported = || env::var("COLUMNS").ok()?.parse().ok();
    let page_style = PageStyle {
        width: size.map(|(columns, _)| usize::from(columns)).or_else(reported).unwrap_or(WIDTH),
        signs: signs(),
        time: &now(),
        processes: args.processes,
        marked: None,
        history: &History::default(),
    };
    let colours = Colours::wanted(is_terminal, env::var_os("NO_COLOR").as_deref());
    Ok(print(&sheet(snapshot, &page_style).lines, colours, out)?)
}
