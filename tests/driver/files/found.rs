//! Whether images of every kind find the driver, of hosts of every kind.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// Whether a program is there in which `sh -c` runs what the test asks.
const WITH_SHELL: [Userland; 4] =
    [Userland::Debian11, Userland::Debian12, Userland::Debian13, Userland::Linked];

#[test]
fn every_userland_with_a_glibc_finds_the_driver() {
    let host = DriverHost::new();
    for userland in Userland::GLIBC {
        for search in [Search::Usual, Search::NoCache, Search::Cache, Search::Variable] {
            println!("{userland:?} {search:?}");
            let image = host.image(userland, search);
            host.lacks_only_the_kernel(&image);
            let own = ["/probe", crate::support::userland::OWN_LIBRARY, "app"];
            match search {
                Search::Cache | Search::Variable => {
                    let outcome = host.run(&image, &own).ok();
                    assert_eq!(outcome.stdout.lines().nth(1), Some("7"), "{outcome}");
                }
                Search::Usual | Search::NoCache => drop(host.run(&image, &own).exits(NOT_LOADED)),
            }
        }
    }
}

#[test]
fn without_injection_nothing_is_found() {
    let mut host = DriverHost::new();
    host.host.set("driver.inject", "off");
    for userland in Userland::GLIBC {
        let image = host.image(userland, Search::Usual);
        host.run(&image, &["/probe", "libcuda.so.1"]).exits(NOT_LOADED);
        let outcome = host.run(&image, &["nvidia-smi"]).exits(1);
        assert!(outcome.stderr.contains("executable file not found"), "{outcome}");
    }
}

/// The linker finds the driver without variables, and from any process of the container.
#[test]
fn linker_finds_driver_without_environment_variables() {
    let host = DriverHost::new();
    for userland in Userland::GLIBC {
        let image = host.image(userland, Search::Usual);
        // As sshd, su and setuid programs start theirs.
        let bundle = host.bundle(&image, &["/probe", "libcuda.so.1", "cuInit"]);
        let runtime = host.host.runtime();
        let edited = runtime.create(&bundle).ok();
        drop(edited);
        runtime.delete(&bundle).ok();
        let mut config = bundle.config();
        let env = config["process"]["env"].as_array_mut().unwrap();
        env.retain(|item| !item.as_str().unwrap().starts_with("LD_LIBRARY_PATH"));
        println!("{userland:?}");
        // The real runtime alone, with all that was mounted.
        config.as_object_mut().unwrap().remove("hooks");
        bundle.write_config(&config);
        let outcome = host.host.scratch.runc().run(&bundle).ok();
        let found = outcome.stdout.lines().next().unwrap();
        let below = match userland {
            Userland::Debian11 => "/tls/libcuda.so.1",
            _ => "/glibc-hwcaps/x86-64-v2/libcuda.so.1",
        };
        assert!(found.ends_with(below), "{userland:?}: {found}");
        assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
    }
}

#[test]
fn every_layout_of_a_host_is_found() {
    for layout in Layout::ALL {
        println!("{layout:?}");
        let host = DriverHost::with(&layout.root());
        let image = host.image(Userland::Distroless, Search::Usual);
        host.lacks_only_the_kernel(&image);
        for library in ["libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libcuda.so"] {
            let outcome = host.run(&image, &["/probe", library]).ok();
            assert!(outcome.stdout.contains(library), "{outcome}");
        }
    }
}

/// A container that is recreated from the same root finds the driver again.
#[test]
fn recreated_container_finds_driver_again() {
    let host = DriverHost::new();
    for userland in Userland::GLIBC.into_iter().chain([Userland::Musl]) {
        let image = host.image(userland, Search::Usual);
        let run = || host.run(&image, &["/probe", "libcuda.so.1"]);
        let (first, second) = (run(), run());
        assert_eq!(first.status, second.status, "{userland:?}: {second}");
        assert_eq!((first.stdout, first.stderr), (second.stdout, second.stderr));
    }
}

#[test]
fn a_read_only_root_is_no_hindrance() {
    let host = DriverHost::new();
    for userland in WITH_SHELL {
        let image = host.image(userland, Search::Usual);
        let bundle = host.bundle_with(&image, &["/probe", "libcuda.so.1", "cuInit"], |config| {
            config["root"]["readonly"] = json!(true);
        });
        let outcome = host.host.runtime().run(&bundle).ok();
        assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
    }
}

