//! `cgpu-node-setup`: what the DaemonSet's containers begin with. It puts cgpu's programs on the node, and runs
//! programs there: with the node's files and name, and the pod's network and service account.
//!
//! The image has no system in it; what the node's programs need (NVML, systemctl, the C library) is the node's.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use cgpu_host::atomic_file::replace;
use clap::{Parser, Subcommand};
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create, open};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::thread::{
    CapabilitySet, CapabilitySets, LinkNameSpaceType, clear_ambient_capability_set,
    move_into_link_name_space, remove_capability_from_bounding_set, set_capabilities,
};
use serde_json::json;

use crate::engine_check::{EngineArgs, require, require_cdi, restart_in_turn, seen_at};

/// The first process of the node, if the pod has `hostPID: true`.
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
        /// What the node's configuration gets of the cluster.
        #[command(flatten)]
        settings: Settings,
        /// The engine.
        #[command(flatten)]
        engine: EngineArgs,
        /// Have the program restart the engine if it has to be (`--restart`), one node after another: by a lease in
        /// that namespace.
        #[arg(long, value_name = "NAMESPACE")]
        restart_in: Option<String>,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
    /// Say whether the engine makes containers by cgpu, and what is to be done if it doesn't: a readiness probe.
    Ready {
        /// The engine.
        #[command(flatten)]
        engine: EngineArgs,
        /// The socket of the device plugin, which has to answer.
        #[arg(long, value_name = "FILE")]
        plugin: Option<PathBuf>,
        /// A directory of CDI files that the engine has to read, for claims.
        #[arg(long, value_name = "DIR")]
        cdi_dir: Option<PathBuf>,
    },
    /// Run a program of the node's.
    Enter {
        /// Run it in the node's network, too: the kubelet's credentials may name the API server by an address of the
        /// node's alone.
        #[arg(long)]
        network: bool,
        /// The capabilities that it keeps of the container's, as `SYS_PTRACE,MKNOD`; all without this option.
        #[arg(long, value_name = "NAMES", value_delimiter = ',')]
        keep: Option<Vec<String>>,
        /// The program and its arguments.
        #[arg(last = true, required = true)]
        command: Vec<String>,
    },
}

/// What the cluster sets of a node's configuration.
#[derive(Debug, clap::Args)]
pub struct Settings {
    /// The file on the node, in the directory `conf.d` next to its configuration.
    #[arg(
        long = "settings",
        value_name = "FILE",
        default_value = "/etc/cgpu/conf.d/kubernetes.toml"
    )]
    pub file: PathBuf,
    /// What a pod's container gets that names GPUs and was given none; without it, nothing is set.
    #[arg(long, value_name = "WAY", value_parser = ["none", "refuse", "whole", "as-asked"])]
    pub ungranted: Option<String>,
    /// A namespace whose pods get what they ask for all the same; several by several options.
    #[arg(long, value_name = "NAMESPACE", requires = "ungranted")]
    pub exempt: Vec<String>,
    /// The profile: open or strict.
    #[arg(long, value_name = "PROFILE", value_parser = ["open", "strict"], requires = "ungranted")]
    pub profile: Option<String>,
}

impl Settings {
    /// What the file says, if anything is set.
    fn text(&self) -> Option<String> {
        let ungranted = self.ungranted.as_ref()?;
        let profile = self
            .profile
            .iter()
            .map(|profile| format!("[admission]\nprofile = {}\n\n", json!(profile)));
        Some(format!(
            "# Written by cgpu's DaemonSet at each start, by the chart's values: change them instead of this file.\n\
             {}[kubernetes]\nungranted = {}\nexempt = {}\n",
            profile.collect::<String>(),
            json!(ungranted),
            json!(self.exempt),
        ))
    }
}

