//! `config.json` of an OCI bundle as a value: read, looked into, replaced atomically.
//!
//! Knows the file and its JSON. Must not know where edits come from. The value is
//! never turned into a typed copy, and what is written back is the engine's own text but
//! for what changed: unknown fields, order, numbers and escapes stay to the byte. Nothing
//! is written where nothing changed.

mod brought_gpus;
mod devices;
mod edit;
mod exec_process;
mod json_splice;
mod plan_edits;
mod shape;

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde_json::Value;
use thiserror::Error;

pub use edit::{leads_to_daemon, leads_to_mps};
pub use exec_process::ProcessFile;
pub use plan_edits::{Bind, DeviceNode, Edits, HookCall, HookStage, Mount, Withheld};
pub use shape::plain;

use cgpu_core::processor::ProcessorShares;
use cgpu_core::request::Brought;
use cgpu_host::failpoint::failpoint;
use cgpu_host::process::ProcessId;

/// The largest `config.json` we read, in bytes; runc reads its bundles whole, too.
const MAX_CONFIG_BYTES: u64 = 64 << 20;

/// A bundle whose configuration was read.
#[derive(Debug, Clone)]
pub struct Bundle {
    dir: PathBuf,
    config: PathBuf,
    text: String,
    /// What was read, where edits have changed it.
    before: Option<Value>,
    value: Value,
    /// Go replaces bytes that are no UTF-8, JSON forbids them: we read, but don't edit.
    utf8: bool,
}

/// A mount of a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mounted<'a> {
    /// Where in the container.
    pub destination: &'a str,
    /// What; a path on the host if it is a bind mount.
    pub source: &'a str,
    /// Whether it is a bind mount.
    pub is_bind: bool,
    /// Whether it is read-only by its options.
    pub is_read_only: bool,
}

/// Which pid namespace a container is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PidNamespace<'a> {
    /// One that is new with it.
    New,
    /// That of the runtime: the host's.
    Runtime,
    /// That at this path.
    At(&'a str),
}

/// Why a bundle can't be read or written.
#[derive(Debug, Error)]
pub enum BundleError {
    /// A file operation failed.
    #[error("bundle {}: {}: {source}; {remedy}", dir.display(), file.display())]
    File {
        /// The bundle.
        dir: PathBuf,
        /// The file in it.
        file: PathBuf,
        #[source]
        source: io::Error,
        remedy: &'static str,
    },
    /// The configuration is a FIFO, a directory or the like: what was read from it could
    /// not be read again by the real runtime, or not be replaced.
    #[error("bundle {}: {} is not a regular file; have the engine write it again", dir.display(), file.display())]
    NoFile {
        /// The bundle.
        dir: PathBuf,
        /// What should be a file.
        file: PathBuf,
    },
    /// The configuration is no JSON.
    #[error("bundle {}: {} is not valid JSON: {source}; have the engine write it again", dir.display(), file.display())]
    Json {
        /// The bundle.
        dir: PathBuf,
        /// The file in it.
        file: PathBuf,
        /// Where and why.
        #[source]
        source: serde_json::Error,
    },
    /// A part of the configuration is not what the OCI specification says.
    #[error("bundle {}: {field} in {} is not {expected}; have the engine write it again", dir.display(), file.display())]
    Shape {
        /// The bundle.
        dir: PathBuf,
        /// The file in it.
        file: PathBuf,
        /// The field, as `process.env`.
        field: &'static str,
        /// What it must be.
        expected: &'static str,
    },
    /// The configuration is larger than we read.
    #[error("bundle {}: {} has more than {} MiB; have the engine write a smaller one", dir.display(), file.display(), MAX_CONFIG_BYTES >> 20)]
    TooLarge {
        /// The bundle.
        dir: PathBuf,
        /// The file in it.
        file: PathBuf,
    },
}

impl BundleError {
    /// Whether there is no such bundle, or no configuration in it.
    #[must_use]
    pub fn is_absence(&self) -> bool {
        let absent = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
        matches!(self, BundleError::File { source, .. } if absent.contains(&source.kind()))
    }
}

