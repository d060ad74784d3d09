//! The CDI file of a claim: what the engine puts into a container that uses it. Environment alone: the runtime brings the
//! GPU, by the record that the variable names.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use cgpu_core::request::claim::{Claim, VOID};
use cgpu_core::request::setting_names::NVIDIA_VISIBLE_DEVICES;
use cgpu_host::atomic_file::replace;
use serde_json::{Value, json};

/// The version of the specification that the files need: from it on a device's name may begin with a digit, as a UID does.
const VERSION: &str = "0.5.0";

/// Where and as what the files are written.
#[derive(Debug, Clone)]
pub(super) struct CdiFiles {
    /// A directory that the engine reads.
    pub(super) directory: PathBuf,
    /// The driver: its devices are of the kind `DRIVER/claim`.
    pub(super) driver: String,
    /// `cgpu-hook` on the node: it refuses a container that another runtime makes.
    pub(super) hook: PathBuf,
    /// The configuration by which that finds the registry, if it isn't the usual one.
    pub(super) config: Option<PathBuf>,
}

impl CdiFiles {
    /// The CDI device of a claim's request.
    #[must_use]
    pub(super) fn device(&self, claim: &Claim, request: &str) -> String {
        format!("{}/claim={}", self.driver, name(&claim.uid, request))
    }

    /// The file of the claim with that UID.
    #[must_use]
    pub(super) fn path(&self, uid: &str) -> PathBuf {
        self.directory.join(format!("{}-claim_{uid}.json", self.driver))
    }

    /// Writes the file of a claim; the same content again leaves it as it is.
    ///
    /// # Errors
    ///
    /// If it can't be written.
    pub(super) fn write(&self, claim: &Claim) -> io::Result<()> {
        fs::create_dir_all(&self.directory)?;
        let text = self.text(claim);
        let path = self.path(&claim.uid);
        match fs::read(&path) {
            Ok(old) if old == text => Ok(()),
            // The tokens are root's alone.
            _ => replace(&path, &text, 0o600),
        }
    }

    /// Removes the file of the claim with that UID, if there is one.
    ///
    /// # Errors
    ///
    /// If it can't be removed.
    pub(super) fn remove(&self, uid: &str) -> io::Result<()> {
        match fs::remove_file(self.path(uid)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn text(&self, claim: &Claim) -> Vec<u8> {
        let device = |share| {
            let (variable, value) = claim.variable(share);
            // A runtime that isn't cgpu's brings no GPU by an image's own variable.
            let env = [format!("{variable}={value}"), format!("{NVIDIA_VISIBLE_DEVICES}={VOID}")];
            json!({"name": name(&claim.uid, &share.request), "containerEdits": {"env": env}})
        };
        let devices: Vec<Value> = claim.shares.iter().map(device).collect();
        let mut args = vec![file_name(&self.hook), "claim".to_owned()];
        if let Some(config) = &self.config {
            args.extend(["--config".to_owned(), config.display().to_string()]);
        }
        let hook = json!({"hookName": "createRuntime", "path": self.hook, "args": args});
        let file = json!({
            "cdiVersion": VERSION,
            "kind": format!("{}/claim", self.driver),
            "devices": devices,
            "containerEdits": {"hooks": [hook]},
        });
        let mut text = serde_json::to_vec_pretty(&file).unwrap_or_default();
        text.push(b'\n');
        text
    }
}

fn name(uid: &str, request: &str) -> String {
    format!("{uid}-{request}")
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use cgpu_core::request::claim::{CLAIM_FORMAT, Share};

    use super::*;

    fn claim() -> Claim {
        let share = |request: &str, token: &str| Share {
            request: request.to_owned(),
            token: token.repeat(32),
            gpus: Vec::new(),
            weight: None,
        };
        Claim {
            format: CLAIM_FORMAT,
            namespace: "team".to_owned(),
            name: "c".to_owned(),
            uid: "5c3b9a52-0000-4c8e-9d0e-4f1d2c3b4a59".to_owned(),
            pods: Vec::new(),
            of_one_pod: true,
            shares: vec![share("a", "1"), share("b", "f")],
        }
    }

    #[test]
    fn cdi_file_has_one_variable_per_request() {
        let directory = tempfile::tempdir().unwrap();
        let files = CdiFiles {
            directory: directory.path().join("cdi"),
            driver: "gpu.cgpu.io".to_owned(),
            hook: "/usr/bin/cgpu-hook".into(),
            config: None,
        };
        files.write(&claim()).unwrap();
        let path = directory
            .path()
            .join("cdi/gpu.cgpu.io-claim_5c3b9a52-0000-4c8e-9d0e-4f1d2c3b4a59.json");
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let written: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let expected: Value =
            serde_json::from_str(include_str!("../../../../tests/fixtures/claim.cdi.json"))
                .unwrap();
        assert_eq!(written, expected);
        assert_eq!(
            files.device(&claim(), "a"),
            "gpu.cgpu.io/claim=5c3b9a52-0000-4c8e-9d0e-4f1d2c3b4a59-a"
        );
        for _ in 0..2 {
            files.remove(&claim().uid).unwrap();
        }
        assert!(!path.exists());
    }
}
