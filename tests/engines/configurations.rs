//! Configurations as other programs write them, and what `cgpu setup` makes of them: the table
//! in docs/engines.md. The real program edits a copy of each in a mount namespace of its own, and
//! where a containerd reads it, that one is asked what it makes of the result.
//!
//! `configurations/NAME` has the files of each, at their paths. Needs root and containerd; in
//! other userlands the same test tries their containerd (`make test-engines`).

#![allow(clippy::unwrap_used, reason = "clippy.toml allows it in tests, not in their helpers")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Outcome, Scratch, program, run_with_timeout, timeout};

const RUNTIME: &str = env!("CARGO_BIN_EXE_cgpu-runtime");

fn cgpu() -> &'static str {
    crate::support::sibling(RUNTIME, "cgpu")
}

/// What setup does with a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Does {
    /// It writes this file, and takes it back with `--remove`.
    Writes(&'static str),
    /// It refuses, in these words.
    Refuses(&'static str),
    /// There is nothing to do.
    Nothing,
    /// This containerd doesn't read such a version: what setup wrote is taken back.
    Unread,
}

use Does::{Nothing, Refuses, Unread, Writes};

struct Case {
    /// The directory of its files.
    name: &'static str,
    /// Whose configuration it is, as the table of docs/engines.md says.
    of: &'static str,
    /// The arguments of `cgpu setup`.
    words: &'static [&'static str],
    /// What comes of it where the files alone decide; of containerd's by release: 1.6, 1.7, 2.1.
    does: [Does; 3],
    /// Whether pods' cgroups are systemd's, as each of these releases reads the files.
    systemd: [bool; 3],
}

const MAIN: &str = "/etc/containerd/config.toml";
const DROP_IN: &str = "/etc/containerd/conf.d/99-cgpu.toml";

const fn case(
    name: &'static str,
    of: &'static str,
    words: &'static [&'static str],
    does: [Does; 3],
) -> Case {
    Case { name, of, words, does, systemd: [true; 3] }
}

/// One whose engine has no release that matters.
const fn one(
    name: &'static str,
    of: &'static str,
    words: &'static [&'static str],
    does: Does,
) -> Case {
    case(name, of, words, [does; 3])
}

const CONTAINERD: &[&str] = &["containerd"];
const BY_DEFAULT: &[&str] = &["containerd", "--default"];
const NEW: [Does; 3] = [Unread, Unread, Writes(MAIN)];