impl Bundle {
    /// Reads the configuration `file` (crun may call it otherwise than `config.json`) of
    /// the bundle `dir`.
    ///
    /// # Errors
    ///
    /// Where there is none, or it is no JSON object.
    pub fn load(dir: &Path, file: &Path) -> Result<Self, BundleError> {
        let failed = |source, remedy| BundleError::File {
            dir: dir.to_owned(),
            file: file.to_owned(),
            source,
            remedy,
        };
        let remedy = "give the bundle's directory with --bundle";
        let dir_found = fs::canonicalize(dir).map_err(|source| failed(source, remedy))?;
        let config = dir_found.join(file);
        let mut bytes = Vec::new();
        // Opening a FIFO would wait for a writer, and the engine for us, for ever.
        let opened = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(&config)
            .map_err(|source| failed(source, remedy))?;
        if !opened.metadata().map_err(|source| failed(source, remedy))?.is_file() {
            return Err(BundleError::NoFile { dir: dir.to_owned(), file: file.to_owned() });
        }
        opened
            .take(MAX_CONFIG_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(|source| failed(source, remedy))?;
        if bytes.len() as u64 > MAX_CONFIG_BYTES {
            return Err(BundleError::TooLarge { dir: dir.to_owned(), file: file.to_owned() });
        }
        Self::from_bytes(&bytes, dir_found, config)
    }

    /// A configuration that has no file of its own: podman's `precreate` hands it over a
    /// pipe. It can't be saved.
    ///
    /// # Errors
    ///
    /// Where `bytes` is no JSON object.
    pub fn from_bytes(bytes: &[u8], dir: PathBuf, config: PathBuf) -> Result<Self, BundleError> {
        let file = || PathBuf::from(config.file_name().unwrap_or_default());
        let utf8 = std::str::from_utf8(bytes).is_ok();
        let text = String::from_utf8_lossy(bytes).into_owned();
        let value: Value = serde_json::from_str(&text).map_err(|source| BundleError::Json {
            dir: dir.clone(),
            file: file(),
            source,
        })?;
        if !value.is_object() {
            let (field, expected) = ("the outermost value", "an object");
            return Err(BundleError::Shape { file: file(), dir, field, expected });
        }
        Ok(Bundle { dir, config, text, before: None, value, utf8 })
    }

    /// The bundle's directory, without links.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn misshapen(&self, field: &'static str, expected: &'static str) -> BundleError {
        let file = PathBuf::from(self.config.file_name().unwrap_or_default());
        BundleError::Shape { dir: self.dir.clone(), file, field, expected }
    }

