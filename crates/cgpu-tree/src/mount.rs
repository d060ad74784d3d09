//! Mounts the tree, and takes it down when it is told to.

use std::fs;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use cgpu::admission::{Host, require_root};
use clap::Parser;
use fuser::{Config, MountOption, SessionACL};
use nix::errno::Errno;
use nix::mount::{MntFlags, umount2};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::files::Tree;
use crate::host::Shown;

/// How often it is seen whether somebody has unmounted the tree, in ms.
const LOOK_MS: u16 = 500;

/// Shows GPUs and the containers that share them as a tree of files, until ended.
#[derive(Debug, Parser)]
#[command(name = "cgpu-tree", version)]
pub struct Args {
    /// The configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where to mount it; made where it isn't there [default: km in the state directory].
    pub dir: Option<PathBuf>,
}

/// Mounts the tree, and unmounts it when it is told to end.
///
/// # Errors
///
/// Where it can't be mounted.
pub fn run(args: &Args) -> Result<()> {
    require_root()?;
    let host = Host::load(args.config.as_deref().map(AsRef::as_ref))?;
    cgpu::log::init(&host.config.log);
    let dir = args.dir.clone().unwrap_or_else(|| host.config.state_dir.join("km"));
    // Its directory is ours alone, or it isn't there yet.
    host.registry()?;
    make_ready(&dir)?;
    // Before there are other threads, which would take the signals.
    let mut ends = SigSet::empty();
    [Signal::SIGTERM, Signal::SIGINT].into_iter().for_each(|signal| ends.add(signal));
    ends.thread_block()?;
    let told = SignalFd::with_flags(&ends, SfdFlags::SFD_CLOEXEC)?;
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("cgpu".to_owned()),
        MountOption::Subtype("cgpu-tree".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
        MountOption::NoExec,
    ];
    // Root alone reads, too: the files tell of every container.
    config.acl = SessionACL::Owner;
    let session =
        fuser::spawn_mount(Tree::new(Shown::new(host)), &dir, &config).with_context(|| {
            format!("cannot mount the tree on {}; is FUSE here (/dev/fuse)?", dir.display())
        })?;
    // Nobody may be there to read it.
    let _ = writeln!(io::stdout(), "mounted on {}", dir.display());
    loop {
        let mut fds = [PollFd::new(told.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::from(LOOK_MS)) {
            Ok(0) | Err(Errno::EINTR) if session.guard.is_finished() => return Ok(()),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => break,
            Err(errno) => return Err(errno.into()),
        }
    }
    // Whoever is in it loses it with this process, and nobody else finds it.
    umount2(&dir, MntFlags::MNT_DETACH).with_context(|| format!("cannot unmount {}", dir.display()))
}

/// Sees that something can be mounted on `dir`. What a killed one has left there is taken down.
fn make_ready(dir: &Path) -> Result<()> {
    match fs::metadata(dir) {
        Err(error) if error.raw_os_error() == Some(Errno::ENOTCONN as i32) => {
            umount2(dir, MntFlags::MNT_DETACH).with_context(|| {
                format!(
                    "{} has a mount that nobody serves; umount {}",
                    dir.display(),
                    dir.display()
                )
            })?;
            return make_ready(dir);
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return fs::create_dir_all(dir)
                .with_context(|| format!("cannot make {}", dir.display()));
        }
        Err(error) => {
            return Err(error).with_context(|| format!("cannot look at {}", dir.display()));
        }
        Ok(meta) if !meta.is_dir() => bail!("{} is no directory; name another", dir.display()),
        Ok(meta) => {
            let parent = fs::metadata(dir.join(".."))?;
            if parent.dev() != meta.dev() {
                bail!(
                    "something is mounted on {} already; `findmnt {}` says what, `umount {}` takes \
                     it down",
                    dir.display(),
                    dir.display(),
                    dir.display()
                );
            }
        }
    }
    Ok(())
}