/// Does what the command line asks for. If that is to become another program, it returns only if that has failed.
///
/// # Errors
///
/// If the pod isn't let to the node, or something can't be written or run.
pub fn set_up(args: &SetupArgs) -> Result<()> {
    let node = Path::new(NODE);
    match &args.command {
        SetupCommand::Install { from, to, settings, engine, restart_in, command } => {
            require_node(node)?;
            // Before a runtime is there that goes by them.
            if let Some(text) = settings.text() {
                write_settings(&on_node(node, &settings.file)?, &text)?;
            }
            copy_programs(from, &on_node(node, to)?)?;
            let Some(namespace) = restart_in else { return enter(node, command, false, None) };
            let words = command.clone();
            let own = std::env::current_exe().context("cannot tell this program's name")?;
            let on_node = move |more: &[&str]| {
                let mut run = Command::new(&own);
                run.args(["enter", "--"]).args(&words).args(more);
                run
            };
            now(restart_in_turn(&node.join("root"), engine, namespace, on_node))
        }
        SetupCommand::Ready { engine, plugin, cdi_dir } => {
            // A probe runs in the namespaces of the container's first process, which may be in the node's by then.
            let root =
                if is_on_node(node)? { Path::new("/").to_owned() } else { node.join("root") };
            now(async {
                require(&root, engine, plugin.as_deref()).await?;
                match cdi_dir {
                    Some(directory) => require_cdi(&root, engine, directory).await,
                    None => Ok(()),
                }
            })
        }
        SetupCommand::Enter { network, keep, command } => {
            let retained = keep.as_deref().map(capabilities).transpose()?;
            require_node(node)?;
            enter(node, command, *network, retained)
        }
    }
}

fn now<T>(what: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(what)
}

/// Whether this process has the mount namespace of the first process that is seen.
fn is_on_node(node: &Path) -> Result<bool> {
    let namespace = |process: &Path| fs::metadata(process.join("ns/mnt")).map(|meta| meta.ino());
    let of_node = namespace(node).context(
        "the node's first process can't be looked at; the pod needs hostPID: true and a privileged container",
    )?;
    let own = namespace(Path::new("/proc/self")).context("cannot read /proc/self/ns/mnt")?;
    Ok(own == of_node)
}

/// Makes sure that the first process that is seen is the node's.
fn require_node(node: &Path) -> Result<()> {
    ensure!(
        !is_on_node(node)?,
        "the first process is this container's own, not the node's; the pod needs hostPID: true"
    );
    Ok(())
}

/// Where a path of the node's is seen.
fn on_node(node: &Path, path: &Path) -> Result<PathBuf> {
    ensure!(path.is_absolute(), "{} is no absolute path on the node", path.display());
    Ok(seen_at(&node.join("root"), path))
}

/// Writes a file of the node's configuration in one step, unless it says the same already.
fn write_settings(path: &Path, text: &str) -> Result<()> {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return Ok(());
    }
    let written = match path.parent() {
        Some(directory) => {
            fs::create_dir_all(directory).and_then(|()| replace(path, text.as_bytes(), 0o644))
        }
        None => Err(io::ErrorKind::InvalidInput.into()),
    };
    written.with_context(|| format!("cannot write {}", path.display()))
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

/// The capabilities of these names.
fn capabilities(names: &[String]) -> Result<CapabilitySet> {
    let of = |name: &String| {
        let short = name.strip_prefix("CAP_").unwrap_or(name);
        CapabilitySet::from_name(short)
            .with_context(|| format!("{name} is no capability; write as SYS_PTRACE"))
    };
    names.iter().map(of).collect()
}

/// Takes all other capabilities from the program that is run next, whatever it becomes.
fn keep_only(retained: CapabilitySet) -> io::Result<()> {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if retained.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            // The kernel has none of that number, nor of higher ones.
            Err(Errno::INVAL) => break,
            removed => removed?,
        }
    }
    clear_ambient_capability_set()?;
    let own = rustix::thread::capabilities(None)?;
    set_capabilities(None, CapabilitySets { inheritable: CapabilitySet::empty(), ..own })?;
    Ok(())
}

