use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::engines::file_change::{WriteError, backup_of, write};

const PROGRAM: &str = "/usr/bin/cgpu-runtime";

const CRI: &str = "[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/x\"\n";

/// A host of files, with our runtime.
struct Host(tempfile::TempDir, Option<Release>);

impl Host {
    fn new() -> Self {
        let host = Host(tempfile::tempdir().unwrap(), None);
        host.file(PROGRAM, "");
        fs::set_permissions(host.at(PROGRAM), fs::Permissions::from_mode(0o755)).unwrap();
        host
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.path().join(path.strip_prefix('/').unwrap())
    }

    fn file(&self, path: &str, text: &str) {
        fs::create_dir_all(self.at(path).parent().unwrap()).unwrap();
        fs::write(self.at(path), text).unwrap();
    }

    fn text(&self, path: &str) -> String {
        fs::read_to_string(self.at(path)).unwrap()
    }

    fn plan(&self, kind: Kind, action: Action) -> Result<Vec<Change>, PlanError> {
        let root = self.0.path().to_owned();
        Ok(plan(&Request { kind, root, file: None, release: self.1, action })?.changes)
    }

    /// Makes the changes, and returns their files.
    fn run(&self, kind: Kind, action: Action) -> Vec<String> {
        let changes = self.plan(kind, action).unwrap();
        changes.iter().for_each(|change| write(change).unwrap());
        changes.iter().map(|change| change.path.display().to_string()).collect()
    }

    fn refusal(&self, kind: Kind) -> String {
        self.plan(kind, add(true)).unwrap_err().to_string()
    }
}

fn add(default: bool) -> Action {
    Action::Add { program: PROGRAM.into(), default }
}

#[test]
fn containerd_is_edited_in_its_plugins_file() {
    let main = "/etc/containerd/config.toml";
    let imports = "version = 2\nimports = [\"/etc/containerd/conf.d/*.toml\"]\n";
    let drop_in = "/etc/containerd/conf.d/99-cgpu.toml";
    let other = "/etc/containerd/conf.d/50-cri.toml";
    for (files, target) in [
        (&[][..], main),
        (&[(main, "version = 2\n")], main),
        // A containerd before 2.0 would drop the section of the file that imports ours.
        (&[(main, &format!("{imports}{CRI}"))], main),
        (&[(main, imports)], drop_in),
        (&[(main, imports), (other, CRI)], other),
        (&[(main, &format!("{imports}{CRI}")), (other, CRI)], other),
    ] {
        let host = Host::new();
        files.iter().for_each(|(path, text)| host.file(path, text));
        assert_eq!(host.run(Kind::Containerd, add(true)), [target], "{files:?}");
        assert!(host.plan(Kind::Containerd, add(true)).unwrap().is_empty());
        let version = imports::declared_version(&host.text(target));
        assert!(version == Some(2) || target == other, "{version:?}");
        assert_eq!(host.run(Kind::Containerd, Action::Remove), [target]);
        for (path, text) in files {
            assert_eq!(host.text(path), *text);
            assert!(!backup_of(&host.at(path)).exists(), "it has nothing to tell");
        }
        let is_given = files.iter().any(|(path, _)| *path == target);
        assert_eq!(host.at(target).exists(), is_given, "what setup made is gone: {target}");
    }
}

