//! The command line: [`Args`].

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Parser;

/// Serves what the GPUs of this host and the containers that share them use, for Prometheus.
#[derive(Debug, Parser)]
#[command(name = "cgpu-metrics", version)]
pub struct Args {
    /// The configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where to listen: an address with a port, or `unix:` and the path of a socket.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9835")]
    pub listen: Address,
    /// Print the metrics once, and end.
    #[arg(long, conflicts_with = "listen")]
    pub once: bool,
    /// Ask nothing of NVIDIA's driver: without utilisation, temperature and power.
    #[arg(long)]
    pub no_nvml: bool,
    /// Where the kubelet reports which pods have which devices; on a host without a kubelet nothing is asked.
    #[arg(
        long,
        value_name = "SOCKET",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pub pod_resources: PathBuf,
    /// The node's name in the cluster, which all series have as the label `node` [default: $NODE_NAME, else no label].
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
}

impl Args {
    /// The node's name: the option's, else that of the variable `NODE_NAME`, which is `variable`.
    pub(crate) fn node(&self, variable: Option<String>) -> Option<String> {
        self.node_name.clone().or(variable).filter(|name| !name.is_empty())
    }
}

/// Where to listen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// At an address of the host.
    Net(SocketAddr),
    /// At a socket in the file system.
    Unix(PathBuf),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some(path) if path.starts_with('/') => Ok(Address::Unix(path.into())),
            Some(_) => Err("the path of a socket is absolute: unix:/run/cgpu-metrics.sock".into()),
            None => text.parse().map(Address::Net).map_err(|_| {
                "write an address with a port, as 127.0.0.1:9835, or unix:/PATH".to_owned()
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    const OPERATIONS: &str = include_str!("../../../docs/operations.md");
    const KUBERNETES: &str = include_str!("../../../docs/kubernetes.md");

    #[test]
    fn address_has_a_port_or_is_a_socket() {
        assert_eq!("[::1]:1".parse(), Ok(Address::Net("[::1]:1".parse().unwrap())));
        assert_eq!("unix:/x".parse(), Ok(Address::Unix("/x".into())));
        for text in ["", "9835", "localhost:1", "127.0.0.1", "unix:", "unix:x"] {
            assert!(text.parse::<Address>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_option_names_the_node_before_the_variable() {
        let node = |words: &[&str], variable: Option<&str>| {
            let args = Args::try_parse_from([&["x"], words].concat()).unwrap();
            args.node(variable.map(str::to_owned))
        };
        assert_eq!(node(&["--node-name=a"], Some("b")).as_deref(), Some("a"));
        assert_eq!(node(&[], Some("b")).as_deref(), Some("b"));
        // An empty name is none: `$(NODE_NAME)` of a variable that is set to nothing.
        for variable in [None, Some("")] {
            assert_eq!(node(&[], variable), None);
            assert_eq!(node(&["--node-name="], variable), None);
        }
    }

    #[test]
    fn every_option_is_documented() {
        for argument in Args::command().get_arguments() {
            let long = argument.get_long().unwrap_or_default();
            let is_known = ["help", "version", "config"].contains(&long);
            assert!(is_known || OPERATIONS.contains(&format!("--{long}")), "--{long}");
            // A node's are the cluster's administrator's to know, too.
            let is_kubernetes = ["node-name", "pod-resources", "listen"].contains(&long);
            assert!(!is_kubernetes || KUBERNETES.contains(&format!("--{long}`")), "--{long}");
        }
    }
}
