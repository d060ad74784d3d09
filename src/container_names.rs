//! What engines call their containers: [`of`], and which one a word means: [`chosen`].
//!
//! A name is read when it is needed, for docker and podman can rename a container: from the
//! engine's own file of it, else from the bundle's annotations. No engine is asked, and nothing is
//! retained here; events keep the name that they were written with. Must not know what a name is for.
//! The container's creator may have chosen it: it can be of any length and any characters.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::Deserialize;

use cgpu_host::registry::{Record, RegistryError};
use cgpu_inject::bundle::Bundle;

/// Most bytes that are read of an engine's file: podman has one for all its containers.
const MOST_BYTES: u64 = 16 << 20;

/// What docker mounts from its own directory of a container.
const DOCKERS: [&str; 3] = ["/etc/hostname", "/etc/hosts", "/etc/resolv.conf"];

/// Annotations by which Kubernetes' engines tell a container: the pod's namespace, the pod, the
/// container. containerd's, then CRI-O's.
const KUBERNETES: [[&str; 3]; 2] = [
    [
        "io.kubernetes.cri.sandbox-namespace",
        "io.kubernetes.cri.sandbox-name",
        "io.kubernetes.cri.container-name",
    ],
    ["io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name"],
];

/// Another engine's annotation.
const NERDCTL: &str = "nerdctl/name";

/// What its engine calls the container of `record`; `None` where that isn't known.
#[must_use]
pub fn of(record: &Record) -> Option<String> {
    Files::default().name(record)
}

/// What its engine calls the container `id` of `bundle`; `None` where that isn't known.
#[must_use]
pub fn of_bundle(id: &str, bundle: &Bundle) -> Option<String> {
    let annotations = bundle.annotations().unwrap_or_default();
    Files::default().found(id, bundle.dir(), bundle.mounted(), &annotations)
}

/// Engines' files while several containers are read: a file about all of them is read once.
#[derive(Debug, Default)]
pub struct Files {
    /// podman's, by path: the first name of each container.
    podmans: HashMap<PathBuf, HashMap<String, String>>,
}

/// What a bundle's configuration says of a name. Nothing else of it is retained: a host has hundreds.
#[derive(Debug, Deserialize)]
struct Config<'a> {
    #[serde(borrow, default)]
    annotations: Option<HashMap<Cow<'a, str>, Cow<'a, str>>>,
    #[serde(borrow, default)]
    mounts: Option<Vec<Mount<'a>>>,
}

#[derive(Debug, Deserialize)]
struct Mount<'a> {
    #[serde(borrow)]
    destination: Cow<'a, str>,
    #[serde(borrow, default)]
    source: Cow<'a, str>,
}

impl Files {
    /// What its engine calls the container of `record`; `None` where that isn't known.
    pub fn name(&mut self, record: &Record) -> Option<String> {
        // Whose bundle isn't known has none.
        let bundle = record.bundle.is_absolute().then_some(&record.bundle)?;
        let text = read(&bundle.join("config.json"))?;
        let config: Config<'_> = serde_json::from_slice(&text).ok()?;
        let annotations = config.annotations.unwrap_or_default();
        let annotations: Vec<(&str, &str)> =
            annotations.iter().map(|(key, value)| (&**key, &**value)).collect();
        let mounts = config.mounts.unwrap_or_default();
        let mounted = mounts.iter().map(|mount| (&*mount.destination, &*mount.source));
        self.found(record.container_id(), bundle, mounted, &annotations)
    }

    /// The name of the container `id`, by what its bundle says.
    fn found<'a>(
        &mut self,
        id: &str,
        bundle: &Path,
        mounted: impl Iterator<Item = (&'a str, &'a str)>,
        annotations: &[(&str, &str)],
    ) -> Option<String> {
        // An engine's own word goes before one that its user may have chosen.
        dockers_file(id, mounted)
            .and_then(|file| dockers_name(&read(&file)?))
            .or_else(|| {
                let files = podmans_files(id, bundle)?;
                files.into_iter().find_map(|file| self.podmans_name(id, file))
            })
            .or_else(|| annotated(annotations))
            .filter(|name| !name.is_empty())
    }

    fn podmans_name(&mut self, id: &str, file: PathBuf) -> Option<String> {
        let names = self.podmans.entry(file).or_insert_with_key(|file| {
            read(file).and_then(|text| podmans_names(&text)).unwrap_or_default()
        });
        names.get(id).cloned()
    }
}

/// docker's own file of the container `id`, whose mounts are `mounted`: where, and from where. One
/// that shares another's network has the other's files, from next to its own.
fn dockers_file<'a>(
    id: &str,
    mut mounted: impl Iterator<Item = (&'a str, &'a str)>,
) -> Option<PathBuf> {
    let is_id = |id: &str| id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    let all = mounted.find_map(|(to, from)| {
        let own = Path::new(from).parent()?;
        let all = own.parent()?;
        let is_dockers = DOCKERS.contains(&to)
            && own.file_name()?.to_str().is_some_and(is_id)
            && all.ends_with("containers");
        is_dockers.then_some(all)
    })?;
    is_id(id).then(|| all.join(id).join("config.v2.json"))
}

