//! Configurations that are broken, and state directories that can't be used.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use crate::host::{Host, TOTAL_MIB, names, state};
use crate::support::{run_with_timeout, timeout};

/// Mounts a tmpfs of `bytes` on the directory `name`, lets `fill` put things there, and
/// then fills what is left.
pub(crate) fn full_tmpfs(host: &Host, name: &str, bytes: u64, fill: impl FnOnce(&Path)) -> PathBuf {
    let path = host.scratch.path().join(name);
    let mut mount = host.scratch.command("mount");
    mount.args(["-t", "tmpfs", "-o", &format!("size={bytes},mode=700"), "tmpfs"]).arg(&path);
    run_with_timeout(&mut mount, timeout()).ok();
    fill(&path);
    // It ends by ENOSPC, after having taken all there was.
    fs::write(path.join("filler"), vec![0; usize::try_from(bytes + 1).unwrap()]).unwrap_err();
    path
}

fn mount(host: &Host, words: &[&str], path: &Path) {
    let mut mount = host.scratch.command("mount");
    run_with_timeout(mount.args(words).arg(path), timeout()).ok();
}

/// A broken configuration refuses container creations, and everything else is passed through.
#[test]
fn broken_configuration_refuses_only_container_creations() {
    let host = Host::new();
    let runtime = host.runtime();
    let running = host.bundle("running", |_| {});
    let good = fs::read_to_string(host.config()).unwrap();
    for (id, text, sentence) in [
        ("toml", "state_dir = [[[", "config.toml: TOML parse error at line 1"),
        (
            "key",
            "[admission]\nmax_insts = 3",
            "unknown key admission.max_insts; did you mean admission.max_inst?",
        ),
        ("type", "[admission]\nmax_inst = \"many\"", "config.toml: TOML parse error at line 2"),
        ("value", "[admission]\nmax_inst = 26", "admission.max_inst = 26: must be 1 to 25"),
    ] {
        fs::write(host.config(), &good).unwrap();
        runtime.create(&running).ok();
        fs::write(host.config(), text).unwrap();
        let bundle = host.asking(id, 1);
        let old = fs::read(bundle.directory.join("config.json")).unwrap();
        host.was_reported(runtime.create(&bundle), &bundle, &[sentence]);
        assert_eq!(fs::read(bundle.directory.join("config.json")).unwrap(), old);
        runtime.start(&running).ok();
        assert_eq!(runtime.status(&running), "running");
        runtime.exec(&running, &["true"]).ok();
        runtime.kill(&running, "KILL").ok();
        runtime.delete(&running).ok();
        assert!(runtime.call(&["--version"]).ok().stdout.starts_with("runc version"));
    }
}

#[test]
fn the_candidates_of_a_broken_configuration_still_count() {
    let host = Host::new();
    let script = host.scratch.script("other", "#!/bin/sh\necho \"other $*\"\n");
    for rest in ["nonsense = 1", "[admission]\nmax_inst = \"many\"", "[driver]\ninject = \"x\""] {
        let text = format!("[runtime]\ncandidates = [\"{}\"]\n", script.display());
        let text = if rest.starts_with('[') { text + rest } else { format!("{rest}\n{text}") };
        fs::write(host.config(), text).unwrap();
        let said = host.runtime().call(&["state", "x"]).ok();
        assert!(said.text().starts_with("other --root /"), "{said}");
        assert!(said.text().ends_with(" state x"), "{said}");
    }
}

#[test]
fn uncreatable_or_untrusted_state_directory_is_named() {
    let refused = |id: &str, prepare: &dyn Fn(&mut Host), parts: &[&str]| {
        let mut host = Host::new();
        prepare(&mut host);
        let bundle = host.asking(id, 1);
        let old = fs::read(bundle.directory.join("config.json")).unwrap();
        let created = host.runtime().create(&bundle);
        let dir = host.state_dir().display().to_string();
        host.was_reported(created, &bundle, &[&[dir.as_str()], parts].concat());
        assert_eq!(fs::read(bundle.directory.join("config.json")).unwrap(), old);
        // Others are started as ever.
        host.runtime().create(&host.bundle("other", |_| {})).ok();
        host
    };
    refused(
        "below-a-file",
        &|host| {
            let path = host.scratch.file("file", "").join("state").display().to_string();
            host.set("state_dir", path);
        },
        &[
            "state directory: cannot make ",
            ": Not a directory",
            "; make state_dir writable for root",
        ],
    );
    refused(
        "a-file",
        &|host| drop(host.scratch.file("state", "")),
        &["state: it is no directory; set state_dir to a directory that root alone can write"],
    );
    refused(
        "read-only",
        &|host| {
            host.scratch.directory("closed");
            let path = host.scratch.path().join("closed");
            mount(host, &["-t", "tmpfs", "-o", "ro", "tmpfs"], &path);
            host.set("state_dir", path.join("state").display().to_string());
        },
        &["state directory: cannot make ", ": Read-only file system (os error 30); make"],
    );
    let host = refused(
        "of-somebody-else",
        &|host| {
            let path = host.scratch.directory("state");
            fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
            chown(path, Some(1000), None).unwrap();
        },
        &["it belongs to somebody else; set state_dir"],
    );
    assert_eq!(names(&host.state_dir()), [].into());
    let host = refused(
        "a-link",
        &|host| {
            let target = host.scratch.directory("target");
            symlink(target, host.scratch.path().join("state")).unwrap();
        },
        &["state: it is no directory; set state_dir"],
    );
    assert_eq!(names(&host.scratch.path().join("target")), [].into());
    let host = refused(
        "everybodys",
        &|host| {
            host.scratch.directory("state");
            host.scratch.file("state/utmp", "");
        },
        &[
            "others may enter it, and it holds utmp, which is not cgpu's; set state_dir to a directory of its own",
        ],
    );
    let mode = fs::metadata(host.state_dir()).unwrap().mode();
    assert_eq!(mode & 0o7777, 0o755, "others can still enter it");
}

