//! What happens when the driver of the host changes.

use std::os::unix::fs::PermissionsExt;

use super::*;

/// The driver's files are searched for once, and again if the driver has changed.
#[test]
fn driver_scan_is_repeated_only_after_a_change() {
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Ubuntu.install(&scratch, "driver");
    let host = DriverHost::with(installed.root());
    let image = host.image(Userland::Distroless, Search::Usual);
    let tree = |host: &DriverHost| {
        let bundle = host.bundle(&image, &["/probe", "libcuda.so.1", "cuInit"]);
        host.host.runtime().run(&bundle).ok();
        let mounts = mounts(&bundle);
        mounts.into_iter().find(|(to, _)| to == "/usr/local/nvidia").unwrap().1
    };
    let first = tree(&host);
    let retained = std::fs::read(host.host.state_dir().join("driver.cache")).unwrap();
    assert_eq!(tree(&host), first);
    assert_eq!(std::fs::read(host.host.state_dir().join("driver.cache")).unwrap(), retained);

    // As an update of the package does: another file of the same name.
    let library = format!("usr/lib/x86_64-linux-gnu/libcuda.so.{}", driver::version());
    let bytes = std::fs::read(installed.file(&library)).unwrap();
    installed.remove(&library);
    installed.write(&library, bytes);
    let second = tree(&host);
    assert_ne!(second, first, "containers would get what is no longer installed");

    // A library more, and one less.
    installed.remove("usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.1");
    assert_eq!(tree(&host), second, "a link is no file of its own");
}

