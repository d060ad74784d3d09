//! The ways by which the driver's files come: `[driver] inject`.

use std::fs;

use super::*;

/// Auto finds the driver's files by itself if no other program brings them.
#[test]
fn auto_injects_natively_without_another_provider() {
    let mut host = DriverHost::new();
    host.host.set("driver.inject", "auto");
    host.host.keep_log();
    let image = host.image(Userland::Distroless, Search::Usual);
    host.lacks_only_the_kernel(&image);
    assert!(host.host.log().contains("driver_files=\"native\""), "{}", host.host.log());
}

/// If there is no driver, auto goes without its files, and native refuses the container.
#[test]
fn without_driver_auto_continues_and_native_fails() {
    let empty = crate::support::Scratch::new();
    let mut host = DriverHost::with(&empty.directory("root"));
    let image = host.image(Userland::Distroless, Search::Usual);
    let outcome = host.run(&image, &["/probe", "libcuda.so.1"]).exits(1);
    assert!(outcome.stderr.starts_with("cgpu: no driver libraries below /"), "{outcome}");
    assert!(outcome.stderr.contains("or set inject = \"off\" under [driver]"), "{outcome}");
    host.host.set("driver.inject", "auto");
    host.host.keep_log();
    host.run(&image, &["/probe", "libcuda.so.1"]).exits(NOT_LOADED);
    // A simulated host need not be mended: the log line of the container creation reports it, and no warning.
    let log = host.host.log();
    assert!(log.contains("driver_files=\"off\"") && !log.contains("WARN"), "{log}");
}

/// Auto leaves the driver's files to the hook or the mount that has brought them before.
#[test]
fn auto_defers_to_a_prior_driver_injection() {
    let mut host = DriverHost::new();
    host.host.set("driver.inject", "auto");
    let image = host.image(Userland::Debian12, Search::Usual);
    let hook = host.host.scratch.script("nvidia-container-runtime-hook", "#!/bin/sh\n");
    let bundle = host.bundle_with(&image, &["true"], |config| {
        config["hooks"] = json!({"prestart": [{"path": hook, "args": ["hook", "prestart"]}]});
    });
    host.host.runtime().run(&bundle).ok();
    assert!(!mounts(&bundle).iter().any(|(to, _)| to == "/usr/local/nvidia"));

    let library = host.root.join("usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so");
    let bundle = host.bundle_with(&image, &["true"], |config| {
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/usr/lib64/libcuda.so.1", "type": "bind", "options": ["bind"],
            "source": fs::canonicalize(&library).unwrap(),
        }));
    });
    host.host.runtime().run(&bundle).ok();
    assert!(!mounts(&bundle).iter().any(|(to, _)| to == "/usr/local/nvidia"));
}

#[test]
fn user_mount_at_driver_path_is_left_alone() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let own = host.host.scratch.directory("own");
    fs::write(own.join("mine"), "").unwrap();
    let bundle = host.bundle_with(&image, &["ls", "/usr/local/nvidia"], |config| {
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/usr/local/nvidia", "type": "bind", "options": ["bind"], "source": own,
        }));
    });
    assert_eq!(host.host.runtime().run(&bundle).ok().stdout, "mine\n");
}