const CASES: &[Case] = &[
    case("kubeadm", "kubeadm, by Kubernetes' documents", BY_DEFAULT, [Writes(MAIN); 3]),
    case("kubespray", "kubespray, options in lower camel", BY_DEFAULT, NEW),
    Case {
        systemd: [false; 3],
        ..case("containerd.io", "Docker's package containerd.io", BY_DEFAULT, [Writes(MAIN); 3])
    },
    // containerd 2.1 doesn't read runc's options there: ours are no more than runc's.
    Case {
        systemd: [true, true, false],
        ..case("no-version", "a node since containerd 1.2", BY_DEFAULT, [Writes(MAIN); 3])
    },
    case("version-4", "containerd 2.3, version 4", BY_DEFAULT, [Unread; 3]),
    case(
        "nvidia-ctk-2",
        "nvidia-ctk and the GPU operator, version 2",
        CONTAINERD,
        [
            Writes("/etc/containerd/conf.d/99-nvidia.toml"),
            Writes("/etc/containerd/conf.d/99-nvidia.toml"),
            Writes(DROP_IN),
        ],
    ),
    case("nvidia-ctk-3", "the same, version 3", BY_DEFAULT, [Unread, Unread, Writes(DROP_IN)]),
    case(
        "nvidia-default",
        "the same, NVIDIA's runtime the default one",
        BY_DEFAULT,
        [Unread, Unread, Refuses("makes nvidia the default runtime and is read after")],
    ),
    case(
        "imports-of-imports",
        "imports of imports, by classes and directories",
        CONTAINERD,
        [Unread, Unread, Writes(DROP_IN)],
    ),
    Case {
        systemd: [false; 3],
        ..case(
            "relative-imports",
            "relative imports, which containerd 1.6 looks for elsewhere",
            CONTAINERD,
            [Writes(MAIN), Writes("/etc/containerd/conf.d/50-site.toml"), Writes(DROP_IN)],
        )
    },
    // containerd 1.7 doesn't start with these; 2.1 drops what the older file says, runc's options too.
    Case {
        systemd: [true, true, false],
        ..case(
            "mixed-versions",
            "a file of version 2 that imports one of version 3",
            CONTAINERD,
            [Writes(MAIN), Unread, Writes(DROP_IN)],
        )
    },
    case("earlier-cgpu", "an earlier cgpu beside options in lower camel", CONTAINERD, NEW),
    case(
        "eks",
        "Amazon EKS (nodeadm)",
        BY_DEFAULT,
        [Unread, Unread, Writes("/etc/containerd/config.d/99-cgpu.toml")],
    ),
    case("gke", "Google GKE", BY_DEFAULT, [Writes(MAIN); 3]),
    case("bottlerocket", "Bottlerocket, whose file is new at each boot", CONTAINERD, NEW),
    one(
        "k3s",
        "k3s with `config-v3.toml.d`",
        &["k3s", "--default"],
        Writes("/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.d/99-cgpu.toml"),
    ),
    one(
        "k3s-2",
        "k3s of containerd 1.7",
        &["k3s"],
        Writes("/var/lib/rancher/k3s/agent/etc/containerd/config.toml.tmpl"),
    ),
    one(
        "rke2",
        "RKE2 without such a directory",
        &["rke2"],
        Writes("/var/lib/rancher/rke2/agent/etc/containerd/config-v3.toml.tmpl"),
    ),
    one(
        "gpu-operator-on-k3s",
        "the GPU operator on k3s",
        &["k3s"],
        Writes("/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.d/99-cgpu.toml"),
    ),
    one(
        "k3s-beside-docker",
        "docker's containerd beside k3s",
        CONTAINERD,
        Refuses("Kubernetes uses the containerd of k3s here"),
    ),
    one("k3s", "k3s alone", CONTAINERD, Refuses("use `cgpu setup k3s`")),
    one(
        "microk8s",
        "MicroK8s",
        &["microk8s", "--default"],
        Writes("/var/snap/microk8s/current/args/containerd-template.toml"),
    ),
    one("k0s", "k0s", &["k0s"], Writes("/etc/k0s/containerd.d/99-cgpu.toml")),
    one(
        "cri-o",
        "CRI-O's packages",
        &["crio", "--default"],
        Writes("/etc/crio/crio.conf.d/99-cgpu.conf"),
    ),
    one(
        "docker-over-crun",
        "docker whose default is crun",
        &["docker", "--default"],
        Writes("/etc/docker/daemon.json"),
    ),
    one("docker-runtime-type", "docker's `runtimeType`", &["docker"], Nothing),
    one(
        "podman",
        "podman's `/usr/share/containers`",
        &["podman", "--default"],
        Writes("/etc/containers/containers.conf.d/99-cgpu.conf"),
    ),
];

/// A host of a configuration's files, in a scratch.
struct Host {
    scratch: Scratch,
    root: PathBuf,
}

impl Host {
    fn new(case: &Case) -> Self {
        let scratch = Scratch::new();
        let root = scratch.path().join("root");
        let files =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/configurations").join(case.name);
        copy(&files, &root);
        for program in
            ["usr/bin/cgpu-runtime", "usr/bin/runc", "usr/bin/crun", "usr/libexec/crio/crun"]
        {
            let at = root.join(program);
            fs::create_dir_all(at.parent().unwrap()).unwrap();
            let mut command = scratch.command("install");
            let made = command.args(["-m", "755", "/bin/true"]).arg(at).status();
            assert!(made.unwrap().success());
        }
        Host { scratch, root }
    }

    /// `cgpu setup WORDS` on the files alone.
    fn setup(&self, words: &[&str]) -> Outcome {
        let root = self.root.to_str().unwrap();
        let mut command = self.scratch.command(cgpu());
        run_with_timeout(command.arg("setup").args(words).args(["--root", root]), timeout())
    }

    /// A command in a mount namespace whose /etc/containerd is this host's.
    fn within(&self, words: &[&str]) -> Outcome {
        let mut command = self.scratch.command("unshare");
        let script = "mount --bind \"$0\" /etc/containerd && exec \"$@\"";
        command.args(["--mount", "--propagation", "private", "sh", "-c", script]);
        command.arg(self.root.join("etc/containerd")).args(words);
        run_with_timeout(&mut command, timeout())
    }