/// A state directory with a driver in it is still identified as ours.
#[test]
fn state_directory_with_driver_is_still_ours() {
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Ubuntu.install(&scratch, "driver");
    let host = DriverHost::with(installed.root());
    let image = host.image(Userland::Distroless, Search::Usual);
    let state = host.host.state_dir();
    for _ in 0..2 {
        let bundle = host.bundle(&image, &["/probe", "libcuda.so.1", "cuInit"]);
        host.host.runtime().run(&bundle).ok();
        // What a killed create leaves, in a directory that somebody has opened.
        std::fs::write(state.join(".driver.cache.cgpu-tmp"), "half").unwrap();
        std::fs::set_permissions(&state, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    host.host.gc();
    assert_eq!(std::fs::metadata(&state).unwrap().permissions().mode() & 0o777, 0o700);
    host.host.check_registry();
}

#[test]
fn running_container_retains_its_original_driver() {
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Ubuntu.install(&scratch, "driver");
    let host = DriverHost::with(installed.root());
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.sleeping(&image);
    let runtime = host.host.runtime();
    let library = format!("usr/lib/x86_64-linux-gnu/libcuda.so.{}", driver::version());
    installed.remove(&library);
    let outcome = runtime.exec(&bundle, &["/probe", "libcuda.so.1", "cuInit"]).ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
    runtime.delete(&bundle).ok();
}

/// Libraries of another version than the kernel module's are refused, with what to do.
#[test]
fn driver_version_mismatch_is_refused_with_a_remedy() {
    let host = DriverHost::new();
    host.load_module("550.54.14");
    let image = host.image(Userland::Debian12, Search::Usual);
    let outcome = host.run(&image, &["true"]).exits(1);
    let expected = format!(
        "cgpu: the driver's kernel module is 550.54.14, its libraries below {} are {}; neither \
         works with the other: reboot, or load the module again, after an update of the driver",
        host.root.display(),
        driver::version()
    );
    assert!(outcome.stderr.starts_with(&expected), "{outcome}");
    assert!(host.host.records().is_empty());
}

/// A driver directory that was left half-made, or unmounted as by a reboot, is detected and
/// repaired.
#[test]
fn half_made_driver_directory_is_repaired() {
    let host = DriverHost::new();
    let image = host.image(Userland::Distroless, Search::Usual);
    host.lacks_only_the_kernel(&image);
    // As after a kill in the middle: a file is not mounted, others can be written to.
    let home = host.host.state_dir().join("driver");
    let mounted = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let ours = |line: &str| {
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        path.starts_with(&format!("{}/", home.display())).then_some(path)
    };
    let files: Vec<_> = mounted.lines().filter_map(ours).collect();
    assert!(files.len() > 5, "{files:?}");
    let whole = files.iter().min_by_key(|file| file.len()).unwrap();
    let has = |name: &str| files.iter().find(|file| file.contains(name)).unwrap();
    let (library, program, datum) = (has("libcuda.so"), has("nvidia-smi"), has("nvidia.icd"));
    let none = None::<&str>;
    let writable = nix::mount::MsFlags::MS_BIND | nix::mount::MsFlags::MS_REMOUNT;
    for point in [whole, library, datum] {
        nix::mount::mount(none, point.as_str(), none, writable, none).unwrap();
    }
    nix::mount::umount2(program.as_str(), nix::mount::MntFlags::MNT_DETACH).unwrap();
    host.lacks_only_the_kernel(&image);
    let mounted = std::fs::read_to_string("/proc/self/mounts").unwrap();
    for point in [whole, library, program, datum] {
        let line = mounted.lines().find(|line| line.contains(&format!(" {point} "))).unwrap();
        assert!(line.contains(" ro,nosuid,nodev"), "{line}");
    }
    // As after a start of the machine.
    nix::mount::umount2(&home, nix::mount::MntFlags::MNT_DETACH).unwrap();
    host.lacks_only_the_kernel(&image);
}

/// As on hosts with systemd, where all mounts are passed on.
#[test]
fn no_other_namespace_gets_the_driver_s_mounts() {
    let host = DriverHost::new();
    let image = host.image(Userland::Distroless, Search::Usual);
    let bundle = host.bundle(&image, &["/probe", "libcuda.so.1"]);
    let check = "\"$@\" >/dev/null && cat /proc/self/mountinfo";
    let shared = ["unshare", "--mount", "--propagation", "shared", "sh", "-c", check, "sh"];
    let outcome = host.run_by(&shared, &bundle).ok();
    let home = host.host.state_dir().join("driver").display().to_string();
    let ours: Vec<_> = outcome.stdout.lines().filter(|line| line.contains(&home)).collect();
    assert!(ours.len() > 5, "{outcome}");
    assert!(ours.iter().all(|line| !line.contains("shared:")), "{ours:#?}");
    assert!(
        outcome.stdout.lines().any(|line| line.contains("shared:")),
        "then this proves nothing"
    );
}

/// As with an engine of the host's and one of a snap's, say.
#[test]
fn engines_in_separate_mount_namespaces_do_not_interfere() {
    let host = DriverHost::new();
    let image = host.image(Userland::Distroless, Search::Usual);
    let elsewhere = |propagation: &str| {
        let bundle = host.bundle(&image, &["/probe", "libcuda.so.1", "cuInit"]);
        let outcome =
            host.run_by(&["unshare", "--mount", "--propagation", propagation], &bundle).ok();
        assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
    };
    elsewhere("slave");
    host.lacks_only_the_kernel(&image);
    let mounted = || {
        let all = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        let home = host.host.state_dir().join("driver").display().to_string();
        all.lines().filter(|line| line.contains(&home)).count()
    };
    let before = mounted();
    assert!(before > 5, "{before}");
    for propagation in ["slave", "private", "unchanged"] {
        elsewhere(propagation);
        assert!(mounted() >= before, "{propagation} took away what is mounted here");
        host.lacks_only_the_kernel(&image);
    }
}

/// What a running container has of the driver outlives the directories of former drivers.
#[test]
fn running_container_outlives_removed_driver_directories() {
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Ubuntu.install(&scratch, "driver");
    let host = DriverHost::with(installed.root());
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.sleeping(&image);
    let runtime = host.host.runtime();
    // The driver changes, and what was made for the former one has grown old.
    let library = format!("usr/lib/x86_64-linux-gnu/libcuda.so.{}", driver::version());
    let bytes = std::fs::read(installed.file(&library)).unwrap();
    installed.remove(&library);
    installed.write(&library, bytes);
    let home = host.host.state_dir().join("driver");
    let namespace = std::fs::read_dir(&home).unwrap().next().unwrap().unwrap().path();
    let former = std::fs::read_dir(namespace).unwrap().next().unwrap().unwrap().path();
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(3600);
    std::fs::File::open(&former).unwrap().set_modified(old).unwrap();
    host.lacks_only_the_kernel(&image);
    let mounted = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let former = former.display().to_string();
    assert!(!mounted.contains(&former), "what is no longer needed stays mounted");
    let outcome = runtime.exec(&bundle, &["/probe", "libcuda.so.1", "cuInit"]).ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
    runtime.exec(&bundle, &["nvidia-smi"]).exits(DRIVER_NOT_LOADED);
    runtime.delete(&bundle).ok();
}

/// As where an engine is started with such a mask.
#[test]
fn non_root_user_finds_driver_despite_restrictive_umask() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.bundle_with(&image, &["/probe", "libcuda.so.1", "cuInit"], |config| {
        config["process"]["user"] = json!({"uid": 1000, "gid": 1000});
    });
    let outcome = host.run_by(&["sh", "-c", "umask 077; exec \"$@\"", "sh"], &bundle).ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
}

/// Debian's programs and settings lie behind two links each, in directories that are not checked.
#[test]
fn what_changes_behind_links_is_seen() {
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Debian.install(&scratch, "driver");
    let host = DriverHost::with(installed.root());
    let image = host.image(Userland::Debian12, Search::Usual);
    host.lacks_only_the_kernel(&image);
    let program = driver::resolve(installed.root(), "usr/bin/nvidia-smi");
    std::fs::remove_file(&program).unwrap();
    scratch.copy_program(&scratch.script("another", "#!/bin/sh\necho another\n"), &program);
    assert_eq!(host.run(&image, &["nvidia-smi"]).ok().stdout, "another\n");
    std::fs::remove_file(&program).unwrap();
    let outcome = host.run(&image, &["/probe", "libcuda.so.1", "cuInit"]).ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
    let library = format!("nvidia/current/libcuda.so.{}", driver::version());
    let library = installed.root().join("usr/lib/x86_64-linux-gnu").join(library);
    let bytes = std::fs::read(&library).unwrap();
    std::fs::remove_file(&library).unwrap();
    std::fs::write(&library, bytes).unwrap();
    let outcome = host.run(&image, &["/probe", "libcuda.so.1", "cuInit"]).ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
}
