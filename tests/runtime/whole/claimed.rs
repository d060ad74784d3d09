//! What claims of Kubernetes give a container: the sum of their shares, to one container at once, and to no other pod's.

use cgpu_core::request::Grant;
use cgpu_core::request::claim::{CLAIM_FORMAT, Claim, ClaimedGpu, Share};
use cgpu_core::request::grant::{FORMAT, GrantedGpu, PodContainer};
use cgpu_host::grants::{Claims, GrantError, Grants};
use serde_json::{Value, json};

use super::{INSPECT, host};
use crate::host::Host;
use crate::support::{Bundle, program};

/// What a pod's author may write to have more.
const GREED: [&str; 3] = ["CGPU_DISABLE=true", "CGPU_MEMORY=100%", "NVIDIA_VISIBLE_DEVICES=void"];

/// A host with claims, and their place.
fn node(profile: &str) -> (Host, Claims) {
    let mut host = host();
    let place = host.scratch.path().join("grants");
    host.set("kubernetes.grants", place.display().to_string());
    host.set("admission.profile", profile);
    (host, Claims::at(&place))
}

/// A part of a GPU, or all of it.
fn part(uuid: &str, mib: u64) -> ClaimedGpu {
    ClaimedGpu {
        uuid: uuid.to_owned(),
        bytes: mib << 20,
        whole: mib >= 16_000,
        pool: "node".to_owned(),
        device: uuid.to_lowercase(),
        share_id: None,
    }
}

/// A claim of the pod `web` with requests `(name, GPU, MiB)`.
fn claim(uid: &str, requests: &[(&str, &str, u64)]) -> Claim {
    let share = |(at, (request, uuid, mib)): (usize, &(&str, &str, u64))| Share {
        request: (*request).to_owned(),
        token: format!("{at:x}{}", uid.as_bytes()[1] as char).repeat(16),
        gpus: vec![part(uuid, *mib)],
        weight: None,
    };
    Claim {
        format: CLAIM_FORMAT,
        namespace: "default".to_owned(),
        name: format!("claim-{uid}"),
        uid: uid.to_owned(),
        pods: vec!["uid-of-web".to_owned()],
        of_one_pod: true,
        shares: requests.iter().enumerate().map(share).collect(),
    }
}

fn prepare(claims: &Claims, claim: &Claim) {
    claims.put(|_| Ok::<_, GrantError>(claim.clone())).unwrap();
}

/// The variable that names a claim's share.
fn variable(claim: &Claim, request: &str) -> String {
    let (name, value) = claim.variable(claim.share(request).unwrap());
    format!("{name}={value}")
}

/// The container of a pod, as containerd marks it.
fn bundle(host: &Host, id: &str, of: (&str, &str), env: &[String]) -> Bundle {
    bundle_with(host, id, of, (env, &json!(null)))
}

/// The same with hooks.
fn bundle_with(
    host: &Host,
    id: &str,
    (pod, container): (&str, &str),
    (env, hooks): (&[String], &Value),
) -> Bundle {
    host.bundle(id, |config| {
        if hooks.is_object() {
            config["hooks"] = hooks.clone();
        }
        let variables = config["process"]["env"].as_array_mut().unwrap();
        variables.extend(env.iter().map(|variable| json!(variable)));
        for (name, value) in [
            ("io.kubernetes.cri.container-type", "container"),
            ("io.kubernetes.cri.sandbox-id", "77"),
            ("io.kubernetes.cri.sandbox-name", pod),
            ("io.kubernetes.cri.sandbox-namespace", "default"),
            ("io.kubernetes.cri.sandbox-uid", &format!("uid-of-{pod}")),
            ("io.kubernetes.cri.container-name", container),
        ] {
            config["annotations"][name] = json!(value);
        }
        config["process"]["args"] = json!(["sh", "-c", INSPECT]);
    })
}

const WEB: (&str, &str) = ("web", "main");

/// A container has the sum of the shares that it uses, whatever its pod says beside.
#[test]
fn claims_shares_add_up_in_a_container() {
    for profile in ["open", "strict"] {
        let (host, claims) = node(profile);
        let one = claim("u1", &[("a", "GPU-b", 1000)]);
        let other = claim("u2", &[("a", "GPU-b", 200), ("b", "GPU-a", 300)]);
        prepare(&claims, &one);
        prepare(&claims, &other);
        let mut env = GREED.map(str::to_owned).to_vec();
        env.extend([variable(&one, "a"), variable(&other, "a"), variable(&other, "b")]);
        // As after a kubelet's restart.
        env.push(variable(&one, "a"));
        let made = bundle(&host, "sum", WEB, &env);
        let runtime = host.runtime();
        runtime.create(&made).ok();
        let container = host.container("sum");
        let uuids: Vec<_> =
            container["gpus"].as_array().unwrap().iter().map(|gpu| gpu["uuid"].clone()).collect();
        assert_eq!(uuids, ["GPU-b", "GPU-a"], "{profile}");
        assert_eq!(host.limits_mib("sum"), [1200, 300], "{profile}");
        runtime.delete(&made).ok();
        let log = host.log();
        assert!(log.contains("CGPU_MEMORY=100% counts for nothing"), "{log}");
        assert!(!log.contains("=void counts for nothing"), "the CDI file has set it: {log}");
    }
}

