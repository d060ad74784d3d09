//! What Kubernetes has given a container: the record counts, and nothing that a pod or its image says next to it.

use cgpu_core::request::Grant;
use cgpu_core::request::grant::{FORMAT, GrantedGpu, PodContainer};
use cgpu_host::grants::Grants;
use serde_json::json;

use super::{INSPECT, RUNTIME, host};
use crate::host::Host;
use crate::support::{Bundle, Docker, IMAGE, Outcome};

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// What a container sees that has the second GPU alone.
const SECOND: &str = "nvidia-uvm nvidia1 nvidiactl\n[GPU-b]";

/// What a pod's author may write to have more.
const GREED: [&str; 4] = [
    "NVIDIA_VISIBLE_DEVICES=all",
    "CGPU_DISABLE=true",
    "CGPU_MEMORY=100%",
    "ALIYUN_COM_GPU_MEM_CONTAINER=15000",
];

/// A host with grants, and their place.
fn node(profile: &str) -> (Host, Grants) {
    let mut host = host();
    let place = host.scratch.path().join("grants");
    host.set("kubernetes.grants", place.display().to_string());
    host.set("admission.profile", profile);
    (host, Grants::at(&place))
}

fn pod(name: &str) -> PodContainer {
    PodContainer {
        namespace: "default".to_owned(),
        pod: name.to_owned(),
        uid: format!("uid-of-{name}"),
        container: "main".to_owned(),
    }
}

/// A grant of `mib` of the second GPU, or of all of it.
fn grant(mib: Option<u64>, candidates: &[&str]) -> Grant {
    Grant {
        format: FORMAT,
        token: TOKEN.to_owned(),
        resource: "aliyun.com/gpu-mem".to_owned(),
        devices: vec!["b-0".to_owned()],
        gpus: vec![GrantedGpu { uuid: "GPU-b".to_owned(), bytes: mib.map(|mib| mib << 20) }],
        weight: None,
        unenforced: false,
        candidates: candidates.iter().map(|name| pod(name)).collect(),
        holder: None,
        variables: [].into(),
        shares: Vec::new(),
    }
}

/// A container of a pod, as containerd marks it. That of `web` asks by an annotation, too.
fn bundle(host: &Host, id: &str, pod: &str, env: &[&str]) -> Bundle {
    host.bundle(id, |config| {
        let variables = config["process"]["env"].as_array_mut().unwrap();
        variables.extend(env.iter().map(|variable| json!(variable)));
        for (name, value) in [
            ("io.kubernetes.cri.container-type", "container"),
            ("io.kubernetes.cri.sandbox-id", "77"),
            ("io.kubernetes.cri.sandbox-name", pod),
            ("io.kubernetes.cri.sandbox-namespace", "default"),
            ("io.kubernetes.cri.sandbox-uid", &format!("uid-of-{pod}")),
            ("io.kubernetes.cri.container-name", "main"),
        ] {
            config["annotations"][name] = json!(value);
        }
        if pod == "web" {
            config["annotations"]["cgpu/memory"] = json!("15000MiB");
        }
        config["process"]["args"] = json!(["sh", "-c", INSPECT]);
    })
}

fn token(token: &str) -> String {
    format!("CGPU_GRANT={token}")
}

/// What a container of that pod sees.
fn sees(host: &Host, id: &str, pod: &str, env: &[&str]) -> Outcome {
    host.runtime().run(&bundle(host, id, pod, env))
}

