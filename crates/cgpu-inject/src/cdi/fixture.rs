//! Specifications for tests: those of `tests/fixtures/cdi`, and the shortest one; and hosts that
//! have what a specification names.

use std::fs;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, makedev, mknod};

use super::dirs::{Content, Source};
use super::parser::{Form, parse};
use super::spec::Edits;
use super::{HostFacts, Specifications};

/// A device and an edit for each container; every part can be replaced.
pub(super) const MINIMAL: &str = "\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  env: [A=b]
devices:
  - name: \"0\"
    containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
";

/// A fixture by its file's name.
pub(super) fn text(name: &str) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/cdi");
    fs::read_to_string(directory.join(name)).unwrap()
}

/// Texts as they are read from files, each with its directory's place and its name.
pub(super) fn sources(files: &[(usize, &str, &str)]) -> Vec<Source> {
    let source = |(precedence, name, text): &(usize, &str, &str)| {
        let content = match parse(text.as_bytes(), Form::Yaml) {
            Ok(spec) => Content::Specification(Box::new(spec)),
            Err(error) => Content::Unusable(error.to_string()),
        };
        Source {
            file: format!("/cdi/{precedence}/{name}").into(),
            precedence: *precedence,
            content,
        }
    };
    files.iter().map(source).collect()
}

/// The version of the driver that fixtures are of.
pub(super) const DRIVER: &str = "535.247.01";

/// A host under a directory of its own.
pub(super) struct Host(tempfile::TempDir);

impl Host {
    /// One that has what `specification` names: as many nodes as files.
    pub(super) fn with(specification: &str) -> Self {
        let host = Host(tempfile::tempdir().unwrap());
        let spec = parse(specification.as_bytes(), Form::Yaml).unwrap();
        let devices = spec.devices.iter().map(|device| &device.container_edits);
        for edits in devices.chain([&spec.container_edits]) {
            host.has(edits);
        }
        host
    }

    fn has(&self, edits: &Edits) {
        for node in &edits.device_nodes {
            let usual = match node.source() {
                "/dev/nvidiactl" => (195, 255),
                "/dev/nvidia-modeset" => (195, 254),
                "/dev/nvidia-uvm" => (510, 0),
                "/dev/nvidia-uvm-tools" => (510, 1),
                path => (195, path.trim_start_matches("/dev/nvidia").parse().unwrap_or(200)),
            };
            let stated = u64::try_from(node.major).unwrap();
            let numbers = match stated {
                0 => usual,
                major => (major, u64::try_from(node.minor).unwrap()),
            };
            self.node(node.source(), numbers);
        }
        let mounts = edits.mounts.iter().map(|mount| &mount.host_path);
        for path in mounts.chain(edits.hooks.iter().map(|hook| &hook.path)) {
            self.file(path);
        }
    }

    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path.trim_start_matches('/'))
    }

    pub(super) fn file(&self, path: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        if !self.at(path).exists() {
            fs::write(self.at(path), "").unwrap();
        }
    }

    pub(super) fn remove(&self, path: &str) {
        fs::remove_file(self.at(path)).unwrap();
    }

    pub(super) fn node(&self, path: &str, (major, minor): (u64, u64)) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        let _ = fs::remove_file(self.at(path));
        let mode = Mode::from_bits_truncate(0o644);
        mknod(&self.at(path), SFlag::S_IFCHR, mode, makedev(major, minor)).unwrap();
    }

    pub(super) fn facts(&self) -> HostFacts {
        HostFacts { root: self.0.path().to_owned(), driver: DRIVER.parse().ok() }
    }
}

/// The specifications of [`sources`].
pub(super) fn specifications(files: &[(usize, &str, &str)]) -> Specifications {
    Specifications { sources: sources(files) }
}
