//! The driver's files and the userlands that driver injection is tested with, by themselves: what
//! they do in a container of bare runc, without the driver, with its files mounted one by one, and
//! with its libraries mounted as one directory.
//!
//! No kernel driver is needed. Where there is one it is hidden, so that programs say the same.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

use crate::support::driver::{self, Layout};
use crate::support::userland::{OWN_LIBRARY, Rootfs, Search, Userland};
use crate::support::{Outcome, Scratch, run_with_timeout, timeout};

/// `CUDA_ERROR_NO_DEVICE` of cuda.h: what `cuInit` returns without a kernel driver.
const NO_DEVICE: &str = "100";

/// What nvidia-smi exits with without one: `NVML_ERROR_DRIVER_NOT_LOADED` of nvml.h.
const DRIVER_NOT_LOADED: i32 = 9;

/// What nvidia-smi exits with where it finds no NVML: `NVML_ERROR_LIBRARY_NOT_FOUND`.
const LIBRARY_NOT_FOUND: i32 = 12;

/// The probe's, where the library was not found or not loaded.
const NOT_LOADED: i32 = 3;

/// Where glibc since 2.33 looks on every processor made since 2009 or so.
const HWCAPS: &str = "glibc-hwcaps/x86-64-v2";

/// A userland with files of the driver mounted into it by the test itself.
struct Image<'scratch> {
    scratch: &'scratch Scratch,
    rootfs: Rootfs,
    mounts: Vec<Value>,
}

impl<'scratch> Image<'scratch> {
    fn new(scratch: &'scratch Scratch, userland: Userland, search: Search) -> Self {
        let name = format!("image-{}", next());
        Self { scratch, rootfs: userland.rootfs(scratch, &name, search), mounts: Vec::new() }
    }

    fn mount(&mut self, source: &Path, destination: &str) {
        self.mounts.push(json!({
            "source": source, "destination": destination, "type": "bind",
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }));
    }

    /// nvidia-smi, which needs no link.
    fn mount_smi(&mut self) {
        self.mount(&Layout::Ubuntu.root().join("usr/bin/nvidia-smi"), "/usr/bin/nvidia-smi");
    }

    /// Every library of the driver under each of its names, where the loader looks.
    fn mount_each(&mut self, directory: &str) {
        let root = Layout::Ubuntu.root();
        let libraries = root.join(Layout::Ubuntu.libraries());
        for name in names(&libraries).iter().filter(|name| name.contains(".so")) {
            let file = driver::resolve(&root, &format!("{}/{name}", Layout::Ubuntu.libraries()));
            self.mount(&file, &format!("{directory}/{name}"));
        }
    }

    /// All of them by one mount.
    fn mount_directory(&mut self, directory: &str) {
        self.mount(&Layout::Ubuntu.root().join(Layout::Ubuntu.libraries()), directory);
    }

    fn run(&self, args: &[&str]) -> Outcome {
        let bundle = self.scratch.bundle(&format!("container-{}", next()), |config| {
            self.rootfs.use_in(config);
            config["process"]["args"] = json!(args);
            let mounts = config["mounts"].as_array_mut().expect("mounts are a list");
            mounts.extend(self.mounts.iter().cloned());
            let masked = config["linux"]["maskedPaths"].as_array_mut().expect("so are these");
            masked.push(json!("/proc/driver"));
        });
        self.scratch.runc().run(&bundle)
    }

    /// That the loader finds `library` in `directory`, or in what that is a link to.
    #[track_caller]
    fn finds(&self, library: &str, directory: &str) {
        let outcome = self.run(&["/probe", library]).ok();
        let found = outcome.text().strip_suffix(&format!("/{library}")).expect("it is its path");
        // /lib is a link to /usr/lib in most userlands, and searched first.
        assert!(directory.ends_with(found), "found in {found}, not in {directory}");
    }

