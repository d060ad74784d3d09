use std::fs;
use std::time::Instant;

use proptest::prelude::*;

use super::fixture::{DRIVER, Host, MINIMAL, specifications, text};
use super::*;
use crate::bundle::{Bind, DeviceNode, HookStage, Mount};
use merger::Why;

const UUID_0: &str = "GPU-5c1f1a0e-3b7d-4e0a-9f7c-0000a0000000";

fn gpu(index: u32, minor: u32) -> Wanted {
    Wanted { index, uuid: format!("GPU-of-{index}"), minor, mig: None }
}

fn found(text: &str, wanted: &[Wanted], host: &Host) -> Result<CdiEdits, String> {
    specifications(&[(0, "nvidia.yaml", text)])
        .edits_for(wanted, &host.facts())
        .map(|found| found.expect("there is a specification"))
        .map_err(|error| error.to_string())
}

fn paths(devices: &[DeviceNode]) -> Vec<&str> {
    devices.iter().map(|device| device.path.as_str()).collect()
}

/// A host without specifications is distinguished from one whose files are broken.
#[test]
fn missing_specifications_differ_from_broken_files() {
    let host = Host::with(MINIMAL);
    let nothing = Specifications::load(&["/nowhere".into()], Some(Path::new("/proc/x/cdi.json")));
    assert_eq!(nothing.edits_for(&[gpu(0, 0)], &host.facts()).unwrap(), None);
    let nowhere = CdiError::NoSpecification { directories: Specifications::directories() };
    assert_eq!(
        nowhere.to_string(),
        "no CDI specification of nvidia.com/gpu in /etc/cdi or /var/run/cdi; write one: `cgpu cdi \
         generate --output /etc/cdi/nvidia.yaml` or `nvidia-ctk cdi generate \
         --output=/etc/cdi/nvidia.yaml`"
    );
    let broken = specifications(&[(0, "a.yaml", "kind: ["), (0, "b.yaml", "")]);
    let error = broken.edits_for(&[gpu(0, 0)], &host.facts()).unwrap_err().to_string();
    assert!(error.starts_with("/cdi/0/a.yaml: "), "{error}");
    assert!(
        error.ends_with(
            "; write it again: `cgpu cdi generate --output /cdi/0/a.yaml` or \
             `nvidia-ctk cdi generate --output=/cdi/0/a.yaml`"
        ),
        "{error}"
    );
}

#[test]
fn gpu_gets_common_edits_once_and_own_node() {
    let eight = text("eight-gpus.yaml");
    let host = Host::with(&eight);
    let wanted = [gpu(1, 2), Wanted { uuid: UUID_0.to_owned(), ..gpu(0, 3) }];
    let found = found(&eight, &wanted, &host).unwrap();
    assert_eq!(found.devices, ["nvidia.com/gpu=1", &format!("nvidia.com/gpu={UUID_0}")]);
    assert_eq!(found.files, [Path::new("/cdi/0/nvidia.yaml")]);
    let edits = &found.edits;
    assert_eq!(
        paths(&edits.devices),
        [
            "/dev/nvidia-modeset",
            "/dev/nvidia-uvm",
            "/dev/nvidia-uvm-tools",
            "/dev/nvidiactl",
            "/dev/nvidia2",
            "/dev/nvidia3"
        ]
    );
    assert_eq!(edits.devices[1], DeviceNode::new("/dev/nvidia-uvm".into(), 510, 0));
    // `NVIDIA_VISIBLE_DEVICES=void` is not among them.
    let env = ("NVIDIA_CTK_LIBCUDA_DIR".to_owned(), "/usr/lib/x86_64-linux-gnu".to_owned());
    assert_eq!(edits.env, [env]);
    // Of the sixty, the MPS daemon's directory is no container's under a quota.
    assert_eq!((edits.mounts.len(), edits.driver_hooks.len()), (59, 4));
    assert!(found.left_out.iter().any(|left| left.why == Why::Mps), "{:?}", found.left_out);
    let library = format!("/usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER}");
    assert_eq!(
        edits.mounts[0],
        Mount {
            source: library.clone(),
            destination: library,
            kind: String::new(),
            options: merger::MOUNT_OPTIONS.map(String::from).to_vec(),
        }
    );
    assert!(edits.hooks.is_empty() && edits.withheld.is_empty() && edits.binds.is_empty());
    // The nodes of nvidia-drm, of two GPUs, and the MPS daemon's directory.
    assert_eq!(found.left_out.len(), 5);
    let drm = found.left_out.iter().find(|left| left.why == Why::Drm);
    assert_eq!(
        drm.unwrap().to_string(),
        "/dev/dri/card2 of /cdi/0/nvidia.yaml is left out: memory of nvidia-drm is not under a quota"
    );
}