/// The name in docker's file of a container, where it is `/name`.
fn dockers_name(text: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Container {
        #[serde(rename = "Name")]
        name: String,
    }
    let name = serde_json::from_slice::<Container>(text).ok()?.name;
    Some(name.strip_prefix('/').map(str::to_owned).unwrap_or(name))
}

/// podman's files of all its containers, where `bundle` is what it makes for `id`:
/// `DRIVER-containers/ID/userdata`.
fn podmans_files(id: &str, bundle: &Path) -> Option<[PathBuf; 2]> {
    let own = bundle.parent().filter(|own| own.file_name().is_some_and(|name| name == id))?;
    let all = own.parent()?;
    let is_podmans = bundle.ends_with("userdata")
        && all.file_name()?.to_str().is_some_and(|name| name.ends_with("-containers"));
    is_podmans.then(|| ["containers.json", "volatile-containers.json"].map(|name| all.join(name)))
}

/// The first name of each container in podman's file of all, by id.
fn podmans_names(text: &[u8]) -> Option<HashMap<String, String>> {
    #[derive(Deserialize)]
    struct Container {
        id: String,
        #[serde(default)]
        names: Option<Vec<String>>,
    }
    let all: Vec<Container> = serde_json::from_slice(text).ok()?;
    let named = all.into_iter().filter_map(|container| {
        let first = container.names?.into_iter().next()?;
        Some((container.id, first))
    });
    Some(named.collect())
}

/// The name in annotations: `NAMESPACE/POD/CONTAINER`, as far as they tell.
fn annotated(annotations: &[(&str, &str)]) -> Option<String> {
    let value = |name: &str| {
        let found = annotations.iter().rfind(|(key, _)| *key == name);
        found.map(|(_, value)| *value).filter(|value| !value.is_empty())
    };
    let pods = KUBERNETES.iter().find(|[.., container]| value(container).is_some());
    let in_pod = pods.map(|names| names.iter().filter_map(|name| value(name)).collect::<Vec<_>>());
    in_pod.map(|parts| parts.join("/")).or_else(|| value(NERDCTL).map(str::to_owned))
}

/// The bytes of a regular file, and of nothing else: a pipe would wait.
fn read(path: &Path) -> Option<Vec<u8>> {
    if !fs::symlink_metadata(path).ok()?.is_file() {
        return None;
    }
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).ok()?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// The container that `word` means: by its id; else by its name; else by the last part of its name,
/// as of a container in a pod; else by the beginning of its id.
///
/// # Errors
///
/// Where none is meant, or more than one.
pub fn chosen(word: &str, records: Vec<Record>) -> Result<Record, RegistryError> {
    // One that has ended has the name of its successor, and the beginning of its id.
    let (leaked, living): (Vec<_>, Vec<_>) = records.into_iter().partition(Record::is_leaked);
    match chosen_of(word, living) {
        Err(RegistryError::Unknown { .. }) => chosen_of(word, leaked),
        found => found,
    }
}

fn chosen_of(word: &str, records: Vec<Record>) -> Result<Record, RegistryError> {
    let mut names = None;
    let found = {
        let ids: Vec<&str> = records.iter().map(|record| record.key.id.as_str()).collect();
        meant(word, &ids, || names.insert(records.iter().map(of).collect::<Vec<_>>()))
    };
    let word = || word.to_owned();
    match found.as_slice() {
        [] => Err(RegistryError::Unknown { id: word() }),
        [at] => {
            let one = records.into_iter().nth(*at);
            one.ok_or_else(|| RegistryError::Unknown { id: word() })
        }
        several => Err(RegistryError::Ambiguous { id: word(), count: several.len() }),
    }
}