// Engines with a directory of files get one of ours; a later file with another default is refused.
#[test]
fn crio_and_podman_get_a_drop_in() {
    for (kind, drop_in, early, late, key) in [
        (
            Kind::Crio,
            "/etc/crio/crio.conf.d/99-cgpu.conf",
            "/etc/crio/crio.conf.d/10-crio.conf",
            "/etc/crio/crio.conf.d/zz.conf",
            "[crio.runtime]\ndefault_runtime = \"crun\"\n",
        ),
        (
            Kind::Podman,
            "/etc/containers/containers.conf.d/99-cgpu.conf",
            "/etc/containers/containers.conf",
            "/etc/containers/containers.conf.d/zz.conf",
            "[engine]\nruntime = \"crun\"\n",
        ),
    ] {
        let host = Host::new();
        host.file(early, key);
        assert_eq!(host.run(kind, add(false)), [drop_in]);
        assert_eq!(host.run(kind, add(true)), [drop_in]);
        assert!(host.plan(kind, add(true)).unwrap().is_empty());
        assert_eq!(host.run(kind, Action::Remove), [drop_in]);
        let left = fs::read_to_string(host.at(drop_in));
        assert!(left.is_err() && !backup_of(&host.at(drop_in)).exists(), "{kind:?} {left:?}");
        assert_eq!(host.text(early), key);
        host.file(late, key);
        let refusal = format!(
            "{late} makes crun the default runtime and is read after {drop_in}; change it \
             there first"
        );
        assert_eq!(host.refusal(kind), refusal);
        assert!(!host.at(drop_in).exists());
        assert_eq!(host.run(kind, add(false)), [drop_in], "the runtime alone is no matter");
        host.run(kind, Action::Remove);
        fs::rename(host.at(late), host.at(early)).unwrap();
    }
}

