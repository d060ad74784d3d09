//! `cgpu-node-setup`: what the DaemonSet's containers begin with. It puts cgpu's programs on the node, and runs
//! programs there: with the node's files and name, and the pod's network and service account.
//!
//! The image has no system in it; what the node's programs need (NVML, systemctl, the C library) is the node's.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use nix::fcntl::{FcntlArg, FdFlag, OFlag, fcntl, open};
use nix::sched::{CloneFlags, setns};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::Mode;
use serde_json::json;

/// The first process of the node, where the pod has `hostPID: true`.
const NODE: &str = "/proc/1";

/// Where a pod has its service account.
const ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Puts cgpu's programs on a Kubernetes node, and runs programs there; for the containers of cgpu's DaemonSet.
#[derive(Debug, Parser)]
#[command(name = "cgpu-node-setup", version)]
pub struct SetupArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: SetupCommand,
}

/// What is done.
#[derive(Debug, Subcommand)]
pub enum SetupCommand {
    /// Copy the programs to the node, then run a program of the node's.
    Install {
        /// The directory of the programs in the image.
        #[arg(long, value_name = "DIR", default_value = "/programs")]
        from: PathBuf,
        /// The directory on the node.
        #[arg(long, value_name = "DIR", default_value = "/opt/cgpu/bin")]
        to: PathBuf,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Run a program of the node's.
    Enter {
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

/// Does what it is told. Where it returns, that has failed.
///
/// # Errors
///
/// Where the pod isn't let to the node, or something can't be written or run.
pub fn set_up(args: &SetupArgs) -> Result<()> {
    let node = Path::new(NODE);
    let command = match &args.command {
        SetupCommand::Install { from, to, command } => {
            require_node(node)?;
            ensure!(to.is_absolute(), "{} is no absolute path on the node", to.display());
            let below = to.strip_prefix("/").unwrap_or(to);
            copy_programs(from, &node.join("root").join(below))?;
            command
        }
        SetupCommand::Enter { command } => {
            require_node(node)?;
            command
        }
    };
    enter(node, command)
}

/// Makes sure that the first process that is seen is the node's.
fn require_node(node: &Path) -> Result<()> {
    let namespace = |process: &Path| fs::metadata(process.join("ns/mnt")).map(|meta| meta.ino());
    let of_node = namespace(node).context(
        "the node's first process can't be looked at; the pod needs hostPID: true and a privileged container",
    )?;
    let own = namespace(Path::new("/proc/self")).context("cannot read /proc/self/ns/mnt")?;
    ensure!(
        own != of_node,
        "the first process is this container's own, not the node's; the pod needs hostPID: true"
    );
    Ok(())
}

/// Puts all files of `from` into `to`, each in one step: an engine may call one at any time. What is the same
/// already stays.
fn copy_programs(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    let programs = fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))?;
    for program in programs {
        let program = program.with_context(|| format!("cannot read {}", from.display()))?;
        let name = program.file_name();
        let target = to.join(&name);
        let new = fs::read(program.path())
            .with_context(|| format!("cannot read {}", program.path().display()))?;
        if fs::read(&target).is_ok_and(|old| old == new) {
            continue;
        }
        let beside = to.join(format!(".{}.new", name.to_string_lossy()));
        write_program(&beside, &new)
            .and_then(|()| fs::rename(&beside, &target))
            .with_context(|| format!("cannot write {}", target.display()))?;
    }
    Ok(())
}

fn write_program(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(content)?;
    file.set_permissions(fs::Permissions::from_mode(0o755))?;
    file.sync_all()
}

/// Becomes a program of the node's.
fn enter(node: &Path, command: &[String]) -> Result<()> {
    let Some((program, arguments)) = command.split_first() else { bail!("no program is named") };
    let account = service_account()?;
    // Metrics bear the node's name; the pod has one of its own.
    for (name, kind) in [("uts", CloneFlags::CLONE_NEWUTS), ("mnt", CloneFlags::CLONE_NEWNS)] {
        let namespace = File::open(node.join("ns").join(name))
            .with_context(|| format!("cannot open the node's namespace {name}"))?;
        setns(namespace, kind).context("the container has to be privileged to be on the node")?;
    }
    std::env::set_current_dir("/").context("the node has no root directory")?;
    let mut run = Command::new(program);
    run.args(arguments).env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    if let Some(account) = &account {
        // The service account is read by it: its files aren't in the node's namespace.
        run.env_remove("KUBERNETES_SERVICE_HOST").env("KUBECONFIG", &account.kubeconfig);
    }
    let error = run.exec();
    Err(error).with_context(|| format!("cannot run {program} on the node"))
}

/// The pod's service account as a kubeconfig that can be read in any mount namespace.
struct ServiceAccount {
    kubeconfig: String,
    /// They stay open in the program that runs next.
    _open: [OwnedFd; 2],
}

/// `None` where the pod has none. The token is renewed by the kubelet, and is read anew through the directory.
fn service_account() -> Result<Option<ServiceAccount>> {
    let server = std::env::var("KUBERNETES_SERVICE_HOST").ok();
    let port = std::env::var("KUBERNETES_SERVICE_PORT").unwrap_or_else(|_| "443".to_owned());
    let Some(host) = server.filter(|_| Path::new(ACCOUNT).is_dir()) else { return Ok(None) };
    let directory = open(ACCOUNT, OFlag::O_PATH | OFlag::O_DIRECTORY, Mode::empty())
        .context("cannot open the service account")?;
    let file = memfd_create("kubeconfig", MFdFlags::empty()).context("cannot make a kubeconfig")?;
    let inherit = |fd: &OwnedFd| fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()));
    inherit(&directory).and_then(|_| inherit(&file)).context("cannot keep the service account")?;
    let text = kubeconfig(&host, &port, &format!("/proc/self/fd/{}", directory.as_raw_fd()));
    let mut file = File::from(file);
    file.write_all(text.as_bytes()).context("cannot write a kubeconfig")?;
    let file = OwnedFd::from(file);
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    Ok(Some(ServiceAccount { kubeconfig: path, _open: [directory, file] }))
}

