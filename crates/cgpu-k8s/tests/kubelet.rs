//! The plugin next to a kubelet's side of the API: a registry that plugins make themselves known to, and
//! a client that asks over the plugin's own socket. Needs root, as the plugin does.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

#[path = "../../../tests/support/patience.rs"]
mod patience;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use cgpu_kubelet::api::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest, ContainerDevices,
    ContainerPreferredAllocationRequest, ContainerResources, Empty, HEALTHY, ListAndWatchResponse,
    ListPodResourcesRequest, ListPodResourcesResponse, PodResources as PodResourcesOfPod,
    PreferredAllocationRequest, RegisterRequest,
};
use cgpu_kubelet::device_plugin_client::DevicePluginClient;
use cgpu_kubelet::pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer};
use cgpu_kubelet::registration_server::{Registration, RegistrationServer};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Server, Uri};
use tonic::{Code, Request, Response, Status, Streaming};
use tower::service_fn;

use patience::timeout;

const MEM: &str = "aliyun.com/gpu-mem";

const UUIDS: [&str; 3] = [
    "GPU-c09d11f5-a565-1f83-903c-a65a7ba138af",
    "GPU-07c1b1a2-0c4d-7b0f-8a73-5bd3e6f7a111",
    "GPU-5e0a9a63-2222-3333-4444-555566667777",
];

/// A kubelet's registry: of plugins for memory, and of plugins for exclusive GPUs.
struct Registry {
    memory: mpsc::Sender<RegisterRequest>,
    whole: mpsc::Sender<RegisterRequest>,
}

#[tonic::async_trait]
impl Registration for Registry {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let request = request.into_inner();
        let is_whole = request.resource_name == "aliyun.com/gpu-whole";
        // A test that checks one of them drops the other's end.
        let _ = if is_whole { &self.whole } else { &self.memory }.send(request);
        Ok(Response::new(Empty {}))
    }
}

/// Reports which containers have what.
struct PodResources(Arc<Mutex<ListPodResourcesResponse>>);

#[tonic::async_trait]
impl PodResourcesLister for PodResources {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        Ok(Response::new(self.0.lock().unwrap().clone()))
    }
}

/// A pod of one container that has these devices.
fn has(pod: &str, resource: &str, ids: &[String]) -> PodResourcesOfPod {
    let devices = ContainerDevices { resource_name: resource.into(), device_ids: ids.to_vec() };
    let container = ContainerResources { name: "main".into(), devices: vec![devices] };
    PodResourcesOfPod { name: pod.into(), namespace: "default".into(), containers: vec![container] }
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
        "index": index, "uuid": UUIDS[index], "minor": index, "bus_id": format!("0000:{:02x}:00.0", 0x3b + index), "name": "Tesla V100",
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
            "state_dir = {:?}\nlog = {:?}\n[inventory]\nsource = \"file\"\npath = {:?}\n\
             [kubernetes]\ngrants = {:?}\n",
            node.path("state"),
            node.path("log"),
            node.path("gpus.json"),
            node.path("grants"),
        );
        fs::write(node.path("config.toml"), config).unwrap();
        fs::create_dir(node.path("plugins")).unwrap();
        fs::write(node.path("kmsg"), "6,1,1,-;Linux version 6.1.0\n").unwrap();
        node.has(gpus);
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// What was recorded of the grant of that token.
    fn record(&self, token: &str) -> Value {
        let text = fs::read(self.path(&format!("grants/{token}.json"))).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    fn has(&self, gpus: &Value) {
        // All at once, for a process that reads it meanwhile.
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
        command.arg("--plugin-dir").arg(self.path("plugins"));
        command.arg("--kernel-log").arg(self.path("kmsg"));
        command.arg("--pod-resources").arg(self.path("pod-resources.sock")).args(words);
        command
    }

    /// A kubelet begins; what plugins for memory say to it comes out of the channel. As the real one does, it
    /// removes the sockets that were there.
    fn kubelet(&self) -> mpsc::Receiver<RegisterRequest> {
        self.kubelet_of_both().0
    }

    /// The same, and what plugins for exclusive GPUs say.
    fn kubelet_of_both(
        &self,
    ) -> (mpsc::Receiver<RegisterRequest>, mpsc::Receiver<RegisterRequest>) {
        for entry in fs::read_dir(self.path("plugins")).unwrap() {
            // A plugin may have taken its own away, once another was gone.
            match fs::remove_file(entry.unwrap().path()) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => panic!("{error}"),
                _ => {}
            }
        }
        let (memory, memory_comes) = mpsc::channel();
        let (whole, whole_comes) = mpsc::channel();
        let _in = self.runtime.enter();
        let listener = UnixListener::bind(self.path("plugins").join("kubelet.sock")).unwrap();
        let service = RegistrationServer::new(Registry { memory, whole });
        self.runtime.spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        (memory_comes, whole_comes)
    }

    /// The kubelet's socket that reports which containers have what: what is set is reported.
    fn pod_resources(&self) -> Arc<Mutex<ListPodResourcesResponse>> {
        let held = Arc::new(Mutex::default());
        let _in = self.runtime.enter();
        let listener = UnixListener::bind(self.path("pod-resources.sock")).unwrap();
        let service = PodResourcesListerServer::new(PodResources(Arc::clone(&held)));
        self.runtime.spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        held
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

    /// The driver reports a GPU.
    fn report(&self, message: &str) {
        let mut log = fs::OpenOptions::new().append(true).open(self.path("kmsg")).unwrap();
        writeln!(log, "4,2,2,-;NVRM: Xid (PCI:{message}").unwrap();
    }

    fn log(&self) -> String {
        fs::read_to_string(self.path("log")).unwrap_or_default()
    }
}

