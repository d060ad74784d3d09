//! `cgpu setup`: adds the runtime `cgpu` to an engine's configuration, or removes it.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};

use super::table::printable;
use crate::engines::containerd::config_dump;
use crate::engines::distributions::kubernetes_containerd;
use crate::engines::docker::reload::{self, Outcome};
use crate::engines::file_change::{Backup, Change, write};
use crate::engines::host_tree::Tree;
use crate::engines::plan::{Action, Plan, Request, cri_disabled_by, plan};
use crate::engines::service::{Init, RuntimeChange, next_step, restart, unit};
use crate::engines::{Kind, Observed, installation, runtime_below};
use cgpu_host::report::sentence;

/// Which engine, and what to do.
#[derive(Debug, Args)]
pub struct Setup {
    /// Whose configuration is edited.
    #[arg(value_enum)]
    pub engine: Engine,
    /// Take out what setup put in, and restore the default runtime where it is cgpu.
    #[arg(long, conflicts_with_all = ["default", "runtime"])]
    pub remove: bool,
    /// Show the difference, and write nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Show the difference, write nothing, and fail where there is one or the engine is still to be restarted for the last.
    #[arg(long, conflicts_with_all = ["dry_run", "restart"])]
    pub check: bool,
    /// Containers that name no runtime get cgpu.
    #[arg(long)]
    pub default: bool,
    /// Have the engine read its configuration again; containers run on.
    #[arg(long)]
    pub restart: bool,
    /// With --restart: only where something was written.
    #[arg(long, requires = "restart")]
    pub if_changed: bool,
    /// The engine's configuration, where it isn't where it usually is.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Our runtime, as the host names it [default: cgpu-runtime beside this program].
    #[arg(long, value_name = "PROGRAM")]
    pub runtime: Option<PathBuf>,
    /// The engine's containerd, where it isn't where it usually is: it is asked what it makes of
    /// its configuration.
    #[arg(long, value_name = "PROGRAM", conflicts_with = "root")]
    pub containerd: Option<PathBuf>,
    /// Where the host's file system is, from inside a container.
    #[arg(long, value_name = "DIR", default_value = "/", conflicts_with = "restart")]
    pub root: PathBuf,
}

/// An engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// `/etc/docker/daemon.json`.
    Docker,
    /// `/etc/containerd/config.toml` or what it imports: the handler for Kubernetes.
    Containerd,
    /// The containerd of k3s.
    K3s,
    /// The containerd of RKE2.
    Rke2,
    /// The containerd of MicroK8s.
    #[value(name = "microk8s")]
    MicroK8s,
    /// The containerd of k0s.
    K0s,
    /// `/etc/crio/crio.conf.d/99-cgpu.conf`.
    Crio,
    /// `/etc/containers/containers.conf.d/99-cgpu.conf`.
    Podman,
}

impl From<Engine> for Kind {
    fn from(engine: Engine) -> Self {
        match engine {
            Engine::Docker => Kind::Docker,
            Engine::Containerd => Kind::Containerd,
            Engine::K3s => Kind::K3s,
            Engine::Rke2 => Kind::Rke2,
            Engine::MicroK8s => Kind::MicroK8s,
            Engine::K0s => Kind::K0s,
            Engine::Crio => Kind::Crio,
            Engine::Podman => Kind::Podman,
        }
    }
}