/// On a full disk nothing is reserved, and what was reserved can be released.
#[test]
fn full_disk_allows_releases_but_no_reservations() {
    let mut host = Host::new();
    host.scratch.directory("small");
    let path = host.scratch.path().join("small");
    host.set("state_dir", path.display().to_string());
    let runtime = host.runtime();
    let early = host.asking("early", TOTAL_MIB / 2);
    let hooked = host.asking("hooked", TOTAL_MIB / 2);
    let init = host.sleeper();
    let reported = state(&hooked.id, init.pid(), &hooked.directory);
    full_tmpfs(&host, "small", 64 << 10, |_| {
        runtime.create(&early).ok();
        host.hook(&["createRuntime"], &reported).ok();
    });
    let no_space = ": No space left on device (os error 28); make state_dir writable for root and give it space";
    let late = host.asking("late", 1);
    // Without an index and without space for one, everything is as right as before.
    for attempt in 0..3 {
        let full = runtime.create(&host.asking("over", TOTAL_MIB)).exits(1);
        assert!(full.stderr.contains("0 MiB of 16000 MiB left"), "{attempt}: {full}");
    }
    // If the GPU has memory left, the disk is what is in the way. The index's page is enough for
    // the reservation, but not for what the hook writes.
    host.hook(&["poststop"], &reported).ok();
    assert_eq!(host.registered(), ["early".to_owned()].into());
    fs::write(path.join("filler2"), vec![0; 64 << 10]).unwrap_err();
    let late_init = host.sleeper();
    let late = state(&late.id, late_init.pid(), &late.directory);
    let failed = host.hook(&["createRuntime"], &late).exits(1);
    assert!(failed.stderr.contains("cgpu: state directory: cannot write /"), "{failed}");
    assert!(failed.stderr.contains(no_space), "{failed}");
    assert_eq!(host.records().len(), 1, "early's alone");
    let _ = fs::remove_file(path.join("index"));
    fs::write(path.join("filler3"), vec![0; 64 << 10]).unwrap_err();
    let late = host.asking("later", 1);
    let old = fs::read(late.directory.join("config.json")).unwrap();
    host.was_reported(runtime.create(&late), &late, &["state directory: cannot write /", no_space]);
    assert_eq!(fs::read(late.directory.join("config.json")).unwrap(), old);
    assert_eq!(host.registered(), ["early".to_owned()].into());
    let refused = host.hook(&["createRuntime"], &reported).exits(1);
    assert!(refused.stderr.contains(no_space), "{refused}");
    assert!(!names(&path).contains("next"), "half a record is left");

    runtime.delete(&early).ok();
    assert_eq!(names(&path.join("containers")), [].into());
    for filler in ["filler", "filler2", "filler3"] {
        fs::remove_file(path.join(filler)).unwrap();
    }
    host.whole_gpu_can_be_had("after");
}

#[test]
fn full_disk_at_first_creation_leaves_nothing() {
    let mut host = Host::new();
    host.scratch.directory("small");
    let path = host.scratch.path().join("small");
    host.set("state_dir", path.join("state").display().to_string());
    full_tmpfs(&host, "small", 16 << 10, |_| {});
    let bundle = host.asking("first", 1);
    let created = host.runtime().create(&bundle);
    host.was_reported(created, &bundle, &["state directory: cannot ", "No space left on device"]);
    assert_eq!(host.registered(), [].into());
    fs::remove_file(path.join("filler")).unwrap();
    host.whole_gpu_can_be_had("after");
}

/// Reading the status changes nothing on a host that has no state yet.
#[test]
fn reading_status_changes_nothing_on_fresh_host() {
    let host = Host::new();
    let bundle = host.asking("looked-at", 4000);
    let before = (names(host.scratch.path()), names(&bundle.directory));
    let plan = host.cgpu(&["inspect", "--bundle", "looked-at", "--format", "json"]).ok().json();
    assert_eq!(plan["plan"]["gpus"][0]["memory_limit_bytes"], 4000u64 << 20);
    assert_eq!(host.cgpu(&["ps", "--format", "json"]).ok().text(), "[]");
    host.cgpu(&["ps"]).ok();
    assert_eq!((names(host.scratch.path()), names(&bundle.directory)), before);
    assert!(!host.state_dir().exists());
    // And says what a container creation would say of a directory that it would not trust.
    symlink("/nowhere", host.state_dir()).unwrap();
    let refused = host.cgpu(&["inspect", "--bundle", "looked-at"]).exits(1);
    assert!(refused.stderr.contains("it is no directory; set state_dir"), "{refused}");
}