    /// That programs find what they need of the driver, and want no more than a kernel driver.
    #[track_caller]
    fn lacks_only_the_kernel(&self) {
        let outcome = self.run(&["/probe", "libcuda.so.1", "cuInit"]).ok();
        assert_eq!(outcome.stdout.lines().nth(1), Some(NO_DEVICE), "{outcome}");
        let outcome = self.run(&["/usr/bin/nvidia-smi"]).exits(DRIVER_NOT_LOADED);
        assert_eq!(
            outcome.stdout,
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make \
             sure that the latest NVIDIA driver is installed and running.\n\n"
        );
    }

    /// That programs find nothing of the driver's libraries.
    #[track_caller]
    fn lacks_the_libraries(&self) {
        let outcome = self.run(&["/probe", "libcuda.so.1", "cuInit"]).exits(NOT_LOADED);
        assert!(outcome.stderr.contains("No such file or directory"), "{outcome}");
        let outcome = self.run(&["/usr/bin/nvidia-smi"]).exits(LIBRARY_NOT_FOUND);
        assert!(outcome.stdout.contains("couldn't find libnvidia-ml.so"), "{outcome}");
    }
}

/// A number that none has had in this binary.
fn next() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

fn names(directory: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(directory).expect("a tree has this directory");
    let name = |entry: fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    entries.map(|entry| name(entry.expect("it can be read"))).collect()
}

/// What the loader's cache below `root` says: names and paths of 64-bit libraries.
fn cached(scratch: &Scratch, root: &Path) -> Vec<(String, String)> {
    let mut ldconfig = scratch.command("ldconfig");
    let printed = run_with_timeout(ldconfig.arg("-r").arg(root).arg("-p"), timeout()).ok().stdout;
    let wide = printed.lines().filter(|line| line.contains("x86-64"));
    let parse = |line: &str| {
        let (name, path) = line
            .trim()
            .split_once(" (")
            .zip(line.rsplit_once(" => "))
            .map(|((name, _), (_, path))| (name.to_owned(), path.to_owned()))?;
        Some((name, path))
    };
    wide.filter_map(parse).collect()
}

#[test]
fn debian_has_its_driver_behind_two_absolute_links() {
    let root = driver::root();
    let link = |path: &str| fs::read_link(root.join(path)).expect("it is a link");
    let alternative = "etc/alternatives/nvidia--libcuda.so.1-x86_64-linux-gnu";
    let own = "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1";
    assert_eq!(link("usr/lib/x86_64-linux-gnu/libcuda.so.1"), Path::new("/").join(alternative));
    assert_eq!(link(alternative), Path::new("/").join(own));
    let file = format!("libcuda.so.{}", driver::version());
    assert_eq!(link(own), PathBuf::from(&file));
    let found = driver::resolve(&root, "lib/x86_64-linux-gnu/libcuda.so.1");
    assert_eq!(found, root.join("usr/lib/x86_64-linux-gnu/nvidia/current").join(file));
}

#[test]
fn every_layout_has_the_driver_where_it_says() {
    let version = driver::version();
    for layout in Layout::ALL {
        let root = layout.root();
        for name in ["libcuda.so", "libnvidia-ml.so", "libnvidia-nvvm.so", "libEGL_nvidia.so"] {
            let file = root.join(layout.libraries()).join(format!("{name}.{version}"));
            assert!(file.is_file(), "{layout:?} has no {}", file.display());
        }
        let smi = driver::resolve(&root, &format!("{}/nvidia-smi", layout.programs()));
        assert!(smi.is_file(), "{layout:?} has no nvidia-smi");
    }
}

#[test]
fn loader_caches_lead_to_driver_files() {
    let scratch = Scratch::new();
    for layout in Layout::ALL.into_iter().filter(|layout| *layout != Layout::ContainerOs) {
        let root = layout.root();
        let cached = cached(&scratch, &root);
        for wanted in ["libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-cfg.so.1"] {
            let entry = cached.iter().find(|(name, _)| name == wanted);
            let (_, path) = entry.unwrap_or_else(|| panic!("{layout:?} does not list {wanted}"));
            let file = driver::resolve(&root, path);
            assert!(file.display().to_string().ends_with(&driver::version()), "{layout:?}");
        }
    }
    assert!(!Layout::ContainerOs.root().join("etc").exists());
}