/// Shows the difference, writes it unless it is only to be shown, and says what is left to do.
///
/// # Errors
///
/// Where a file isn't what it seems, can't be written, or the engine can't be restarted.
pub fn run(setup: &Setup, out: &mut dyn Write) -> Result<()> {
    let kind = Kind::from(setup.engine);
    let root = std::path::absolute(&setup.root)?;
    let file = setup.file.as_ref().map(std::path::absolute).transpose()?;
    let action = match setup.remove {
        true => Action::Remove,
        false => Action::Add { program: program(setup)?, default: setup.default },
    };
    if kind == Kind::Containerd
        && !setup.remove
        && file.is_none()
        && let Some(other) = kubernetes_containerd::other_containerd(&root)
    {
        return Err(anyhow!("{other}"));
    }
    let containerd = containerd(setup, kind);
    let release = containerd.as_deref().and_then(config_dump::release);
    let request = Request { kind, root: root.clone(), file: file.clone(), release, action };
    let planned = plan(&request)?;
    let changes = &planned.changes;
    if changes.is_empty() {
        let state = if setup.remove { "doesn't know cgpu" } else { "knows cgpu" };
        writeln!(out, "nothing to do: the configuration of {} {state}", kind.name())?;
    }
    for change in changes {
        for line in change.diff().lines() {
            writeln!(out, "{}", printable(line))?;
        }
    }
    for note in &planned.notes {
        writeln!(out, "{}", printable(note))?;
    }
    if let Some(links) = &planned.links {
        writeln!(
            out,
            "containers of cgpu are made by {}, as those of {} are now",
            printable(&links.lower().display().to_string()),
            kind.name()
        )?;
    }
    let disabled_by = cri_disabled_by(&request);
    if let Some(disabling) = disabled_by.as_ref().filter(|_| !setup.remove) {
        writeln!(
            out,
            "{} names cri in disabled_plugins: Kubernetes can't use this containerd until that is \
             gone; ctr and nerdctl can",
            printable(&disabling.display().to_string())
        )?;
    }
    if setup.check {
        out.flush()?;
        return check(kind, changes);
    }
    if setup.dry_run {
        return would(setup, kind, out);
    }
    if let Some(links) = &planned.links {
        links.make(&root)?;
    }
    let is_owed = setup.restart && owed(kind).exists();
    if setup.if_changed && changes.is_empty() && is_owed {
        writeln!(out, "{} has not been restarted since its configuration changed", kind.name())?;
    } else if setup.if_changed && changes.is_empty() {
        checked(setup, kind, &planned, containerd.as_deref().filter(|_| disabled_by.is_none()))?;
        return Ok(out.flush()?);
    }
    if setup.restart && kind == Kind::Docker {
        let file = file.as_deref().unwrap_or(Path::new(kind.installation().main_file));
        // It has a say in the order of the steps.
        let outcome = reload::apply(file, changes.first())?;
        changes.iter().try_for_each(|change| writeln!(out, "{}", done(change)))?;
        if let Some(registered) = planned.program.as_deref().filter(|_| setup.remove) {
            runtime_below::remove_unused(&root, registered, |registered| {
                is_named(&root, registered)
            });
        }
        return reloaded(outcome, out);
    }
    for change in changes {
        write(change)?;
        writeln!(out, "{}", done(change))?;
    }
    checked(setup, kind, &planned, containerd.as_deref().filter(|_| disabled_by.is_none()))?;
    if let Some(registered) = planned.program.as_deref().filter(|_| setup.remove) {
        runtime_below::remove_unused(&root, registered, |registered| is_named(&root, registered));
    }
    out.flush()?;
    again(setup, kind, !changes.is_empty(), out)
}

/// The engine's containerd, where it can be asked.
fn containerd(setup: &Setup, kind: Kind) -> Option<PathBuf> {
    let own = setup.root.as_os_str() == "/";
    let usual = kind.installation().containerd.filter(|_| own)?;
    let path = std::env::var_os("PATH");
    let usual = || Tree::new(Path::new("/"), path.as_deref()).program(usual);
    setup.containerd.clone().or_else(usual)
}

/// Asks containerd what it makes of what was written; where that is something else, all files
/// become what they were.
fn checked(setup: &Setup, kind: Kind, planned: &Plan, containerd: Option<&Path>) -> Result<()> {
    // The others make of what setup wrote what containerd reads, at their next start.
    let reads = [Kind::Containerd, Kind::K3s, Kind::Rke2].contains(&kind);
    let is_read = |change: &Change| change.path.extension().is_some_and(|end| end != "tmpl");
    let (Some(containerd), Some(registered)) = (containerd, planned.program.as_deref()) else {
        return Ok(());
    };
    if setup.remove || !reads || !planned.changes.iter().all(is_read) {
        return Ok(());
    }
    let Err(error) = config_dump::check(containerd, &planned.main, registered, setup.default)
    else {
        return Ok(());
    };
    for change in planned.changes.iter().rev() {
        write(&change.reverse()?)?;
    }
    Err(error.into())
}

/// Whether a file of any engine of the host names a program.
fn is_named(root: &Path, program: &str) -> bool {
    let tree = Tree::new(root, None);
    let files = Kind::ALL.iter().flat_map(|kind| installation::files(&tree, *kind, None, None));
    let mut texts = files.filter_map(|path| match tree.read(&path) {
        Observed::Present(text) => Some(text),
        _ => None,
    });
    texts.any(|text| text.contains(program))
}