// A file that can't be parsed, is a link, is shared, is read-only or is no file is refused and stays.
#[test]
fn unsafe_files_are_refused_and_stay() {
    let daemon = "/etc/docker/daemon.json";
    let host = Host::new();
    let refused = |words: &str| {
        let refusal = host.refusal(Kind::Docker);
        assert_eq!(refusal, format!("{daemon} {words}"));
        let count = fs::read_dir(host.at("/etc/docker")).unwrap().count();
        assert_eq!(count, 1, "nothing is left next to it: {words}");
    };
    host.file(daemon, "{\"a\": }");
    refused("can't be read: expected value at line 1 column 7; correct it first");
    host.file(daemon, r#"{"runtimes": {"cgpu": {"path": "/opt/x"}}}"#);
    refused("has a runtime `cgpu` that runs /opt/x, not cgpu-runtime; rename or remove it first");
    fs::write(host.at(daemon), b"{\"a\": \"\xff\"}").unwrap();
    refused("is no text in UTF-8; correct it first");
    host.file(daemon, "{}");
    fs::set_permissions(host.at(daemon), fs::Permissions::from_mode(0o444)).unwrap();
    refused("is read-only (mode 0444); `chmod u+w` it if it may be edited");
    fs::remove_file(host.at(daemon)).unwrap();
    host.file("/srv/daemon.json", "{}");
    symlink("/srv/daemon.json", host.at(daemon)).unwrap();
    refused(
        "is a link to /srv/daemon.json; links aren't followed: name that file with --file, \
         if it is to be edited",
    );
    fs::remove_file(host.at(daemon)).unwrap();
    fs::hard_link(host.at("/srv/daemon.json"), host.at(daemon)).unwrap();
    refused("is one of 2 names of its file; replace it with a copy of its own first");
    fs::remove_file(host.at(daemon)).unwrap();
    nix::unistd::mkfifo(&host.at(daemon), nix::sys::stat::Mode::S_IRWXU).unwrap();
    refused("is no regular file; remove it, or name the engine's file with --file");
    fs::remove_file(host.at(daemon)).unwrap();
    fs::remove_file(host.at(PROGRAM)).unwrap();
    assert_eq!(
        host.refusal(Kind::Docker),
        "/usr/bin/cgpu-runtime isn't there or can't be executed; install cgpu, or name it \
         with --runtime"
    );
}

#[test]
fn file_changed_meanwhile_is_left_alone() {
    let daemon = "/etc/docker/daemon.json";
    let host = Host::new();
    for (before, now) in [(Some("{}"), "{ }"), (None, "{}")] {
        match before {
            Some(text) => host.file(daemon, text),
            None => fs::remove_file(host.at(daemon)).unwrap(),
        }
        let changes = host.plan(Kind::Docker, add(false)).unwrap();
        host.file(daemon, now);
        let refused = write(&changes[0]);
        assert!(matches!(refused, Err(WriteError::Changed { .. })), "{refused:?}");
        assert_eq!(host.text(daemon), now);
        assert!(!backup_of(&host.at(daemon)).exists());
    }
}

#[test]
fn former_default_and_mode_survive_several_edits() {
    let daemon = "/etc/docker/daemon.json";
    let host = Host::new();
    let text = "{\"default-runtime\": \"crun\", \"debug\": true}\n";
    host.file(daemon, text);
    fs::set_permissions(host.at(daemon), fs::Permissions::from_mode(0o640)).unwrap();
    let backup = backup_of(&host.at(daemon));
    host.run(Kind::Docker, add(false));
    assert_eq!(fs::read_to_string(&backup).unwrap(), text);
    host.run(Kind::Docker, add(true));
    host.file("/opt/cgpu-runtime", "");
    fs::set_permissions(host.at("/opt/cgpu-runtime"), fs::Permissions::from_mode(0o755)).unwrap();
    host.run(Kind::Docker, Action::Add { program: "/opt/cgpu-runtime".into(), default: false });
    assert_eq!(fs::read_to_string(&backup).unwrap(), text, "it is the first one");
    assert!(host.text(daemon).contains("/opt/cgpu-runtime"));
    host.run(Kind::Docker, Action::Remove);
    assert_eq!(host.text(daemon), text);
    assert!(!backup.exists(), "the file has its text again");
    let mode = fs::metadata(host.at(daemon)).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    assert_eq!(host.run(Kind::Docker, Action::Remove), [""; 0]);
}

const RKE2: &str = "/var/lib/rancher/rke2/agent/etc/containerd";

fn generated(by: &str, rest: &str) -> String {
    format!("# File generated by {by}. DO NOT EDIT. Use config.toml.tmpl instead.\n{rest}")
}

// The generated file is left alone; its template, or a file that it imports, is edited.
#[test]
fn generated_files_of_distributions_are_left_alone() {
    let runc = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
                runtime_type = 'io.containerd.runc.v2'\noptions = {SystemdCgroup = true}\n";
    let third = |imports: &str| generated("rke2", &format!("version = 3\n{imports}{runc}"));
    let second = generated(
        "k3s",
        "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.runc]\n\
         runtime_type = 'io.containerd.runc.v2'\n",
    );
    let imports = format!("imports = ['{RKE2}/config-v3.toml.d/*.toml']\n");
    for (kind, text, target) in [
        (Kind::K3s, second, "config.toml.tmpl"),
        (Kind::Rke2, third(""), "config-v3.toml.tmpl"),
        (Kind::Rke2, third(&imports), "config-v3.toml.d/99-cgpu.toml"),
    ] {
        let host = Host::new();
        let main = kind.installation().main_file;
        assert_eq!(
            host.plan(kind, add(false)).unwrap_err().to_string(),
            format!(
                "{main} isn't there: {} writes it when it starts; start it once, then run this \
                 again",
                kind.name()
            )
        );
        host.file(main, &text);
        let target = Path::new(main).with_file_name(target).display().to_string();
        assert_eq!(host.run(kind, add(false)), [&*target]);
        assert!(host.plan(kind, add(false)).unwrap().is_empty());
        let written = host.text(&target);
        assert!(written.contains("BinaryName = \"/usr/bin/cgpu-runtime\""), "{written}");
        assert!(!written.contains("runtimes.runc"), "it would be there twice: {written}");
        assert_eq!(written.contains("SystemdCgroup = true"), kind == Kind::Rke2, "{written}");
        let by_default = host.plan(kind, add(true));
        match target.ends_with("tmpl") {
            true => {
                assert!(by_default.unwrap_err().to_string().contains("`default-runtime: cgpu`"))
            }
            false => assert_eq!(by_default.unwrap().len(), 1),
        }
        assert_eq!(host.run(kind, Action::Remove), [&*target]);
        assert!(!host.at(&target).exists());
        assert_eq!(host.text(main), text);
        // As containerd's file it is refused, and the distribution is named.
        let root = host.0.path().to_owned();
        let file = Some(PathBuf::from(main));
        let request =
            Request { kind: Kind::Containerd, root, file, release: None, action: add(false) };
        let refused = plan(&request).unwrap_err().to_string();
        let words = format!("at each of its starts; use `cgpu setup {}`", kind.name());
        assert!(refused.ends_with(&words), "{refused}");
    }
}

#[test]
fn users_template_stays_the_same() {
    let host = Host::new();
    host.file(Kind::K3s.installation().main_file, &generated("k3s", "version = 3\n"));
    let template =
        Path::new(Kind::K3s.installation().main_file).with_file_name("config-v3.toml.tmpl");
    let template = template.to_str().unwrap();
    let own = "{{ template \"base\" . }}\n# mine\n[debug]\n  level = \"info\"\n";
    host.file(template, own);
    assert_eq!(host.run(Kind::K3s, add(false)), [template]);
    assert!(host.text(template).starts_with(own));
    assert_eq!(host.run(Kind::K3s, Action::Remove), [template]);
    assert_eq!(host.text(template), own);
    assert!(!backup_of(&host.at(template)).exists());
}

#[test]
fn microk8s_and_k0s_are_edited_in_their_files() {
    let template = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n  \
                    default_runtime_name = \"${RUNTIME}\"\n  \
                    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc]\n    \
                    runtime_type = \"${RUNTIME_TYPE}\"\n    \
                    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.runc.options]\n      \
                    SystemdCgroup = true\n";
    let host = Host::new();
    let main = Kind::MicroK8s.installation().main_file;
    host.file(main, template);
    assert_eq!(host.run(Kind::MicroK8s, add(true)), [main]);
    let written = host.text(main);
    assert_eq!(written.matches("SystemdCgroup = true").count(), 2, "{written}");
    assert_eq!(host.run(Kind::MicroK8s, Action::Remove), [main]);
    assert_eq!(host.text(main), template);

    for (release, managed, target) in [
        (None, true, "/etc/k0s/containerd.d/99-cgpu.toml"),
        (Some(Release { major: 1, minor: 7 }), true, "/etc/k0s/containerd.d/99-cgpu.toml"),
        (None, false, "/etc/k0s/containerd.toml"),
    ] {
        let mut host = Host::new();
        host.1 = release;
        let header = if managed { "# k0s_managed=true\n" } else { "# mine\n" };
        host.file(Kind::K0s.installation().main_file, &format!("{header}version = 3\n"));
        assert_eq!(host.run(Kind::K0s, add(false)), [target]);
        let version = imports::declared_version(&host.text(target));
        assert_eq!(version, Some(if release.is_some() { 2 } else { 3 }));
        assert!(host.plan(Kind::K0s, add(false)).unwrap().is_empty());
        assert_eq!(host.run(Kind::K0s, Action::Remove), [target]);
    }
}

#[test]
fn removal_leaves_files_without_our_runtime() {
    let host = Host::new();
    for (kind, path, text) in [
        (Kind::Podman, "/usr/share/containers/containers.conf", "# many\n[engine]\n# words\n"),
        (Kind::Podman, "/etc/containers/containers.conf", "[engine]\n# my note\n"),
        (Kind::Crio, "/etc/crio/crio.conf", "[crio.runtime.runtimes]\n"),
        (
            Kind::Containerd,
            "/etc/containerd/config.toml",
            "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\n\
             runtime_type = 'io.containerd.runc.v2'\n",
        ),
    ] {
        host.file(path, text);
        assert!(host.plan(kind, Action::Remove).unwrap().is_empty(), "{path}");
        host.run(kind, add(false));
        host.run(kind, Action::Remove);
        assert_eq!(host.text(path), text);
    }
}

// Our runtime runs the one that created the engine's containers before.
#[test]
fn ours_runs_the_former_runtime() {
    let cases = [
        (
            Kind::Docker,
            "/etc/docker/daemon.json",
            "{\"default-runtime\": \"small\", \"runtimes\": {\"small\": {\"path\": \
             \"/usr/bin/crun\"}}}",
        ),
        (
            Kind::Docker,
            "/etc/docker/daemon.json",
            "{\"default-runtime\": \"small\", \"runtimes\": {\"small\": {\"runtimeType\": \
             \"io.containerd.runc.v2\", \"options\": {\"BinaryName\": \"/usr/bin/crun\"}}}}",
        ),
        (Kind::Containerd, "/etc/containerd/config.toml", DEFAULT_CRUN),
        (
            Kind::Crio,
            "/etc/crio/crio.conf.d/10-crio.conf",
            "[crio.runtime]\ndefault_runtime = \"crun\"\n[crio.runtime.runtimes.crun]\n\
             runtime_path = \"/usr/bin/crun\"\n",
        ),
        (Kind::Podman, "/etc/containers/containers.conf", "[engine]\n"),
    ];
    for (kind, path, text) in cases {
        let host = Host::new();
        for program in ["/usr/bin/runc", "/usr/bin/crun"] {
            host.file(program, "x");
            fs::set_permissions(host.at(program), fs::Permissions::from_mode(0o755)).unwrap();
        }
        host.file(path, text);
        let registered = |action| {
            let root = host.0.path().to_owned();
            let request = Request { kind, root, file: None, release: None, action };
            let planned = plan(&request).unwrap();
            if let Some(links) = &planned.links {
                links.make(host.0.path()).unwrap();
            }
            planned.changes.iter().for_each(|change| write(change).unwrap());
            planned.program.unwrap().display().to_string()
        };
        let over = "/usr/libexec/cgpu/over-crun/cgpu-runtime";
        // As the default one it hides the runtime below it, which stays.
        for default in [false, true, true] {
            assert_eq!(registered(add(default)), over, "{kind:?}");
        }
        assert_eq!(registered(Action::Remove), over, "so that its links can go");
        assert_eq!(host.text(path), text);
    }
}

const DEFAULT_CRUN: &str = "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".containerd]\n\
    default_runtime_name = \"crun\"\n\
    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.crun]\n\
    runtime_type = \"io.containerd.runc.v2\"\n\
    options = { BinaryName = \"crun\" }\n";

