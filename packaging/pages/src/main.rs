//! `cgpu-pages DIR`: writes man pages and completions below DIR, laid out as packages have them.
//!
//! `cgpu`, `cgpu-smi` and `cgpu-hook` come from the definitions that they parse their command lines by, so a
//! page can't be behind its program. `cgpu-runtime` has the real runtime's command line and
//! `cgpu-monitor` none; what little there is to say of them stands here.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use cgpu::hook::command_line::Hook;
use cgpu_cli::commands::Cli;
use clap::{Arg, Command, CommandFactory, Parser};
use clap_complete::{Shell, generate};
use clap_mangen::Man;

/// System administration: all of it needs root.
const SECTION: &str = "8";

/// Writes the man pages and completions of cgpu's programs.
#[derive(Debug, Parser)]
struct Pages {
    /// What stands for `/usr` in a package.
    dir: PathBuf,
}

/// Where each shell's completions of packages are, and what stands around a program's name.
const COMPLETIONS: [(Shell, &str, &str, &str); 3] = [
    (Shell::Bash, "share/bash-completion/completions/", "", ""),
    (Shell::Zsh, "share/zsh/vendor-completions/", "_", ""),
    (Shell::Fish, "share/fish/vendor_completions.d/", "", ".fish"),
];

/// The programs that parse their command lines by definitions of theirs, but for the hook.
fn own() -> [Command; 7] {
    [
        Cli::command(),
        cgpu_smi::Args::command(),
        cgpu_metrics::Args::command(),
        cgpu_tree::Args::command(),
        cgpu_k8s::Args::command(),
        cgpu_k8s::InspectArgs::command(),
        cgpu_k8s::dra::DraArgs::command(),
    ]
}

fn runtime() -> Command {
    Command::new("cgpu-runtime")
        .version(env!("CARGO_PKG_VERSION"))
        .about("OCI runtime that lets containers share GPUs")
        .long_about(
            "Called by an engine (docker, containerd, CRI-O, podman) in the place of runc or crun. \
             A create gives the container the GPUs and the memory quota that its variables or \
             annotations ask for, and then becomes the real runtime; every other command becomes \
             the real runtime at once. All flags and commands are the real runtime's, but for the \
             one below.",
        )
        .override_usage("cgpu-runtime [--cgpu-config FILE] [FLAG OF THE RUNTIME]... COMMAND ...")
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(
            Arg::new("cgpu-config")
                .long("cgpu-config")
                .value_name("FILE")
                .help("The configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml]"),
        )
        .after_help("See also: cgpu(8), cgpu-hook(8), runc(8), crun(1)")
}

fn monitor() -> Command {
    Command::new("cgpu-monitor")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Answers the driver calls of one container")
        .long_about(
            "Started by cgpu-runtime for each container that has a memory quota, and ends with it; \
             no other program calls it. `cgpu ps` lists the containers, `cgpu upgrade-monitors` gives \
             running ones the monitor that is installed now.",
        )
        .disable_help_flag(true)
        .disable_version_flag(true)
        .after_help("See also: cgpu(8), cgpu-ps(8), cgpu-upgrade-monitors(8)")
}

/// The page of `command`, and one of each of its commands, `cgpu-cdi-list` say.
fn write_pages(command: &Command, dir: &Path) -> Result<()> {
    for below in command.get_subcommands().filter(|below| !below.is_hide_set()) {
        if below.get_name() != "help" {
            write_pages(below, dir)?;
        }
    }
    let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
    let file = dir.join(format!("{name}.{SECTION}"));
    let mut page = Vec::new();
    Man::new(command.clone()).section(SECTION).render(&mut page)?;
    fs::write(&file, page).with_context(|| format!("cannot write {}", file.display()))
}

fn write(dir: &Path) -> Result<()> {
    for mut command in own() {
        let name = command.get_name().to_owned();
        for (shell, path, before, after) in COMPLETIONS {
            let file = dir.join(path).join(format!("{before}{name}{after}"));
            make_parent(&file)?;
            let mut text = Vec::new();
            generate(shell, &mut command, &*name, &mut text);
            fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    let pages = dir.join("share/man/man8");
    fs::create_dir_all(&pages).with_context(|| format!("cannot make {}", pages.display()))?;
    let own = own();
    for mut command in own.into_iter().chain([Hook::command(), runtime(), monitor()]) {
        command = command.disable_help_subcommand(true);
        command.build();
        write_pages(&command, &pages)?;
    }
    Ok(())
}

fn make_parent(file: &Path) -> Result<()> {
    let parent = file.parent().context("a path of completions has a directory")?;
    fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))
}

fn main() -> Result<()> {
    write(&Pages::parse().dir)
}
