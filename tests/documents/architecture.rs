//! Architecture rules that a compiler doesn't know: what the pure modules must not import, and
//! how thin the programs are.

use std::fs;
use std::path::{Path, PathBuf};

/// Files and directories that decide and touch nothing.
const PURE: &[&str] = &[
    "crates/cgpu-monitor/src/gate/profile.rs",
    "crates/cgpu-monitor/src/gate/traps.rs",
    "crates/cgpu-monitor/src/snapshot/mod.rs",
    "crates/cgpu-monitor/src/snapshot/record.rs",
    "crates/cgpu-monitor/src/decide",
    "crates/cgpu-monitor/src/audit/judge.rs",
    "crates/cgpu-monitor/src/gate/syscall.rs",
    "crates/cgpu-monitor/src/state/channels.rs",
    "crates/cgpu-monitor/src/state/container_state.rs",
    "crates/cgpu-monitor/src/uvm/vma_list.rs",
    "crates/cgpu-monitor/src/state/groups.rs",
    "crates/cgpu-monitor/src/state/creators.rs",
    "crates/cgpu-monitor/src/processes/provenance.rs",
    "crates/cgpu-monitor/src/processes/holder.rs",
    "crates/cgpu-inject/src/bundle/edit.rs",
    "crates/cgpu-inject/src/bundle/plan_edits.rs",
    "crates/cgpu-inject/src/bundle/devices.rs",
    "crates/cgpu-inject/src/bundle/shape.rs",
    "crates/cgpu-inject/src/bundle/json_splice.rs",
    "crates/cgpu-inject/src/requirements.rs",
    "crates/cgpu-inject/src/catalogue.rs",
    "crates/cgpu-inject/src/device_numbers.rs",
    "crates/cgpu-inject/src/mounts.rs",
    "crates/cgpu-inject/src/path_variables.rs",
    "crates/cgpu-cli/src/doctor/facts.rs",
    "crates/cgpu-cli/src/engines/config_text",
    "crates/cgpu-cli/src/engines/containerd/cri_table.rs",
    "crates/cgpu-cli/src/engines/containerd/merged_config.rs",
    "crates/cgpu-cli/src/engines/containerd/release.rs",
    "crates/cgpu-cli/src/engines/containerd/runtimes.rs",
    "crates/cgpu-cli/src/engines/crio.rs",
    "crates/cgpu-cli/src/engines/distributions/mod.rs",
    "crates/cgpu-cli/src/engines/distributions/template.rs",
    "crates/cgpu-cli/src/engines/docker/daemon_json.rs",
    "crates/cgpu-cli/src/engines/docker/mod.rs",
    "crates/cgpu-cli/src/engines/hooks.rs",
    "crates/cgpu-cli/src/engines/named_runtime.rs",
    "crates/cgpu-cli/src/engines/plan/target.rs",
    "crates/cgpu-cli/src/engines/podman.rs",
    "crates/cgpu-cli/src/engines/runtime_name.rs",
    "crates/cgpu-cli/src/engines/runtime_syntax.rs",
    "crates/cgpu-cli/src/engines/toml_style.rs",
    "crates/cgpu-cli/src/engines/toml_tables.rs",
    "crates/cgpu-cli/src/engines/toml_values.rs",
    "crates/cgpu-cli/src/doctor/judge.rs",
    "crates/cgpu-cli/src/doctor/judge",
    "crates/cgpu-inject/src/driver.rs",
    "crates/cgpu-inject/src/cdi/spec.rs",
    "crates/cgpu-inject/src/cdi/validation.rs",
    "crates/cgpu-inject/src/cdi/parser.rs",
    "crates/cgpu-inject/src/cdi/node_kind.rs",
    "crates/cgpu-inject/src/cdi/device_choice.rs",
    "crates/cgpu-inject/src/cdi/merger.rs",
    "crates/cgpu-inject/src/cdi/generator.rs",
    "crates/cgpu-inject/src/cdi/yaml.rs",
    "crates/cgpu-host/src/events/bucket.rs",
    "crates/cgpu-host/src/events/cause.rs",
    "crates/cgpu-host/src/events/event.rs",
    "crates/cgpu-host/src/events/filter.rs",
    "crates/cgpu-host/src/registry/index.rs",
    "crates/cgpu-host/src/registry/record.rs",
    "src/runtime/argv.rs",
    "src/backend/km/meminfo.rs",
    "crates/cgpu-cli/src/view/mod.rs",
    "crates/cgpu-cli/src/view/assembly.rs",
    "crates/cgpu-smi/src/cells.rs",
    "crates/cgpu-smi/src/gpu_choice.rs",
    "crates/cgpu-smi/src/history.rs",
    "crates/cgpu-smi/src/query.rs",
    "crates/cgpu-smi/src/sheet",
    "crates/cgpu-smi/src/watch/state.rs",
    "crates/cgpu-kubelet/src/api.rs",
    "crates/cgpu-k8s/src/pod_request.rs",
    "crates/cgpu-k8s/src/environment.rs",
    "crates/cgpu-k8s/src/extender/choice.rs",
    "crates/cgpu-k8s/src/extender/fleet.rs",
    "crates/cgpu-k8s/src/extender/protocol.rs",
    "crates/cgpu-k8s/src/inspect.rs",
    "crates/cgpu-k8s/src/node.rs",
    "crates/cgpu-k8s/src/placement.rs",
    "crates/cgpu-k8s/src/pods.rs",
    "crates/cgpu-k8s/src/units.rs",
    "crates/cgpu-k8s/src/gpu_modes.rs",
    "crates/cgpu-k8s/src/annotations.rs",
    "crates/cgpu-k8s/src/xid.rs",
    "crates/cgpu-metrics/src/creations.rs",
    "crates/cgpu-metrics/src/exposition.rs",
    "crates/cgpu-metrics/src/pods.rs",
    "crates/cgpu-tree/src/node.rs",
    "crates/cgpu-tree/src/numbers.rs",
    "crates/cgpu-tree/src/write_request.rs",
];