/// A program in the place of NVIDIA's runtime that does what that does to the order of things:
/// it checks the bundle, and becomes runc with the same arguments.
#[test]
fn nvidia_runtime_is_called_only_for_gpu_containers() {
    let mut host = DriverHost::new();
    let runc = crate::support::program("runc").display().to_string();
    let script = "#!/bin/sh\n{ echo \"$@\"; grep -o 'NVIDIA_VISIBLE_DEVICES=[^\"]*' \
                  \"$BUNDLE/config.json\"; } >> \"$SEEN\"\nexec RUNC \"$@\"\n"
        .replace("RUNC", &runc);
    let program = host.host.scratch.script("nvidia-container-runtime", &script);
    let seen = host.host.scratch.path().join("seen");
    host.host.set("driver.inject", "nvidia-runtime");
    host.host.set("driver.nvidia_runtime", program.display().to_string());
    let image = host.image(Userland::Debian12, Search::Usual);
    let run = |bundle: &Bundle| {
        let directory = bundle.directory.display().to_string();
        let runtime = host.host.runtime().env("BUNDLE", directory);
        runtime.env("SEEN", seen.display().to_string()).run(bundle)
    };
    let bundle = host.bundle(&image, &["echo", "made"]);
    assert_eq!(run(&bundle).ok().stdout, "made\n");
    let reported = fs::read_to_string(&seen).unwrap();
    let lines: Vec<_> = reported.lines().collect();
    assert!(lines[0].contains(" run ") && lines[0].contains(&bundle.id), "{reported}");
    assert_eq!(lines[1], format!("NVIDIA_VISIBLE_DEVICES={UUID_0}"));
    assert!(!mounts(&bundle).iter().any(|(to, _)| to == "/usr/local/nvidia"));

    // What else it would give an image or a pod that asks.
    let bundle = host.bundle_with(&image, &["true"], |config| {
        set_env(config, "NVIDIA_IMEX_CHANNELS", "all");
        set_env(config, "NVIDIA_GDS", "enabled");
        config["annotations"] = json!({"cdi.k8s.io/x": "nvidia.com/gpu=all", "io.x/y": "z"});
    });
    run(&bundle).ok();
    let config = bundle.config();
    assert_eq!(config["annotations"], json!({"io.x/y": "z"}));
    let env = config["process"]["env"].to_string();
    assert!(env.contains("\"NVIDIA_IMEX_CHANNELS=\"") && env.contains("\"NVIDIA_GDS=\""), "{env}");

    fs::remove_file(&seen).unwrap();
    let plain = host.host.bundle("plain", |config| {
        image.use_in(config);
        config["process"]["args"] = json!(["echo", "plain"]);
    });
    assert_eq!(run(&plain).ok().stdout, "plain\n");
    assert!(!seen.exists());
}

#[test]
fn missing_nvidia_runtime_is_named_in_the_error() {
    let mut host = DriverHost::new();
    host.host.set("driver.inject", "nvidia-runtime");
    host.host.set("driver.nvidia_runtime", "no-such-runtime");
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.bundle(&image, &["true"]);
    let directory = bundle.directory.display().to_string();
    let expected =
        "cgpu: inject or whole = \"nvidia-runtime\", and no-such-runtime is no executable file";
    for outcome in
        [host.host.runtime().run(&bundle), host.host.cgpu(&["inspect", "--bundle", &directory])]
    {
        assert!(outcome.exits(1).stderr.starts_with(expected));
    }
    assert!(host.host.records().is_empty());
}

#[test]
fn an_image_that_demands_another_driver_is_refused() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let run = |variables: &[(&str, &str)]| {
        let bundle = host.bundle_with(&image, &["true"], |config| {
            for (name, value) in variables {
                set_env(config, name, value);
            }
        });
        host.host.runtime().run(&bundle)
    };
    run(&[("NVIDIA_REQUIRE_CUDA", "cuda>=12.2 brand=tesla,driver>=470")]).ok();
    let demand = ("NVIDIA_REQUIRE_CUDA", "cuda>=12.4 driver>=550,driver<551");
    let outcome = run(&[demand]).exits(1);
    for said in ["NVIDIA_REQUIRE_CUDA", "12.2", "NVIDIA_DISABLE_REQUIRE"] {
        assert!(outcome.stderr.contains(said), "{said}: {outcome}");
    }
    run(&[demand, ("NVIDIA_DISABLE_REQUIRE", "true")]).ok();
    assert!(host.host.records().is_empty());
}

/// A process that an engine starts later in the container has the driver's variables too.
#[test]
fn exec_process_gets_the_driver_variables_too() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.sleeping(&image);
    // As engines write it: the image's variables, and none of ours.
    let process = json!({
        "cwd": "/", "args": ["env"], "user": {"uid": 0, "gid": 0},
        "env": ["PATH=/usr/bin:/bin", "LD_LIBRARY_PATH=/opt/x"],
    });
    let file = host.host.scratch.file("process.json", process.to_string());
    let outcome = host.exec_by(&bundle, &file).ok();
    let has = |line: &str| outcome.stdout.lines().any(|there| there == line);
    assert!(has("LD_LIBRARY_PATH=/opt/x:/usr/local/nvidia/lib64"), "{outcome}");
    assert!(has("PATH=/usr/bin:/bin:/usr/local/nvidia/bin"), "{outcome}");
    host.host.runtime().delete(&bundle).ok();
}