/// A grant counts, and nothing that a pod says next to it.
#[test]
fn grant_overrides_everything_a_pod_requests() {
    for profile in ["open", "strict"] {
        let (host, grants) = node(profile);
        grants.give(&grant(Some(3000), &["web"])).unwrap();
        let mut env = GREED.to_vec();
        let named = token(TOKEN);
        env.push(&named);
        let made = bundle(&host, "first", "web", &env);
        let runtime = host.runtime();
        runtime.create(&made).ok();
        assert_eq!(host.limits_mib("first"), [3000], "{profile}");
        let variable = made.config()["process"]["env"].to_string();
        assert!(variable.contains("NVIDIA_VISIBLE_DEVICES=GPU-b"), "{variable}");
        runtime.delete(&made).ok();
        let log = host.log();
        for setting in GREED.iter().copied().chain(["cgpu/memory=15000MiB"]) {
            let reported = format!(
                "{setting} counts for nothing: Kubernetes has given this container its GPUs \
                 (aliyun.com/gpu-mem); take it out of the pod or its image"
            );
            assert!(log.contains(&reported), "{profile}: {reported}\n{log}");
        }
        // It is made again, by whatever token.
        for (id, named) in [("again", ""), ("third", "CGPU_GRANT=another")] {
            let outcome =
                sees(&host, id, "web", &[GREED[0], named][..1 + usize::from(!named.is_empty())]);
            assert_eq!(outcome.ok().text(), SECOND, "{profile} {id}");
        }
    }
}

/// A grant of an unlimited GPU needs no quota, even if the host requires one.
#[test]
fn unlimited_gpu_grant_needs_no_quota_despite_requirement() {
    for profile in ["open", "strict"] {
        let (mut host, grants) = node(profile);
        host.set("admission.require_quota", true);
        grants.give(&grant(None, &["web"])).unwrap();
        let env = [token(TOKEN), "CGPU_MEMORY=1GiB".to_owned()];
        let outcome = sees(&host, "whole", "web", &[&env[0], &env[1]]);
        assert_eq!(outcome.ok().text(), SECOND, "{profile}");
        // No other container gets one so.
        sees(&host, "other", "other", &["NVIDIA_VISIBLE_DEVICES=GPU-a"]).fails();
    }
}

#[test]
fn foreign_grant_token_is_refused_with_reason() {
    let (host, grants) = node("open");
    let refused = |id: &str, pod: &str, named: &str, parts: &[&str]| {
        let made = bundle(&host, id, pod, &[named]);
        host.was_reported(host.runtime().create(&made), &made, parts);
        assert!(host.records().is_empty());
    };
    let named = token(TOKEN);
    refused(
        "unassigned",
        "web",
        &named,
        &["CGPU_GRANT names no grant of this node", "delete the pod"],
    );
    grants.give(&grant(Some(3000), &["web"])).unwrap();
    let words = "CGPU_GRANT names a grant that isn't container main of pod default/thief's: it is \
                 container main of pod default/web's; take the variable out of the pod";
    refused("anothers", "thief", &named, &[words]);
    refused("invented", "web", "CGPU_GRANT=../../etc/passwd", &["is no grant's name"]);
    sees(&host, "own", "web", &[&named]).ok();
    refused("late", "thief", &named, &["CGPU_GRANT names no grant of this node"]);
    // What others could have written is not believed.
    let place = host.scratch.path().join("grants");
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(place, open).unwrap();
    refused("open", "web", &named, &["grants can't be trusted: others may write to it"]);
}

#[test]
fn docker_gives_nothing_by_a_token() {
    let (host, grants) = node("open");
    grants.give(&grant(Some(3000), &[])).unwrap();
    let config = format!("--cgpu-config={}", host.config().display());
    let docker = Docker::builder().runtime(RUNTIME).runtime_arg(config).start();
    let named = token(TOKEN);
    let refused = docker.run(&["--rm", "--runtime=cgpu", "-e", &named, IMAGE, "true"]).fails();
    assert!(
        refused.stderr.contains("this container is no pod's; take the variable out"),
        "{refused}"
    );
    docker.run(&["--rm", "--runtime=cgpu", "-e", "CGPU_GRANT=", IMAGE, "true"]).ok();
}

