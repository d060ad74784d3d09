//! The DRA driver next to a kubelet's and an API server's side of its APIs. Needs root, as the driver does.

#![allow(clippy::unwrap_used, unreachable_pub, reason = "a test that can't go on may panic")]

#[path = "../../../../tests/support/patience.rs"]
mod patience;

mod api_server;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use api_server::ApiServer;
use cgpu_host::failpoint;
use cgpu_kubelet::dra::{
    Claim, DeviceHealth, InfoRequest, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodeUnprepareResourcesRequest, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
    RegistrationStatus, UNHEALTHY,
};
use cgpu_kubelet::dra_plugin_client::DRAPluginClient;
use cgpu_kubelet::dra_resource_health_client::DRAResourceHealthClient;
use cgpu_kubelet::plugin_registration::registration_client::RegistrationClient;
use hyper_util::rt::TokioIo;
use patience::timeout;
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;
use tonic::Streaming;
use tonic::transport::{Channel, Endpoint, Uri};
use tower::service_fn;

const DRIVER: &str = "gpu.cgpu.io";
const NODE: &str = "n1";

const UUIDS: [&str; 2] =
    ["GPU-c09d11f5-a565-1f83-903c-a65a7ba138af", "GPU-07c1b1a2-0c4d-7b0f-8a73-5bd3e6f7a111"];

/// A node: its files, the API server, and the driver.
struct Node {
    runtime: Runtime,
    dir: tempfile::TempDir,
    api: ApiServer,
    driver: Option<Child>,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

fn gpu(index: usize, memory_mib: u64) -> Value {
    json!({
        "index": index, "uuid": UUIDS[index], "minor": index, "bus_id": format!("0000:{:02x}:00.0", 0x3b + index),
        "name": "Tesla V100", "memory_mib": memory_mib, "state": "ok", "mig_enabled": false, "mig_devices": [],
    })
}

/// The device of the GPU with that index.
fn device(index: usize) -> String {
    UUIDS[index].to_lowercase()
}

/// A claim with the requests `(name, GPU, MiB)`, for the pod of that UID.
fn claim(uid: &str, pod: &str, requests: &[(&str, usize, u64)]) -> Value {
    let result = |(request, at, mib): &(&str, usize, u64)| {
        json!({
            "request": request, "driver": DRIVER, "pool": NODE, "device": device(*at),
            "shareID": format!("a671734a-e8e5-11e4-8fde-42010af0{at:04}"),
            "consumedCapacity": {"memory": format!("{mib}Mi"), "cores": "0"},
        })
    };
    let results: Vec<Value> = requests.iter().map(result).collect();
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
        "metadata": {"namespace": "team", "name": format!("c-{uid}"), "uid": uid},
        "spec": {},
        "status": {
            "allocation": {"devices": {"results": results}},
            "reservedFor": [{"resource": "pods", "name": "p", "uid": pod}],
        },
    })
}

fn named(uid: &str) -> Claim {
    Claim { namespace: "team".to_owned(), name: format!("c-{uid}"), uid: uid.to_owned() }
}