/// A host with nodes of its driver, and a specification written for it.
struct CdiHost {
    host: DriverHost,
    directory: PathBuf,
    _driver: crate::support::Scratch,
}

impl CdiHost {
    fn new(layout: Layout) -> Self {
        let scratch = crate::support::Scratch::new();
        let installed = layout.install(&scratch, "driver");
        let mut host = DriverHost::with(installed.root());
        for (name, major, minor) in [
            ("nvidiactl", 195, 255),
            ("nvidia0", 195, 0),
            ("nvidia1", 195, 1),
            ("nvidia-uvm", 511, 0),
            ("nvidia-uvm-tools", 511, 1),
        ] {
            node(&installed.root().join("dev").join(name), major, minor);
        }
        let directory = host.host.scratch.directory("cdi");
        host.host.set("driver.inject", "cdi");
        host.host.set("driver.cdi_dirs", vec![directory.display().to_string()]);
        host.host.keep_log();
        CdiHost { host, directory, _driver: scratch }
    }

    fn file(&self) -> PathBuf {
        self.directory.join("nvidia.yaml")
    }

    fn generate(&self, capabilities: &str) {
        let file = self.file().display().to_string();
        let words = ["cdi", "generate", "--output", &file, "--capabilities", capabilities];
        self.host.host.cgpu(&words).ok();
    }
}

fn node(path: &Path, major: u64, minor: u64) {
    use nix::sys::stat::{Mode, SFlag, makedev, mknod};
    let _ = fs::create_dir_all(path.parent().unwrap());
    let _ = fs::remove_file(path);
    mknod(path, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(major, minor)).unwrap();
}

#[test]
fn a_specification_that_we_write_serves_every_userland() {
    let cdi = CdiHost::new(Layout::Debian);
    cdi.generate("compute,utility");
    for userland in Userland::GLIBC {
        let image = cdi.host.image(userland, Search::Usual);
        cdi.host.lacks_only_the_kernel(&image);
    }
    let image = cdi.host.image(Userland::Distroless, Search::Usual);
    let bundle = cdi.host.bundle(&image, &["/probe", "libcuda.so.1"]);
    cdi.host.host.runtime().run(&bundle).ok();
    let config = bundle.config();
    let env = config["process"]["env"].to_string();
    assert!(env.contains(&format!("NVIDIA_VISIBLE_DEVICES={UUID_0}")) && !env.contains("void"));
    let devices = config["linux"]["devices"].to_string();
    assert!(devices.contains("/dev/nvidia0") && !devices.contains("/dev/nvidia1"), "{devices}");
    assert!(cdi.host.host.log().contains("driver_files=\"cdi\""));
}

