//! Which containerd Kubernetes uses on a host that has several.
//!
//! k3s, RKE2, MicroK8s and k0s bring their own; a containerd of the distribution, or docker's,
//! may be installed as well. Inspected are the distribution's files, its socket, and the
//! kubelet's command line. The decision is pure.

use std::path::{Path, PathBuf};

use crate::engines::containerd::imports;
use crate::engines::host_tree::Tree;
use crate::engines::{Kind, Observed, installation};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Facts {
    /// The distributions of Kubernetes that are installed.
    installed: Vec<Kind>,
    /// Those of them whose containerd has a socket.
    running: Vec<Kind>,
    /// Whether the host has another containerd than theirs.
    own: bool,
    /// The file that disables that one for Kubernetes.
    disabled_by: Option<PathBuf>,
    /// Whether a kubelet's command line names its socket.
    kubelet: bool,
}

/// Kubernetes uses another containerd than the host's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherContainerd {
    /// The distribution whose containerd Kubernetes uses.
    pub by: Kind,
    why: Why,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Why {
    Only,
    Disabled(PathBuf),
    Running,
}

impl std::fmt::Display for OtherContainerd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let by = self.by.name();
        match &self.why {
            Why::Only => write!(f, "the containerd of this host is that of {by}")?,
            Why::Disabled(path) => write!(
                f,
                "Kubernetes uses the containerd of {by} here; {} keeps it from the other one",
                path.display()
            )?,
            Why::Running => write!(
                f,
                "Kubernetes uses the containerd of {by} here: it runs, and no kubelet is configured \
                 for the other one"
            )?,
        }
        write!(
            f,
            "; use `cgpu setup {by}`, or name the file of the other one: `--file {}`",
            Kind::Containerd.installation().main_file
        )
    }
}

/// The containerd that Kubernetes uses, if it isn't the host's own.
#[must_use]
pub fn other_containerd(root: &Path) -> Option<OtherContainerd> {
    decide(&inspect(&Tree::new(root, None)))
}

fn decide(facts: &Facts) -> Option<OtherContainerd> {
    let by = *facts.running.first().or(facts.installed.first())?;
    let why = match &facts.disabled_by {
        _ if !facts.own => Why::Only,
        Some(path) => Why::Disabled(path.clone()),
        None if !facts.kubelet && !facts.running.is_empty() => Why::Running,
        None => return None,
    };
    Some(OtherContainerd { by, why })
}

fn inspect(tree: &Tree) -> Facts {
    let there = |path: &str| tree.at(path).exists();
    let installed = |kind: &Kind| there(kind.installation().main_file);
    let running = |kind: &Kind| kind.installation().socket.is_some_and(there);
    let distributions = Kind::DISTRIBUTIONS.iter().copied();
    let main = Kind::Containerd.installation().main_file;
    let files = installation::files(tree, Kind::Containerd, None, None);
    Facts {
        installed: distributions.clone().filter(installed).collect(),
        running: distributions.filter(installed).filter(running).collect(),
        own: there(main) || tree.program("containerd").is_some(),
        disabled_by: imports::cri_disabled_by(tree, &files),
        kubelet: kubelets(tree).iter().any(|line| line.contains(SOCKET)),
    }
}

/// The socket of the host's own containerd.
const SOCKET: &str = "/run/containerd/containerd.sock";

/// The command lines of the kubelets that run.
fn kubelets(tree: &Tree) -> Vec<String> {
    let processes = tree.list("/proc").into_iter().filter(|path| {
        let name = path.file_name().unwrap_or_default().as_encoded_bytes();
        name.iter().all(u8::is_ascii_digit)
    });
    let lines = processes.filter_map(|process| match tree.read(process.join("cmdline")) {
        Observed::Present(line) => Some(line),
        _ => None,
    });
    let is_kubelet = |line: &String| {
        let program = line.split('\0').next().unwrap_or_default();
        Path::new(program).file_name().is_some_and(|name| name == "kubelet")
    };
    lines.filter(is_kubelet).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    // Kubernetes uses the host's own containerd unless a file, a socket or its absence shows another.
    #[test]
    fn other_containerd_needs_a_reason() {
        let reason = |facts: Facts| decide(&facts).map(|other| other.to_string());
        let k3s = || Facts { installed: vec![Kind::K3s], ..Facts::default() };
        assert_eq!(reason(Facts { own: true, ..Facts::default() }), None);
        let use_k3s = "; use `cgpu setup k3s`, or name the file of the other one: `--file \
                       /etc/containerd/config.toml`";
        let only = format!("the containerd of this host is that of k3s{use_k3s}");
        assert_eq!(reason(k3s()), Some(only));
        assert_eq!(reason(Facts { own: true, ..k3s() }), None);
        let running = Facts { own: true, running: vec![Kind::K3s], ..k3s() };
        let runs = "Kubernetes uses the containerd of k3s here: it runs, and no kubelet is configured \
                    for the other one";
        assert_eq!(reason(running.clone()), Some(format!("{runs}{use_k3s}")));
        assert_eq!(reason(Facts { kubelet: true, ..running.clone() }), None);
        let dockers = Facts { disabled_by: Some("/etc/x".into()), own: true, ..k3s() };
        let disabled =
            "Kubernetes uses the containerd of k3s here; /etc/x keeps it from the other one";
        assert_eq!(reason(dockers), Some(format!("{disabled}{use_k3s}")));
        let both =
            Facts { installed: vec![Kind::K3s, Kind::K0s], running: vec![Kind::K0s], ..k3s() };
        assert_eq!(decide(&both).map(|elsewhere| elsewhere.by), Some(Kind::K0s));
    }

    #[test]
    fn facts_are_files_sockets_and_command_lines() {
        let root = tempfile::tempdir().unwrap();
        let file = |path: &str, text: &str| {
            let at = root.path().join(path.strip_prefix('/').unwrap());
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            fs::write(at, text).unwrap();
        };
        let facts = || inspect(&Tree::new(root.path(), Some("/nowhere".as_ref())));
        assert_eq!(facts(), Facts::default());
        file(Kind::Rke2.installation().main_file, "version = 3\n");
        // k3s and RKE2 have the same socket: the files show which one runs.
        file("/run/k3s/containerd/containerd.sock", "");
        file("/proc/self/cmdline", "kubelet\0--x=unix:///run/containerd/containerd.sock");
        file("/proc/12/cmdline", "/usr/bin/kubelet\0--config=/x\0");
        let rke2 = vec![Kind::Rke2];
        let expected = Facts { installed: rke2.clone(), running: rke2, ..Facts::default() };
        assert_eq!(facts(), expected);
        assert_eq!(other_containerd(root.path()).unwrap().by, Kind::Rke2);
        file(
            "/proc/13/cmdline",
            "kubelet\0--container-runtime-endpoint=unix:///run/containerd/containerd.sock\0",
        );
        file(Kind::Containerd.installation().main_file, "disabled_plugins = ['cri']\n");
        let main = Some(Kind::Containerd.installation().main_file.into());
        assert_eq!(facts(), Facts { own: true, disabled_by: main, kubelet: true, ..expected });
    }
}