    /// The items of `process.env`; none where there is no process.
    ///
    /// # Errors
    ///
    /// Where it is no list of strings.
    pub fn env(&self) -> Result<Vec<&str>, BundleError> {
        match self.value.pointer("/process/env") {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::Array(items)) => items.iter().map(Value::as_str).collect(),
            Some(_) => None,
        }
        .ok_or_else(|| self.misshapen("process.env", "a list of strings"))
    }

    /// The annotations.
    ///
    /// # Errors
    ///
    /// Where they are no map of strings.
    pub fn annotations(&self) -> Result<Vec<(&str, &str)>, BundleError> {
        match self.value.get("annotations") {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::Object(map)) => {
                map.iter().map(|(key, value)| Some((key.as_str(), value.as_str()?))).collect()
            }
            Some(_) => None,
        }
        .ok_or_else(|| self.misshapen("annotations", "a map of strings"))
    }

    /// The container's seccomp profile.
    #[must_use]
    pub fn seccomp(&self) -> Option<&Value> {
        self.value.pointer("/linux/seccomp")
    }

    /// The container's root directory; `None` where the bundle names none, or one that is
    /// relative to a bundle whose place isn't known.
    #[must_use]
    pub fn rootfs(&self) -> Option<PathBuf> {
        let path = self.dir.join(self.value.pointer("/root/path")?.as_str()?);
        path.is_absolute().then_some(path)
    }

    /// What is mounted in the container: where, and from where on the host.
    pub fn mounted(&self) -> impl Iterator<Item = (&str, &str)> {
        let mounts = self.value.get("mounts").and_then(Value::as_array);
        mounts.into_iter().flatten().filter_map(|mount| {
            Some((mount["destination"].as_str()?, mount["source"].as_str().unwrap_or_default()))
        })
    }

    /// The mounts, in their order.
    pub fn mounts(&self) -> impl Iterator<Item = Mounted<'_>> {
        let mounts = self.value.get("mounts").and_then(Value::as_array).into_iter().flatten();
        mounts.filter_map(|mount| {
            Some(Mounted {
                destination: mount["destination"].as_str()?,
                source: mount["source"].as_str().unwrap_or_default(),
                is_bind: shape::is_bind(mount),
                is_read_only: shape::is_read_only(mount),
            })
        })
    }

    /// Whether the container gets a mount namespace that is new with it.
    #[must_use]
    pub fn has_own_mounts(&self) -> bool {
        let namespaces = self.value.pointer("/linux/namespaces").and_then(Value::as_array);
        namespaces.into_iter().flatten().any(|namespace| {
            let path = namespace.get("path").and_then(Value::as_str).unwrap_or_default();
            namespace["type"] == "mount" && path.is_empty()
        })
    }

    /// How much of a processor the container may take, in thousandths of one; `None` without a limit (`linux.resources.cpu` of
    /// the OCI runtime specification).
    #[must_use]
    pub fn processor_limit(&self) -> Option<u64> {
        let cpu = self.value.pointer("/linux/resources/cpu")?;
        let quota_us = cpu.get("quota")?.as_i64().and_then(|quota| u64::try_from(quota).ok())?;
        // The kernel's period where none is given (`default_bw_period_us`, kernel/sched/core.c).
        let period_us = cpu.get("period").and_then(Value::as_u64).filter(|period| *period > 0);
        let period_us = period_us.unwrap_or(100_000);
        (quota_us > 0).then(|| quota_us.saturating_mul(1000) / period_us)
    }

    /// The container's weight of the processor, by `linux.resources.cpu.shares`, or by `cpu.weight` among the settings of
    /// cgroups of version 2, as runc takes that one rather; `None` for the default one.
    #[must_use]
    pub fn processor_shares(&self) -> Option<ProcessorShares> {
        let resources = self.value.pointer("/linux/resources")?;
        let weight = resources.pointer("/unified/cpu.weight").and_then(Value::as_str);
        let weight =
            weight.and_then(|weight| weight.trim().parse().ok()).map(ProcessorShares::of_weight);
        let shares = || resources.pointer("/cpu/shares")?.as_u64().filter(|shares| *shares > 0);
        weight.or_else(|| shares().map(ProcessorShares))
    }

    /// Whether the container is in a user namespace that isn't the runtime's.
    #[must_use]
    pub fn has_user_namespace(&self) -> bool {
        let namespaces = self.value.pointer("/linux/namespaces").and_then(Value::as_array);
        namespaces.into_iter().flatten().any(|namespace| namespace["type"] == "user")
    }

    /// The hooks, as they are in the file.
    #[must_use]
    pub fn hooks(&self) -> Option<&Value> {
        self.value.get("hooks")
    }

    /// The word behind `flag` in the arguments of a hook whose program is `hook`.
    #[must_use]
    pub fn hook_argument(&self, hook: &Path, flag: &str) -> Option<&str> {
        let stages = self.value.get("hooks")?.as_object()?.values();
        let calls = stages.filter_map(Value::as_array).flatten();
        let mut ours = calls.filter(|call| call["path"].as_str().map(Path::new) == Some(hook));
        ours.find_map(|call| {
            let args = call["args"].as_array()?;
            args.get(args.iter().position(|arg| arg == flag)? + 1)?.as_str()
        })
    }

    /// What others brought of GPUs into the bundle. What an earlier container creation of ours gave is
    /// theirs, too, for this.
    #[must_use]
    pub fn brought(&self) -> Brought {
        brought_gpus::brought(&self.value)
    }

    /// What of the host appears in the container: the sources of its bind mounts.
    pub fn bind_sources(&self) -> impl Iterator<Item = &str> {
        let mounts = self.value.get("mounts").and_then(Value::as_array).into_iter().flatten();
        mounts.filter(|mount| shape::is_bind(mount)).filter_map(|mount| mount["source"].as_str())
    }

    /// Whether the container may use every device of the host.
    #[must_use]
    pub fn allows_every_device(&self) -> bool {
        devices::allows_every_device(&self.value)
    }

    /// Whether the container's processes can have that capability: it is in one of their sets.
    #[must_use]
    pub fn has_capability(&self, name: &str) -> bool {
        let sets = self.value.pointer("/process/capabilities").and_then(Value::as_object);
        let mut sets = sets.into_iter().flat_map(serde_json::Map::values);
        sets.any(|set| set.as_array().is_some_and(|list| list.iter().any(|item| item == name)))
    }

    /// Whether NVIDIA's toolkit would call the container privileged.
    #[must_use]
    pub fn is_privileged(&self) -> bool {
        self.allows_every_device() || self.has_capability("CAP_SYS_ADMIN")
    }

    /// The container's pid namespace.
    #[must_use]
    pub fn pid_namespace(&self) -> PidNamespace<'_> {
        let all = self.value.pointer("/linux/namespaces").and_then(Value::as_array);
        let found = all.into_iter().flatten().find(|namespace| namespace["type"] == "pid");
        match found.map(|namespace| namespace["path"].as_str().unwrap_or_default()) {
            None => PidNamespace::Runtime,
            Some("") => PidNamespace::New,
            Some(path) => PidNamespace::At(path),
        }
    }

    /// Applies `edits`; says whether they changed anything.
    ///
    /// # Errors
    ///
    /// Where a part that must be edited is not what the OCI specification says; then
    /// nothing of the bundle may be used further.
    pub fn apply(&mut self, edits: &Edits) -> Result<bool, BundleError> {
        if !self.utf8 {
            return Err(self.misshapen("the text", "UTF-8"));
        }
        let before = edit::apply(&mut self.value, edits)
            .map_err(|(field, expected)| self.misshapen(field, expected))?;
        let changed = before.is_some();
        self.before = self.before.take().or(before);
        Ok(changed)
    }

    /// The configuration's text with the edits.
    #[must_use]
    pub fn to_text(&self) -> String {
        let before = self.before.as_ref().unwrap_or(&self.value);
        json_splice::splice(&self.text, before, &self.value)
    }

    /// Replaces the configuration on disk in one step, with its mode and owner. Where
    /// `config.json` is a link, the link is replaced and its target left alone.
    ///
    /// # Errors
    ///
    /// If it can't be written; then the old one is still complete.
    pub fn save(&self) -> Result<(), BundleError> {
        let mut prefix = self.config.file_name().unwrap_or_default().to_owned();
        prefix.push(".cgpu-");
        self.scan(&prefix);
        let mut name = prefix;
        name.push(std::process::id().to_string());
        let temporary = self.config.with_file_name(name);
        let written = self.write_beside(&temporary);
        if written.is_err() {
            // The first error is the one to report; a file that was never made is no other.
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(|source| BundleError::File {
            dir: self.dir.clone(),
            file: self.config.file_name().unwrap_or_default().into(),
            source,
            remedy: "make the bundle's directory writable and give it space",
        })
    }

    /// Removes the temporary files of processes that were killed while they wrote: an engine
    /// that retries again and again would fill the bundle with them. A name that is not
    /// shared keeps two container creations of one bundle from writing into the same file.
    fn scan(&self, prefix: &OsStr) {
        let writer = |name: &OsStr| {
            let pid = name.as_bytes().strip_prefix(prefix.as_bytes())?;
            str::from_utf8(pid).ok()?.parse::<i32>().ok()
        };
        let own = i32::try_from(std::process::id()).ok();
        // What can't be listed or removed fails at the writing, where it is reported.
        let beside = self.config.parent().unwrap_or(&self.dir);
        for entry in fs::read_dir(beside).into_iter().flatten().flatten() {
            if let Some(pid) = writer(&entry.file_name())
                && (Some(pid) == own || ProcessId::is_absent(pid))
            {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    fn write_beside(&self, temporary: &Path) -> io::Result<()> {
        let old = fs::metadata(&self.config)?;
        let mut file = File::create_new(temporary)?;
        file.write_all(self.to_text().as_bytes())?;
        fchown(&file, Some(old.uid()), Some(old.gid()))?;
        file.set_permissions(Permissions::from_mode(old.mode() & 0o7777))?;
        failpoint("bundle-written");
        fs::rename(temporary, &self.config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bundle(text: &str) -> (tempfile::TempDir, Bundle) {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), text).unwrap();
        let bundle = Bundle::load(dir.path(), Path::new("config.json")).unwrap();
        (dir, bundle)
    }

    fn edits() -> Edits {
        Edits { env: vec![("A".into(), "b".into())], ..Edits::default() }
    }

    #[test]
    fn order_unknown_fields_and_numbers_survive_an_edit() {
        let text = r#"{"z":1,"a":{"x-unknown":[1.50,1e3,18446744073709551616,-0.0]},"process":{"env":["P=\"é"],"y":null}}"#;
        let (dir, mut bundle) = bundle(text);
        assert!(bundle.apply(&edits()).unwrap());
        bundle.save().unwrap();
        let expected = text.replace(r#""P=\"é"]"#, r#""P=\"é","A=b"]"#);
        assert_eq!(fs::read_to_string(dir.path().join("config.json")).unwrap(), expected);
    }

    #[test]
    fn non_utf8_config_is_readable_but_not_editable() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("config.json"), b"{\"process\":{\"env\":[\"A=\xff\"]}}").unwrap();
        let mut bundle = Bundle::load(dir.path(), Path::new("config.json")).unwrap();
        assert_eq!(bundle.env().unwrap(), ["A=\u{fffd}"]);
        let error = bundle.apply(&edits()).unwrap_err().to_string();
        assert!(error.contains("the text in config.json is not UTF-8"), "{error}");
    }

    /// Mode and owner are retained, and nothing is left next to the configuration.
    #[test]
    fn saved_config_retains_mode_and_owner() {
        let (dir, mut bundle) = bundle(r#"{"process":{}}"#);
        let file = dir.path().join("config.json");
        fs::set_permissions(&file, Permissions::from_mode(0o604)).unwrap();
        std::os::unix::fs::chown(&file, Some(1234), Some(4321)).unwrap();
        bundle.apply(&edits()).unwrap();
        bundle.save().unwrap();
        let meta = fs::metadata(&file).unwrap();
        assert_eq!((meta.mode() & 0o7777, meta.uid(), meta.gid()), (0o604, 1234, 4321));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn linked_config_is_replaced_and_target_untouched() {
        let dir = tempfile::tempdir().unwrap();
        let (target, link) = (dir.path().join("template.json"), dir.path().join("config.json"));
        fs::write(&target, r#"{"process":{}}"#).unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let mut bundle = Bundle::load(dir.path(), Path::new("config.json")).unwrap();
        bundle.apply(&edits()).unwrap();
        bundle.save().unwrap();
        assert_eq!(fs::read_to_string(&target).unwrap(), r#"{"process":{}}"#);
        assert!(fs::symlink_metadata(&link).unwrap().is_file());
    }

    #[test]
    fn invalid_bundle_is_refused_with_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let load = |text: &str| {
            fs::write(dir.path().join("config.json"), text).unwrap();
            Bundle::load(dir.path(), Path::new("config.json")).unwrap_err().to_string()
        };
        assert!(load("{").contains("config.json is not valid JSON: EOF while parsing"));
        assert!(load("[]").contains("the outermost value in config.json is not an object"));
        fs::remove_file(dir.path().join("config.json")).unwrap();
        let missing = Bundle::load(dir.path(), Path::new("config.json")).unwrap_err().to_string();
        assert!(missing.contains("config.json: No such file or directory"), "{missing}");
        assert!(missing.ends_with("give the bundle's directory with --bundle"), "{missing}");
        let missing = Bundle::load(Path::new("/nowhere"), Path::new("c")).unwrap_err().to_string();
        assert!(missing.starts_with("bundle /nowhere: c: No such file"), "{missing}");
    }

    #[test]
    fn ten_mebibytes_are_no_trouble() {
        let filler = "x".repeat(10 << 20);
        let (_dir, mut bundle) =
            bundle(&format!(r#"{{"process":{{}},"annotations":{{"a":"{filler}"}}}}"#));
        assert!(bundle.apply(&edits()).unwrap());
        bundle.save().unwrap();
    }

    #[test]
    fn processor_limit_is_a_quota_per_period() {
        let limit = |cpu: &str| {
            bundle(&format!(r#"{{"linux":{{"resources":{{"cpu":{cpu}}}}}}}"#)).1.processor_limit()
        };
        assert_eq!(limit(r#"{"quota":10000,"period":100000}"#), Some(100));
        assert_eq!(limit(r#"{"quota":250000}"#), Some(2500));
        assert_eq!(limit(r#"{"quota":50000,"period":0}"#), Some(500));
        for unlimited in
            [r#"{"quota":-1,"period":100000}"#, r#"{"quota":0}"#, r#"{"shares":512}"#, "{}"]
        {
            assert_eq!(limit(unlimited), None, "{unlimited}");
        }
        assert_eq!(bundle("{}").1.processor_limit(), None);
    }

    #[test]
    fn processor_weight_is_shares_or_cgroup_v2_weight() {
        let shares = |resources: &str| {
            bundle(&format!(r#"{{"linux":{{"resources":{resources}}}}}"#)).1.processor_shares()
        };
        assert_eq!(shares(r#"{"cpu":{"shares":512}}"#), Some(ProcessorShares(512)));
        let both = r#"{"cpu":{"shares":512},"unified":{"cpu.weight":"10000"}}"#;
        assert_eq!(shares(both), Some(ProcessorShares(262_144)));
        for default in [r#"{"cpu":{"shares":0}}"#, r#"{"unified":{"cpu.weight":"much"}}"#, "{}"] {
            assert_eq!(shares(default), None, "{default}");
        }
    }

    /// Mounts are the container's own if its mount namespace is new.
    #[test]
    fn mounts_are_own_in_a_new_namespace() {
        let own = |text: &str| bundle(text).1.has_own_mounts();
        assert!(own(r#"{"linux":{"namespaces":[{"type":"pid"},{"type":"mount"}]}}"#));
        assert!(own(r#"{"linux":{"namespaces":[{"type":"mount","path":""}]}}"#));
        assert!(!own(r#"{"linux":{"namespaces":[{"type":"mount","path":"/proc/1/ns/mnt"}]}}"#));
        assert!(!own(r#"{"linux":{"namespaces":[{"type":"pid"}]}}"#));
        assert!(!own("{}"));
    }

    #[test]
    fn variables_and_annotations_must_be_strings() {
        let (_dir, good) = bundle(r#"{"process":{"env":["A=b"]},"annotations":{"k":"v"}}"#);
        assert_eq!(good.env().unwrap(), ["A=b"]);
        assert_eq!(good.annotations().unwrap(), [("k", "v")]);
        let (_dir, bad) = bundle(r#"{"process":{"env":[1]},"annotations":{"k":1}}"#);
        assert!(bad.env().unwrap_err().to_string().contains("process.env in config.json is not"));
        assert!(bad.annotations().unwrap_err().to_string().contains("annotations in"));
    }
}
