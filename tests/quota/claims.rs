//! A claim of Kubernetes' from its CDI file on: containerd puts its variable into the container, the runtime reads the
//! record that it names, and the quota holds.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};

use cgpu_core::request::claim::{CLAIM_FORMAT, Claim, ClaimedGpu, Share};
use cgpu_host::grants::{Claims, GrantError};
use serde_json::json;

use crate::engines::APP;
use crate::gated::{Gated, MIB, NO_MEMORY, RMTOOL, RUNTIME, rmtool};
use crate::support::{Containerd, Cri, eventually};

/// What the driver writes for the claim [`claimed`] (a unit test of it compares the file).
const CDI_FILE: &str = include_str!("../fixtures/claim.cdi.json");

const UID: &str = "5c3b9a52-0000-4c8e-9d0e-4f1d2c3b4a59";
const DRIVER: &str = "gpu.cgpu.io";

/// The claim of [`CDI_FILE`]: 1000 MiB of the first GPU by each of two requests, for the pod `claiming`.
fn claimed(gated: &Gated) -> Claim {
    let uuid = gated.sim.state().gpus[0].uuid.clone();
    let share = |request: &str, token: &str| Share {
        request: request.to_owned(),
        token: token.repeat(32),
        gpus: vec![ClaimedGpu {
            uuid: uuid.clone(),
            bytes: 1000 * MIB,
            whole: false,
            pool: "node".to_owned(),
            device: uuid.to_lowercase(),
            share_id: None,
        }],
        weight: None,
    };
    Claim {
        format: CLAIM_FORMAT,
        namespace: "default".to_owned(),
        name: "claim".to_owned(),
        uid: UID.to_owned(),
        pods: vec!["claiming".to_owned()],
        of_one_pod: true,
        shares: vec![share("a", "1"), share("b", "f")],
    }
}

fn prepare(gated: &mut Gated, containerd: &Containerd) {
    let grants = gated.host.scratch.path().join("grants");
    let claim = claimed(gated);
    Claims::at(&grants).put(|_| Ok::<_, GrantError>(claim)).expect("it can be written");
    let hook = Path::new(RUNTIME).with_file_name("cgpu-hook");
    let text = CDI_FILE.replace("/usr/bin/cgpu-hook", &hook.display().to_string());
    // The hook finds the same configuration.
    let env = format!(
        "\"env\": [\"CGPU_CONFIG={}\"],\n        \"hookName\"",
        gated.host.config().display()
    );
    fs::create_dir_all(containerd.cdi_dir()).expect("a directory can be made");
    fs::write(containerd.cdi_dir().join("claim.json"), text.replace("\"hookName\"", &env))
        .expect("a file can be written");
}

/// A container of `claiming` with these requests of the claim.
fn container(cri: &Cri<'_>, name: &str, requests: &[&str]) -> serde_json::Value {
    let mut container = cri.container_config(name);
    container["mounts"] =
        json!([{"container_path": RMTOOL, "host_path": rmtool(), "readonly": true}]);
    let device = |request: &&str| json!({"name": format!("{DRIVER}/claim={UID}-{request}")});
    container["cdi_devices"] = requests.iter().map(device).collect();
    // What an image of CUDA says, and what a pod that wants more does.
    container["envs"] = json!([
        {"key": "NVIDIA_VISIBLE_DEVICES", "value": "all"}, {"key": "CGPU_DISABLE", "value": "true"},
    ]);
    container
}

/// Whether a containerd that is to read CDI files does: Debian 12's can't.
fn reads_cdi(cri: &Cri<'_>) -> bool {
    let version = cri.call("version", &json!({})).ok().json()["runtime_version"].take();
    let version = version.as_str().expect("a version").trim_start_matches('v').to_owned();
    let mut numbers = version.split(['.', '~', '+', '-']).map(|part| part.parse::<u32>());
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or_default();
    (next(), next(), next()) >= (1, 7, 2)
}