    /// How serious `cgpu doctor` finds what it says of containerd.
    fn doctor_of_containerd(&self) -> Vec<String> {
        let json = self.within(&[cgpu(), "doctor", "--format", "json"]).json();
        let findings = json["findings"].as_array().unwrap().iter();
        let findings = findings.filter(|found| found["name"] == "containerd");
        findings.map(|found| found["severity"].as_str().unwrap().to_owned()).collect()
    }

    /// All files and links, and what they say.
    fn files(&self) -> Vec<(PathBuf, Vec<u8>)> {
        let mut files = Vec::new();
        let mut pending = vec![self.root.clone()];
        while let Some(directory) = pending.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() && !path.is_symlink() {
                    pending.push(path);
                } else {
                    let text =
                        fs::read_link(&path).map(|link| link.into_os_string().into_encoded_bytes());
                    files.push((path.clone(), text.or_else(|_| fs::read(&path)).unwrap()));
                }
            }
        }
        files.sort();
        files
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => drop(fs::copy(entry.path(), to).unwrap()),
        }
    }
}

/// What is said of it, and that `--remove` gives every byte back.
#[track_caller]
fn try_out(case: &Case, expected: Does, setup: impl Fn(&[&str]) -> Outcome, host: &Host) {
    let name = case.name;
    let before = host.files();
    let reported = setup(case.words);
    match expected {
        Writes(path) => {
            let reported = reported.ok();
            let wrote = format!("wrote {path}");
            let line = reported.stdout.lines().any(|line| {
                line == wrote
                    || line.strip_prefix(&wrote).is_some_and(|rest| rest.starts_with([';', ':']))
            });
            assert!(line, "{name}: {reported}");
            let written = fs::read_to_string(host.root.join(path.trim_start_matches('/'))).unwrap();
            assert!(written.contains("cgpu-runtime"), "{name}: {written}");
            let again = setup(case.words).ok();
            assert!(again.stdout.starts_with("nothing to do"), "{name}: {again}");
        }
        Nothing => assert!(reported.ok().stdout.starts_with("nothing to do"), "{name}"),
        Refuses(words) => {
            let reported = reported.exits(1);
            assert!(reported.stderr.contains(words), "{name}: {reported}");
            assert_eq!(host.files(), before, "{name}");
            return;
        }
        Unread => {
            let reported = reported.exits(1);
            let words = ["containerd makes something else of", "config dump` says nothing"];
            assert!(
                words.iter().any(|words| reported.stderr.contains(words)),
                "{name}: {reported}"
            );
            assert_eq!(host.files(), before, "{name}");
            return;
        }
    }
    if expected != Nothing && name != "earlier-cgpu" {
        setup(&[case.words[0], "--remove"]).ok();
        assert_eq!(host.files(), before, "{name}");
    }
}

/// Which of the three columns is the containerd of this machine.
fn column(containerd: &Path) -> usize {
    let version = run_with_timeout(Command::new(containerd).arg("--version"), timeout()).ok();
    let number = |of: &str| {
        version.stdout.contains(&format!(" {of}.")) || version.stdout.contains(&format!(" v{of}."))
    };
    ["1.6", "1.7", "2.1"]
        .iter()
        .position(|of| number(of))
        .unwrap_or_else(|| panic!("no column of the table is this containerd's: {version}"))
}