#[test]
fn what_a_test_changes_stays_in_its_scratch() {
    let scratch = Scratch::new();
    for layout in Layout::ALL {
        let driver = layout.install(&scratch, &format!("{layout:?}"));
        driver.nodes(&["nvidia-of-this-test", "nvidia-caps/nvidia-cap1"]);
        let smi = format!("{}/nvidia-smi", layout.programs());
        driver.remove(&smi);
        driver.link("nvidia-debugdump", &smi);
        assert!(driver.root().join("dev/nvidia-caps/nvidia-cap1").is_file());
        assert!(driver.file(&smi).ends_with("nvidia-debugdump"));
        assert!(!layout.root().join("dev/nvidia-of-this-test").exists());
        assert!(driver::resolve(&layout.root(), &smi).ends_with("nvidia-smi"));
    }
}

#[test]
fn userlands_have_nothing_of_the_driver() {
    let scratch = Scratch::new();
    for userland in Userland::GLIBC.into_iter().chain([Userland::Musl]) {
        let image = Image::new(&scratch, userland, Search::Usual);
        let outcome = image.run(&["/probe", "libcuda.so.1", "cuInit"]).exits(NOT_LOADED);
        assert!(outcome.stderr.contains("libcuda.so.1"), "{outcome}");
        let outcome = image.run(&["nvidia-smi"]).fails();
        assert!(outcome.stderr.contains("executable file not found"), "{userland:?}: {outcome}");
    }
}

#[test]
fn individually_mounted_files_lack_only_the_kernel_driver() {
    let scratch = Scratch::new();
    for userland in Userland::GLIBC {
        let mut image = Image::new(&scratch, userland, Search::Usual);
        image.mount_smi();
        image.lacks_the_libraries();
        image.mount_each(userland.libraries());
        image.lacks_only_the_kernel();
    }
}

/// One hwcaps directory is enough for the driver's libraries since glibc 2.33.
#[test]
fn hwcaps_directory_suffices_since_glibc_2_33() {
    let scratch = Scratch::new();
    for userland in Userland::GLIBC {
        let mut image = Image::new(&scratch, userland, Search::Usual);
        let directory = format!("{}/{HWCAPS}", userland.libraries());
        image.mount_smi();
        image.mount_directory(&directory);
        if userland == Userland::Debian11 {
            image.lacks_the_libraries();
        } else {
            image.finds("libcuda.so.1", &directory);
            image.lacks_only_the_kernel();
        }
    }
}

/// One directory called tls is enough for the driver's libraries until glibc 2.36.
#[test]
fn tls_directory_suffices_until_glibc_2_36() {
    let scratch = Scratch::new();
    for userland in Userland::GLIBC {
        let mut image = Image::new(&scratch, userland, Search::Usual);
        let directory = format!("{}/tls", userland.libraries());
        image.mount_smi();
        image.mount_directory(&directory);
        if userland == Userland::Debian13 {
            image.lacks_the_libraries();
        } else {
            image.finds("libcuda.so.1", &directory);
            image.lacks_only_the_kernel();
        }
    }
}

#[test]
fn images_find_their_own_libraries_beside_the_drivers() {
    let scratch = Scratch::new();
    for userland in Userland::GLIBC {
        let directory = match userland {
            Userland::Debian11 => format!("{}/tls", userland.libraries()),
            _ => format!("{}/{HWCAPS}", userland.libraries()),
        };
        for search in [Search::NoCache, Search::Cache, Search::Variable] {
            let mut image = Image::new(&scratch, userland, search);
            image.mount_smi();
            image.mount_directory(&directory);
            image.finds("libcuda.so.1", &directory);
            image.lacks_only_the_kernel();
            let outcome = image.run(&["/probe", OWN_LIBRARY, "app"]);
            match search {
                Search::Usual | Search::NoCache => drop(outcome.exits(NOT_LOADED)),
                _ => assert_eq!(outcome.ok().stdout, "/opt/app/lib/libapp.so.1\n7\n"),
            }
        }
    }
}