#[test]
fn containerds_claims_are_quotas_that_hold() {
    let mut gated = Gated::new();
    let grants = gated.host.scratch.path().join("grants").display().to_string();
    gated.host.set("kubernetes.grants", grants);
    let config = gated.host.config().display().to_string();
    let containerd =
        Containerd::builder().runtime(RUNTIME).env("CGPU_CONFIG", config).cdi().start();
    let cri = containerd.cri();
    if !reads_cdi(&cri) {
        return println!("skipped: this containerd is older than 1.7.2 and has no CDI devices");
    }
    prepare(&mut gated, &containerd);
    let pod = cri.pod_config("claiming");
    let pod_id = cri.run_pod("cgpu", &pod);
    let one = container(&cri, "one", &["a"]);
    let id = cri.create(&pod_id, &one, &pod);
    cri.start(&id).ok();
    let reported = cri.exec_sync(&id, &APP);
    assert!(reported.stdout.contains(&format!("alloc a {NO_MEMORY}")), "{reported:?}");
    assert!(reported.stdout.contains("alloc b ok"), "{reported:?}");
    // The kubelet may name a device twice; another container of the pod can't have the same share.
    let request = |config: &serde_json::Value| json!({"pod_sandbox_id": pod_id, "config": config, "sandbox_config": pod});
    let second = container(&cri, "second", &["a", "b"]);
    let created = cri.call("create", &request(&second)).ok().json();
    let second_id = created["container_id"].as_str().expect("an id").to_owned();
    let refused = cri.start(&second_id).fails();
    assert!(refused.stderr.contains("/a is in use by the container"), "{refused}");
    cri.remove(&second_id).ok();
    cri.stop(&id).ok();
    cri.remove(&id).ok();
    let both = container(&cri, "both", &["a", "a", "b"]);
    let id = cri.create(&pod_id, &both, &pod);
    cri.start(&id).ok();
    let sums = APP.map(|word| match word {
        "alloc 1001MiB as a" => "alloc 2001MiB as a",
        "alloc 1000MiB as b" => "alloc 2000MiB as b",
        word => word,
    });
    let reported = cri.exec_sync(&id, &sums);
    assert!(reported.stdout.contains(&format!("alloc a {NO_MEMORY}")), "{reported:?}");
    assert!(reported.stdout.contains("alloc b ok"), "{reported:?}");
    cri.stop(&id).ok();
    cri.remove(&id).ok();
    cri.remove_pod(&pod_id).ok();
    // Another runtime's container is refused in words: it would have no GPU.
    let bare = cri.run_pod("runc", &pod);
    let theirs = container(&cri, "theirs", &["b"]);
    let id = cri.create(&bare, &theirs, &pod);
    let refused = cri.start(&id).fails();
    assert!(refused.stderr.contains("set runtimeClassName: cgpu"), "{refused}");
    cri.remove(&id).ok();
    cri.remove_pod(&bare).ok();
    gated.soon_is_empty();
}

/// A DRA driver of a node whose API server isn't there.
struct Driver(Child);

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The driver registers only where the engine puts CDI devices into containers; else it says what is to be done.
#[test]
fn driver_waits_for_an_engine_with_cdi() {
    let gated = Gated::new();
    for reads in [false, true] {
        let builder = Containerd::builder().runtime(RUNTIME);
        let containerd = if reads { builder.cdi() } else { builder }.start();
        let directory = gated.host.scratch.directory(&format!("driver-{reads}"));
        let path = |name: &str| directory.join(name).display().to_string();
        let kubeconfig = json!({
            "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        });
        fs::write(path("kubeconfig"), kubeconfig.to_string()).expect("a file can be written");
        let mut command =
            gated.host.scratch.command(Path::new(RUNTIME).with_file_name("cgpu-dra-driver"));
        command.arg("--config").arg(gated.host.config()).args(["--log", &path("log")]);
        command.args(["--kubeconfig", &path("kubeconfig"), "--node-name", "n"]);
        command.args(["--registry-dir", &path("registry"), "--plugins-dir", &path("plugins")]);
        command.arg("--engine-socket").arg(containerd.socket());
        command.arg("--cdi-dir").arg(containerd.cdi_dir());
        let _driver = Driver(command.stdout(Stdio::null()).spawn().expect("it can be started"));
        let log = || fs::read_to_string(path("log")).unwrap_or_default();
        let is_registered =
            || Path::new(&path("registry")).join(format!("{DRIVER}-reg.sock")).exists();
        let lack = match (reads_cdi(&containerd.cri()), reads) {
            (true, true) => {
                assert!(eventually(is_registered), "{}", log());
                continue;
            }
            (true, false) => "its enable_cdi is false",
            (false, _) => "it is older than 1.7.2",
        };
        let words = format!("the running engine drops CDI devices in silence: {lack}");
        assert!(
            eventually(|| log().contains(&words) && log().contains("the driver doesn't register")),
            "{}",
            log()
        );
        assert!(!is_registered(), "{}", log());
    }
}