#[test]
fn nodes_of_other_gpus_never_come_along() {
    let everybody = text("gpus-for-everybody.yaml");
    let host = Host::with(
        &everybody
            .replace("hostPath: /dev/nvidia1", "hostPath: /gpu")
            .replace("hostPath: /dev\n", "hostPath: /x\n"),
    );
    let both = found(&everybody, &[gpu(0, 0), gpu(1, 1)], &host).unwrap();
    assert_eq!(
        paths(&both.edits.devices),
        ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/other"]
    );
    let one = found(&everybody, &[gpu(0, 0)], &host).unwrap();
    assert_eq!(paths(&one.edits.devices), ["/dev/nvidia0", "/dev/nvidiactl"]);
    assert!(one.edits.mounts.is_empty());
    let left_out: Vec<_> = one.left_out.iter().map(|it| (it.path.as_str(), it.why)).collect();
    let other = Why::OtherGpu;
    assert_eq!(left_out, [("/dev/nvidia1", other), ("/dev/other", other), ("/dev", Why::Devices)]);
    // What a node is shows in its number, too, once it is inspected.
    let hidden = MINIMAL.replace("env: [A=b]", "deviceNodes: [{path: /dev/other}]");
    host.node("/dev/other", (195, 1));
    let found = found(&hidden, &[gpu(0, 0)], &host).unwrap();
    assert_eq!(paths(&found.edits.devices), ["/dev/nvidia0"]);
    assert_eq!((found.left_out[0].path.as_str(), found.left_out[0].why), ("/dev/other", other));
}

#[test]
fn mig_device_brings_its_instances_and_its_gpu() {
    let mig = text("mig.yaml");
    let host = Host::with(&mig);
    let part = Some(WantedMig { index: 1, uuid: "MIG-new".into() });
    let found = found(&mig, &[Wanted { mig: part, ..gpu(0, 0) }], &host).unwrap();
    assert_eq!(found.devices, ["nvidia.com/gpu=0:1"]);
    assert_eq!(
        paths(&found.edits.devices)[4..],
        ["/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap30", "/dev/nvidia-caps/nvidia-cap31"]
    );
}

#[test]
fn a_hook_has_an_environment_of_its_own() {
    let hooks = text("hooks.yaml");
    let host = Host::with(&hooks);
    let edits = found(&hooks, &[gpu(0, 0)], &host).unwrap().edits;
    let path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
    let envs: Vec<_> = edits.driver_hooks.iter().map(|hook| hook.env.join(" ")).collect();
    assert_eq!(envs, [path, &format!("NVIDIA_CTK_DEBUG=false {path}"), "PATH=/opt/bin"]);
    let first = &edits.driver_hooks[0];
    assert_eq!(
        (first.stage, first.args.join(" ")),
        (HookStage::CreateRuntime, "/usr/bin/true".into())
    );
    assert_eq!(edits.driver_hooks[1].timeout_s, Some(5));
    assert_eq!(edits.gids, [44]);
    assert_eq!(edits.mounts[0].options, merger::MOUNT_OPTIONS);
    let of_a_socket = ["nosuid", "nodev", "rbind", "rprivate", "noexec", "ro"];
    assert_eq!(edits.mounts[1].options, of_a_socket);
}

#[test]
fn later_edits_replace_earlier_ones() {
    let text = MINIMAL
        .replace("env: [A=b]", "env: [A=b, B=c]\n  mounts: [{hostPath: /a, containerPath: /x/../y, options: [ro]}, {hostPath: /b, containerPath: /y, options: [ro, bind], type: none}]")
        .replace("{deviceNodes:", "{env: [A=d], mounts: [{hostPath: /c, containerPath: /z}], deviceNodes:");
    let host = Host::with(&text);
    let edits = found(&text, &[gpu(0, 0)], &host).unwrap().edits;
    let variable = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    assert_eq!(edits.env, [variable("A", "d"), variable("B", "c")]);
    let sources: Vec<_> =
        edits.mounts.iter().map(|it| (it.source.as_str(), it.kind.as_str())).collect();
    assert_eq!(sources, [("/b", "none"), ("/c", "")]);
}