#[test]
fn musl_finds_what_only_another_linker_can_load() {
    let host = DriverHost::new();
    for search in [Search::Usual, Search::Cache, Search::Variable] {
        let image = host.image(Userland::Musl, search);
        let outcome = host.run(&image, &["/probe", "libcuda.so.1"]).exits(NOT_LOADED);
        assert!(outcome.stderr.contains("libcuda.so.1: __register_atfork"), "{outcome}");
        // What the image finds by itself it finds as before.
        let outcome = host.run(&image, &["/probe", crate::support::userland::OWN_LIBRARY, "app"]);
        match search {
            Search::Cache | Search::Variable => {
                assert_eq!(outcome.ok().stdout.lines().nth(1), Some("7"));
            }
            Search::Usual | Search::NoCache => drop(outcome.exits(NOT_LOADED)),
        }
    }
}

#[test]
fn image_without_linker_runs_with_driver_files() {
    let host = DriverHost::new();
    let image = host.image(Userland::Static, Search::Usual);
    let shown = ["busybox", "ls", "/usr/local/nvidia/lib64/libcuda.so.1", "/usr/bin/nvidia-smi"];
    host.run(&image, &shown).ok();
}

/// A container gets the driver's files for the capabilities that it asks for, and no more.
#[test]
fn container_gets_only_the_capabilities_it_requests() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let has = |capabilities: &str, library: &str| {
        let bundle = host.bundle_with(&image, &["/probe", library], |config| {
            set_env(config, "NVIDIA_DRIVER_CAPABILITIES", capabilities);
        });
        host.host.runtime().run(&bundle).status.success()
    };
    for (capabilities, library, there) in [
        ("", "libcuda.so.1", true),
        ("", "libnvidia-ml.so.1", true),
        ("", "libnvidia-encode.so.1", false),
        ("utility", "libcuda.so.1", false),
        ("utility", "libnvidia-ml.so.1", true),
        ("compute,video", "libnvidia-encode.so.1", true),
        ("compute,video", "libnvidia-ml.so.1", false),
        ("all", "libnvidia-eglcore.so.{version}", true),
        ("all", "libnvidia-encode.so.1", true),
    ] {
        let library = library.replace("{version}", &driver::version());
        assert_eq!(has(capabilities, &library), there, "{capabilities} {library}");
    }
    let bundle = host.bundle_with(&image, &["true"], |config| {
        set_env(config, "NVIDIA_DRIVER_CAPABILITIES", "compute,everything");
    });
    let outcome = host.host.runtime().run(&bundle).exits(1);
    assert!(outcome.stderr.contains("\"everything\" is no capability"), "{outcome}");
    assert!(host.host.records().is_empty());
}

/// What is mounted of the driver can be neither written to nor left behind: only mount points stay
/// in the image.
#[test]
fn read_only_driver_mounts_leave_only_mount_points() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let tried = "for file in /usr/local/nvidia/lib64/* /usr/local/nvidia/bin/* \
                 /usr/local/nvidia /usr/bin/nvidia-smi /usr/lib/*/glibc-hwcaps/*/* \
                 /usr/lib/*/glibc-hwcaps/* /etc/OpenCL/vendors/nvidia.icd \
                 /lib/firmware/nvidia/*; do \
                   if (echo >> $file) 2>/dev/null || touch $file/x 2>/dev/null; then \
                     echo written: $file; fi; done; \
                 awk '$2 ~ /nvidia|hwcaps/ && $2 !~ /^.dev/ { n++; \
                      if ($4 !~ /^ro,nosuid,nodev/) print }; END { print n }' /proc/self/mounts";
    let outcome = host.run(&image, &["sh", "-c", tried]);
    let mounted: u32 = outcome.text().parse().unwrap_or_else(|_| panic!("{outcome}"));
    assert!(mounted > 20, "{outcome}");
    // What would be committed of the container: mount points, one of them an empty file.
    let upper = PathBuf::from(format!("{}.upper", image.path.display()));
    let mut left = Vec::new();
    files(&upper, &mut left);
    let left: Vec<_> = left.iter().map(|path| path.strip_prefix(&upper).unwrap()).collect();
    let of_the_driver = |path: &&&Path| path.to_string_lossy().contains("nvidia");
    let left: Vec<_> = left.iter().filter(of_the_driver).collect();
    let expected: [&Path; 2] =
        ["etc/OpenCL/vendors/nvidia.icd".as_ref(), "usr/bin/nvidia-smi".as_ref()];
    assert!(left.iter().all(|path| expected.contains(path)), "{left:?}");
}

