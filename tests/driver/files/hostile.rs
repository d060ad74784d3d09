//! Images that were made to break what brings the driver into them, each by a class of mistake
//! that others were broken by. The host's files must be as they were, whatever the container
//! becomes.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;

/// What an image's links lead to on the host, if anything follows them there.
struct Bait {
    directory: PathBuf,
}

impl Bait {
    fn lay(host: &DriverHost) -> Self {
        let directory = host.host.scratch.directory("bait");
        for name in ["file", "ld.so.cache"] {
            fs::write(directory.join(name), "the host's").unwrap();
        }
        fs::create_dir(directory.join("directory")).unwrap();
        Bait { directory }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    #[track_caller]
    fn is_untouched(&self) {
        let found = crate::host::names(&self.directory);
        let laid = ["directory", "file", "ld.so.cache"].map(str::to_owned);
        assert_eq!(found, laid.into(), "something was made on the host");
        for name in ["file", "ld.so.cache"] {
            assert_eq!(fs::read_to_string(self.at(name)).unwrap(), "the host's", "{name}");
        }
        assert_eq!(fs::read_dir(self.at("directory")).unwrap().count(), 0);
    }
}

/// Replaces what an image has at `path` by a link.
fn link(image: &Rootfs, path: &str, target: &Path) {
    let path = image.path.join(path);
    let _ = fs::remove_dir_all(&path);
    let _ = fs::remove_file(&path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    symlink(target, path).unwrap();
}

/// Every place of an image at which something is mounted or looked for.
const PLACES: &[&str] = &[
    "usr/local/nvidia",
    "usr/local",
    "usr/bin/nvidia-smi",
    "usr/lib/x86_64-linux-gnu/glibc-hwcaps",
    "usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2",
    "usr/lib/firmware",
    "etc/OpenCL",
    "etc/OpenCL/vendors/nvidia.icd",
    "etc/ld.so.cache",
    "run",
];

/// CVE-2024-0132, CVE-2025-23359, CVE-2024-0134: a link of the image leads what is mounted, or the
/// mount point that is made for it, to the host.
#[test]
fn image_links_lead_no_mount_to_the_host() {
    let host = DriverHost::new();
    let bait = Bait::lay(&host);
    for place in PLACES {
        for target in ["file", "directory", "not-there-yet"] {
            for up in ["", "../../../../../../../.."] {
                let image = host.image(Userland::Debian12, Search::Usual);
                let target = format!("{up}{}", bait.at(target).display());
                link(&image, place, Path::new(&target));
                // It may fail, if the real runtime finds a file where a directory must be.
                let outcome = host.run(&image, &["sh", "-c", "cat /usr/local/nvidia/* 2>&1; true"]);
                assert!(!outcome.stdout.contains("the host's"), "{place} -> {target}: {outcome}");
                bait.is_untouched();
                assert!(host.host.records().is_empty(), "{place} -> {target}");
            }
        }
    }
}

/// The same through the kernel's own links.
#[test]
fn no_link_into_proc_is_followed() {
    let host = DriverHost::new();
    let bait = Bait::lay(&host);
    for place in ["usr/local/nvidia", "usr/lib/x86_64-linux-gnu/glibc-hwcaps", "usr/bin"] {
        for root in ["/proc/self/root", "/proc/1/root", "/proc/self/cwd/../../../../../.."] {
            for name in ["directory", "not-there-yet"] {
                let image = host.image(Userland::Debian12, Search::Usual);
                let target = format!("{root}{}", bait.at(name).display());
                link(&image, place, Path::new(&target));
                let outcome = host.run(&image, &["/bin/true"]);
                assert!(
                    matches!(outcome.status.code(), Some(0 | 1)),
                    "{place} {target}: {outcome}"
                );
                bait.is_untouched();
                assert!(host.host.records().is_empty(), "{place} -> {target}");
            }
        }
    }
}

/// CVE-2025-23267, CVE-2025-23266: a program of the host runs on files of the image, or a hook
/// has variables of the container (`LD_PRELOAD`).
#[test]
fn hooks_use_neither_image_files_nor_its_variables() {
    let host = DriverHost::new();
    let bait = Bait::lay(&host);
    let image = host.image(Userland::Debian12, Search::Cache);
    link(&image, "etc/ld.so.cache", &bait.at("ld.so.cache"));
    link(&image, "etc/ld.so.conf.d", &bait.at("directory"));
    let evil = image.path.join("evil.so");
    fs::copy(image.path.join("opt/app/lib/libapp.so.1"), evil).unwrap();
    let bundle = host.bundle_with(&image, &["/probe", "libcuda.so.1"], |config| {
        set_env(config, "LD_PRELOAD", "/proc/self/cwd/evil.so");
        set_env(config, "LD_AUDIT", "/evil.so");
    });
    let _ = host.host.runtime().run(&bundle);
    bait.is_untouched();
    let config = bundle.config();
    for (stage, hooks) in config["hooks"].as_object().unwrap() {
        assert!(["createRuntime", "poststop"].contains(&stage.as_str()), "a hook at {stage}");
        for hook in hooks.as_array().unwrap() {
            let program = Path::new(hook["path"].as_str().unwrap());
            assert_eq!(program.file_name().unwrap(), "cgpu-hook");
            let env = hook["env"].as_array().unwrap();
            assert!(!env.is_empty(), "it would inherit the container's");
            assert!(!hook["env"].to_string().contains("LD_"), "{hook}");
        }
    }
}

/// CVE-2025-23266 again: the working directory of who comes for the container is its root.
#[test]
fn nothing_is_loaded_from_the_working_directory() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.bundle(&image, &["/probe", "libcuda.so.1", "cuInit"]);
    for name in ["libcuda.so.1", "libnvidia-ml.so.1", "libc.so.6", "runc"] {
        fs::write(bundle.directory.join(name), "#!/bin/sh\ntouch /tmp/broken\n").unwrap();
    }
    let mut command = host.host.runtime().command();
    command.current_dir(&bundle.directory).args(["run", &bundle.id]);
    let outcome = crate::support::run_with_timeout(&mut command, crate::support::timeout()).ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
}

/// An image whose linker is anything but one.
#[test]
fn fake_linker_neither_stalls_nor_breaks_creation() {
    let host = DriverHost::new();
    let linker = "lib64/ld-linux-x86-64.so.2";
    type Make = fn(&Path);
    let images: [(&str, Make); 5] = [
        ("a pipe", |path| {
            nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        }),
        ("a directory", |path| fs::create_dir(path).unwrap()),
        ("a device", |path| symlink("/dev/zero", path).unwrap()),
        ("itself", |path| symlink("ld-linux-x86-64.so.2", path).unwrap()),
        ("without end", |path| {
            let file = fs::File::create(path).unwrap();
            file.set_len(1 << 42).or_else(|_| file.set_len(1 << 30)).unwrap();
        }),
    ];
    for (name, make) in images {
        let image = host.image(Userland::Static, Search::Usual);
        let path = image.path.join(linker);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        make(&path);
        println!("{name}");
        host.run(&image, &["busybox", "true"]).ok();
    }
}

/// A container can't reach what is mounted for all.
#[test]
fn driver_directory_is_root_only_without_container_mounts() {
    use std::os::unix::fs::MetadataExt;
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let before = || fs::read_to_string("/proc/self/mountinfo").unwrap();
    host.run(&image, &["true"]).ok();
    let mounted = before();
    let attempt = "umount -l /usr/local/nvidia; mount -t tmpfs x /usr/local/nvidia; \
                   mount -o remount,rw /usr/local/nvidia && touch /usr/local/nvidia/x";
    let bundle = host.bundle_with(&image, &["sh", "-c", attempt], |config| {
        let all = json!(["CAP_SYS_ADMIN", "CAP_DAC_OVERRIDE"]);
        for set in ["bounding", "effective", "permitted"] {
            config["process"]["capabilities"][set] = all.clone();
        }
    });
    let _ = host.host.runtime().run(&bundle);
    let after = before();
    let of_ours = |text: &str| {
        let home = host.host.state_dir().join("driver").display().to_string();
        text.lines().filter(|line| line.contains(&home)).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(of_ours(&after), of_ours(&mounted), "even with CAP_SYS_ADMIN");
    assert!(of_ours(&after).iter().all(|line| !line.contains("shared:")), "{after}");
    let home = fs::metadata(host.host.state_dir().join("driver")).unwrap();
    assert_eq!((home.mode() & 0o777, home.uid()), (0o700, 0));
}

/// Root in a container may change whose a socket is, and who may connect; the host's it must not.
#[test]
fn container_cannot_modify_a_host_socket() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let scratch = crate::support::Scratch::new();
    let installed = Layout::Ubuntu.install(&scratch, "driver");
    let daemon = installed.root().join("run/nvidia-persistenced/socket");
    fs::create_dir_all(daemon.parent().unwrap()).unwrap();
    let _listener = std::os::unix::net::UnixListener::bind(&daemon).unwrap();
    fs::set_permissions(&daemon, fs::Permissions::from_mode(0o666)).unwrap();
    let host = DriverHost::with(installed.root());
    let image = host.image(Userland::Debian12, Search::Usual);
    let attempt = "cd /run/nvidia-persistenced && test -S socket && \
                   { chmod 000 socket; chown 7 socket; rm -f socket; touch -d 2001-01-01 socket; }";
    let bundle = host.whole(&image, &["sh", "-c", attempt], |config| {
        for set in ["bounding", "effective", "permitted"] {
            let all = json!(["CAP_CHOWN", "CAP_FOWNER", "CAP_DAC_OVERRIDE"]);
            config["process"]["capabilities"][set] = all;
        }
    });
    let outcome = host.host.runtime().run(&bundle);
    assert!(outcome.stderr.contains("Read-only file system"), "{outcome}");
    let after = fs::metadata(&daemon).unwrap();
    assert_eq!((after.mode() & 0o777, after.uid()), (0o666, 0));
}

/// A file that an engine could not have written, where its description of a process should be.
#[test]
fn an_exec_replaces_no_link_of_the_host() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.sleeping(&image);
    let process = json!({
        "cwd": "/", "args": ["/bin/true"], "env": [], "user": {"uid": 0, "gid": 0},
    });
    let file = host.host.scratch.file("process.json", process.to_string());
    let linked = host.host.scratch.path().join("link.json");
    symlink(&file, &linked).unwrap();
    host.exec_by(&bundle, &linked).ok();
    assert!(fs::symlink_metadata(&linked).unwrap().is_symlink());
    host.host.runtime().delete(&bundle).ok();
}