/// Becomes a program of the node's, in its network, too, or the pod's; with those capabilities, or all.
fn enter(
    node: &Path,
    command: &[String],
    network: bool,
    retained: Option<CapabilitySet>,
) -> Result<()> {
    let Some((program, arguments)) = command.split_first() else { bail!("no program is named") };
    let account = service_account()?;
    // Metrics bear the node's name; the pod has one of its own.
    let network = network.then_some(("net", LinkNameSpaceType::Network));
    let others =
        [("uts", LinkNameSpaceType::HostNameAndNISDomainName), ("mnt", LinkNameSpaceType::Mount)];
    for (name, kind) in network.into_iter().chain(others) {
        let namespace = File::open(node.join("ns").join(name))
            .with_context(|| format!("cannot open the node's namespace {name}"))?;
        move_into_link_name_space(namespace.as_fd(), Some(kind))
            .context("the container has to be privileged to be on the node")?;
    }
    std::env::set_current_dir("/").context("the node has no root directory")?;
    let mut run = Command::new(program);
    run.args(arguments).env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
    if let Some(account) = &account {
        // The service account is read by it: its files aren't in the node's namespace.
        run.env_remove("KUBERNETES_SERVICE_HOST").env("KUBECONFIG", &account.kubeconfig);
    }
    if let Some(retained) = retained {
        keep_only(retained).context("the capabilities can't be given up")?;
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

/// `None` if the pod has none. The token is renewed by the kubelet, and is read again through the directory.
fn service_account() -> Result<Option<ServiceAccount>> {
    let server = std::env::var("KUBERNETES_SERVICE_HOST").ok();
    let port = std::env::var("KUBERNETES_SERVICE_PORT").unwrap_or_else(|_| "443".to_owned());
    let Some(host) = server.filter(|_| Path::new(ACCOUNT).is_dir()) else { return Ok(None) };
    let directory = open(ACCOUNT, OFlags::PATH | OFlags::DIRECTORY, Mode::empty())
        .context("cannot open the service account")?;
    let file =
        memfd_create("kubeconfig", MemfdFlags::empty()).context("cannot make a kubeconfig")?;
    let inherit = |fd: &OwnedFd| fcntl_setfd(fd, FdFlags::empty());
    inherit(&directory).and_then(|()| inherit(&file)).context("cannot keep the service account")?;
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
    fn programs_are_installed_and_identical_files_left() {
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
    fn cluster_settings_become_a_configuration_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("etc/cgpu/conf.d/kubernetes.toml");
        let of = |words: &[&str]| {
            let words = [&["x", "install"], words, &["--", "true"]].concat();
            let SetupCommand::Install { settings, .. } = SetupArgs::parse_from(words).command
            else {
                panic!("it is an install")
            };
            settings
        };
        assert_eq!(of(&[]).text(), None);
        let settings = of(&["--ungranted=none", "--exempt=a", "--exempt=b", "--profile=strict"]);
        write_settings(&path, &settings.text().unwrap()).unwrap();
        let main = dir.path().join("etc/cgpu/config.toml");
        fs::write(&main, "").unwrap();
        let config = cgpu_host::config::load(Some(main.as_os_str()), None).unwrap().config;
        assert_eq!(config.kubernetes.ungranted, cgpu_core::request::Ungranted::None);
        assert_eq!(config.kubernetes.exempt, ["a", "b"]);
        assert_eq!(config.admission.profile, cgpu_core::request::Profile::Strict);
        let inode = || fs::metadata(&path).unwrap().ino();
        let first = inode();
        write_settings(&path, &settings.text().unwrap()).unwrap();
        assert_eq!(inode(), first, "what is the same is left");
        write_settings(&path, &of(&["--ungranted=whole"]).text().unwrap()).unwrap();
        let config = cgpu_host::config::load(Some(main.as_os_str()), None).unwrap().config;
        assert_eq!(config.kubernetes.ungranted, cgpu_core::request::Ungranted::Whole);
        assert_eq!(config.admission.profile, cgpu_core::request::Profile::Open);
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o644);
    }

    /// In a container that does not see its node, the error says what the pod needs: hostPID.
    #[test]
    fn missing_node_access_error_names_host_pid() {
        let error = require_node(Path::new("/proc/self")).unwrap_err();
        assert!(error.to_string().contains("hostPID: true"), "{error}");
        require_node(Path::new("/proc/none")).unwrap_err();
    }

    #[test]
    fn service_account_is_read_through_its_open_descriptor() {
        let reported: serde_json::Value =
            serde_json::from_str(&kubeconfig("10.96.0.1", "443", "/proc/self/fd/5")).unwrap();
        assert_eq!(reported["clusters"][0]["cluster"]["server"], "https://10.96.0.1:443");
        assert_eq!(reported["users"][0]["user"]["tokenFile"], "/proc/self/fd/5/token");
        assert!(kubeconfig("fd00::1", "443", "/x").contains("https://[fd00::1]:443"));
    }
}
