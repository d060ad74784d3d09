//! What packages bring beside programs: pages, completions, scripts. `tests/packages` installs them.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use cgpu_cli::commands::Cli;
use clap::CommandFactory;
use tempfile::TempDir;

const PAGES: &str = env!("CARGO_BIN_EXE_cgpu-pages");

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[track_caller]
fn reported(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {}{text}", output.status);
    output
}

fn pages() -> TempDir {
    let dir = tempfile::tempdir().expect("a directory can be made");
    reported(Command::new(PAGES).arg(dir.path()));
    dir
}

/// The names of all commands: `cgpu`, `cgpu-cdi`, `cgpu-cdi-list`, …
fn names(name: &str, command: &clap::Command) -> Vec<String> {
    let shown = command.get_subcommands().filter(|below| !below.is_hide_set());
    let below = shown.flat_map(|below| names(&format!("{name}-{}", below.get_name()), below));
    [name.to_owned()].into_iter().chain(below).collect()
}

#[test]
fn every_command_and_program_has_a_renderable_page() {
    let dir = pages();
    let man = dir.path().join("share/man/man8");
    let mut wanted = names("cgpu", &Cli::command());
    assert!(wanted.len() > 8 && wanted.contains(&"cgpu-cdi-list".to_owned()), "{wanted:?}");
    wanted.extend(
        [
            "cgpu-device-plugin",
            "cgpu-dra-driver",
            "cgpu-hook",
            "cgpu-metrics",
            "cgpu-monitor",
            "cgpu-runtime",
            "cgpu-smi",
            "cgpu-tree",
            "kubectl-inspect-gpushare",
        ]
        .map(str::to_owned),
    );
    let found = fs::read_dir(&man).expect("pages are written");
    let name = |entry: std::io::Result<fs::DirEntry>| entry.expect("it can be read").file_name();
    let mut found: Vec<_> = found.map(|entry| name(entry).to_string_lossy().into_owned()).collect();
    found.sort();
    let mut wanted_files: Vec<_> = wanted.iter().map(|name| format!("{name}.8")).collect();
    wanted_files.sort();
    // A program that a command becomes has its page under the same name.
    wanted_files.dedup();
    assert_eq!(found, wanted_files);
    for name in wanted {
        let page = man.join(format!("{name}.8"));
        let page =
            reported(Command::new("groff").args(["-man", "-Tascii", "-ww", "-P-bcu"]).arg(&page));
        let (text, complaints) =
            (String::from_utf8_lossy(&page.stdout), String::from_utf8_lossy(&page.stderr));
        assert_eq!(complaints, "", "{name}");
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION"] {
            assert!(text.contains(section), "{name} has no {section}:\n{text}");
        }
    }
}

#[test]
fn bash_completes_commands_and_their_flags() {
    let dir = pages();
    let file = dir.path().join("share/bash-completion/completions/cgpu");
    for (words, wanted) in [
        ("cgpu upg", "upgrade-monitors"),
        ("cgpu cdi gen", "generate"),
        ("cgpu ps --for", "--format"),
        ("cgpu ps --format js", "json"),
    ] {
        let script = r#"
            . "$1"
            COMP_WORDS=($2)
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _cgpu cgpu "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
            echo "${COMPREPLY[@]}"
        "#;
        let bash = &mut Command::new("bash");
        let output = reported(bash.args(["-c", script, "bash"]).arg(&file).arg(words));
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), wanted, "{words}");
    }
}

#[test]
fn other_shells_completions_know_the_same_commands() {
    let dir = pages();
    for file in ["share/zsh/vendor-completions/_cgpu", "share/fish/vendor_completions.d/cgpu.fish"]
    {
        let text = fs::read_to_string(dir.path().join(file)).expect("it is written");
        for verb in Cli::command().get_subcommands() {
            assert!(text.contains(verb.get_name()), "{file} lacks {}", verb.get_name());
        }
    }
}

#[test]
fn scripts_of_packages_parse() {
    let packaging = repository().join("packaging");
    let scripts = ["build", "stage", "install.sh"].map(|name| packaging.join(name));
    let of_packages = fs::read_dir(packaging.join("scripts")).expect("they are there");
    let of_packages: Vec<_> =
        of_packages.map(|entry| entry.expect("it can be read").path()).collect();
    assert_eq!(of_packages.len(), 3);
    for script in scripts.iter().chain(&of_packages) {
        reported(Command::new("sh").arg("-n").arg(script));
        let mode = fs::metadata(script).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o111, 0o111, "{} can't be executed", script.display());
    }
    reported(Command::new("bash").arg("-n").arg(repository().join("tests/packages")));
}