#[test]
fn others_configurations_come_out_as_the_table_says() {
    let containerd = program("containerd");
    let column = column(&containerd);
    for case in CASES {
        let host = Host::new(case);
        let expected = case.does[column];
        let real = host.root.join("etc/containerd").exists() && !matches!(expected, Refuses(_));
        if !real || case.words[0] != "containerd" {
            try_out(case, expected, |words| host.setup(words), &host);
            continue;
        }
        let setup = |words: &[&str]| {
            let adds = !words.contains(&"--remove");
            let program: &[&str] = if adds { &["--runtime", RUNTIME] } else { &[] };
            host.within(&[&[cgpu(), "setup"], words, program].concat())
        };
        let containerd = containerd.to_str().unwrap();
        let dump = || host.within(&[containerd, "--config", MAIN, "config", "dump"]);
        if case.name == "earlier-cgpu" && column == 2 {
            assert_eq!(host.doctor_of_containerd(), ["error"], "what an earlier setup left");
        }
        try_out(case, expected, setup, &host);
        if !matches!(expected, Writes(_)) {
            continue;
        }
        // And containerd says so itself, and doctor agrees with it.
        setup(case.words).ok();
        // That one is Docker's, and doctor says so.
        if case.name != "containerd.io" {
            let mut found = host.doctor_of_containerd();
            found.dedup();
            assert_eq!(found, ["ok"], "{}", case.name);
        }
        let dumped: toml::Table = dump().ok().stdout.parse().unwrap();
        let plugins = &dumped["plugins"];
        let plugin =
            if column == 2 { "io.containerd.cri.v1.runtime" } else { "io.containerd.grpc.v1.cri" };
        if case.name == "containerd.io" && column < 2 {
            assert!(plugins.get(plugin).is_none(), "it is switched off");
            continue;
        }
        let section = &plugins[plugin]["containerd"];
        let options = &section["runtimes"]["cgpu"]["options"];
        let reported = options["BinaryName"].as_str().unwrap();
        assert!(reported.ends_with("/cgpu-runtime"), "{}: {options}", case.name);
        let mut all = options.as_table().unwrap().iter();
        let systemd = all.find(|(key, _)| key.eq_ignore_ascii_case("SystemdCgroup"));
        let systemd = systemd.and_then(|(_, value)| value.as_bool());
        assert_eq!(systemd.unwrap_or_default(), case.systemd[column], "{}: {options}", case.name);
        let spellings = |key: &str| {
            options
                .as_table()
                .unwrap()
                .keys()
                .filter(|other| other.eq_ignore_ascii_case(key))
                .count()
        };
        assert_eq!(
            (spellings("BinaryName"), spellings("SystemdCgroup") < 2),
            (1, true),
            "{options}"
        );
        if case.words.contains(&"--default") {
            assert_eq!(section["default_runtime_name"].as_str(), Some("cgpu"), "{}", case.name);
        }
    }
}

/// Over what ours stands, where that isn't runc of the host.
#[test]
fn the_runtime_below_stays_what_it_was() {
    for (name, words, lower) in [
        ("docker-over-crun", &["docker", "--default"][..], "/usr/bin/crun"),
        ("cri-o", &["crio"], "/usr/libexec/crio/crun"),
        ("podman", &["podman"], "/usr/bin/crun"),
    ] {
        let case = CASES.iter().find(|case| case.name == name).unwrap();
        let host = Host::new(case);
        let reported = host.setup(words).ok();
        let line = format!("containers of cgpu are made by {lower}, as those of");
        assert!(reported.stdout.contains(&line), "{reported}");
        let all = host.files();
        let links = all.iter().filter(|(path, _)| path.to_string_lossy().contains("/over-"));
        let links: Vec<_> = links.map(|(_, to)| String::from_utf8_lossy(to).into_owned()).collect();
        assert_eq!(links, ["/usr/bin/cgpu-runtime", lower], "{name}");
        host.setup(&[words[0], "--remove"]).ok();
        assert!(!host.root.join("usr/libexec/cgpu").exists(), "{name}: nothing is left");
    }
}

/// The table of docs/engines.md.
#[test]
fn the_documents_have_the_table() {
    let cell = |does: Does| match does {
        Writes(path) => {
            let short = path.strip_prefix("/etc/containerd/").unwrap_or(path);
            format!("`{short}`")
        }
        Refuses(words) => format!("refused: \u{201c}… {words} …\u{201d}"),
        Nothing => "known, nothing to do".to_owned(),
        Unread => "not read by it, so refused".to_owned(),
    };
    let mut table = String::from(
        "| configuration | `cgpu setup` | containerd 1.6 | 1.7 | 2.1 |\n|---|---|---|---|---|\n",
    );
    for case in CASES {
        let words = case.words.join(" ");
        let does = case.does.map(cell);
        let does = if does.iter().all(|other| *other == does[0]) && case.words[0] != "containerd" {
            format!("{} | |", does[0])
        } else {
            does.join(" | ")
        };
        table.push_str(&format!("| {} | `{words}` | {does} |\n", case.of));
    }
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/engines.md");
    let text = fs::read_to_string(page).unwrap();
    assert!(text.contains(&table), "docs/engines.md should have:\n{table}");
}