/// Our runtime, as the host names it.
fn program(setup: &Setup) -> Result<PathBuf> {
    if let Some(named) = &setup.runtime {
        return Ok(named.clone());
    }
    if setup.root.as_os_str() != "/" {
        return Ok("/usr/bin/cgpu-runtime".into());
    }
    let own = std::env::current_exe()?;
    let beside = own.parent().map(|directory| directory.join("cgpu-runtime"));
    beside.ok_or_else(|| anyhow!("{} has no directory; give --runtime", own.display()))
}

fn done(change: &Change) -> String {
    let path = printable(&change.path.display().to_string());
    let backup = change.backup().map(|backup| printable(&backup.display().to_string()));
    match (&change.after, change.backup, backup) {
        (None, ..) => format!("removed {path}"),
        (Some(_), Backup::Drop, _) => format!("wrote {path}: it is what it was before setup"),
        (Some(_), Backup::Make, Some(backup)) => format!("wrote {path}; what it was is {backup}"),
        (Some(_), Backup::Keep, Some(backup)) => {
            format!("wrote {path}; what it was before setup is {backup}")
        }
        (Some(_), _, None) => format!("wrote {path}"),
    }
}

/// Fails where setup would do something.
fn check(kind: Kind, changes: &[Change]) -> Result<()> {
    let kind_name = kind.name();
    if !changes.is_empty() {
        bail!("the configuration of {kind_name} isn't what setup would make of it");
    }
    if owed(kind).exists() {
        bail!("{kind_name} has not been restarted since its configuration changed");
    }
    Ok(())
}

/// Says what a restart would do.
fn would(setup: &Setup, kind: Kind, out: &mut dyn Write) -> Result<()> {
    if setup.restart {
        let line = match (kind, Init::here(), unit(kind)) {
            (_, _, None) => nothing(kind),
            (Kind::Docker, ..) if setup.remove => {
                "would have docker forget cgpu while containers run on: for a reload the file \
                 names runc as the default runtime, then it is as shown"
                    .to_owned()
            }
            (Kind::Docker, ..) => "would have docker read it; containers run on".to_owned(),
            (_, Init::Systemd, Some(unit)) => format!("would run: `systemctl restart {unit}`"),
            (_, Init::Other, Some(unit)) => {
                format!("no systemd runs here: {unit} is yours to restart")
            }
        };
        writeln!(out, "{line}")?;
    }
    Ok(out.flush()?)
}

/// Says what became of dockerd.
fn reloaded(outcome: Outcome, out: &mut dyn Write) -> Result<()> {
    match outcome {
        Outcome::Applied => writeln!(out, "done: docker has read it; containers run on")?,
        Outcome::NotRunning(error) => {
            writeln!(out, "{}", sentence(&error).trim_start_matches("cgpu: "))?;
        }
    }
    Ok(out.flush()?)
}

/// Of an engine that has nothing to restart.
fn nothing(kind: Kind) -> String {
    match kind {
        Kind::K0s => "k0s sees it and restarts its containerd: nothing to restart".to_owned(),
        _ => format!("{} reads it at its next command: nothing to restart", kind.name()),
    }
}

/// The file that is there from before an engine is restarted until that has succeeded; gone with the boot, as what it is for.
fn owed(kind: Kind) -> PathBuf {
    Path::new("/run").join(format!("cgpu-restart-{}", kind.name()))
}

/// Has the engine read its files again, or says who is to do that.
fn again(setup: &Setup, kind: Kind, changed: bool, out: &mut dyn Write) -> Result<()> {
    let done = if setup.remove { RuntimeChange::Removed } else { RuntimeChange::Added };
    let init = Init::here();
    match (next_step(kind, done, init), unit(kind)) {
        (Some(_), Some(unit)) if setup.restart && init == Init::Systemd => {
            let owed = owed(kind);
            fs::write(&owed, "").with_context(|| format!("cannot write {}", owed.display()))?;
            restart(unit)?;
            fs::remove_file(&owed).with_context(|| format!("cannot remove {}", owed.display()))?;
            writeln!(out, "done: `systemctl restart {unit}`")?;
        }
        (Some(step), _) if setup.restart => writeln!(out, "no systemd runs here: {step}")?,
        (Some(step), _) if changed => writeln!(out, "next: {step}")?,
        // The files may be applied or not: that is the engine's to know.
        (Some(step), _) => writeln!(out, "if that isn't in force yet: {step}")?,
        (None, _) if changed || setup.restart => {
            writeln!(out, "{}", nothing(kind))?;
        }
        (None, _) => {}
    }
    Ok(out.flush()?)
}
