//! The plugin beside a kubelet's side of the API: a registry that plugins make themselves known to, and a
//! client that asks over the plugin's own socket. Needs root, as the plugin does.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use cgpu_k8s::api::{
    AllocateRequest, ContainerAllocateRequest, ContainerPreferredAllocationRequest, Empty, HEALTHY,
    ListAndWatchResponse, PreferredAllocationRequest, RegisterRequest,
};
use cgpu_k8s::device_plugin_client::DevicePluginClient;
use cgpu_k8s::registration_server::{Registration, RegistrationServer};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tonic::{Code, Request, Response, Status};
use tower::service_fn;

/// How long a fact may take to come true, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(600);

const UUIDS: [&str; 3] = [
    "GPU-c09d11f5-a565-1f83-903c-a65a7ba138af",
    "GPU-07c1b1a2-0c4d-7b0f-8a73-5bd3e6f7a111",
    "GPU-5e0a9a63-2222-3333-4444-555566667777",
];

/// A kubelet's registry.
struct Registry(mpsc::Sender<RegisterRequest>);

#[tonic::async_trait]
impl Registration for Registry {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        self.0.send(request.into_inner()).unwrap();
        Ok(Response::new(Empty {}))
    }
}

/// A node: its files, and what runs on it.
struct Node {
    runtime: Runtime,
    dir: tempfile::TempDir,
    plugin: Option<Child>,
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Some(mut plugin) = self.plugin.take() {
            let _ = plugin.kill();
            let _ = plugin.wait();
        }
    }
}

fn gpu(index: usize, memory_gib: u64) -> Value {
    json!({
        "index": index, "uuid": UUIDS[index], "minor": index, "bus_id": "", "name": "Tesla V100",
        "memory_mib": memory_gib << 10, "state": "ok", "mig_enabled": false, "mig_devices": [],
    })
}