/// A tarball's tree, unpacked, whose programs are stand-ins: what they hold plays no part.
fn unpacked() -> TempDir {
    let dir = tempfile::tempdir().expect("a directory can be made");
    let programs = dir.path().join("programs");
    fs::create_dir(&programs).expect("it can be made");
    for program in [
        "cgpu",
        "cgpu-hook",
        "cgpu-monitor",
        "cgpu-runtime",
        "cgpu-smi",
        "cgpu-metrics",
        "cgpu-tree",
        "cgpu-device-plugin",
        "cgpu-dra-driver",
        "kubectl-inspect-gpushare",
    ] {
        fs::write(programs.join(program), program).expect("it can be written");
    }
    let stage = &mut Command::new(repository().join("packaging/stage"));
    reported(
        stage.args([&programs, Path::new(PAGES), &dir.path().join("files")]).args(["/usr", "/etc"]),
    );
    let script = repository().join("packaging/install.sh");
    fs::copy(script, dir.path().join("install.sh")).expect("it can be copied");
    dir
}

fn files_below(root: &Path) -> Vec<String> {
    let find = &mut Command::new("find");
    let output = reported(find.arg(root).args(["-type", "f", "-printf", "%P %m\n"]));
    let mut files: Vec<_> =
        String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    files.sort();
    files
}

/// The installer leaves the files that are the host's, and a purge leaves nothing.
#[test]
fn installer_preserves_host_configuration_and_purge_removes_everything() {
    let tarball = unpacked();
    let host = tempfile::tempdir().expect("a directory can be made");
    let install = |arguments: &[&str]| {
        let installer = &mut Command::new(tarball.path().join("install.sh"));
        let output = reported(installer.args(arguments).env("DESTDIR", host.path()));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let config = host.path().join("etc/cgpu/config.toml");
    install(&[]);
    let installed = files_below(host.path());
    for file in [
        "etc/cgpu/config.toml 644",
        "etc/logrotate.d/cgpu 644",
        "usr/bin/cgpu 755",
        "usr/bin/cgpu-hook 755",
        "usr/bin/cgpu-monitor 755",
        "usr/bin/cgpu-runtime 755",
        "usr/bin/cgpu-smi 755",
        "usr/bin/cgpu-metrics 755",
        "usr/lib/systemd/system/cgpu-metrics.service 644",
        "usr/bin/cgpu-tree 755",
        "usr/bin/cgpu-device-plugin 755",
        "usr/bin/cgpu-dra-driver 755",
        "usr/bin/kubectl-inspect-gpushare 755",
        "usr/share/cgpu/cgpu.yaml 644",
        "usr/share/cgpu/scheduler-config.yaml 644",
        "usr/lib/systemd/system/cgpu-device-plugin.service 644",
        "usr/lib/systemd/system/cgpu-tree.service 644",
        "usr/lib/systemd/system/cgpu-view.service 644",
        "usr/share/cgpu/cgpu.rules.yml 644",
        "usr/share/cgpu/grafana-dashboard.json 644",
        "usr/share/bash-completion/completions/cgpu-smi 644",
        "usr/share/man/man8/cgpu-smi.8 644",
        "usr/share/bash-completion/completions/cgpu 644",
        "usr/share/cgpu/hooks/cgpu-precreate.json 644",
        "usr/share/cgpu/containerd.toml 644",
        "usr/share/cgpu/daemon.json 644",
        "usr/share/cgpu/runtimeclass.yaml 644",
        "usr/share/doc/cgpu/LICENSE 644",
        "usr/share/doc/cgpu/README.md 644",
        "usr/share/doc/cgpu/docs/operations.md 644",
        "usr/share/doc/cgpu/docs/stands.svg 644",
        "usr/share/doc/cgpu/hooks/README.md 644",
        "usr/share/man/man8/cgpu-ps.8 644",
    ] {
        assert!(installed.iter().any(|found| found == file), "{file} is missing: {installed:#?}");
    }

    fs::write(&config, "# ours\n").expect("it can be written");
    let gone = tarball.path().join("files/usr/share/doc/cgpu/CHANGELOG.md");
    fs::remove_file(gone).expect("the next version has one file less");
    let reported = install(&[]);
    assert!(reported.contains("kept: ") && reported.contains("etc/cgpu/config.toml"), "{reported}");
    assert_eq!(fs::read_to_string(&config).expect("it is there"), "# ours\n");
    assert!(!host.path().join("usr/share/doc/cgpu/CHANGELOG.md").exists());

    install(&["--remove"]);
    let left = ["etc/cgpu/config.toml 644", "etc/logrotate.d/cgpu 644"];
    assert_eq!(files_below(host.path()), left);
    install(&[]);
    install(&["--purge"]);
    assert_eq!(files_below(host.path()), Vec::<String>::new());
}

#[test]
fn the_installer_says_what_is_missing_or_unknown() {
    let tarball = unpacked();
    let host = tempfile::tempdir().expect("a directory can be made");
    let refused = |arguments: &[&str]| {
        let installer = &mut Command::new(tarball.path().join("install.sh"));
        let output = installer.args(arguments).env("DESTDIR", host.path()).output();
        let output = output.expect("it can be started");
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(refused(&["--prefix=/opt"]).contains("unknown: --prefix=/opt; usage: "));
    assert!(refused(&["--remove"]).contains("cgpu isn't installed by this script"));
    fs::remove_dir_all(tarball.path().join("files")).expect("it can be removed");
    assert!(refused(&[]).contains("unpack the whole tarball"));
    assert_eq!(files_below(host.path()), Vec::<String>::new());
}