// The backup is the first text until the file has nothing of ours.
#[test]
fn backup_is_the_text_before_first_setup() {
    let daemon = "/etc/docker/daemon.json";
    let host = Host::new();
    let backup = backup_of(&host.at(daemon));
    let first = "{\"default-runtime\": \"crun\"}\n";
    host.file(daemon, first);
    host.run(Kind::Docker, add(true));
    host.file(daemon, &host.text(daemon).replacen('{', "{\"debug\": true, ", 1));
    host.run(Kind::Docker, Action::Remove);
    assert!(host.text(daemon).contains("debug"), "what came later stays");
    assert_eq!(fs::read_to_string(&backup).unwrap(), first, "and so does the first text");
    // The next setup begins with what is there then.
    let second = "{\"default-runtime\": \"runc\"}\n";
    host.file(daemon, second);
    host.run(Kind::Docker, add(false));
    assert_eq!(fs::read_to_string(&backup).unwrap(), second);
    // A default that the administrator names later is restored too: no backup has it.
    host.file(daemon, &host.text(daemon).replace("\"runc\"", "\"crun\""));
    host.run(Kind::Docker, add(true));
    host.run(Kind::Docker, Action::Remove);
    assert!(host.text(daemon).contains("\"crun\""), "{}", host.text(daemon));
}