/// Every combination of capabilities is an author's to ask for, and the host's mounts are copied
/// for every container that starts.
#[test]
fn capability_combinations_leave_host_mounts_bounded() {
    let host = DriverHost::new();
    let image = host.image(Userland::Distroless, Search::Usual);
    let names = ["compute", "utility", "video", "graphics", "display"];
    let mounted = || {
        let all = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let home = host.host.state_dir().join("driver").display().to_string();
        all.lines().filter(|line| line.contains(&home)).count()
    };
    for combination in 1..1 << names.len() {
        let chosen = |at: &usize| combination >> at & 1 == 1;
        let chosen: Vec<_> = (0..names.len()).filter(chosen).map(|at| names[at]).collect();
        let library = match chosen.contains(&"compute") {
            true => "libcuda.so.1",
            false => "libnvidia-ml.so.1",
        };
        let bundle = host.bundle_with(&image, &["/probe", library], |config| {
            set_env(config, "NVIDIA_DRIVER_CAPABILITIES", &chosen.join(","));
        });
        let outcome = host.host.runtime().run(&bundle);
        let expected = ["compute", "utility"].iter().any(|name| chosen.contains(name));
        assert_eq!(outcome.status.success(), expected, "{chosen:?}: {outcome}");
    }
    assert!(mounted() < 300, "{}", mounted());
}