impl Node {
    fn new(gpus: &Value) -> Self {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let api = ApiServer::start(&runtime, dir.path());
        let node = Node { runtime, dir, api, driver: None };
        let config = format!(
            "state_dir = {:?}\nlog = {:?}\n[inventory]\nsource = \"file\"\npath = {:?}\n\
             [kubernetes]\ngrants = {:?}\n",
            node.path("state"),
            node.path("log"),
            node.path("gpus.json"),
            node.path("grants"),
        );
        fs::write(node.path("config.toml"), config).unwrap();
        fs::write(node.path("kmsg"), "6,1,1,-;Linux version 6.1.0\n").unwrap();
        fs::write(node.path("gpus.json"), gpus.to_string()).unwrap();
        node
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn start(&mut self) {
        self.start_failing_at("");
    }

    /// Starts a driver that is killed where it comes to `place`.
    fn start_failing_at(&mut self, place: &str) {
        self.kill();
        let mut command = Command::new(env!("CARGO_BIN_EXE_cgpu-dra-driver"));
        command.arg("--config").arg(self.path("config.toml"));
        command.arg("--kubeconfig").arg(self.path("kubeconfig"));
        command.arg("--registry-dir").arg(self.path("registry"));
        command.arg("--plugins-dir").arg(self.path("plugins"));
        command.arg("--cdi-dir").arg(self.path("cdi"));
        command.arg("--kernel-log").arg(self.path("kmsg"));
        command.args(["--node-name", NODE]).env(failpoint::VARIABLE, place);
        self.driver = Some(command.stdout(Stdio::null()).spawn().unwrap());
    }

    fn kill(&mut self) {
        if let Some(mut driver) = self.driver.take() {
            let _ = driver.kill();
            let _ = driver.wait();
        }
    }

    /// The driver's socket, once it answers at that of its registration.
    fn registered(&self) -> PathBuf {
        let socket = self.path(&format!("registry/{DRIVER}-reg.sock"));
        let asked = || {
            self.runtime.block_on(async {
                let mut client = RegistrationClient::new(connect(&socket).await.ok()?);
                let info = client.get_info(InfoRequest {}).await.ok()?.into_inner();
                let status = RegistrationStatus { plugin_registered: true, ..Default::default() };
                client.notify_registration_status(status).await.ok()?;
                Some(info)
            })
        };
        let info = soon(asked, "the driver registers");
        assert_eq!((&*info.plugin_type, &*info.name), ("DRAPlugin", DRIVER));
        assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1alpha1.DRAResourceHealth"]);
        info.endpoint.into()
    }

    fn channel(&self) -> Channel {
        let endpoint = self.registered();
        self.runtime.block_on(connect(&endpoint)).unwrap()
    }

    /// What becomes of a claim that the kubelet has prepared; `None` if the driver is gone meanwhile.
    fn prepare(&self, uid: &str) -> Option<NodePrepareResourceResponse> {
        let mut client = DRAPluginClient::new(self.channel());
        let request = NodePrepareResourcesRequest { claims: vec![named(uid)] };
        let answer = self.runtime.block_on(client.node_prepare_resources(request)).ok()?;
        Some(answer.into_inner().claims.remove(uid).unwrap())
    }

    fn prepared(&self, uid: &str) -> NodePrepareResourceResponse {
        let answer = self.prepare(uid).unwrap();
        assert_eq!(answer.error, "");
        answer
    }

    fn refused(&self, uid: &str) -> String {
        let answer = self.prepare(uid).unwrap();
        assert!(answer.devices.is_empty() && !answer.error.is_empty(), "{answer:?}");
        answer.error
    }

    fn unprepare(&self, uid: &str) -> Option<String> {
        let mut client = DRAPluginClient::new(self.channel());
        let request = NodeUnprepareResourcesRequest { claims: vec![named(uid)] };
        let answer = self.runtime.block_on(client.node_unprepare_resources(request)).ok()?;
        Some(answer.into_inner().claims.remove(uid).unwrap().error)
    }

    fn record(&self, uid: &str) -> Option<Value> {
        let text = fs::read(self.path(&format!("grants/claims/{uid}.json"))).ok()?;
        Some(serde_json::from_slice(&text).unwrap())
    }

    fn cdi_file(&self, uid: &str) -> PathBuf {
        self.path(&format!("cdi/{DRIVER}-claim_{uid}.json"))
    }

    /// The variables of each CDI device of a claim.
    fn variables(&self, uid: &str) -> BTreeMap<String, Vec<String>> {
        let text = fs::read(self.cdi_file(uid)).unwrap();
        let file: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(file["kind"], format!("{DRIVER}/claim"));
        let devices = file["devices"].as_array().unwrap().iter();
        let of = |device: &Value| {
            let env = device["containerEdits"]["env"].as_array().unwrap().iter();
            let env = env.map(|item| item.as_str().unwrap().to_owned()).collect();
            (device["name"].as_str().unwrap().to_owned(), env)
        };
        devices.map(of).collect()
    }

    /// The names of all files of claims.
    fn files(&self) -> Vec<String> {
        let names = |directory: &str| {
            let entries = fs::read_dir(self.path(directory)).into_iter().flatten();
            let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.filter(|name| !name.starts_with('.')).collect::<Vec<_>>()
        };
        [names("grants/claims"), names("cdi")].concat()
    }

    /// The devices that the API server has, by name, with their taints.
    fn published(&self) -> BTreeMap<String, String> {
        let slices = self.api.slices();
        let devices = slices.iter().flat_map(|slice| slice["spec"]["devices"].as_array().unwrap());
        let of = |device: &Value| {
            let taint = device["taints"][0]["key"].as_str().unwrap_or_default().to_owned();
            (device["name"].as_str().unwrap().to_owned(), taint)
        };
        devices.map(of).collect()
    }

    fn publishes(&self, wanted: &[(usize, &str)]) {
        let wanted: BTreeMap<String, String> =
            wanted.iter().map(|(at, taint)| (device(*at), (*taint).to_owned())).collect();
        soon(|| (self.published() == wanted).then_some(()), &format!("{wanted:?} is published"));
    }

    /// The driver of the GPUs reports a fault.
    fn report(&self, message: &str) {
        let mut log = fs::OpenOptions::new().append(true).open(self.path("kmsg")).unwrap();
        writeln!(log, "4,2,2,-;NVRM: Xid (PCI:{message}").unwrap();
    }

    fn logs(&self, part: &str) {
        let log = || fs::read_to_string(self.path("log")).unwrap_or_default();
        soon(|| log().contains(part).then_some(()), &format!("the log says {part:?}"));
    }
}

/// A channel to a socket of the driver's: a kubelet waits longer than the driver waits for the API server.
async fn connect(socket: &Path) -> Result<Channel, tonic::transport::Error> {
    let socket = socket.to_owned();
    let connect = service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { std::io::Result::Ok(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    Endpoint::from_static("http://driver").connect_with_connector(connect).await
}

/// What is had, once it is.
#[track_caller]
fn soon<T>(had: impl Fn() -> Option<T>, what: &str) -> T {
    let until = Instant::now() + timeout();
    loop {
        if let Some(had) = had() {
            return had;
        }
        assert!(Instant::now() < until, "in time: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A claim is a record, a CDI file with a variable for each request, and an answer that names its devices; asked again by
/// another kubelet, of another driver, all are the same.
#[test]
fn claims_are_prepared_and_let_go() {
    let mut node = Node::new(&json!([gpu(0, 16_130), gpu(1, 24_000)]));
    let requests = [("small", 0, 4096), ("big", 1, 24_000), ("small", 1, 1)];
    node.api.set_claim(&claim("u1", "pod-1", &requests[..2]));
    node.start();
    node.publishes(&[(0, ""), (1, "")]);
    let memory = &node.api.slices()[0]["spec"]["devices"][0]["capacity"]["memory"];
    assert_eq!(memory["value"], "16130Mi");
    let first = node.prepared("u1");
    let named: Vec<_> = first
        .devices
        .iter()
        .map(|device| {
            assert_eq!(device.pool_name, NODE);
            assert!(device.share_id.is_some());
            (&*device.request_names[0], &*device.device_name, &*device.cdi_device_ids[0])
        })
        .collect();
    assert_eq!(
        named,
        [
            ("big", &*device(1), "gpu.cgpu.io/claim=u1-big"),
            ("small", &*device(0), "gpu.cgpu.io/claim=u1-small"),
        ]
    );
    let record = node.record("u1").unwrap();
    let small = &record["shares"][1];
    assert_eq!(
        (&small["gpus"][0]["bytes"], &small["gpus"][0]["whole"]),
        (&json!(4096_u64 << 20), &json!(false))
    );
    assert_eq!(record["shares"][0]["gpus"][0]["whole"], true);
    let variables = node.variables("u1");
    let token = small["token"].as_str().unwrap();
    let item = format!("CGPU_GRANT_{}=u1.{token}", token[..16].to_uppercase());
    assert!(variables["u1-small"].contains(&item), "{variables:?}");
    assert_eq!(node.prepared("u1"), first);
    node.start();
    assert_eq!(node.prepared("u1"), first);
    // After a reboot the engine's directory is empty.
    fs::remove_file(node.cdi_file("u1")).unwrap();
    assert_eq!(node.prepared("u1"), first);
    assert_eq!(node.variables("u1"), variables);
    // The claim's object may be gone before its pod's containers are.
    node.api.remove_claim("team", "c-u1");
    for uid in ["u1", "u1", "unknown"] {
        assert_eq!(node.unprepare(uid).unwrap(), "");
    }
    assert_eq!(node.files(), [""; 0]);
    assert!(node.refused("u1").contains("claim team/c-u1 with UID u1 is gone"));
}

/// Killed between any two steps, it leaves what the next one makes whole or removes.
#[test]
fn drivers_killed_anywhere_lose_and_leak_nothing() {
    let mut node = Node::new(&json!([gpu(0, 16_130)]));
    node.api.set_claim(&claim("u1", "pod-1", &[("a", 0, 4096)]));
    for place in failpoint::OF_CLAIMS {
        let is_prepare = *place != "claim-cdi-removed";
        node.start_failing_at(if is_prepare { place } else { "" });
        if is_prepare {
            assert_eq!(node.prepare("u1"), None, "{place}: it is killed");
        } else {
            node.prepared("u1");
            node.start_failing_at(place);
            assert_eq!(node.unprepare("u1"), None, "{place}: it is killed");
            assert!(!node.cdi_file("u1").exists() && node.record("u1").is_some());
        }
        let before = node.record("u1").unwrap();
        node.start();
        let answer = node.prepared("u1");
        assert_eq!(answer.devices.len(), 1, "{place}");
        assert_eq!(node.record("u1").unwrap(), before, "{place}: the token stays");
        assert_eq!(node.variables("u1").len(), 1, "{place}");
        assert_eq!(node.unprepare("u1").unwrap(), "", "{place}");
        assert_eq!(node.files(), [""; 0], "{place}");
    }
}

/// Who changes or removes its slice sees it written again, once.
#[test]
fn slices_are_written_again_by_next_generation() {
    let mut node = Node::new(&json!([gpu(0, 16_130)]));
    node.api.refuse_writes(2);
    node.start();
    node.publishes(&[(0, "")]);
    let slice = node.api.slices().remove(0);
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    assert_eq!(
        (&slice["spec"]["nodeName"], &slice["spec"]["pool"]),
        (&json!(NODE), &json!({"name": NODE, "generation": 1, "resourceSliceCount": 1}))
    );
    // A driver that is gone for long: the kubelet removes its slices.
    node.api.remove_slices();
    node.publishes(&[(0, "")]);
    let writes = node.api.writes();
    fs::write(node.path("gpus.new"), json!([gpu(0, 16_130), gpu(1, 24_000)]).to_string()).unwrap();
    fs::rename(node.path("gpus.new"), node.path("gpus.json")).unwrap();
    node.publishes(&[(0, ""), (1, "")]);
    assert_eq!(node.api.writes(), writes + 1);
    assert_eq!(node.api.slices()[0]["spec"]["pool"]["generation"], 2);
    node.start();
    node.prepare("unknown");
    assert_eq!(node.api.writes(), writes + 1, "a driver that was restarted finds its slice");
}

/// An API server of old drops what it doesn't know: that is reported, and not written again and again.
#[test]
fn dropped_fields_are_reported_in_words() {
    let mut node = Node::new(&json!([gpu(0, 16_130), gpu(1, 24_000)]));
    node.api.drop_fields(&["allowMultipleAllocations", "requestPolicy", "taints"]);
    node.start();
    node.publishes(&[(0, ""), (1, "")]);
    node.logs("the API server dropped allowMultipleAllocations and requestPolicy: each GPU is one claim's as a whole");
    node.report("0000:3b:00): 79, pid=1, GPU has fallen off the bus.");
    // Without taints it is left out.
    node.publishes(&[(1, "")]);
    node.logs("the API server dropped taints");
    let writes = node.api.writes();
    // A claim of such a server consumes nothing in particular: the GPU is whole.
    let mut whole = claim("u1", "pod-1", &[("a", 1, 1)]);
    let result = &mut whole["status"]["allocation"]["devices"]["results"][0];
    result.as_object_mut().unwrap().remove("consumedCapacity");
    node.api.set_claim(&whole);
    node.prepared("u1");
    assert_eq!(node.record("u1").unwrap()["shares"][0]["gpus"][0]["whole"], true);
    assert_eq!(node.api.writes(), writes);
}

/// The health of all devices as the stream says it once `is_so`.
fn until(
    node: &Node,
    stream: &mut Streaming<NodeWatchResourcesResponse>,
    is_so: impl Fn(&[DeviceHealth]) -> bool,
) -> Vec<DeviceHealth> {
    loop {
        let devices = node.runtime.block_on(stream.message()).unwrap().unwrap().devices;
        if is_so(&devices) {
            return devices;
        }
    }
}

/// A broken GPU is tainted, unhealthy on the stream, and refused by name; then it is as before.
#[test]
fn broken_gpus_are_tainted_and_come_back() {
    let mut node = Node::new(&json!([gpu(0, 16_130), gpu(1, 24_000)]));
    node.api.set_claim(&claim("u1", "pod-1", &[("a", 0, 4096)]));
    node.start();
    node.publishes(&[(0, ""), (1, "")]);
    let mut health = DRAResourceHealthClient::new(node.channel());
    let request = NodeWatchResourcesRequest {};
    let stream = node.runtime.block_on(health.node_watch_resources(request)).unwrap();
    let mut stream = stream.into_inner();
    let unhealthy = |devices: &[DeviceHealth]| {
        devices.iter().filter(|device| device.health == UNHEALTHY).count()
    };
    let first = until(&node, &mut stream, |devices| unhealthy(devices) == 0);
    assert_eq!(first.len(), 2, "each message is the complete list");
    node.report("0000:3b:00): 79, pid=1, GPU has fallen off the bus.");
    node.publishes(&[(0, "gpu.cgpu.io/xid"), (1, "")]);
    let broken = until(&node, &mut stream, |devices| unhealthy(devices) == 1);
    let said = broken.iter().find(|device| device.health == UNHEALTHY).unwrap();
    assert!(said.message.contains("Xid 79"), "{said:?}");
    assert_eq!(said.device.as_ref().unwrap().device_name, device(0));
    let reported = node.refused("u1");
    assert!(reported.contains("GPU 0") && reported.contains("Xid 79"), "{reported}");
    node.report(
        "0000:3b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
    );
    node.publishes(&[(0, ""), (1, "")]);
    until(&node, &mut stream, |devices| unhealthy(devices) == 0);
    node.prepared("u1");
}

/// A GPU of which the device plugin has given some is none of a claim's, and one of a claim's none of the plugin's.
#[test]
fn plugin_and_claims_never_share_a_gpu() {
    let mut node = Node::new(&json!([gpu(0, 16_130), gpu(1, 24_000)]));
    let grants = cgpu_host::grants::Grants::at(&node.path("grants"));
    let grant = |token: char, uuid: &str| -> cgpu_core::request::Grant {
        serde_json::from_value(json!({
            "format": 1, "token": token.to_string().repeat(32), "resource": "aliyun.com/gpu-mem", "devices": [],
            "gpus": [{"uuid": uuid, "bytes": 1 << 30}], "unenforced": false, "candidates": [], "variables": {},
            "holder": {"namespace": "default", "pod": "old", "uid": "u", "container": "main"},
        }))
        .unwrap()
    };
    grants.give(&grant('a', UUIDS[0])).unwrap();
    node.api.set_claim(&claim("u1", "pod-1", &[("a", 0, 4096)]));
    node.api.set_claim(&claim("u2", "pod-2", &[("a", 1, 4096)]));
    node.start();
    node.publishes(&[(1, "")]);
    let reported = node.refused("u1");
    assert!(
        reported.contains("aliyun.com/gpu-mem to container main of pod default/old"),
        "{reported}"
    );
    node.prepared("u2");
    let reported = grants.give(&grant('b', UUIDS[1])).unwrap_err().to_string();
    assert!(reported.contains("claim team/c-u2 has it"), "{reported}");
    grants.end(|_| true).unwrap();
    node.publishes(&[(0, ""), (1, "")]);
    node.prepared("u1");
}

/// The API server is asked once of a claim that a template made for its pod, however often of a shared one.
#[test]
fn claims_of_templates_are_not_asked_again() {
    let mut node = Node::new(&json!([gpu(0, 16_130)]));
    let mut own = claim("u1", "pod-1", &[("a", 0, 4096)]);
    own["metadata"]["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "pod-1", "controller": true}]);
    node.api.set_claim(&own);
    node.api.set_claim(&claim("u2", "pod-2", &[("a", 0, 4096)]));
    node.start();
    node.prepared("u1");
    node.prepared("u2");
    let more = node.api.asked("c-u2") + 2;
    soon(|| (node.api.asked("c-u2") >= more).then_some(()), "the shared claim is asked of again");
    assert_eq!(node.api.asked("c-u1"), 1);
}

/// What a claim was allocated is known without an API server; for which pods it is reserved is taken in later.
#[test]
fn claims_follow_the_api_server_and_outlive_it() {
    let mut node = Node::new(&json!([gpu(0, 16_130)]));
    node.api.set_claim(&claim("u1", "pod-1", &[("a", 0, 4096)]));
    node.start();
    let first = node.prepared("u1");
    assert_eq!(node.record("u1").unwrap()["pods"], json!(["pod-1"]));
    node.api.set_claim(&claim("u1", "pod-2", &[("a", 0, 4096)]));
    let pods = || Some(node.record("u1")?["pods"] == json!(["pod-2"])).filter(|is| *is);
    soon(pods, "the claim is another pod's");
    node.api.set_down(true);
    assert_eq!(node.prepared("u1"), first);
    assert!(node.refused("u2").contains("claim team/c-u2 can't be read"));
    node.api.set_down(false);
    // One of the same name that was made after it.
    node.api.set_claim(&claim("u2", "pod-2", &[("a", 0, 16_130)]));
    let mut other = claim("u3", "pod-2", &[("a", 0, 4096)]);
    other["metadata"]["name"] = json!("c-u1");
    node.api.set_claim(&other);
    assert!(node.refused("u1").contains("with UID u1 is gone"));
    let reported = node.refused("u2");
    assert!(reported.contains("12034 MiB of 16130 MiB left: team/c-u1 has 4096 MiB"), "{reported}");
}