/// Auto takes a CDI specification that fits, and reports why one doesn't.
#[test]
fn auto_uses_fitting_cdi_specification_or_reports_why() {
    let mut cdi = CdiHost::new(Layout::Ubuntu);
    let image = cdi.host.image(Userland::Debian12, Search::Usual);
    let chosen = |cdi: &CdiHost| {
        cdi.host.lacks_only_the_kernel(&image);
        let log = cdi.host.host.log();
        cdi.host.host.forget_log();
        log
    };
    let refused = |cdi: &mut CdiHost, expected: &str| {
        let bundle = cdi.host.bundle(&image, &["true"]);
        let outcome = cdi.host.host.runtime().run(&bundle).exits(1);
        assert!(outcome.stderr.contains(expected), "{outcome}");
        cdi.host.host.forget_log();
        cdi.host.host.set("driver.inject", "auto");
        let log = chosen(cdi);
        assert!(log.contains("driver_files=\"native\""), "{log}");
        assert!(log.contains("CDI is of no use here: ") && log.contains(expected), "{log}");
        cdi.host.host.set("driver.inject", "cdi");
    };
    cdi.host.host.set("driver.inject", "auto");
    let log = chosen(&cdi);
    assert!(log.contains("driver_files=\"native\""), "{log}");
    cdi.generate("compute,utility");
    assert!(chosen(&cdi).contains("driver_files=\"cdi\""));
    cdi.host.host.set("driver.inject", "cdi");

    // After a reboot nvidia-uvm has another major, and the file says the old one.
    let text = fs::read_to_string(cdi.file()).unwrap();
    let uvm = cdi.host.root.join("dev/nvidia-uvm").display().to_string();
    let stale = text.replacen(
        &format!("hostPath: {uvm}\n"),
        &format!("hostPath: {uvm}\n      major: 510\n      minor: 0\n      type: c\n"),
        1,
    );
    assert_ne!(stale, text);
    fs::write(cdi.file(), stale).unwrap();
    refused(&mut cdi, "nvidia-uvm");
    // A library is gone.
    let path = format!("libcuda.so.{}", driver::version());
    fs::write(cdi.file(), text.replace(&path, "libcuda.so.535.1.1")).unwrap();
    refused(&mut cdi, "libcuda.so.535.1.1");
    // The GPU isn't in it.
    let other =
        [(UUID_0, "GPU-other"), ("name: \"0\"", "name: \"9\""), ("dev/nvidia0", "dev/nvidia1")];
    let without = other.iter().fold(text.clone(), |text, (from, to)| text.replace(from, to));
    fs::write(cdi.file(), without).unwrap();
    refused(&mut cdi, "nvidia.yaml");
    // It can't be read.
    fs::write(cdi.file(), "cdiVersion: [").unwrap();
    refused(&mut cdi, "nvidia.yaml");
    fs::remove_file(cdi.file()).unwrap();
    let outcome = cdi.host.run(&image, &["true"]).exits(1);
    let directory = cdi.directory.display();
    let expected =
        format!("cgpu: no CDI specification of nvidia.com/gpu in {directory}; write one");
    assert!(outcome.stderr.starts_with(&expected), "{outcome}");
}

/// Every file of the driver that NVIDIA's own toolkit gives a container, or why we don't; and the
/// other way round.
#[test]
fn toolkit_listed_files_are_provided_or_explained() {
    let cdi = CdiHost::new(Layout::Ubuntu);
    let version = driver::version();
    for name in ["persistenced", "fabricmanager"] {
        let directory = cdi.host.root.join(format!("run/nvidia-{name}"));
        fs::create_dir_all(&directory).unwrap();
        drop(std::os::unix::net::UnixListener::bind(directory.join("socket")).unwrap());
    }
    cdi.generate("all");
    let sources = |text: &str| -> std::collections::BTreeSet<String> {
        let lines = text.lines().map(str::trim_start);
        let paths =
            lines.filter_map(|line| line.trim_start_matches("- ").strip_prefix("hostPath: "));
        paths.map(|path| path.trim_matches('"').to_owned()).collect()
    };
    let root = cdi.host.root.display().to_string();
    let below = |path: &str| path.strip_prefix(&root).unwrap().trim_start_matches('/').to_owned();
    let ours = sources(&fs::read_to_string(cdi.file()).unwrap());
    let ours: std::collections::BTreeSet<String> =
        ours.iter().map(|path| format!("/{}", below(path))).collect();
    let theirs = include_str!("../../fixtures/driver/nvidia-ctk-1.20.0-535-ubuntu.yaml");
    let theirs = sources(&theirs.replace("@VERSION@", &version));
    let real = |path: &String| {
        let path = driver::resolve(&cdi.host.root, path);
        format!("/{}", below(&path.display().to_string()))
    };
    let theirs: std::collections::BTreeSet<String> = theirs.iter().map(real).collect();
    let lacking: Vec<_> = theirs
        .difference(&ours)
        // A directory of ours has them.
        .filter(|path| !path.contains("/firmware/nvidia/"))
        .collect();
    assert_eq!(lacking, Vec::<&String>::new());
    let more: Vec<_> = ours.difference(&theirs).filter(|path| !path.starts_with("/dev/")).collect();
    let explained = |path: &&&String| {
        // Libraries of 32 bits, which their CDI mode leaves out.
        path.contains("i386-linux-gnu")
            // The directory of the files that they name one by one.
            || **path == &format!("/usr/lib/firmware/nvidia/{version}")
            // Settings of graphics programs, which theirs takes in the older mode only.
            || path.contains("nvidia-application-profiles")
    };
    let unexplained: Vec<_> = more.iter().filter(|path| !explained(path)).collect();
    assert!(unexplained.is_empty(), "{unexplained:?}");
}

