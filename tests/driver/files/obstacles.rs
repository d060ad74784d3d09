//! Containers whose mounts or images leave no place for the driver's files: a read-only mount over
//! the place, a directory where a file goes, links that lead in a circle. Bare runc would end the
//! creation, and crun would write into what is mounted.

use std::fs;
use std::os::unix::fs::symlink;

use crate::support::{Docker, IMAGE, Image};

use super::*;

const SMI: [&str; 1] = ["nvidia-smi"];
const CUDA: [&str; 3] = ["/probe", "libcuda.so.1", "cuInit"];

/// Mounts `source` of the host read-only.
fn mount(config: &mut Value, source: &Path, destination: &str) {
    let mount = json!({"destination": destination, "type": "bind", "source": source,
                       "options": ["rbind", "ro", "rprivate"]});
    config["mounts"].as_array_mut().unwrap().push(mount);
}

/// That a container of `image` with the read-only mount has CUDA and nvidia-smi.
#[track_caller]
fn works(host: &DriverHost, image: &Rootfs, edit: impl Fn(&mut Value)) -> Bundle {
    let bundle = host.bundle_with(image, &CUDA, &edit);
    let outcome = host.host.runtime().run(&bundle).ok();
    assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
    let smi = host.bundle_with(image, &SMI, &edit);
    host.host.runtime().run(&smi).exits(DRIVER_NOT_LOADED);
    bundle
}

/// All names below a directory.
fn below(directory: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let of = |path: PathBuf| match path.is_dir() && !path.is_symlink() {
        true => [vec![path.clone()], below(&path)].concat(),
        false => vec![path],
    };
    let mut all: Vec<_> = entries.flat_map(of).collect();
    all.sort();
    all
}

#[test]
fn read_only_mounts_over_driver_paths_are_harmless() {
    let mut host = DriverHost::new();
    host.host.keep_log();
    let empty = host.host.scratch.directory("empty");
    for real in [crate::support::program("runc"), host.host.scratch.crun_program()] {
        host.host.wrap(&real);
        for (destination, left_out) in [
            ("/usr/local", ""),
            ("/usr/local/", ""),
            ("/usr", "/usr/bin/nvidia-smi /usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2"),
            ("/usr/bin", "/usr/bin/nvidia-smi"),
            ("/etc", "/etc/OpenCL/vendors/nvidia.icd"),
            ("/usr/lib", "/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2"),
            ("/usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu/glibc-hwcaps/x86-64-v2"),
            ("/lib/firmware", "firmware"),
        ] {
            // As the image has it, or empty where that has nothing. Of its own: a creation leaves mount
            // points in it.
            let image = host.image(Userland::Debian12, Search::Usual);
            let own = image.path.join(destination.trim_matches('/'));
            let firmware = destination == "/lib/firmware";
            let source = if own.exists() && !firmware { own } else { empty.clone() };
            let before = below(&source);
            println!("{destination} under {}", real.display());
            let _ = fs::remove_file(host.host.scratch.path().join("cgpu.log"));
            let bundle = works(&host, &image, |config| mount(config, &source, destination));
            assert_eq!(below(&source), before, "something was made in the mounted directory");
            let elsewhere = mounts(&bundle).iter().any(|(to, _)| to == "/nvidia-driver");
            assert_eq!(elsewhere, ["/usr/local", "/usr/local/", "/usr"].contains(&destination));
            let log = host.host.log();
            let reported = log.contains("files of the driver are left out: ");
            assert_eq!(reported, !left_out.is_empty(), "{log}");
            if reported {
                // Where a link of the image leads.
                let at = destination.replace("/lib/firmware", "/usr/lib/firmware");
                let mounted = format!("{} is mounted read-only at {at} and", source.display());
                let said = [mounted.as_str(), "mount it without ro"];
                let wanted = left_out.split(' ').chain(said);
                wanted.for_each(|part| assert!(log.contains(part), "no {part:?} in {log}"));
            }
        }
    }
}