/// What is stale is reported with file, path and remedy.
#[test]
fn stale_specification_error_names_path_and_remedy() {
    let again = "; write it again: `cgpu cdi generate --output /cdi/0/nvidia.yaml` or \
                 `nvidia-ctk cdi generate --output=/cdi/0/nvidia.yaml`";
    let fits = text("eight-gpus.yaml");
    let host = Host::with(&fits);
    let reported = |name: &str, expected: &str| {
        let error = found(&text(name), &[gpu(0, 0)], &host).unwrap_err();
        assert_eq!(error, format!("/cdi/0/nvidia.yaml {expected}{again}"));
    };
    reported(
        "wrong-uvm-major.yaml",
        "says that /dev/nvidia-uvm is 506:0, and it is 510:0 since the driver was loaded (and 1 more of the kind)",
    );
    reported(
        "other-driver.yaml",
        "is for driver 525.60.13 (it names /usr/lib/x86_64-linux-gnu/libcuda.so.525.60.13), and 535.247.01 is running (and 2 more of the kind)",
    );
    host.remove("/usr/lib/x86_64-linux-gnu/libcuda.so.535.247.01");
    reported(
        "one-gpu.yaml",
        "names /usr/lib/x86_64-linux-gnu/libcuda.so.535.247.01, and there is no such file",
    );
    host.remove("/dev/nvidia-uvm");
    reported(
        "one-gpu.yaml",
        "names /dev/nvidia-uvm, and there is no such node; load the driver (`nvidia-modprobe -u -c=0`) (and 1 more of the kind)",
    );
    host.remove("/dev/nvidia-modeset");
    let error = found(&text("one-gpu.yaml"), &[gpu(0, 0)], &host).unwrap_err();
    assert!(error.contains("names /dev/nvidia-modeset, and there is no such node; load the driver (`nvidia-modprobe -m`)"), "{error}");
    host.node("/dev/nvidia-modeset", (195, 254));
    host.remove("/usr/bin/nvidia-cdi-hook");
    host.node("/dev/nvidia-uvm", (510, 0));
    let error = found(&text("hooks.yaml"), &[gpu(0, 0)], &host).unwrap_err();
    assert!(error.contains("(and 2 more of the kind)"), "{error}");
}

#[test]
fn missing_gpu_error_lists_available_devices() {
    let one = text("one-gpu.yaml");
    let host = Host::with(&one);
    let files = [(0, "nvidia.yaml", one.as_str()), (1, "x.yaml", "kind: [")];
    let error = specifications(&files).edits_for(&[gpu(0, 0), gpu(3, 3)], &host.facts());
    let error = error.unwrap_err().to_string();
    let begin = "no CDI device nvidia.com/gpu is GPU 3 (GPU-of-3) (there are 0, all); \
                 /cdi/1/x.yaml can't be used: ";
    assert!(error.starts_with(begin), "{error}");
    assert!(error.contains("`cgpu cdi generate --output /cdi/0/nvidia.yaml`"), "{error}");
    // A broken file is no matter where another gives the device.
    assert!(specifications(&files).edits_for(&[gpu(0, 0)], &host.facts()).is_ok());
}

#[test]
fn what_we_cannot_do_refuses_the_specification() {
    let host = Host::with(MINIMAL);
    for (edits, what) in [
        ("deviceNodes: [{path: /dev/sda, type: b}]", "/dev/sda, which is no character device"),
        ("intelRdt: {closID: x}", "intelRdt"),
        (
            "mounts: [{hostPath: devtmpfs, containerPath: /d, type: devtmpfs}]",
            "a mount of type devtmpfs at /d",
        ),
        ("netDevices: [{hostInterfaceName: ib0, name: ib0}]", "network interface ib0"),
    ] {
        let text = MINIMAL.replace("env: [A=b]", edits).replace("0.5.0", "1.1.0");
        let error = found(&text, &[gpu(0, 0)], &host).unwrap_err();
        assert_eq!(error, format!("/cdi/0/nvidia.yaml asks for {what}, which cgpu cannot give"));
    }
    let text = MINIMAL.replace("{path: /dev/nvidia0}", "{path: /x, major: 195}, {path: /x}");
    let error = found(&text, &[gpu(0, 0)], &host).unwrap_err();
    assert!(error.contains("asks for two nodes at one path"), "{error}");
    host.file("/dev/disk");
    let text = MINIMAL.replace("env: [A=b]", "deviceNodes: [{path: /dev/disk, major: 8}]");
    let error = found(&text, &[gpu(0, 0)], &host).unwrap_err();
    assert!(error.contains("names /dev/disk, which is no character device"), "{error}");
}