/// What would make them impure.
const IMPURE: &[&str] = &[
    "std::fs",
    "std::io",
    "std::process",
    "std::env",
    "std::time",
    "std::net",
    "use nix::",
    "use rustix::",
    "use libc::",
    "procfs::",
    "tracing::",
    "tempfile::",
    "crate::shared",
];

fn sources(path: &Path) -> Vec<PathBuf> {
    if path.is_file() {
        return vec![path.to_owned()];
    }
    let entries = fs::read_dir(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    entries.flat_map(|entry| sources(&entry.expect("a directory can be read").path())).collect()
}

/// The code of a file without its tests and comments.
fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).expect("sources are text");
    let end = text.find("#[cfg(test)]").unwrap_or(text.len());
    let lines = text[..end].lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

fn is_tests(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name == "tests.rs")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

#[test]
fn pure_modules_import_no_impure_interfaces() {
    for module in PURE {
        let files = sources(&root().join(module));
        for file in files.into_iter().filter(|file| !is_tests(file)) {
            let code = code(&file);
            for edge in IMPURE {
                assert!(!code.contains(edge), "{} uses {edge}", file.display());
            }
        }
    }
}

/// NVML can hang with the driver, and the others are large.
#[test]
fn what_engines_start_links_no_heavy_library() {
    let heavy = ["nvml-wrapper", "libloading", "fuser", "tokio", "hyper", "tonic", "ratatui"];
    let below = ["cgpu-monitor", "cgpu-inject", "cgpu-host", "cgpu-core", "nvrm"];
    let manifests = below.map(|name| format!("crates/{name}/Cargo.toml"));
    for manifest in manifests.iter().map(String::as_str).chain(["Cargo.toml"]) {
        let text = fs::read_to_string(root().join(manifest)).expect("it is text");
        let (_, rest) = text.split_once("[dependencies]\n").expect("it has dependencies");
        let lines = rest.lines().take_while(|line| !line.starts_with('['));
        let names = lines.filter_map(|line| Some(line.split_once(" = ")?.0));
        let ours: Vec<_> = names.clone().filter(|name| name.starts_with("cgpu")).collect();
        assert!(ours.iter().all(|name| below.contains(name)), "{manifest}: {ours:?}");
        names.for_each(|name| assert!(!heavy.contains(&name), "{manifest} has {name}"));
    }
}

#[test]
fn programs_are_under_sixty_lines() {
    for file in sources(&root().join("src/bin")) {
        let lines = fs::read_to_string(&file).expect("sources are text").lines().count();
        assert!(lines < 60, "{} has {lines} lines", file.display());
    }
}

#[test]
fn every_module_says_what_it_is_for() {
    let crates = fs::read_dir(root().join("crates")).expect("it can be read");
    let crates = crates.map(|one| one.expect("it can be read").path().join("src"));
    for file in crates.chain([root().join("src")]).flat_map(|of| sources(&of)) {
        let text = fs::read_to_string(&file).expect("sources are text");
        assert!(is_tests(&file) || text.starts_with("//! "), "{} has no //!", file.display());
    }
}

#[test]
fn shipped_hooks_have_environment_and_absolute_paths() {
    let files = sources(&root().join("hooks"));
    let hooks = files.iter().filter(|file| file.extension().is_some_and(|ending| ending == "json"));
    assert_eq!(hooks.clone().count(), 3);
    for file in hooks {
        let text = fs::read_to_string(file).expect("it is text");
        let hook: serde_json::Value = serde_json::from_str(&text).expect("it is JSON");
        assert!(hook["hook"]["path"].as_str().is_some_and(|path| path.starts_with('/')));
        assert!(hook["hook"]["env"].as_array().is_some_and(|env| !env.is_empty()));
        let stage = hook["stages"][0].as_str().expect("it has a stage");
        assert_eq!(hook["hook"]["args"][1], stage);
    }
}
