//! `cgpu-metrics` on a node of Kubernetes: what the kubelet reports at its socket of which pods have which GPUs. Needs
//! root.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cgpu_kubelet::api::{
    ContainerDevices, ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse,
    PodResources,
};
use cgpu_kubelet::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
use serde_json::json;
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

const UUID: &str = "GPU-c09d11f5-a565-1f83-903c-a65a7ba138af";

/// The kubelet's side of its socket.
struct PodResourcesServer(ListPodResourcesResponse);

#[tonic::async_trait]
impl PodResourcesLister for PodResourcesServer {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        Ok(Response::new(self.0.clone()))
    }
}

/// A host of one GPU, and a kubelet's socket.
struct Node(tempfile::TempDir);

impl Node {
    fn new() -> Self {
        let node = Node(tempfile::tempdir().unwrap());
        let gpus = json!([{
            "index": 0, "uuid": UUID, "minor": 0, "bus_id": "0000:3b:00.0", "name": "Tesla V100",
            "memory_mib": 16384, "state": "ok", "mig_enabled": false, "mig_devices": [],
        }]);
        fs::write(node.path("gpus.json"), gpus.to_string()).unwrap();
        let config = format!(
            "state_dir = {:?}\nlog = {:?}\n[inventory]\nsource = \"file\"\npath = {:?}\n",
            node.path("state"),
            node.path("log"),
            node.path("gpus.json"),
        );
        fs::write(node.path("config.toml"), config).unwrap();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The metrics that are reported with that socket.
    fn metrics(&self, socket: &Path) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cgpu-metrics"));
        command.arg("--config").arg(self.path("config.toml")).args(["--once", "--no-nvml"]);
        let output = command.arg("--pod-resources").arg(socket).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }
}

/// A kubelet that reports this at `socket`, as long as the runtime lives.
fn kubelet(socket: &Path, reported: ListPodResourcesResponse) -> Runtime {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = {
        let _in = runtime.enter();
        UnixListener::bind(socket).unwrap()
    };
    let service = PodResourcesListerServer::new(PodResourcesServer(reported));
    let server = Server::builder().add_service(service);
    runtime.spawn(server.serve_with_incoming(UnixListenerStream::new(listener)));
    runtime
}

/// A pod that has a GPU by NVIDIA's device plugin is reported.
#[test]
fn pod_with_nvidias_plugin_gpu_is_reported() {
    let node = Node::new();
    let devices =
        ContainerDevices { resource_name: "nvidia.com/gpu".into(), device_ids: vec![UUID.into()] };
    let container = ContainerResources { name: "main".into(), devices: vec![devices] };
    let pod = PodResources {
        name: "train-0".into(),
        namespace: "team".into(),
        containers: vec![container],
    };
    let socket = node.path("kubelet.sock");
    let _kubelet = kubelet(&socket, ListPodResourcesResponse { pod_resources: vec![pod] });
    let text = node.metrics(&socket);
    let line = text.lines().find(|line| line.starts_with("cgpu_pod_gpu_devices{")).unwrap();
    for part in [
        &format!("UUID=\"{UUID}\""),
        "pci_bus_id=\"00000000:3B:00.0\"",
        "namespace=\"team\",pod=\"train-0\",container=\"main\",resource=\"nvidia.com/gpu\"} 1.0",
    ] {
        assert!(line.contains(part), "{part}\n{line}");
    }
    assert!(text.contains("cgpu_unseen{") && unseen(&text) == "0.0", "{text}");
}

/// How many parts of the host could not be polled.
fn unseen(text: &str) -> &str {
    let line = text.lines().find(|line| line.starts_with("cgpu_unseen{")).unwrap();
    line.rsplit(' ').next().unwrap()
}

/// A host without a kubelet lacks nothing, and a kubelet that does not answer is counted as unseen.
#[test]
fn only_an_unanswering_kubelet_counts_as_unseen() {
    let node = Node::new();
    let text = node.metrics(&node.path("nowhere.sock"));
    assert!(!text.contains("cgpu_pod") && unseen(&text) == "0.0", "{text}");
    let left = node.path("left.sock");
    drop(std::os::unix::net::UnixListener::bind(&left).unwrap());
    let text = node.metrics(&left);
    assert!(!text.contains("cgpu_pod") && unseen(&text) == "1.0", "{text}");
    assert!(text.contains("cgpu_gpu_memory_total_bytes{"), "{text}");
}