/// All files below a directory.
fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => files(&entry.path(), found),
            false => found.push(entry.path()),
        }
    }
}

/// Firmware and what the kernel reports of the GPUs come along, and the daemon's socket if there is
/// no quota.
#[test]
fn firmware_is_injected_and_sockets_without_a_quota() {
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Ubuntu.install(&scratch, "driver");
    let host = DriverHost::with(installed.root());
    let image = host.image(Userland::Debian12, Search::Usual);
    let daemon = installed.root().join("run/nvidia-persistenced/socket");
    let bundle = |host: &DriverHost| {
        let bundle = host.bundle(&image, &["true"]);
        host.host.runtime().run(&bundle).ok();
        bundle
    };
    let has = |bundle: &Bundle, path: &str| mounts(bundle).iter().any(|(to, _)| to == path);
    let before = bundle(&host);
    assert!(!has(&before, "/run/nvidia-persistenced/socket"));
    let firmware = format!("/lib/firmware/nvidia/{}", driver::version());
    assert!(has(&before, &firmware), "{:?}", mounts(&before));
    assert!(has(&before, "/etc/OpenCL/vendors/nvidia.icd"));

    // A daemon comes and goes, whatever was found before. It obeys every caller, for any GPU.
    let whole = || {
        let bundle = host.whole(&image, &["true"], |_| {});
        host.host.runtime().run(&bundle).ok();
        bundle
    };
    std::fs::create_dir_all(daemon.parent().unwrap()).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(&daemon).unwrap();
    assert!(!has(&bundle(&host), "/run/nvidia-persistenced/socket"), "it has a quota");
    assert!(has(&whole(), "/run/nvidia-persistenced/socket"));
    drop(listener);
    std::fs::remove_file(&daemon).unwrap();
    assert!(!has(&whole(), "/run/nvidia-persistenced/socket"));

    let masked = before.config()["linux"]["maskedPaths"].clone();
    let masked: Vec<_> = masked.as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert!(masked.contains(&"/proc/driver/nvidia/gpus/0000:01:00.0"), "{masked:?}");
    assert!(!masked.contains(&"/proc/driver/nvidia/gpus/0000:00:00.0"), "{masked:?}");
}

#[test]
fn container_in_own_user_namespace_finds_driver() {
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Ubuntu.install(&scratch, "driver");
    installed.nodes(&["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"]);
    let host = DriverHost::with(installed.root());
    let image = host.image(Userland::Distroless, Search::Usual);
    // As an engine does that maps root away.
    let mut chown = host.host.scratch.command("chown");
    crate::support::run_with_timeout(
        chown.args(["-R", "100000:100000"]).arg(&image.path),
        crate::support::timeout(),
    )
    .ok();
    let bundle = host.bundle_with(&image, &["/probe", "libcuda.so.1", "cuInit"], |config| {
        let mapping = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
        config["linux"]["uidMappings"] = mapping.clone();
        config["linux"]["gidMappings"] = mapping;
        let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
        namespaces.push(json!({"type": "user"}));
    });
    let open = |path: &Path| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    open(host.host.scratch.path());
    let outcome = host.host.runtime().run(&bundle).ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
}

/// Makes the nodes of two GPUs in `dev` below `root`: devices of the kernel's that can be opened, null, zero, full and
/// urandom.
fn lay_nodes(root: &Path) {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    std::fs::create_dir_all(root.join("dev")).unwrap();
    for (name, minor) in [("nvidiactl", 3), ("nvidia-uvm", 5), ("nvidia0", 7), ("nvidia1", 9)] {
        let path = root.join("dev").join(name);
        mknod(&path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, minor)).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
    }
}

