//! Mounts the tree, and takes it down when it is asked to.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use cgpu::host::{Host, require_root};
use clap::Parser;
use fuser::{Config, MountOption, SessionACL};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::stdio::{dup2_stderr, dup2_stdin, dup2_stdout};

use crate::files::Tree;
use crate::host::Shown;
use crate::mount_point::{self, MountPoint};

/// How many readers are answered at once.
const THREADS: usize = 4;

/// What is said once the tree is there; behind it, where.
const MOUNTED_ON: &str = "mounted on ";

/// How often it is checked whether the tree was unmounted.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Shows GPUs and the containers that share them as a tree of files, until ended.
#[derive(Debug, Parser)]
#[command(name = "cgpu-tree", version)]
pub struct Args {
    /// The configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where to mount it; made where it isn't there [default: km in the state directory].
    pub dir: Option<PathBuf>,
    /// Go on in the background: return once the tree is there.
    #[arg(long)]
    pub detach: bool,
    /// Take the tree down that is mounted there.
    #[arg(long, conflicts_with = "detach")]
    pub unmount: bool,
    /// No process reads what is said once the tree is there.
    #[arg(long, hide = true)]
    pub unheard: bool,
}

/// Mounts the tree, and unmounts it when a signal asks it to exit; or does what else the command line asks
/// for.
///
/// # Errors
///
/// Where it can't be mounted, or unmounted.
pub fn run(args: &Args) -> Result<()> {
    require_root()?;
    let host = Host::load(args.config.as_deref().map(AsRef::as_ref))?;
    cgpu_host::log::init(&host.config.log);
    let dir = args.dir.clone().unwrap_or_else(|| host.config.state_dir.join("km"));
    // Its directory is ours alone, or it isn't there yet.
    host.registry()?;
    if args.unmount {
        return mount_point::clear(&dir);
    }
    if args.detach {
        return detach(args);
    }
    let MountPoint { dir, lock: _lock } = MountPoint::take(&dir)?;
    // Before there are other threads, which would take the signals.
    let mut ends = SigSet::empty();
    [Signal::SIGTERM, Signal::SIGINT].into_iter().for_each(|signal| ends.add(signal));
    ends.thread_block()?;
    let reported = SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC)?;
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(mount_point::SOURCE.to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoExec,
    ];
    // Root alone reads, too: the files report every container.
    config.acl = SessionACL::Owner;
    // A monitor that doesn't answer holds up one reader, and not all.
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    let session =
        fuser::spawn_mount(Tree::new(Shown::new(host)), &dir, &config).with_context(|| {
            format!("cannot mount the tree on {}; is FUSE here (/dev/fuse)?", dir.display())
        })?;
    // There may be no reader.
    let _ = writeln!(io::stdout(), "{MOUNTED_ON}{}", dir.display());
    if args.unheard {
        let nowhere = File::options().read(true).write(true).open("/dev/null")?;
        dup2_stdin(&nowhere)?;
        dup2_stdout(&nowhere)?;
        dup2_stderr(&nowhere)?;
    }
    loop {
        let mut fds = [PollFd::new(&reported, PollFlags::IN)];
        match poll(&mut fds, Timespec::try_from(POLL_INTERVAL).ok().as_ref()) {
            Ok(0) | Err(Errno::INTR) if session.guard.is_finished() => return Ok(()),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    // A process that is in it loses it with this process, and no other finds it.
    mount_point::unmount(&dir).with_context(|| format!("cannot unmount {}", dir.display()))
}

/// Has a process of its own mount the tree, and returns once it has.
fn detach(args: &Args) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    if let Some(config) = &args.config {
        command.arg("--config").arg(config);
    }
    command.arg("--unheard").args(&args.dir);
    // A terminal's signals aren't for it.
    command.process_group(0).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().context("cannot start cgpu-tree")?;
    let mut said = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut said)?;
    }
    if said.starts_with(MOUNTED_ON) {
        return Ok(io::stdout().write_all(said.as_bytes())?);
    }
    let output = child.wait_with_output()?;
    let why = String::from_utf8_lossy(&output.stderr);
    let why = why.trim();
    bail!("{}", why.strip_prefix("cgpu: ").unwrap_or(why))
}