/// A claim that consumes all of a GPU is an unlimited GPU, even if the host requires a quota.
#[test]
fn claim_of_all_memory_is_a_whole_gpu() {
    let (mut host, claims) = node("open");
    host.set("admission.require_quota", true);
    let whole = claim("u1", &[("a", "GPU-b", 16_000), ("b", "GPU-a", 100)]);
    prepare(&claims, &whole);
    let made = bundle(&host, "whole", WEB, &[variable(&whole, "a")]);
    let outcome = host.runtime().run(&made).ok();
    assert_eq!(outcome.text(), "nvidia-uvm nvidia1 nvidiactl\n[GPU-b]");
    // Next to a quota it is one of all its memory.
    let both = bundle(&host, "both", WEB, &[variable(&whole, "a"), variable(&whole, "b")]);
    host.runtime().create(&both).ok();
    assert_eq!(host.limits_mib("both"), [16_000, 100]);
}

#[test]
fn one_share_is_in_one_container_at_once() {
    let (host, claims) = node("open");
    let shared = claim("u1", &[("a", "GPU-a", 1000), ("b", "GPU-a", 500)]);
    prepare(&claims, &shared);
    let runtime = host.runtime();
    let first = bundle(&host, "first", WEB, &[variable(&shared, "a")]);
    runtime.create(&first).ok();
    let second = bundle(&host, "second", ("web", "side"), &[variable(&shared, "a")]);
    let parts = [
        "the claim's share u1/a is in use by the container default/web/main",
        "ResourceClaimTemplate",
    ];
    host.was_reported(runtime.create(&second), &second, &parts);
    // Another request of the claim is another share.
    let third = bundle(&host, "third", ("web", "side"), &[variable(&shared, "b")]);
    runtime.create(&third).ok();
    // Its container may be made again, and after its end another one, as an init container's.
    runtime.delete(&first).ok();
    let again = bundle(&host, "again", ("web", "side"), &[variable(&shared, "a")]);
    runtime.create(&again).ok();
    assert_eq!(host.limits_mib("again"), [1000]);
}

#[test]
fn foreign_and_forged_claims_are_refused() {
    let (host, claims) = node("open");
    let own = claim("u1", &[("a", "GPU-a", 1000)]);
    let named = variable(&own, "a");
    let refused = |id: &str, pod: &str, env: &[String], parts: &[&str]| {
        let made = bundle(&host, id, (pod, "main"), env);
        host.was_reported(host.runtime().create(&made), &made, parts);
        assert!(host.records().is_empty());
    };
    let one = std::slice::from_ref(&named);
    refused(
        "early",
        "web",
        one,
        &["names no claim that is prepared on this node", "delete the pod"],
    );
    prepare(&claims, &own);
    refused("thief", "thief", one, &["names a claim that isn't this pod's"]);
    refused("guess", "web", &[format!("{named}0")], &["is no name of a claim's share"]);
    let renamed = named.replacen("CGPU_GRANT_", "CGPU_GRANT_A", 1);
    refused("renamed", "web", &[renamed], &["names no claim that is prepared"]);
    refused("path", "web", &["CGPU_GRANT_1=../../etc/x".to_owned()], &["is no name of"]);
    // Next to what the device plugin gave.
    let holder = PodContainer {
        namespace: "default".to_owned(),
        pod: "web".to_owned(),
        uid: "uid-of-web".to_owned(),
        container: "main".to_owned(),
    };
    let grant = Grant {
        format: FORMAT,
        token: "f".repeat(32),
        resource: "aliyun.com/gpu-mem".to_owned(),
        devices: Vec::new(),
        gpus: vec![GrantedGpu { uuid: "GPU-b".to_owned(), bytes: Some(1 << 30) }],
        weight: None,
        unenforced: false,
        candidates: Vec::new(),
        holder: Some(holder),
        variables: [].into(),
        shares: Vec::new(),
    };
    Grants::at(&host.scratch.path().join("grants")).give(&grant).unwrap();
    refused("two-ways", "web", one, &["both by the claim", "by aliyun.com/gpu-mem"]);
    // A container that is no pod's.
    let plain = host.bundle("plain", |config| {
        let variables = config["process"]["env"].as_array_mut().unwrap();
        variables.push(json!(named));
    });
    host.was_reported(host.runtime().create(&plain), &plain, &["this container is no pod's"]);
}

/// The hook of a claim's CDI file lets cgpu-runtime's containers start, and refuses another runtime's in words.
#[test]
fn a_claim_under_another_runtime_is_refused() {
    let (host, claims) = node("open");
    let own = claim("u1", &[("a", "GPU-a", 1000)]);
    prepare(&claims, &own);
    let hook = json!({
        "path": std::path::Path::new(super::RUNTIME).with_file_name("cgpu-hook"),
        "args": ["cgpu-hook", "claim"], "env": [format!("CGPU_CONFIG={}", host.config().display())],
    });
    let hooks = json!({"createRuntime": [hook]});
    let with_hook = |id: &str| bundle_with(&host, id, WEB, (&[variable(&own, "a")], &hooks));
    let made = with_hook("ours");
    host.runtime().create(&made).ok();
    host.runtime().delete(&made).ok();
    let bare = host.scratch.runtime(program("runc"));
    let outcome = bare.create(&with_hook("theirs")).fails();
    let words = "the runtime that makes it isn't cgpu's, so that it would have no GPU: set runtimeClassName: cgpu";
    assert!(outcome.stderr.contains(words), "{outcome}");
    let events = host.cgpu(&["events"]).ok().stdout;
    assert!(events.contains("set runtimeClassName: cgpu"), "{events}");
}
