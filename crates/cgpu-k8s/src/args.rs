//! The command line: [`Args`].

use std::path::PathBuf;

use clap::Parser;

use crate::certificate::CertificateFiles;
use crate::placement::Placement;
use crate::pod_request::{AskRules, MEMORY, WHOLE};
use crate::units::Unit;

/// What pods ask for, and whose containers are made by cgpu.
#[derive(Debug, clap::Args)]
pub struct AskArgs {
    /// What pods ask for.
    #[arg(long, value_name = "NAME", default_value = MEMORY)]
    pub resource: String,
    /// What pods ask for that want an exclusive GPU; nothing (`''`) if NVIDIA's plugin gives these out.
    #[arg(long, value_name = "NAME", default_value = WHOLE)]
    pub whole_resource: String,
    /// A RuntimeClass whose containers are made by cgpu; several by several options.
    #[arg(long, value_name = "NAME", default_value = "cgpu")]
    pub runtime_class: Vec<String>,
    /// Refuse pods without a RuntimeClass: cgpu isn't the nodes' default runtime.
    #[arg(long)]
    pub not_default_runtime: bool,
}

impl AskArgs {
    /// The rules that they are.
    #[must_use]
    pub fn rules(&self) -> AskRules {
        AskRules {
            memory: self.resource.clone(),
            whole: self.whole_resource.clone(),
            runtime_classes: self.runtime_class.clone(),
            is_default: !self.not_default_runtime,
        }
    }
}

/// Reports this node's GPUs to the kubelet, and gives their memory out in units.
#[derive(Debug, Parser)]
#[command(name = "cgpu-device-plugin", version)]
pub struct Args {
    /// cgpu's configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// How much memory a unit of the resource is: GiB or MiB.
    #[arg(long, value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: Unit,
    /// The GPU that is preferred of those with enough free memory: the fullest (binpack) or the emptiest (spread).
    #[arg(long, value_name = "WAY", default_value = "binpack")]
    pub placement: Placement,
    /// Give containers their GPU with `CGPU_DISABLE=true`: their quotas are not enforced.
    #[arg(long)]
    pub disable_isolation: bool,
    /// What pods ask for.
    #[command(flatten)]
    pub asks: AskArgs,
    /// The node's name in the cluster [default: $NODE_NAME, else the host's].
    #[arg(long, value_name = "NAME")]
    pub node_name: Option<String>,
    /// How the API server is reached [default: by the kubelet's own credentials].
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Write on pods which GPUs they have, by the pod's service account or $KUBECONFIG: if another scheduler extender
    /// than cgpu's reads it.
    #[arg(long)]
    pub write_pod_annotations: bool,
    /// The engine's CRI socket, where it is asked whether it makes containers by cgpu; nothing is given out before.
    /// Without this option the engine is not asked.
    #[arg(long, value_name = "FILE")]
    pub engine_socket: Option<PathBuf>,
    /// Where the log goes: stderr, or a file [default: as the configuration says].
    #[arg(long, value_name = "FILE")]
    pub log: Option<String>,
    /// The directory of the kubelet's sockets.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins")]
    pub plugin_dir: PathBuf,
    /// The kubelet's socket that reports which container has which devices.
    #[arg(
        long,
        value_name = "FILE",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock"
    )]
    pub pod_resources: PathBuf,
    /// Where the driver reports broken GPUs (Xid).
    #[arg(long, value_name = "FILE", default_value = "/dev/kmsg")]
    pub kernel_log: PathBuf,
}

/// Shows which pods have what of which shared GPU in a cluster, by what nodes and pods have written on them.
#[derive(Debug, Parser)]
#[command(name = "kubectl-inspect-gpushare", bin_name = "kubectl inspect gpushare", version)]
pub struct InspectArgs {
    /// This node alone.
    #[arg(value_name = "NODE")]
    pub node: Option<String>,
    /// Each node with its pods.
    #[arg(short, long)]
    pub details: bool,
    /// As a table, or as JSON.
    #[arg(short, long, value_name = "FORMAT", default_value = "table", value_parser = ["table", "json"])]
    pub output: String,
    /// What pods ask for.
    #[arg(long, value_name = "NAME", default_value = "aliyun.com/gpu-mem")]
    pub resource: String,
    /// The DRA driver whose claims are shown, too.
    #[arg(long, value_name = "NAME", default_value = "gpu.cgpu.io")]
    pub driver_name: String,
    /// How the API server is reached [default: as kubectl does].
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// Ask the scheduler's extender at that address which pods have what, and not the pods.
    #[arg(long, value_name = "URL")]
    pub extender: Option<String>,
    /// Ask an extender by TLS that has a certificate of that CA (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["extender", "extender_cert", "extender_key"])]
    pub extender_ca: Option<PathBuf>,
    /// The certificate to ask with (PEM).
    #[arg(long, value_name = "FILE", requires = "extender_ca")]
    pub extender_cert: Option<PathBuf>,
    /// The certificate's key (PEM).
    #[arg(long, value_name = "FILE", requires = "extender_ca")]
    pub extender_key: Option<PathBuf>,
}

impl InspectArgs {
    /// What the extender is asked by TLS with, if it is.
    pub(crate) fn files(&self) -> Option<CertificateFiles> {
        let (certificate, key) = (&self.extender_cert, &self.extender_key);
        Some(CertificateFiles {
            certificate: certificate.clone()?,
            key: key.clone()?,
            ca: self.extender_ca.clone()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    const KUBERNETES: &str = include_str!("../../../docs/kubernetes.md");

    #[test]
    fn units_and_placements_are_words() {
        let args = Args::try_parse_from(["x", "--memory-unit", "mib", "--placement", "spread"]);
        let args = args.unwrap();
        assert_eq!((args.memory_unit, args.placement), (Unit::MiB, Placement::Spread));
        for words in [["x", "--memory-unit=KiB"], ["x", "--placement=best"]] {
            Args::try_parse_from(words).unwrap_err();
        }
    }

    #[test]
    fn every_option_is_documented() {
        let programs = [
            Args::command(),
            InspectArgs::command(),
            crate::extender::ExtenderArgs::command(),
            crate::setup::SetupArgs::command(),
            crate::dra::DraArgs::command(),
        ];
        let of = |command: &clap::Command| {
            let below = command.get_subcommands().flat_map(clap::Command::get_arguments);
            below.chain(command.get_arguments()).cloned().collect::<Vec<_>>()
        };
        for argument in programs.iter().flat_map(of) {
            let Some(long) = argument.get_long() else { continue };
            let is_known = ["help", "version"].contains(&long);
            assert!(is_known || KUBERNETES.contains(&format!("--{long}`")), "--{long}");
        }
    }
}
