//! The command line of `cgpu-dra-driver`.

use std::path::PathBuf;

use clap::Parser;

/// Publishes this node's GPUs as devices that many claims share (Dynamic Resource Allocation), and has the runtime hold
/// each container to the memory that its claim was given.
#[derive(Debug, Parser)]
#[command(name = "cgpu-dra-driver", version)]
pub struct DraArgs {
    /// cgpu's configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The driver's name, which DeviceClasses select by: a domain name.
    #[arg(long, value_name = "NAME", default_value = "gpu.cgpu.io")]
    pub driver_name: String,
    /// The node's name in the cluster [default: $NODE_NAME, else the host's].
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// How the API server is reached [default: by the pod's service account, else $KUBECONFIG].
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The engine's CRI socket, where it is asked whether it makes containers by cgpu and reads CDI files; the driver
    /// doesn't register before. Without this option the engine is not asked.
    #[arg(long, value_name = "FILE")]
    pub engine_socket: Option<PathBuf>,
    /// Where the log goes: stderr, or a file [default: as the configuration says].
    #[arg(long, value_name = "FILE")]
    pub log: Option<String>,
    /// The directory in which the kubelet looks for drivers.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/plugins_registry")]
    pub registry_dir: PathBuf,
    /// The directory of the sockets of drivers.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/plugins")]
    pub plugins_dir: PathBuf,
    /// A directory of CDI files that the engine reads.
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// cgpu-hook on the node: it refuses a container with a claim that another runtime makes.
    #[arg(long, value_name = "FILE", default_value = "/usr/bin/cgpu-hook")]
    pub hook: PathBuf,
    /// Where the driver reports broken GPUs (Xid).
    #[arg(long, value_name = "FILE", default_value = "/dev/kmsg")]
    pub kernel_log: PathBuf,
}
