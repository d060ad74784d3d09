//! A test's own directory, and what every test puts into one: a root file system, a bundle.
//!
//! The path is short, because Unix sockets below it must fit 107 bytes, and its last component is
//! unique on this machine: that name marks everything that belongs to the scratch (see
//! [`Traces`](super::Traces)).

use std::fs::{self, File};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::prerequisites::{prerequisites, program};
use super::runtime::Runtime;
use super::traces::{self, Traces};
use super::{cgroup, run_with_timeout, timeout, warden};

/// What every scratch's name begins with.
const PREFIX: &str = "cgpu-test-";

/// Sockets lie up to 60 bytes deeper than the scratch, and a socket's path has 107.
const PARENT_LENGTH_LIMIT: usize = 24;

/// The applets of busybox that test containers find in `/bin`.
const APPLETS: &[&str] = &[
    "cat", "chmod", "cp", "dd", "echo", "env", "false", "grep", "head", "hostname", "id", "kill",
    "ln", "ls", "mkdir", "mknod", "mount", "mv", "od", "ps", "readlink", "rm", "sh", "sleep",
    "stat", "tail", "test", "touch", "true", "umount", "wc",
];

/// Empty directories of a root file system.
const DIRECTORIES: &[&str] =
    &["dev", "etc", "lib", "mnt", "proc", "root", "run", "sys", "tmp", "usr/bin", "usr/lib", "var"];

/// crun for hybrid cgroups; see [`Scratch::crun_program`].
const CRUN_SCRIPT: &str = r#"#!/bin/sh
exec UNSHARE --mount --propagation unchanged sh -c '
    MOUNT -t cgroup2 cgroup2 /sys/fs/cgroup && exec CRUN --cgroup-manager=disabled "$@"
' crun "$@"
"#;

/// A directory that takes everything with it: processes, mounts and cgroups that carry its name.
#[derive(Debug)]
pub struct Scratch {
    path: PathBuf,
    /// Locked for as long as we live: how other test runs tell an abandoned scratch from ours.
    _lock: File,
}

impl Scratch {
    /// Makes a new directory, watched by the warden from its first moment.
    pub fn new() -> Self {
        prerequisites();
        let parent = std::env::temp_dir();
        let length = parent.as_os_str().len();
        assert!(
            length <= PARENT_LENGTH_LIMIT,
            "{} is too long for sockets below it; set TMPDIR to a shorter path",
            parent.display()
        );
        scan_once(&parent);
        let path = tempfile::Builder::new()
            .prefix(PREFIX)
            .rand_bytes(8)
            .tempdir_in(&parent)
            .expect("a directory can be made")
            .keep();
        warden::watch(&path);
        let lock = File::open(&path).expect("a new directory can be opened");
        lock.lock().expect("a directory can be locked");
        Self { path, _lock: lock }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The cgroup below which everything of this scratch belongs, as engines and bundles want it:
    /// `/cgpu-test-…`.
    pub fn cgroup(&self) -> String {
        format!("/{}", self.path.file_name().expect("a scratch has a name").to_string_lossy())
    }

    /// A command that runs in this directory and carries its name; `name` is a path, or looked up
    /// as an installed program.
    pub fn command(&self, name: impl AsRef<Path>) -> Command {
        let name = name.as_ref();
        let path =
            if name.is_absolute() { name.to_owned() } else { program(&name.to_string_lossy()) };
        let mut command = Command::new(path);
        command.current_dir(&self.path).env(traces::VARIABLE, &self.path);
        command
    }

    /// A command in a mount namespace in which the files below `etc` lie over those of /etc, read-only.
    pub fn command_over_etc(&self, etc: &Path, words: &[&str]) -> Command {
        let mut command = self.command("unshare");
        let script = "mount -t overlay -o \"lowerdir=$0:/etc\" overlay /etc && exec \"$@\"";
        command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
        command.arg(etc).args(words);
        command
    }

    /// Makes a directory below this one and returns its path.
    pub fn directory(&self, name: &str) -> PathBuf {
        let path = self.path.join(name);
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(&path)
            .expect("a directory can be made in a scratch");
        path
    }

    /// Writes a file below this directory and returns its path.
    pub fn file(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path.join(name);
        fs::write(&path, contents).expect("a file can be written in a scratch");
        path
    }

    /// Writes a program below this directory, a script most likely, and returns its path.
    pub fn script(&self, name: &str, contents: &str) -> PathBuf {
        let draft = self.file(&format!("{name}.draft"), contents);
        fs::set_permissions(&draft, fs::Permissions::from_mode(0o755))
            .expect("our own file's mode can be set");
        let (copy, path) = (self.path.join(format!("{name}.copy")), self.path.join(name));
        self.copy_program(&draft, &copy);
        // Somebody may be executing the one that is there.
        fs::rename(copy, &path).expect("both are ours");
        path
    }

    /// Copies a file that is going to be executed.
    ///
    /// By a process of its own: were the copy open for writing in this one, a thread that forks
    /// just then would pass the descriptor to its child for a moment, and executing the copy would
    /// fail ("text file busy").
    pub fn copy_program(&self, from: &Path, to: &Path) {
        run_with_timeout(self.command("cp").arg(from).arg(to), timeout()).ok();
    }

    /// Makes a root file system in the directory `name`: static busybox, links to its applets, the
    /// usual directories.
    pub fn rootfs(&self, name: &str) -> PathBuf {
        let root = self.directory(name);
        for directory in DIRECTORIES {
            self.directory(&format!("{name}/{directory}"));
        }
        let bin = self.directory(&format!("{name}/bin"));
        self.copy_program(&program("busybox"), &bin.join("busybox"));
        for applet in APPLETS {
            symlink("busybox", bin.join(applet)).expect("a link can be made in a new directory");
        }
        root
    }

    /// Makes a bundle in the directory `id`, for a container of that id, that bare runc and
    /// [crun](Self::crun) both run.
    ///
    /// It is what `runc spec` says, except: no terminal, a writable root, a cgroup of this scratch,
    /// `sleep` as its process. `edit` changes the configuration as it likes.
    pub fn bundle(&self, id: &str, edit: impl FnOnce(&mut Value)) -> Bundle {
        let directory = self.directory(id);
        self.rootfs(&format!("{id}/rootfs"));
        run_with_timeout(self.command("runc").arg("spec").current_dir(&directory), timeout()).ok();
        let bundle = Bundle { directory, id: id.to_owned() };
        let mut config = bundle.config();
        config["process"]["terminal"] = json!(false);
        config["process"]["args"] = json!(["sleep", "1000"]);
        config["root"]["readonly"] = json!(false);
        config["linux"]["cgroupsPath"] = json!(format!("{}/{id}", self.cgroup()));
        edit(&mut config);
        bundle.write_config(&config);
        bundle
    }

    /// The distribution's runc, with a state directory of its own in this scratch.
    pub fn runc(&self) -> Runtime<'_> {
        self.runtime(program("runc"))
    }