/// Inspect reports how the driver's files would come, and leaves nothing behind.
#[test]
fn inspect_reports_driver_injection_and_leaves_nothing() {
    let mut host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.bundle(&image, &["true"]);
    let directory = bundle.directory.display().to_string();
    let inspect = |host: &DriverHost| host.host.cgpu(&["inspect", "--bundle", &directory]);
    let reported = inspect(&host).ok();
    assert!(reported.stdout.ends_with("driver files: native (configured)\n"), "{reported}");
    host.host.set("driver.inject", "auto");
    let reported = inspect(&host).ok();
    let expected = "driver files: native (auto: there is no CDI specification)\n";
    assert!(reported.stdout.ends_with(expected), "{reported}");
    assert!(!host.host.state_dir().exists());
    host.load_module("550.54.14");
    let refused = inspect(&host).exits(1);
    assert!(refused.stderr.contains("the driver's kernel module is 550.54.14"), "{refused}");
}

/// A bundle that is used again manually, after something changed.
#[test]
fn reused_bundle_loses_mounts_of_earlier_creation() {
    let mut host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.bundle(&image, &["true"]);
    host.host.runtime().run(&bundle).ok();
    let ours = |host: &DriverHost| {
        let home = host.host.state_dir().display().to_string();
        mounts(&bundle).iter().filter(|(_, from)| from.starts_with(&home)).count()
    };
    assert!(ours(&host) > 0);
    let home = host.host.state_dir().join("driver");
    nix::mount::umount2(&home, nix::mount::MntFlags::MNT_DETACH).unwrap();
    host.host.set("driver.inject", "off");
    host.host.runtime().run(&bundle).ok();
    assert_eq!(ours(&host), 0, "{:?}", mounts(&bundle));
}

/// NVIDIA's own runtime, where it is installed, or where `CGPU_TEST_NVIDIA_RUNTIME` says: no
/// distribution has it.
#[test]
fn real_nvidia_runtime_containers_find_the_driver() {
    let named = std::env::var_os("CGPU_TEST_NVIDIA_RUNTIME").map(PathBuf::from);
    let usual = || Some(PathBuf::from("/usr/bin/nvidia-container-runtime"));
    let Some(program) = named.or_else(usual).filter(|path| path.is_file()) else {
        println!("skipped: NVIDIA's runtime is not installed, see CGPU_TEST_NVIDIA_RUNTIME");
        return;
    };
    let mut cdi = CdiHost::new(Layout::Ubuntu);
    cdi.generate("compute,utility");
    cdi.host.host.set("driver.inject", "nvidia-runtime");
    cdi.host.host.set("driver.nvidia_runtime", program.display().to_string());
    let settings = format!(
        "[nvidia-container-runtime]\nmode = \"cdi\"\nruntimes = [{:?}]\n\
         [nvidia-container-runtime.modes.cdi]\nspec-dirs = [{:?}]\n",
        crate::support::program("runc"),
        cdi.directory
    );
    let settings = cdi.host.host.scratch.file("nvidia.toml", settings);
    for userland in [Userland::Debian11, Userland::Debian12, Userland::Debian13, Userland::Linked] {
        let image = cdi.host.image(userland, Search::Usual);
        let check = "{ /probe libcuda.so.1 cuInit; nvidia-smi; echo $?; } > /seen 2>&1";
        let bundle = cdi.host.bundle(&image, &["sh", "-c", check]);
        let config = settings.display().to_string();
        let runtime = cdi.host.host.runtime().env("NVIDIA_CTK_CONFIG_FILE_PATH", config);
        runtime.create(&bundle).ok();
        runtime.start(&bundle).ok();
        let seen = image.path.join("seen");
        let ended = || fs::read_to_string(&seen).is_ok_and(|text| text.ends_with("\n9\n"));
        crate::support::eventually(ended);
        let text = fs::read_to_string(&seen).unwrap_or_default();
        assert_eq!(text.lines().nth(1), Some(NO_DEVICE), "{userland:?}: {text}");
        assert!(text.ends_with("\n9\n"), "{userland:?}: {text}");
        runtime.delete(&bundle).ok();
    }
}