/// A process that is started later in the container finds the driver's files that went elsewhere.
#[test]
fn exec_process_finds_relocated_driver_files() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let empty = host.host.scratch.directory("empty");
    let bundle = host.bundle_with(&image, &["sleep", "1000"], |config| {
        mount(config, &empty, "/usr/local");
    });
    let runtime = host.host.runtime();
    runtime.create(&bundle).ok();
    runtime.start(&bundle).ok();
    let process = json!({
        "cwd": "/", "args": ["env"], "user": {"uid": 0, "gid": 0},
        "env": ["PATH=/usr/bin:/bin"],
    });
    let file = host.host.scratch.file("process.json", process.to_string());
    let outcome = host.exec_by(&bundle, &file).ok();
    let has = |line: &str| outcome.stdout.lines().any(|there| there == line);
    assert!(has("LD_LIBRARY_PATH=/nvidia-driver/lib64"), "{outcome}");
    assert!(has("PATH=/usr/bin:/bin:/nvidia-driver/bin"), "{outcome}");
    runtime.delete(&bundle).ok();
}

/// A mount that has the mount point already keeps the usual places.
#[test]
fn read_only_mount_with_mount_points_changes_nothing() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let local = host.host.scratch.directory("local");
    host.host.scratch.directory("local/nvidia");
    let bundle = works(&host, &image, |config| mount(config, &local, "/usr/local"));
    assert!(mounts(&bundle).iter().any(|(to, _)| to == "/usr/local/nvidia"));
}

/// An image's directories in the place of files, and its links that lead in a circle, do no harm.
#[test]
fn image_directories_and_link_loops_are_harmless() {
    let host = DriverHost::new();
    type Make = fn(&Path);
    let images: [(&str, Make); 6] = [
        ("usr/local/nvidia", |path| fs::write(path, "").unwrap()),
        ("usr/local/nvidia", |path| symlink("nvidia", path).unwrap()),
        ("usr/bin/nvidia-smi", |path| fs::create_dir(path).unwrap()),
        ("etc/OpenCL", |path| symlink("/etc/OpenCL/x", path).unwrap()),
        ("usr/lib/x86_64-linux-gnu/glibc-hwcaps", |path| symlink("glibc-hwcaps", path).unwrap()),
        ("usr/lib/x86_64-linux-gnu/libcuda.so.1", |path| fs::create_dir(path).unwrap()),
    ];
    for (name, make) in images {
        let image = host.image(Userland::Debian12, Search::Usual);
        let path = image.path.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let _ = fs::remove_dir_all(&path);
        make(&path);
        println!("{name}");
        works(&host, &image, |_| {});
    }
}

/// If there is no place for the driver's files, container creation is refused before runc runs.
#[test]
fn creation_without_mount_place_is_refused_before_runc() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    fs::write(image.path.join("nvidia-driver"), "").unwrap();
    let empty = host.host.scratch.directory("empty");
    let bundle = host.bundle_with(&image, &CUDA, |config| mount(config, &empty, "/usr/local"));
    let in_the_way = format!("{} is mounted read-only at /usr/local and has", empty.display());
    host.host.was_reported(
        host.host.runtime().create(&bundle),
        &bundle,
        &[&in_the_way, "/nvidia-driver (the container has a file at /nvidia-driver)"],
    );
    let directory = bundle.directory.display().to_string();
    let inspected = host.host.cgpu(&["inspect", "--bundle", &directory]).exits(1);
    assert!(inspected.stderr.contains(&in_the_way), "{inspected}");
    assert!(host.host.records().is_empty());
}

/// Under docker, a volume mounted read-only over /usr/local or another driver path does no harm and
/// stays empty.
#[test]
fn docker_read_only_volume_over_usr_local_works() {
    let host = DriverHost::new();
    let config = host.host.config().display().to_string();
    let docker = Docker::builder()
        .runtime(env!("CARGO_BIN_EXE_cgpu-runtime"))
        .runtime_arg(format!("--cgpu-config={config}"))
        .start();
    let rootfs = Userland::Distroless.rootfs(docker.scratch(), "plain", Search::Usual);
    docker.load(&Image::new(IMAGE).env("PATH", "/usr/bin").rootfs(rootfs.path));
    let volume = docker.scratch().directory("volume");
    let ask = ["-e", "CGPU_MEMORY=1GiB", "-e", "CGPU_GPUS=1", "--rm", "--runtime=cgpu"];
    for destination in ["/usr/local", "/etc/OpenCL", "/usr/lib/firmware"] {
        let over = format!("{}:{destination}:ro", volume.display());
        let run = |args: &[&str]| docker.run(&[&ask[..], &["-v", &over, IMAGE], args].concat());
        let outcome = run(&CUDA).ok();
        assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
        run(&SMI).exits(DRIVER_NOT_LOADED);
    }
    assert_eq!(fs::read_dir(&volume).unwrap().count(), 0, "nothing was made in it");
}