/// The places of those that `word` means, in `ids` and in `names`, which is asked for only where
/// no id is that word. Pure.
fn meant<'a>(
    word: &str,
    ids: &[&str],
    names: impl FnOnce() -> &'a mut Vec<Option<String>>,
) -> Vec<usize> {
    let places = |fits: &dyn Fn(usize) -> bool| (0..ids.len()).filter(|at| fits(*at)).collect();
    if word.is_empty() {
        return Vec::new();
    }
    let by_id: Vec<usize> = places(&|at| ids[at] == word);
    if !by_id.is_empty() {
        return by_id;
    }
    let names = names();
    let name = |at: usize| names.get(at).and_then(Option::as_deref);
    let last = |name: &str| name.rsplit('/').next() == Some(word);
    let ways: [&dyn Fn(usize) -> bool; 3] =
        [&|at| name(at) == Some(word), &|at| name(at).is_some_and(last), &|at| {
            ids[at].starts_with(word)
        }];
    ways.into_iter().map(places).find(|found: &Vec<usize>| !found.is_empty()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Which of these containers, each an id and its name, a word means.
    fn means(word: &str, all: &[(&str, Option<&str>)]) -> Vec<usize> {
        let ids: Vec<&str> = all.iter().map(|(id, _)| *id).collect();
        let mut names = all.iter().map(|(_, name)| name.map(str::to_owned)).collect();
        meant(word, &ids, || &mut names)
    }

    /// A word on the command line is an id, a name, or the beginning of one id.
    #[test]
    fn word_resolves_to_id_name_or_id_prefix() {
        let all = [
            ("3f2a00000000", Some("web")),
            ("3f2b00000000", Some("default/pod/main")),
            ("web", None),
            ("4a0000000000", Some("db")),
            ("5b0000000000", Some("4a")),
            ("6c0000000000", Some("kube/pod/main")),
        ];
        for (word, expected) in [
            // A container that is named like another's id gets nothing of the other's.
            ("web", &[2][..]),
            ("db", &[3]),
            ("default/pod/main", &[1]),
            ("kube/pod/main", &[5]),
            // As docker has it: a name goes before the beginning of an id.
            ("4a", &[4]),
            ("4a0", &[3]),
            ("3f2", &[0, 1]),
            ("main", &[1, 5]),
            ("3f2b", &[1]),
            ("pod", &[]),
            ("", &[]),
        ] {
            assert_eq!(means(word, &all), expected, "{word}");
        }
    }

    /// The file that docker has of a container lies where docker's mounts of that container come
    /// from.
    #[test]
    fn docker_file_is_located_by_mount_sources() {
        let (own, other) = ("ab".repeat(32), "cd".repeat(32));
        let at = |id: &str| format!("/data/docker/containers/{id}/hosts");
        let file = |id: &str, mounts: &[(&str, &str)]| dockers_file(id, mounts.iter().copied());
        let expected = Some(PathBuf::from(format!("/data/docker/containers/{own}/config.v2.json")));
        assert_eq!(file(&own, &[("/proc", "proc"), ("/etc/hosts", &at(&own))]), expected);
        assert_eq!(file(&own, &[("/etc/hosts", &at(&other))]), expected, "another's network");
        for (id, to, from) in [
            (own.as_str(), "/data", at(&own)),
            (own.as_str(), "/etc/hosts", "/data/docker/containers/short/hosts".to_owned()),
            (own.as_str(), "/etc/hosts", format!("/data/others/{own}/hosts")),
            (own.as_str(), "/etc/hosts", "hosts".to_owned()),
            ("../../x", "/etc/hosts", at(&own)),
        ] {
            assert_eq!(file(id, &[(to, &from)]), None, "{id} {to} {from}");
        }
        assert_eq!(dockers_name(br#"{"ID": "x", "Name": "/web"}"#), Some("web".into()));
        assert_eq!(dockers_name(b"{}"), None);
        assert_eq!(dockers_name(b"{"), None);
    }

    #[test]
    fn podman_s_file_lies_beside_its_containers() {
        let files = |bundle: &str| podmans_files("3f2a", Path::new(bundle));
        let [all, volatile] = files("/c/overlay-containers/3f2a/userdata").unwrap();
        assert_eq!(all, Path::new("/c/overlay-containers/containers.json"));
        assert_eq!(volatile, Path::new("/c/overlay-containers/volatile-containers.json"));
        for bundle in ["/c/overlay-containers/other/userdata", "/c/x/3f2a/userdata", "/3f2a", "/"] {
            assert_eq!(files(bundle), None, "{bundle}");
        }
        let text = br#"[{"id": "1"}, {"id": "3f2a", "names": ["web", "more"]}, {"id": "2", "names": null}]"#;
        let names = podmans_names(text).unwrap();
        assert_eq!(names, [("3f2a".to_owned(), "web".to_owned())].into());
    }

    /// A Kubernetes name is the namespace, the pod and the container, as far as the annotations
    /// give them.
    #[test]
    fn kubernetes_name_joins_namespace_pod_and_container() {
        let [namespace, pod, container] = KUBERNETES[0];
        let all = [(container, "main"), (pod, "web-0"), (namespace, "default")];
        assert_eq!(annotated(&all).as_deref(), Some("default/web-0/main"));
        assert_eq!(annotated(&all[..2]).as_deref(), Some("web-0/main"));
        // A sandbox has no container's name.
        assert_eq!(annotated(&all[1..]), None);
        let [namespace, pod, container] = KUBERNETES[1];
        let crio = [(namespace, "kube"), (pod, "dns"), (container, "a\nb")];
        assert_eq!(annotated(&crio).as_deref(), Some("kube/dns/a\nb"));
        assert_eq!(annotated(&[(NERDCTL, "web")]).as_deref(), Some("web"));
        assert_eq!(annotated(&[(NERDCTL, "")]), None);
    }

    /// If a path is no regular file (a pipe, a link), nothing is read from it, and nothing waits
    /// for it.
    #[test]
    fn irregular_files_are_skipped_without_waiting() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("plain"), "x").unwrap();
        nix::unistd::mkfifo(&at("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::fs::symlink(at("plain"), at("link")).unwrap();
        assert_eq!(read(&at("plain")), Some(b"x".to_vec()));
        for name in ["pipe", "link", "missing"] {
            assert_eq!(read(&at(name)), None, "{name}");
        }
    }
}