#[test]
fn pod_without_grant_gets_what_node_configures() {
    for (ungranted, sees_first) in [("as-asked", true), ("none", false), ("whole", true)] {
        let (mut host, _grants) = node("open");
        host.set("kubernetes.ungranted", ungranted);
        let named = ["NVIDIA_VISIBLE_DEVICES=0", "CGPU_MEMORY=1GiB"];
        let outcome = sees(&host, "named", "other", &named).ok();
        let expected =
            if sees_first { "nvidia-uvm nvidia0 nvidiactl\n[GPU-a]" } else { "nvidia*\n[0]" };
        assert_eq!(outcome.text(), expected, "{ungranted}");
        let words =
            "NVIDIA_VISIBLE_DEVICES=0 gives no GPU: Kubernetes has given this container none";
        assert_eq!(host.log().contains(words), !sees_first, "{ungranted}");
        host.set("kubernetes.exempt", vec!["default".to_owned()]);
        let outcome = sees(&host, "exempt", "other", &named).ok();
        assert_eq!(outcome.text(), "nvidia-uvm nvidia0 nvidiactl\n[GPU-a]", "{ungranted}");
    }
    let (mut host, _grants) = node("open");
    host.set("kubernetes.ungranted", "refuse");
    let made = bundle(&host, "refused", "other", &["NVIDIA_VISIBLE_DEVICES=0"]);
    let words =
        ["NVIDIA_VISIBLE_DEVICES=0 names GPUs, and Kubernetes has given this container none"];
    host.was_reported(host.runtime().create(&made), &made, &words);
    // A container that names nothing starts.
    sees(&host, "plain", "other", &[]).ok();
}

#[test]
fn grant_survives_reboot_and_plugin_without_tokens() {
    let (host, grants) = node("open");
    grants.give(&grant(Some(3000), &["web"])).unwrap();
    let named = token(TOKEN);
    let runtime = host.runtime();
    let made = bundle(&host, "first", "web", &[&named]);
    runtime.create(&made).ok();
    runtime.delete(&made).ok();
    for (id, env) in [("booted", &[&*named][..]), ("untold", &[])] {
        std::fs::remove_dir_all(host.scratch.path().join("state")).unwrap();
        let made = bundle(&host, id, "web", env);
        runtime.create(&made).ok();
        assert_eq!(host.limits_mib(id), [3000], "{id}");
        runtime.delete(&made).ok();
    }
}

/// A node whose grants are gone or unreadable gives no GPU, and refuses no other container.
#[test]
fn node_without_readable_grants_gives_no_gpu() {
    let (host, _grants) = node("open");
    let place = host.scratch.path().join("grants");
    // As the chart sets it.
    let beside = host.config().with_file_name("conf.d");
    std::fs::create_dir(&beside).unwrap();
    let says = |ungranted: &str| {
        let text = format!("[kubernetes]\nungranted = {ungranted:?}\n");
        std::fs::write(beside.join("kubernetes.toml"), text).unwrap();
    };
    for readable in [true, false] {
        if !readable {
            std::fs::create_dir(&place).unwrap();
            let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
            std::fs::set_permissions(&place, open).unwrap();
        }
        says("none");
        let outcome = sees(&host, "named", "other", &["NVIDIA_VISIBLE_DEVICES=0"]).ok();
        assert_eq!(outcome.text(), "nvidia*\n[0]", "{readable}");
        for ungranted in ["none", "refuse", "whole", "as-asked"] {
            says(ungranted);
            sees(&host, "plain", "other", &["PATH=/bin"]).ok();
            let id = format!("granted-{ungranted}-{readable}");
            let made = bundle(&host, &id, "web", &[&token(TOKEN)]);
            let words = if readable { "names no grant of this node" } else { "can't be trusted" };
            host.was_reported(host.runtime().create(&made), &made, &[words]);
        }
    }
    says("whole");
    let made = bundle(&host, "whole", "other", &["NVIDIA_VISIBLE_DEVICES=0"]);
    host.was_reported(host.runtime().create(&made), &made, &["can't be trusted"]);
}