    /// The distribution's crun, with a state directory of its own in this scratch.
    pub fn crun(&self) -> Runtime<'_> {
        self.runtime(self.crun_program())
    }

    /// Any program that takes runc's arguments, with a state directory of its own in this scratch.
    pub fn runtime(&self, program: impl Into<PathBuf>) -> Runtime<'_> {
        Runtime::new(self, program.into())
    }

    /// A program that behaves as crun does, and works on this machine.
    ///
    /// crun refuses hybrid cgroups. There, this is a script: a private mount namespace with cgroup2
    /// where the hybrid hierarchy is, and `--cgroup-manager=disabled`; containers then stay in the
    /// cgroup of their creator.
    pub fn crun_program(&self) -> PathBuf {
        let crun = program("crun");
        if cgroup::is_unified() {
            return crun;
        }
        let path = self.path.join("crun");
        if !path.exists() {
            let script = CRUN_SCRIPT
                .replace("UNSHARE", &program("unshare").to_string_lossy())
                .replace("MOUNT", &program("mount").to_string_lossy())
                .replace("CRUN", &crun.to_string_lossy());
            self.script("crun", &script);
        }
        path
    }

    /// What exists of this scratch right now, beyond the contents of the directory.
    pub fn traces(&self) -> Traces {
        Traces::of(&self.path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let left = traces::clean(&self.path);
        warden::forget(&self.path);
        if !left.is_empty() && !std::thread::panicking() {
            panic!("could not clean up {}:\n{left}", self.path.display());
        }
    }
}

/// A directory with a `config.json` and a `rootfs`, for one container.
#[derive(Debug)]
pub struct Bundle {
    pub directory: PathBuf,
    /// The id that its container is to have; also the last component of its cgroup.
    pub id: String,
}

impl Bundle {
    /// The root file system.
    pub fn rootfs(&self) -> PathBuf {
        self.directory.join("rootfs")
    }

    /// `config.json` as it is now.
    pub fn config(&self) -> Value {
        let text =
            fs::read(self.directory.join("config.json")).expect("a bundle has a config.json");
        serde_json::from_slice(&text).expect("config.json is JSON")
    }

    /// Replaces `config.json`.
    pub fn write_config(&self, config: &Value) {
        let text = serde_json::to_vec_pretty(config).expect("a value can be written as JSON");
        fs::write(self.directory.join("config.json"), text).expect("a bundle can be written to");
    }
}

fn scan_once(parent: &Path) {
    static SWEPT: std::sync::Once = std::sync::Once::new();
    SWEPT.call_once(|| warden::scan(parent, PREFIX));
}