/// A kubeconfig with the service account of that directory. JSON is YAML.
fn kubeconfig(host: &str, port: &str, account: &str) -> String {
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let cluster = json!({
        "server": format!("https://{host}:{port}"),
        "certificate-authority": format!("{account}/ca.crt"),
    });
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "cluster", "cluster": cluster}],
        "users": [{"name": "pod", "user": {"tokenFile": format!("{account}/token")}}],
        "contexts": [{"name": "pod", "context": {"cluster": "cluster", "user": "pod"}}],
        "current-context": "pod",
    })
    .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_put_in_place_and_what_is_the_same_is_left() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let to = to.path().join("opt/cgpu/bin");
        fs::write(from.path().join("cgpu"), "one").unwrap();
        fs::write(from.path().join("cgpu-hook"), "hook").unwrap();
        copy_programs(from.path(), &to).unwrap();
        let identity = |name: &str| fs::metadata(to.join(name)).unwrap().ino();
        let (cgpu, hook) = (identity("cgpu"), identity("cgpu-hook"));
        assert_eq!(fs::metadata(to.join("cgpu")).unwrap().mode() & 0o7777, 0o755);
        fs::write(from.path().join("cgpu"), "two").unwrap();
        copy_programs(from.path(), &to).unwrap();
        assert_eq!(fs::read_to_string(to.join("cgpu")).unwrap(), "two");
        assert_ne!(identity("cgpu"), cgpu, "who runs the old one keeps it");
        assert_eq!(identity("cgpu-hook"), hook);
        assert_eq!(fs::read_dir(&to).unwrap().count(), 2);
        let error = copy_programs(&from.path().join("none"), &to).unwrap_err();
        assert!(format!("{error:#}").contains("cannot read"), "{error:#}");
    }

    #[test]
    fn a_container_that_sees_no_node_is_told_what_the_pod_needs() {
        let error = require_node(Path::new("/proc/self")).unwrap_err();
        assert!(error.to_string().contains("hostPID: true"), "{error}");
        require_node(Path::new("/proc/none")).unwrap_err();
    }

    #[test]
    fn the_service_account_is_read_from_where_it_is_open() {
        let told: serde_json::Value =
            serde_json::from_str(&kubeconfig("10.96.0.1", "443", "/proc/self/fd/5")).unwrap();
        assert_eq!(told["clusters"][0]["cluster"]["server"], "https://10.96.0.1:443");
        assert_eq!(told["users"][0]["user"]["tokenFile"], "/proc/self/fd/5/token");
        assert!(kubeconfig("fd00::1", "443", "/x").contains("https://[fd00::1]:443"));
    }
}