/// Files where a node's installer puts them, behind a link, and nodes in a third place.
#[test]
fn files_and_nodes_may_have_separate_roots() {
    let seen = "cd /dev; stat -c '%n %t:%T' nvidia*";
    for place in ["var/lib/nvidia", "opt/nvidia/driver"] {
        let scratch = crate::support::Scratch::new();
        let installed = Layout::ContainerOs.install(&scratch, "installed");
        let root = scratch.path().join(place);
        std::fs::create_dir_all(root.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(installed.root(), &root).unwrap();
        let third = scratch.directory("third");
        lay_nodes(&third);
        let mut host = DriverHost::with(&root);
        host.host.set("driver.dev_root", third.display().to_string());
        for real in [crate::support::program("runc"), host.host.scratch.crun_program()] {
            host.host.wrap(&real);
            let image = host.image(Userland::Debian12, Search::Usual);
            host.lacks_only_the_kernel(&image);
            let outcome = host.run(&image, &["sh", "-c", seen]).ok();
            let expected = "nvidia-uvm 1:5\nnvidia0 1:7\nnvidiactl 1:3\n";
            assert_eq!(outcome.stdout, expected, "{place}, {}", real.display());
        }
    }
}

/// A driver container has nodes of its own, and the host's `/dev` has none: runc bind-mounts devices of a
/// container in a user namespace from the host's.
#[test]
fn user_namespace_container_gets_nodes_of_another_root() {
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Ubuntu.install(&scratch, "driver");
    lay_nodes(installed.root());
    let mut host = DriverHost::with(installed.root());
    for scratch in [host.host.scratch.path(), scratch.path()] {
        std::fs::set_permissions(scratch, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let seen =
        "cd /dev; stat -c '%n %t:%T' nvidia*; head -c 3 nvidia-uvm | od -An -tx1; cat nvidiactl";
    for real in [crate::support::program("runc"), host.host.scratch.crun_program()] {
        host.host.wrap(&real);
        let image = host.image(Userland::Debian12, Search::Usual);
        let mut chown = host.host.scratch.command("chown");
        let chown = chown.args(["-R", "100000:100000"]).arg(&image.path);
        crate::support::run_with_timeout(chown, crate::support::timeout()).ok();
        let bundle = host.bundle_with(&image, &["sh", "-c", seen], |config| {
            let mapping = json!([{"containerID": 0, "hostID": 100_000, "size": 65536}]);
            config["linux"]["uidMappings"] = mapping.clone();
            config["linux"]["gidMappings"] = mapping;
            let namespaces = config["linux"]["namespaces"].as_array_mut().unwrap();
            namespaces.push(json!({"type": "user"}));
        });
        let expected = "nvidia-uvm 1:5\nnvidia0 1:7\nnvidiactl 1:3\n 00 00 00\n";
        assert_eq!(host.host.runtime().run(&bundle).ok().stdout, expected, "{}", real.display());
        // A second create of the same bundle changes nothing of it.
        let before = bundle.config();
        host.host.runtime().run(&bundle).ok();
        assert_eq!(bundle.config()["mounts"], before["mounts"]);
        assert_eq!(bundle.config()["linux"]["resources"], before["linux"]["resources"]);
    }
}

/// As an image has it whose distribution builds libraries for newer processors, too; and as it is
/// everywhere on a processor whose linker has no such directory.
#[test]
fn image_libraries_for_this_processor_stay_visible() {
    let host = DriverHost::new();
    for (userland, directory) in [
        (Userland::Debian12, "usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2"),
        (Userland::Lib64, "usr/lib64/glibc-hwcaps/x86-64-v2"),
        (Userland::Debian11, "usr/lib/x86_64-linux-gnu/tls"),
    ] {
        let image = host.image(userland, Search::Usual);
        let own = image.path.join(directory);
        std::fs::create_dir_all(&own).unwrap();
        let library = crate::support::userland::OWN_LIBRARY;
        std::fs::copy(image.path.join("opt/app/lib").join(library), own.join(library)).unwrap();
        for run in ["first", "again"] {
            println!("{userland:?} {run}");
            let outcome = host.run(&image, &["/probe", library, "app"]).ok();
            assert_eq!(outcome.stdout.lines().nth(1), Some("7"), "{outcome}");
            host.lacks_only_the_kernel(&image);
        }
        let bundle = host.bundle(&image, &["true"]);
        let _ = host.host.runtime().run(&bundle);
        let path = format!("{}/libcuda.so.1", userland.libraries());
        assert!(mounts(&bundle).iter().any(|(to, _)| *to == path), "{:?}", mounts(&bundle));
    }
}