/// So an image that one of the driver's libraries is baked into gets that one.
#[test]
fn image_cache_library_precedes_hwcaps_directory() {
    let scratch = Scratch::new();
    let image = || {
        let mut image = Image::new(&scratch, Userland::Debian12, Search::Usual);
        let baked = Layout::Ubuntu.root().join("usr/lib/x86_64-linux-gnu/libcuda.so.1");
        fs::copy(baked, image.rootfs.path.join("usr/lib/x86_64-linux-gnu/libcuda.so.1"))
            .expect("a scratch is writable");
        image.mount_directory(&format!("/usr/lib/x86_64-linux-gnu/{HWCAPS}"));
        image
    };
    image().finds("libcuda.so.1", &format!("/usr/lib/x86_64-linux-gnu/{HWCAPS}"));
    let listed = image();
    let mut ldconfig = scratch.command("chroot");
    run_with_timeout(ldconfig.arg(&listed.rootfs.path).arg("/sbin/ldconfig"), timeout()).ok();
    listed.finds("libcuda.so.1", "/usr/lib/x86_64-linux-gnu");
}

/// The loader of musl finds by its list the driver's libraries that it can't load.
#[test]
fn musl_finds_but_cannot_load_driver_libraries() {
    let scratch = Scratch::new();
    let mut image = Image::new(&scratch, Userland::Musl, Search::Cache);
    assert_eq!(
        image.run(&["/probe", OWN_LIBRARY, "app"]).ok().stdout,
        "/opt/app/lib/libapp.so.1\n7\n"
    );
    image.mount_smi();
    image.mount_directory("/usr/local/lib");
    // The driver is built for glibc, and musl lacks some of it.
    let outcome = image.run(&["/probe", "libcuda.so.1", "cuInit"]).exits(NOT_LOADED);
    assert!(outcome.stderr.contains("Error relocating /usr/local/lib/libcuda.so.1"), "{outcome}");
    let outcome = image.run(&["/usr/bin/nvidia-smi"]).fails();
    assert!(outcome.stderr.contains("no such file or directory"), "{outcome}");
}

#[test]
fn musl_and_static_images_run_their_programs() {
    let scratch = Scratch::new();
    for userland in [Userland::Musl, Userland::Static] {
        let image = Image::new(&scratch, userland, Search::Usual);
        assert_eq!(image.run(&["/bin/echo", "here"]).ok().text(), "here");
        assert_eq!(image.rootfs.path.join("probe").exists(), userland == Userland::Musl);
    }
}

/// All files that NVIDIA's toolkit lists are in the tree of the layout that it lists.
#[test]
fn driver_tree_has_all_toolkit_listed_files() {
    let version = driver::version();
    for (list, layout, prefix) in [
        ("nvidia-ctk-1.20.0-535.yaml", Layout::Debian, ""),
        ("nvidia-ctk-1.20.0-535-ubuntu.yaml", Layout::DriverContainer, ""),
        ("nvidia-ctk-1.20.0-535-container.yaml", Layout::DriverContainer, "/run/nvidia/driver"),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/driver").join(list);
        let text = fs::read_to_string(path).expect("a fixture is text");
        let mounted = text.lines().filter_map(|line| line.trim().strip_prefix("- hostPath: "));
        // Sockets are what only a running host has.
        let files = mounted.filter(|file| !file.ends_with("/socket"));
        let mut count = 0;
        for file in files {
            let below = file.strip_prefix(prefix).expect("all lie in the driver's root");
            driver::resolve(&layout.root(), &below.replace("@VERSION@", &version));
            count += 1;
        }
        assert!(count > 40, "{list} has {count} files");
    }
}