fn eventually(is_so: impl Fn() -> bool) -> bool {
    let until = Instant::now() + timeout();
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

/// Waits until a stream reports that devices of these GPUs are healthy, by the beginning of their UUIDs, and of
/// no others.
fn until(runtime: &Runtime, stream: &mut Streaming<ListAndWatchResponse>, wanted: &[&str]) {
    loop {
        let reported = runtime.block_on(stream.message()).unwrap().unwrap();
        let healthy = reported.devices.iter().filter(|device| device.health == HEALTHY);
        let begins = healthy.map(|device| match device.id.split_once('-').unwrap() {
            ("GPU", uuid) => &uuid[..3],
            (begin, _) => begin,
        });
        if begins.collect::<BTreeSet<&str>>() == wanted.iter().copied().collect() {
            return;
        }
    }
}

fn allocate(ids: &[String]) -> AllocateRequest {
    let request = ContainerAllocateRequest { device_ids: ids.to_vec() };
    AllocateRequest { container_requests: vec![request] }
}

/// The kubelet gets a report of every GPU's own memory, and a container gets memory of one GPU.
#[test]
fn kubelet_sees_every_gpu_and_containers_get_one() {
    let mut node = Node::new(&json!([gpu(0, 16), gpu(1, 24), gpu(2, 16)]));
    let kubelet = node.kubelet();
    node.start(&[]);
    let registered = kubelet.recv_timeout(timeout()).unwrap();
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
    assert_eq!(variables["CGPU_DISABLE"], "false");
    assert_eq!(variables["ALIYUN_COM_GPU_VISIBLE_DEVICES"], UUIDS[0]);
    let record = node.record(&variables["CGPU_GRANT"]);
    assert_eq!(record["gpus"], json!([{"uuid": UUIDS[0], "bytes": 6_u64 << 30}]));
    assert_eq!((&record["resource"], &record["devices"]), (&json!(MEM), &json!(ids)));
    assert_eq!(record["unenforced"], false);
    for name in ["grants".to_owned(), format!("grants/{}.json", variables["CGPU_GRANT"])] {
        let mode = fs::metadata(node.path(&name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{name} is root's alone");
    }
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

/// A GPU that is lost takes its units along, and brings them back when it returns.
#[test]
fn lost_gpus_units_become_unhealthy_and_return() {
    let mut lost = gpu(0, 16);
    let mut node = Node::new(&json!([lost, gpu(1, 24)]));
    let kubelet = node.kubelet();
    node.start(&["--disable-isolation"]);
    let registered = kubelet.recv_timeout(timeout()).unwrap();
    let mut client = node.client(&registered.endpoint);
    let mut list = node.runtime.block_on(client.list_and_watch(Empty {})).unwrap().into_inner();
    let mut next = || node.runtime.block_on(list.message()).unwrap().unwrap();
    assert_eq!(healthy(&next()).values().sum::<usize>(), 40);
    lost["state"] = "lost".into();
    node.has(&json!([lost, gpu(1, 24)]));
    let reported = next();
    assert_eq!((reported.devices.len(), healthy(&reported)), (40, [("07c".to_owned(), 24)].into()));
    lost["state"] = "ok".into();
    node.has(&json!([lost, gpu(1, 24)]));
    assert_eq!(healthy(&next()).values().sum::<usize>(), 40);
    // An inventory that can't be read changes nothing, and is reported.
    fs::write(node.path("gpus.json"), "{").unwrap();
    let reported = || node.log().matches("the GPUs can't be looked at").count();
    assert!(eventually(|| reported() == 1));
    let ids = ["c09-0".to_owned()];
    let made = node.runtime.block_on(client.allocate(allocate(&ids))).unwrap().into_inner();
    assert_eq!(made.container_responses[0].envs["CGPU_DISABLE"], "true");
    // A hangup has it make itself known again, at the same socket; the same complaint isn't repeated.
    let hangup = ["-HUP".to_owned(), node.plugin.as_ref().unwrap().id().to_string()];
    assert!(Command::new("kill").args(hangup).status().unwrap().success());
    assert_eq!(kubelet.recv_timeout(timeout()).unwrap(), registered);
    let again = node.runtime.block_on(client.allocate(allocate(&ids))).unwrap().into_inner();
    let but_token = |answer: &AllocateResponse| {
        let mut variables = answer.container_responses[0].envs.clone();
        (variables.remove("CGPU_GRANT").unwrap(), variables)
    };
    let ((first, before), (second, after)) = (but_token(&made), but_token(&again));
    assert_eq!(before, after);
    assert_eq!(node.record(&second)["unenforced"], true);
    assert!(!node.path(&format!("grants/{first}.json")).exists(), "the unit was given out again");
    assert_eq!(reported(), 1, "{}", node.log());
}

/// A GPU that the driver calls broken is not given out until it is repaired.
#[test]
fn broken_gpu_is_withheld_until_repaired() {
    let mut node = Node::new(&json!([gpu(0, 16), gpu(1, 24)]));
    let kubelet = node.kubelet();
    // From before the plugin was there, and a program's.
    node.report("0000:3b:00): 79, pid=7, name=python, GPU has fallen off the bus.");
    node.report("0000:3c:00): 31, pid=7, name=python, Ch 00000008, MMU Fault");
    node.start(&[]);
    let registered = kubelet.recv_timeout(timeout()).unwrap();
    let mut client = node.client(&registered.endpoint);
    let mut list = node.runtime.block_on(client.list_and_watch(Empty {})).unwrap().into_inner();
    until(&node.runtime, &mut list, &["07c"]);
    assert!(node.log().contains("Xid 79: it is broken until it has been reset"), "{}", node.log());
    node.report(
        "0000:3c:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)",
    );
    until(&node.runtime, &mut list, &[]);
    node.report(
        "0000:3c:00): 154, GPU recovery action changed from 0x2 (Node Reboot) to 0x0 (None)",
    );
    until(&node.runtime, &mut list, &["07c"]);
    let hangup = ["-HUP".to_owned(), node.plugin.as_ref().unwrap().id().to_string()];
    assert!(Command::new("kill").args(hangup).status().unwrap().success());
    until(&node.runtime, &mut list, &["07c", "c09"]);
}

/// The plugin registers again with a kubelet that restarted, and waits for one that starts later.
#[test]
fn plugin_registers_again_and_waits_for_the_kubelet() {
    let mut node = Node::new(&json!([gpu(0, 16)]));
    node.start(&["--memory-unit=MiB"]);
    assert!(eventually(|| node.log().contains("there is no kubelet yet")));
    for _ in 0..3 {
        let kubelet = node.kubelet();
        let registered = kubelet.recv_timeout(timeout()).unwrap();
        let mut client = node.client(&registered.endpoint);
        let mut list = node.runtime.block_on(client.list_and_watch(Empty {})).unwrap().into_inner();
        let reported = node.runtime.block_on(list.message()).unwrap().unwrap();
        assert_eq!(reported.devices.len(), 16 << 10);
    }
    let socket = |dir: &Path| dir.join("cgpu-gpu-mem.sock").exists();
    assert!(socket(&node.path("plugins")));
    // After SIGTERM it leaves nothing.
    let mut plugin = node.plugin.take().unwrap();
    let kill = Command::new("kill").arg(plugin.id().to_string()).status().unwrap();
    assert!(kill.success() && plugin.wait().unwrap().success());
    assert!(!socket(&node.path("plugins")));
}

/// Units that the kubelet would not take are refused when the plugin starts.
#[test]
fn too_many_units_are_refused_at_the_start() {
    let node = Node::new(&json!([gpu(0, 141), gpu(1, 141)]));
    let output = node.command(&["--memory-unit=MiB"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(said.contains("288768 units of 1 MiB") && said.contains("--memory-unit=GiB"), "{said}");
}

#[test]
fn gpu_is_shared_or_exclusive_but_never_both() {
    const WHOLE: &str = "aliyun.com/gpu-whole";
    let mut node = Node::new(&json!([gpu(0, 16), gpu(1, 24), gpu(2, 16)]));
    let (memory, whole) = node.kubelet_of_both();
    node.start(&[]);
    let memory = memory.recv_timeout(timeout()).unwrap();
    let whole = whole.recv_timeout(timeout()).unwrap();
    assert_eq!((&*whole.endpoint, &*whole.resource_name), ("cgpu-gpu-whole.sock", WHOLE));
    let (mut shared, mut whole) = (node.client(&memory.endpoint), node.client(&whole.endpoint));
    let mut units = node.runtime.block_on(shared.list_and_watch(Empty {})).unwrap().into_inner();
    let mut gpus = node.runtime.block_on(whole.list_and_watch(Empty {})).unwrap().into_inner();
    let (first, second, third) = ("c09", "07c", "5e0");
    until(&node.runtime, &mut units, &[first, second, third]);
    // As long as the kubelet doesn't report which containers have what, no container has an exclusive GPU.
    until(&node.runtime, &mut gpus, &[]);
    let held = node.pod_resources();
    until(&node.runtime, &mut gpus, &[first, second, third]);
    let set = |pods: Vec<PodResourcesOfPod>| held.lock().unwrap().pod_resources = pods;

    let unit = ["c09-0".to_owned()];
    node.runtime.block_on(shared.allocate(allocate(&unit))).unwrap();
    until(&node.runtime, &mut gpus, &[second, third]);
    let answer = node.runtime.block_on(whole.allocate(allocate(&[UUIDS[1].to_owned()]))).unwrap();
    let mut variables = answer.into_inner().container_responses[0].envs.clone();
    let record = node.record(&variables.remove("CGPU_GRANT").unwrap());
    assert_eq!(record["gpus"], json!([{"uuid": UUIDS[1], "bytes": null}]));
    // All names of GPUs, so that an image's own doesn't count together with them; and it has no quota of the host's.
    let expected = [
        ("NVIDIA_VISIBLE_DEVICES", UUIDS[1]),
        ("ALIYUN_COM_GPU_VISIBLE_DEVICES", UUIDS[1]),
        ("CGPU_GPUS", ""),
        ("CGPU_DISABLE", "true"),
    ];
    let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
    assert_eq!(variables, expected.into());
    until(&node.runtime, &mut units, &[first, third]);
    until(&node.runtime, &mut gpus, &[second, third]);
    // Asked all the same, by a kubelet that hasn't heard of it.
    let error =
        node.runtime.block_on(whole.allocate(allocate(&[UUIDS[0].to_owned()]))).unwrap_err();
    assert!(error.message().contains("memory of GPU 0 has just become another"), "{error}");
    let error = node.runtime.block_on(shared.allocate(allocate(&["07c-0".into()]))).unwrap_err();
    assert!(error.message().contains("GPU 1 has just become another"), "{error}");

    // What the kubelet reports counts, whichever plugin gave it out: both, and the third exclusively.
    let of_third = [UUIDS[2].to_owned()];
    let of_second = [UUIDS[1].to_owned()];
    set(vec![has("a", MEM, &unit), has("b", WHOLE, &of_second), has("c", WHOLE, &of_third)]);
    until(&node.runtime, &mut units, &[first]);
    let error = node.runtime.block_on(shared.allocate(allocate(&["5e0-0".into()]))).unwrap_err();
    assert!(error.message().contains("GPU 2 has just become another"), "{error}");
    // Another plugin of this node, which was never asked: it learns it.
    let mut plugin = node.plugin.take().unwrap();
    plugin.kill().unwrap();
    plugin.wait().unwrap();
    let (memory, whole) = node.kubelet_of_both();
    node.start(&[]);
    let mut shared = node.client(&memory.recv_timeout(timeout()).unwrap().endpoint);
    let mut whole = node.client(&whole.recv_timeout(timeout()).unwrap().endpoint);
    let mut units = node.runtime.block_on(shared.list_and_watch(Empty {})).unwrap().into_inner();
    let mut gpus = node.runtime.block_on(whole.list_and_watch(Empty {})).unwrap().into_inner();
    until(&node.runtime, &mut units, &[first]);
    until(&node.runtime, &mut gpus, &[second, third]);
    set(vec![has("b", WHOLE, &of_second)]);
    until(&node.runtime, &mut units, &[first, third]);
    until(&node.runtime, &mut gpus, &[first, second, third]);
}