#[test]
fn driver_served_as_files_is_mounted() {
    let host = Host::with(MINIMAL);
    host.remove("/dev/nvidia0");
    host.file("/dev/nvidia0");
    let edits = found(MINIMAL, &[gpu(0, 0)], &host).unwrap().edits;
    let bind = Bind { source: "/dev/nvidia0".into(), destination: "/dev/nvidia0".into() };
    assert_eq!((edits.devices, edits.binds), (vec![], vec![bind]));
}

/// Owner and mode are the specification's if it sets them, and else the node's.
#[test]
fn owner_and_mode_of_specification_override_the_nodes() {
    let host = Host::with(MINIMAL);
    let device = |text: &str| found(text, &[gpu(0, 0)], &host).unwrap().edits.devices.remove(0);
    let plain = device(MINIMAL);
    assert_eq!((plain.mode, plain.uid, plain.gid), (0o644, 0, 0));
    let stated = MINIMAL.replace(
        "path: /dev/nvidia0",
        "path: /dev/nvidia0, type: u, fileMode: 0660, uid: 7, gid: 44",
    );
    let stated = device(&stated);
    assert_eq!((stated.mode, stated.uid, stated.gid), (0o660, 7, 44));
}

#[test]
fn the_version_of_the_driver_is_the_kernels() {
    let proc = tempfile::tempdir().unwrap();
    assert_eq!(HostFacts::read(proc.path()).driver, None);
    fs::create_dir_all(proc.path().join("driver/nvidia")).unwrap();
    let banner = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.247.01  Thu Oct 19\nGCC 12\n";
    fs::write(proc.path().join("driver/nvidia/version"), banner).unwrap();
    assert_eq!(HostFacts::read(proc.path()).driver, DRIVER.parse().ok());
    assert_eq!(HostFacts::read(proc.path()).root, Path::new("/"));
}

#[test]
fn every_device_is_listed_with_its_state() {
    let (one, again, stale) =
        (text("one-gpu.yaml"), text("conflicting.yaml"), text("wrong-uvm-major.yaml"));
    let host = Host::with(&one);
    host.file(&format!("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.{DRIVER}"));
    host.file("/usr/bin/nvidia-smi");
    host.file("/usr/bin/nvidia-cdi-hook");
    let files = [(0, "a", one.as_str()), (0, "b", again.as_str()), (1, "c", stale.as_str())];
    let listed = specifications(&files).devices(&host.facts());
    let states: Vec<_> = listed.iter().map(|it| (it.name.as_str(), &it.state)).collect();
    let c = PathBuf::from("/cdi/1/c");
    assert_eq!(states[0], ("nvidia.com/gpu=0", &State::Overridden(c.clone())));
    assert_eq!(states[1], ("nvidia.com/gpu=all", &State::Overridden(c)));
    let State::Stale(why) = states[3].1 else { panic!("{states:?}") };
    assert!(why.starts_with("/cdi/1/c says that /dev/nvidia-uvm is 506:0"), "{why}");
    let listed = specifications(&files[..2]).devices(&host.facts());
    assert_eq!(listed[0].state, State::Conflict("/cdi/0/b".into()));
    assert_eq!(listed[1].state, State::Ok);
    assert_eq!(listed[2].state, State::Conflict("/cdi/0/a".into()));
}

/// Specifications are cached, and read again if their files change.
#[test]
fn specifications_are_cached_until_their_files_change() {
    let place = tempfile::tempdir().unwrap();
    let (etc, cache) = (place.path().join("cdi"), place.path().join("state/cdi.json"));
    fs::create_dir(&etc).unwrap();
    let load = || Specifications::load(std::slice::from_ref(&etc), Some(&cache));
    assert_eq!(load(), Specifications::default());
    assert!(!cache.exists(), "there is nothing to keep");
    fs::write(etc.join("nvidia.yaml"), text("eight-gpus.yaml")).unwrap();
    let read = load();
    assert!(cache.exists());
    assert_eq!(load(), read);
    // It is the cache that is read: of that file, a lie.
    let lie = fs::read_to_string(&cache).unwrap().replace("/dev/nvidia3", "/dev/nvidia4");
    fs::write(&cache, lie).unwrap();
    assert_ne!(load(), read);
    fs::write(etc.join("nvidia.yaml"), text("one-gpu.yaml")).unwrap();
    assert_eq!(load().devices(&Host::with(MINIMAL).facts()).len(), 2);
    // Without a place to keep them they are read all the same.
    let unkept =
        Specifications::load(std::slice::from_ref(&etc), Some(Path::new("/proc/nowhere/cdi.json")));
    assert_eq!(unkept, load());
}