impl Node {
    fn new(gpus: &Value) -> Self {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let node = Node {
            runtime: runtime.worker_threads(1).enable_all().build().unwrap(),
            dir: tempfile::tempdir().unwrap(),
            plugin: None,
        };
        let config = format!(
            "state_dir = {:?}\nlog = {:?}\n[inventory]\nsource = \"file\"\npath = {:?}\n",
            node.path("state"),
            node.path("log"),
            node.path("gpus.json"),
        );
        fs::write(node.path("config.toml"), config).unwrap();
        fs::create_dir(node.path("plugins")).unwrap();
        node.has(gpus);
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn has(&self, gpus: &Value) {
        // As a whole, for who reads it meanwhile.
        fs::write(self.path("gpus.new"), gpus.to_string()).unwrap();
        fs::rename(self.path("gpus.new"), self.path("gpus.json")).unwrap();
    }

    fn start(&mut self, words: &[&str]) {
        let mut command = self.command(words);
        self.plugin = Some(command.stdout(Stdio::null()).spawn().unwrap());
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_cgpu-device-plugin"));
        command.arg("--config").arg(self.path("config.toml"));
        command.arg("--plugin-dir").arg(self.path("plugins")).args(words);
        command
    }

    /// A kubelet begins; what plugins say to it comes out of the channel. As the real one does, it
    /// removes the sockets that were there.
    fn kubelet(&self) -> mpsc::Receiver<RegisterRequest> {
        for entry in fs::read_dir(self.path("plugins")).unwrap() {
            fs::remove_file(entry.unwrap().path()).unwrap();
        }
        let (registered, comes) = mpsc::channel();
        let _in = self.runtime.enter();
        let listener = UnixListener::bind(self.path("plugins").join("kubelet.sock")).unwrap();
        let service = RegistrationServer::new(Registry(registered));
        self.runtime.spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        comes
    }

    fn client(&self, endpoint: &str) -> DevicePluginClient<Channel> {
        let socket = self.path("plugins").join(endpoint);
        let connect = service_fn(move |_: Uri| {
            let socket = socket.clone();
            async move { std::io::Result::Ok(TokioIo::new(UnixStream::connect(socket).await?)) }
        });
        let endpoint = Endpoint::from_static("http://plugin");
        let channel = self.runtime.block_on(endpoint.connect_with_connector(connect)).unwrap();
        DevicePluginClient::new(channel)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

fn eventually(is_so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + PATIENCE;
    while !is_so() {
        if Instant::now() > until {
            return false;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    true
}

/// How many healthy units there are of each GPU, by the beginning of their ids.
fn healthy(list: &ListAndWatchResponse) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for device in list.devices.iter().filter(|device| device.health == HEALTHY) {
        let (gpu, _) = device.id.split_once('-').unwrap();
        *counts.entry(gpu.to_owned()).or_default() += 1;
    }
    counts
}

fn allocate(ids: &[String]) -> AllocateRequest {
    let request = ContainerAllocateRequest { device_ids: ids.to_vec() };
    AllocateRequest { container_requests: vec![request] }
}

#[test]
fn the_kubelet_is_told_of_every_gpu_s_own_memory_and_a_container_gets_one_gpu_s() {
    let mut node = Node::new(&json!([gpu(0, 16), gpu(1, 24), gpu(2, 16)]));
    let kubelet = node.kubelet();
    node.start(&[]);
    let registered = kubelet.recv_timeout(PATIENCE).unwrap();
    assert_eq!(
        (&*registered.version, &*registered.resource_name),
        ("v1beta1", "aliyun.com/gpu-mem")
    );
    assert!(registered.options.unwrap().get_preferred_allocation_available);
    let mut client = node.client(&registered.endpoint);
    let mut list = node.runtime.block_on(client.list_and_watch(Empty {})).unwrap().into_inner();
    let first = node.runtime.block_on(list.message()).unwrap().unwrap();
    let counts = healthy(&first);
    assert_eq!(counts, [("07c", 24), ("5e0", 16), ("c09", 16)].map(|(g, n)| (g.into(), n)).into());
    let available: Vec<String> = first.devices.iter().map(|device| device.id.clone()).collect();
    assert_eq!(available.iter().collect::<BTreeSet<_>>().len(), available.len());
    let prefer = |size| PreferredAllocationRequest {
        container_requests: vec![ContainerPreferredAllocationRequest {
            available_device_ids: available.clone(),
            must_include_device_ids: Vec::new(),
            allocation_size: size,
        }],
    };
    let chosen = node.runtime.block_on(client.get_preferred_allocation(prefer(6))).unwrap();
    let ids = &chosen.into_inner().container_responses[0].device_ids;
    assert_eq!(ids.len(), 6);
    let made = node.runtime.block_on(client.allocate(allocate(ids))).unwrap().into_inner();
    let variables = &made.container_responses[0].envs;
    for (name, value) in [
        ("NVIDIA_VISIBLE_DEVICES", UUIDS[0]),
        ("ALIYUN_COM_GPU_MEM_IDX", "0"),
        ("ALIYUN_COM_GPU_MEM_CONTAINER", "6"),
        ("ALIYUN_COM_GPU_MEM_POD", "6"),
        ("ALIYUN_COM_GPU_MEM_DEV", "16"),
    ] {
        assert_eq!(variables.get(name).map(String::as_str), Some(value), "{name}");
    }
    assert!(!variables.contains_key("CGPU_DISABLE"));
    // Together they have it, and none of them alone.
    let chosen = node.runtime.block_on(client.get_preferred_allocation(prefer(30))).unwrap();
    assert!(chosen.into_inner().container_responses[0].device_ids.is_empty());
    let error = node.runtime.block_on(client.allocate(allocate(&available[..30]))).unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("no GPU of this node has 30 GiB free"), "{error}");
    assert!(node.log().contains("no GPU of this node has 30 GiB free"), "{}", node.log());
    let error = node.runtime.block_on(client.allocate(allocate(&["xyz-0".into()]))).unwrap_err();
    assert!(error.message().contains("this node has no unit \"xyz-0\""), "{error}");
}

#[test]
fn a_gpu_that_is_lost_takes_its_units_along_and_brings_them_back() {
    let mut lost = gpu(0, 16);
    let mut node = Node::new(&json!([lost, gpu(1, 24)]));
    let kubelet = node.kubelet();
    node.start(&["--disable-isolation"]);
    let registered = kubelet.recv_timeout(PATIENCE).unwrap();
    let mut client = node.client(&registered.endpoint);
    let mut list = node.runtime.block_on(client.list_and_watch(Empty {})).unwrap().into_inner();
    let mut next = || node.runtime.block_on(list.message()).unwrap().unwrap();
    assert_eq!(healthy(&next()).values().sum::<usize>(), 40);
    lost["state"] = "lost".into();
    node.has(&json!([lost, gpu(1, 24)]));
    let told = next();
    assert_eq!((told.devices.len(), healthy(&told)), (40, [("07c".to_owned(), 24)].into()));
    lost["state"] = "ok".into();
    node.has(&json!([lost, gpu(1, 24)]));
    assert_eq!(healthy(&next()).values().sum::<usize>(), 40);
    // An inventory that can't be read changes nothing, and is told.
    fs::write(node.path("gpus.json"), "{").unwrap();
    let told = || node.log().matches("the GPUs can't be looked at").count();
    assert!(eventually(|| told() == 1));
    let ids = ["c09-0".to_owned()];
    let made = node.runtime.block_on(client.allocate(allocate(&ids))).unwrap().into_inner();
    assert_eq!(made.container_responses[0].envs["CGPU_DISABLE"], "true");
    // A hangup has it make itself known again, at the same socket; the same complaint isn't repeated.
    let hangup = ["-HUP".to_owned(), node.plugin.as_ref().unwrap().id().to_string()];
    assert!(Command::new("kill").args(hangup).status().unwrap().success());
    assert_eq!(kubelet.recv_timeout(PATIENCE).unwrap(), registered);
    assert_eq!(node.runtime.block_on(client.allocate(allocate(&ids))).unwrap().into_inner(), made);
    assert_eq!(told(), 1, "{}", node.log());
}

#[test]
fn a_kubelet_that_begins_anew_is_told_anew_and_one_that_comes_later_is_waited_for() {
    let mut node = Node::new(&json!([gpu(0, 16)]));
    node.start(&["--memory-unit=MiB"]);
    assert!(eventually(|| node.log().contains("there is no kubelet yet")));
    for _ in 0..3 {
        let kubelet = node.kubelet();
        let registered = kubelet.recv_timeout(PATIENCE).unwrap();
        let mut client = node.client(&registered.endpoint);
        let mut list = node.runtime.block_on(client.list_and_watch(Empty {})).unwrap().into_inner();
        let told = node.runtime.block_on(list.message()).unwrap().unwrap();
        assert_eq!(told.devices.len(), 16 << 10);
    }
    let socket = |dir: &Path| dir.join("cgpu-gpu-mem.sock").exists();
    assert!(socket(&node.path("plugins")));
    // Told to end, it leaves nothing.
    let mut plugin = node.plugin.take().unwrap();
    let kill = Command::new("kill").arg(plugin.id().to_string()).status().unwrap();
    assert!(kill.success() && plugin.wait().unwrap().success());
    assert!(!socket(&node.path("plugins")));
}

#[test]
fn units_that_the_kubelet_would_not_take_are_refused_at_the_beginning() {
    let node = Node::new(&json!([gpu(0, 141), gpu(1, 141)]));
    let output = node.command(&["--memory-unit=MiB"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(said.contains("288768 units of 1 MiB") && said.contains("--memory-unit=GiB"), "{said}");
}
