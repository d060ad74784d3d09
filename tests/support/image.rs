//! Images made here, because none can be pulled: one layer of busybox and whatever environment a
//! test bakes in.
//!
//! The archive has the layout of `docker save`, which docker, containerd and podman all load.

use std::fs;
use std::path::PathBuf;

use serde_json::json;

use super::{Scratch, run_with_timeout, timeout};

/// The image that every engine has loaded when it has started.
pub const IMAGE: &str = "localhost/busybox:1";

/// What containerd's CRI runs as the process of a pod's sandbox.
pub(super) const PAUSE: &str = "localhost/pause:1";

/// A busybox image with a name, an environment and a command of its own.
#[derive(Debug, Clone)]
pub struct Image {
    name: String,
    environment: Vec<String>,
    command: Vec<String>,
    rootfs: Option<PathBuf>,
}

impl Image {
    /// An image called `name`, like `localhost/greedy:1`, whose command is `sh`.
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            environment: vec!["PATH=/bin".to_owned()],
            command: vec!["sh".to_owned()],
            rootfs: None,
        }
    }

    /// Makes it of a root file system that is there, instead of busybox.
    #[must_use]
    pub fn rootfs(mut self, path: impl Into<PathBuf>) -> Self {
        self.rootfs = Some(path.into());
        self
    }

    /// Bakes a variable into the image.
    #[must_use]
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.environment.push(format!("{name}={value}"));
        self
    }

    /// Sets what runs when a container is given no arguments.
    #[must_use]
    pub fn command(mut self, words: &[&str]) -> Self {
        self.command = words.iter().map(|&word| word.to_owned()).collect();
        self
    }

    /// Writes the image as an archive into the scratch and returns the file's path.
    pub(super) fn archive(&self, scratch: &Scratch) -> PathBuf {
        let tar =
            |args: &[&str]| run_with_timeout(scratch.command("tar").args(args), timeout()).ok();
        let layer = scratch.path().join("layer.tar");
        match &self.rootfs {
            Some(rootfs) => {
                let rootfs = rootfs.to_string_lossy();
                tar(&["--numeric-owner", "-C", &rootfs, "-cf", "layer.tar", "."]);
            }
            None if layer.exists() => {}
            None => {
                scratch.rootfs("image-rootfs");
                tar(&["--numeric-owner", "-C", "image-rootfs", "-cf", "layer.tar", "."]);
            }
        }
        let sum = run_with_timeout(scratch.command("sha256sum").arg("layer.tar"), timeout()).ok();
        let digest =
            sum.stdout.split(' ').next().expect("sha256sum prints the digest first").to_owned();
        let architecture = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            other => other,
        };
        let config = json!({
            "architecture": architecture,
            "os": "linux",
            "config": {"Env": self.environment, "Cmd": self.command},
            "rootfs": {"type": "layers", "diff_ids": [format!("sha256:{digest}")]},
            "history": [{"created_by": "the test harness"}],
        });
        let manifest =
            json!([{"Config": "image.json", "RepoTags": [self.name], "Layers": ["layer.tar"]}]);
        scratch.file("image.json", config.to_string());
        scratch.file("manifest.json", manifest.to_string());
        tar(&["-cf", "image.tar", "manifest.json", "image.json", "layer.tar"]);
        let archive = scratch.path().join(format!("{}.tar", self.name.replace(['/', ':'], "_")));
        fs::rename(scratch.path().join("image.tar"), &archive)
            .expect("a file can be renamed in a scratch");
        if self.rootfs.is_some() {
            fs::remove_file(&layer).expect("it was made here");
        }
        archive
    }
}