fn any_node() -> impl Strategy<Value = String> {
    let path = prop_oneof![
        (0..4_u8).prop_map(|minor| format!("/dev/nvidia{minor}")),
        Just("/dev/nvidiactl".to_owned()),
        Just("/dev/dri/card0".to_owned()),
        Just("/dev/nvidia-caps/nvidia-cap1".to_owned()),
        Just("/dev/other".to_owned()),
    ];
    (path.clone(), proptest::option::of(path), proptest::option::of(0..4_u8)).prop_map(
        |(path, host, minor)| {
            let host = host.map(|host| format!(", hostPath: {host}")).unwrap_or_default();
            let minor =
                minor.map(|minor| format!(", major: 195, minor: {minor}")).unwrap_or_default();
            format!("{{path: {path}{host}{minor}}}")
        },
    )
}

proptest! {
    /// Whatever a specification says, a container gets no node of a GPU that it may not have.
    #[test]
    fn no_specification_gives_away_another_gpu(
        common in proptest::collection::vec(any_node(), 0..5),
        own in proptest::collection::vec(any_node(), 1..4),
        name in prop_oneof!["[0-3]", Just("all".to_owned()), Just("GPU-of-0".to_owned())],
        minor in 0..4_u32,
        hidden in 0..4_u64,
    ) {
        let text = format!(
            "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ncontainerEdits: {{deviceNodes: [{}]}}\n\
             devices: [{{name: \"{name}\", containerEdits: {{deviceNodes: [{}]}}}}]\n",
            common.join(", "), own.join(", ")
        );
        let host = Host::with(MINIMAL);
        for minor in 0..4 {
            host.node(&format!("/dev/nvidia{minor}"), (195, minor));
        }
        host.node("/dev/nvidiactl", (195, 255));
        host.node("/dev/dri/card0", (226, 0));
        host.node("/dev/nvidia-caps/nvidia-cap1", (235, 1));
        host.node("/dev/other", (195, hidden));
        if let Ok(found) = found(&text, &[gpu(0, minor)], &host) {
            for device in &found.edits.devices {
                prop_assert!(device.major != 226, "{text}: {device:?}");
                let other = device.major == 195 && device.minor < 254 && device.minor != i64::from(minor);
                prop_assert!(!other, "{text}: {device:?}");
                let named = device.path.strip_prefix("/dev/nvidia").and_then(|it| it.parse().ok());
                prop_assert!(named.is_none_or(|named: u32| named == minor), "{text}: {device:?}");
            }
            prop_assert!(found.edits.devices.iter().any(|it| it.minor == i64::from(minor)), "{text}");
        }
    }
}

/// Not a test: what a container creation pays, of a specification of eight GPUs and sixty mounts.
#[test]
#[ignore = "prints figures; run it by --release"]
fn cost() {
    let eight = text("eight-gpus.yaml");
    let host = Host::with(&eight);
    let place = tempfile::tempdir().unwrap();
    let (etc, cache) = (place.path().join("cdi"), place.path().join("state/cdi.json"));
    fs::create_dir(&etc).unwrap();
    fs::write(etc.join("nvidia.yaml"), eight).unwrap();
    let directories = [etc, place.path().join("nowhere")];
    let median = |what: &str, of: &mut dyn FnMut()| {
        let mut times: Vec<_> = (0..301)
            .map(|_| {
                let begun = Instant::now();
                of();
                begun.elapsed()
            })
            .collect();
        times.sort_unstable();
        println!("{what}: median {:?}, least {:?}", times[150], times[0]);
    };
    let wanted = [gpu(0, 3)];
    median("parse the YAML", &mut || drop(Specifications::load(&directories, None)));
    drop(Specifications::load(&directories, Some(&cache)));
    median("read the cache", &mut || drop(Specifications::load(&directories, Some(&cache))));
    let specifications = Specifications::load(&directories, Some(&cache));
    let facts = host.facts();
    median("choose, look, merge", &mut || {
        drop(specifications.edits_for(&wanted, &facts).unwrap());
    });
    median("all of a create's", &mut || {
        let specifications = Specifications::load(&directories, Some(&cache));
        drop(specifications.edits_for(&wanted, &facts).unwrap());
    });
    println!("cache: {} bytes", fs::metadata(&cache).unwrap().len());
}
