//! What containers have in their images: C libraries of several ages and kinds, and ways to tell
//! their loaders where libraries are.
//!
//! Each has our probe (`tests/driver/files/probe.c`) as `/probe`, which looks for a library as programs
//! do, unless nothing is linked dynamically there. Each also has a library of its own in a place
//! that no loader searches by default: [`OWN_LIBRARY`], whose function `app` returns 7. What finds
//! it must find it as well when there is a driver.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::LazyLock;

use serde_json::{Value, json};

use super::{Scratch, program, run_with_timeout, timeout, tree};

/// The library that only the image has.
pub const OWN_LIBRARY: &str = "libapp.so.1";

/// Where it lies.
const OWN_DIRECTORY: &str = "opt/app/lib";

/// An image's userland.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Userland {
    /// glibc 2.31, which knows nothing of `glibc-hwcaps`.
    Debian11,
    /// glibc 2.36.
    Debian12,
    /// glibc 2.41.
    Debian13,
    /// Debian 12 whose `/usr/lib` is a link to `../opt/lib`.
    Linked,
    /// glibc 2.36 that searches `/usr/lib64`, as in Fedora, RHEL and SUSE; programs of busybox.
    Lib64,
    /// glibc 2.36 and nothing else: no shell, no cache of the loader.
    Distroless,
    /// musl, as in Alpine; programs of busybox.
    Musl,
    /// Busybox alone, without any loader.
    Static,
}

/// How the image's loader finds the image's own library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Search {
    /// It isn't. Everything is as the distribution has it.
    Usual,
    /// It isn't, and the image has no `/etc/ld.so.cache`.
    NoCache,
    /// By `/etc/ld.so.cache`, or by musl's list of directories.
    Cache,
    /// By `LD_LIBRARY_PATH`.
    Variable,
}

/// A root file system in a scratch.
#[derive(Debug)]
pub struct Rootfs {
    /// The directory.
    pub path: PathBuf,
    /// What the image sets in the environment.
    pub env: Vec<String>,
}

impl Userland {
    /// Those with a loader that loads glibc's libraries.
    pub const GLIBC: [Self; 6] = [
        Self::Debian11,
        Self::Debian12,
        Self::Debian13,
        Self::Linked,
        Self::Lib64,
        Self::Distroless,
    ];

    fn item(self) -> &'static str {
        match self {
            Self::Debian11 => "debian-11",
            Self::Debian12 => "debian-12",
            Self::Debian13 => "debian-13",
            Self::Linked => "linked",
            Self::Lib64 => "lib64",
            Self::Distroless => "distroless",
            Self::Musl => "musl",
            Self::Static => "static",
        }
    }

    /// The directory that its loader searches by default, as containers see it.
    pub fn libraries(self) -> &'static str {
        match self {
            Self::Lib64 => "/usr/lib64",
            Self::Musl | Self::Static => "/usr/lib",
            _ => "/usr/lib/x86_64-linux-gnu",
        }
    }

    /// Makes a root file system in the scratch's directory `name`.
    #[track_caller]
    pub fn rootfs(self, scratch: &Scratch, name: &str, search: Search) -> Rootfs {
        let path = tree::copy(scratch, name, &tree::made(self.item()));
        match self {
            Self::Static => {}
            Self::Musl => copy_program(scratch, &MUSL_PROBE, &path.join("probe")),
            _ => copy_program(scratch, &PROBE, &path.join("probe")),
        }
        let own = path.join(OWN_DIRECTORY);
        fs::create_dir_all(&own).expect("a directory can be made in a scratch");
        copy_program(scratch, &LIBRARY, &own.join(OWN_LIBRARY));
        let rootfs = Rootfs { path, env: Vec::new() };
        match search {
            Search::Usual => rootfs,
            Search::NoCache => {
                // Some have none to begin with.
                let _ = fs::remove_file(rootfs.path.join("etc/ld.so.cache"));
                rootfs
            }
            Search::Cache => {
                self.list_own_directory(scratch, &rootfs.path);
                rootfs
            }
            Search::Variable => {
                Rootfs { env: vec![format!("LD_LIBRARY_PATH=/{OWN_DIRECTORY}")], ..rootfs }
            }
        }
    }

    /// Has the loader find what is in the image's own directory of libraries.
    fn list_own_directory(self, scratch: &Scratch, root: &Path) {
        if self == Self::Musl {
            // The list replaces what musl has built in.
            let list = format!("/lib:/usr/local/lib:/usr/lib:/{OWN_DIRECTORY}\n");
            fs::write(root.join("etc/ld-musl-x86_64.path"), list).expect("a scratch is writable");
            return;
        }
        let configuration = root.join("etc/ld.so.conf");
        let before = fs::read_to_string(&configuration).unwrap_or_default();
        fs::write(configuration, format!("{before}/{OWN_DIRECTORY}\n"))
            .expect("a scratch is writable");
        // The userland's own, where it has one: older ones write what older loaders read.
        let mut ldconfig = if root.join("sbin/ldconfig").exists() {
            let mut command = scratch.command("chroot");
            command.arg(root).arg("/sbin/ldconfig");
            command
        } else {
            let mut command = scratch.command("ldconfig");
            command.arg("-r").arg(root);
            command
        };
        run_with_timeout(&mut ldconfig, timeout()).ok();
    }
}

impl Rootfs {
    /// Makes it the root of a container, with the image's environment.
    pub fn use_in(&self, config: &mut Value) {
        config["root"]["path"] = json!(self.path);
        let env = config["process"]["env"].as_array_mut().expect("the environment is a list");
        env.extend(self.env.iter().map(|variable| json!(variable)));
    }
}

/// The probe, for every glibc.
static PROBE: LazyLock<PathBuf> = LazyLock::new(|| {
    let dlopen_of_old = ["-nostartfiles", "-Wl,--no-as-needed", "-l:libdl.so.2"];
    compile("cc", "probe", "tests/driver/files/probe.c", &dlopen_of_old)
});

/// The probe, for musl.
static MUSL_PROBE: LazyLock<PathBuf> =
    LazyLock::new(|| compile("musl-gcc", "probe-musl", "tests/driver/files/probe.c", &[]));

/// The image's own library; it needs no C library, so any loader loads it.
static LIBRARY: LazyLock<PathBuf> = LazyLock::new(|| {
    let alone = ["-shared", "-fPIC", "-nostdlib", "-Wl,-soname,libapp.so.1"];
    compile("cc", "libapp.so", "tests/driver/files/app.c", &alone)
});

fn compile(compiler: &str, name: &str, source: &str, options: &[&str]) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let compiled = directory.join(name);
    // Another test binary may be using the one that is there.
    let fresh = directory.join(format!("{name}-{}", std::process::id()));
    let mut command = Command::new(program(compiler));
    command.args(["-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&fresh);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source)).args(options);
    run_with_timeout(&mut command, timeout()).ok();
    fs::rename(fresh, &compiled).expect("the target directory can be written");
    compiled
}

/// By a process of its own: see `Scratch::copy_program`.
fn copy_program(scratch: &Scratch, from: &Path, to: &Path) {
    run_with_timeout(scratch.command("cp").arg(from).arg(to), timeout()).ok();
}
