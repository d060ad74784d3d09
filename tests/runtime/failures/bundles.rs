//! Bundles that can't be read, can't be edited, or are not where they seem.

use std::fs;
use std::os::unix::fs::symlink;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::json;

use crate::host::{Host, TOTAL_MIB, ask, names};
use crate::support::{Bundle, run_with_timeout, timeout};

/// A bundle whose `config.json` is `text`.
fn holding(host: &Host, id: &str, text: impl AsRef<[u8]>) -> Bundle {
    let bundle = host.bundle(id, |_| {});
    fs::write(bundle.directory.join("config.json"), text).unwrap();
    bundle
}

#[test]
fn invalid_bundle_configuration_is_refused_and_named() {
    let host = Host::new();
    for (id, text, sentence) in [
        ("empty", "", "config.json is not valid JSON: EOF while parsing a value"),
        ("no-json", "{\"process\":", "config.json is not valid JSON: EOF while parsing"),
        ("array", "[]", "the outermost value in config.json is not an object"),
    ] {
        let bundle = holding(&host, id, text);
        let created = host.runtime().create(&bundle);
        host.was_reported(created, &bundle, &[sentence, id, "; have the engine write it again"]);
        assert_eq!(fs::read_to_string(bundle.directory.join("config.json")).unwrap(), text);
    }
    assert!(host.state_dir().join("events").exists(), "the refusals are reported");
    assert_eq!(host.records(), [].into());
    assert!(!host.state_dir().join("index").exists(), "it never came to more");
}

#[test]
fn what_is_no_file_is_refused_at_once() {
    let host = Host::new();
    let bundle = host.bundle("fifo", |_| {});
    let config = bundle.directory.join("config.json");
    fs::remove_file(&config).unwrap();
    mkfifo(&config, Mode::from_bits_truncate(0o600)).unwrap();
    let created = host.runtime().create(&bundle);
    host.was_reported(created, &bundle, &["config.json is not a regular file; have the engine"]);
    fs::remove_file(&config).unwrap();
    fs::remove_file(bundle.directory.join("log.json")).unwrap();
    fs::create_dir(&config).unwrap();
    let created = host.runtime().create(&bundle);
    host.was_reported(created, &bundle, &["config.json is not a regular file; have the engine"]);
}

/// It is the real runtime that says so, in its own words and where engines look.
#[test]
fn a_bundle_that_is_not_there_is_named() {
    let host = Host::new();
    let runtime = host.runtime();
    let nowhere = runtime.call(&["create", "--bundle", "/nowhere/at/all", "x"]).exits(1);
    assert!(nowhere.stderr.contains("/nowhere/at/all: no such file"), "{nowhere}");
    let bundle = host.bundle("hollow", |_| {});
    fs::remove_file(bundle.directory.join("config.json")).unwrap();
    let created = runtime.create(&bundle).exits(1);
    assert!(created.stderr.contains("config.json not found"), "{created}");
    let log = fs::read_to_string(bundle.directory.join("log.json")).unwrap();
    let last: serde_json::Value = serde_json::from_str(log.lines().last().unwrap()).unwrap();
    assert_eq!(last["level"], "error");
    assert!(last["msg"].as_str().unwrap().contains("config.json not found"), "{log}");
    assert!(!host.state_dir().exists(), "it never came to that");
}

#[test]
fn request_without_process_is_refused_before_any_reservation() {
    let host = Host::new();
    let bundle = host.bundle("no-process", |config| {
        config["annotations"] =
            json!({"aliyun.com/gpu-mem-container": "1", "aliyun.com/gpu-visible-devices": "0"});
        config.as_object_mut().unwrap().remove("process");
    });
    let created = host.runtime().create(&bundle);
    host.was_reported(created, &bundle, &["process in config.json is not an object"]);
    assert_eq!(host.records(), [].into());
}

/// A linked configuration and a linked bundle leave the links' targets alone.
#[test]
fn linked_bundle_configuration_leaves_link_targets_alone() {
    let host = Host::new();
    let bundle = host.asking("linked", TOTAL_MIB);
    let (config, template) =
        (bundle.directory.join("config.json"), host.scratch.path().join("template.json"));
    fs::rename(&config, &template).unwrap();
    symlink(&template, &config).unwrap();
    let old = fs::read(&template).unwrap();
    let alias = host.scratch.path().join("alias");
    symlink(&bundle.directory, &alias).unwrap();
    let runtime = host.runtime();
    let aliased = Bundle { directory: alias.clone(), id: bundle.id.clone() };
    runtime.create(&aliased).ok();
    assert_eq!(fs::read(&template).unwrap(), old);
    assert!(fs::symlink_metadata(&config).unwrap().is_file(), "the link was replaced");
    assert_eq!(bundle.config()["hooks"]["poststop"].as_array().unwrap().len(), 1);
    assert_eq!(host.ps()[0]["state"], "created");
    runtime.delete(&aliased).ok();
    assert_eq!(host.records(), [].into());
    assert!(fs::symlink_metadata(alias).unwrap().is_symlink());
}

/// A configuration of ten mebibytes is edited, and one larger than cgpu reads is refused.
#[test]
fn large_configuration_is_edited_and_oversized_one_refused() {
    let host = Host::new();
    let large = host.bundle("large", |config| {
        ask(config, 1);
        config["annotations"] = json!({"filler": "x".repeat(10 << 20)});
    });
    let runtime = host.runtime();
    // runc stores annotations in its state, and is as patient.
    runtime.create(&large).ok();
    runtime.delete(&large).ok();
    let sparse = holding(&host, "sparse", "");
    let file = fs::File::options().write(true).open(sparse.directory.join("config.json")).unwrap();
    file.set_len(65 << 20).unwrap();
    let created = host.runtime().create(&sparse);
    host.was_reported(created, &sparse, &["sparse: config.json has more than 64 MiB"]);
}

/// serde_json stops at 128 levels, which keeps hostile text off our stack. The engine's
/// types nest eight deep, so that only a text that is no OCI configuration gets there.
#[test]
fn excessive_nesting_is_refused_and_lesser_nesting_retained() {
    let host = Host::new();
    let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    let with = |id: &str, levels| {
        let bundle = host.asking(id, 1);
        let text = bundle.config().to_string();
        let text = text.replacen('{', &format!("{{\"x\":{},", nested(levels)), 1);
        fs::write(bundle.directory.join("config.json"), text).unwrap();
        bundle
    };
    let deep = with("deep", 200);
    let created = host.runtime().create(&deep);
    host.was_reported(created, &deep, &["recursion limit exceeded"]);
    let deepest = with("hundred-thousand", 100_000);
    let created = host.runtime().create(&deepest);
    host.was_reported(created, &deepest, &["recursion limit exceeded"]);
    let retained = with("kept", 100);
    host.runtime().create(&retained).ok();
    let text = fs::read_to_string(retained.directory.join("config.json")).unwrap();
    assert!(text.starts_with(&format!("{{\"x\":{},", nested(100))));
}

#[test]
fn unwritable_bundle_is_refused_and_nothing_stays_reserved() {
    let host = Host::new();
    let bundle = host.asking("read-only", TOTAL_MIB);
    let old = fs::read(bundle.directory.join("config.json")).unwrap();
    let log = host.scratch.path().join("read-only.log");
    let mut bind = host.scratch.command("mount");
    run_with_timeout(bind.arg("--bind").args([&bundle.directory; 2]), timeout()).ok();
    let mut close = host.scratch.command("mount");
    close.args(["-o", "remount,ro,bind"]).arg(&bundle.directory);
    run_with_timeout(&mut close, timeout()).ok();
    let mut create = host.runtime().command();
    create.arg("--log").arg(&log).args(["--log-format", "json", "create", "--bundle"]);
    let created =
        run_with_timeout(create.arg(&bundle.directory).arg(&bundle.id), timeout()).exits(1);
    let sentence = format!(
        "cgpu: bundle {}: config.json: Read-only file system (os error 30); make the bundle's \
         directory writable and give it space",
        bundle.directory.display()
    );
    assert_eq!(created.stderr, format!("{sentence}\n"));
    assert!(fs::read_to_string(log).unwrap().contains(&sentence));
    assert_eq!(fs::read(bundle.directory.join("config.json")).unwrap(), old);
    assert_eq!(host.records(), [].into());
    host.whole_gpu_can_be_had("after");
}

/// A bundle on a full disk retains its configuration, and nothing stays reserved.
#[test]
fn full_disk_leaves_bundle_unchanged_and_nothing_reserved() {
    let host = Host::new();
    let bundle = host.asking("full", TOTAL_MIB);
    let old = fs::read(bundle.directory.join("config.json")).unwrap();
    host.scratch.directory("small");
    let small = crate::failures::configuration::full_tmpfs(&host, "small", 64 << 10, |path| {
        fs::write(path.join("config.json"), &old).unwrap();
    });
    let mut create = host.runtime().command();
    let created =
        run_with_timeout(create.args(["create", "--bundle"]).arg(&small).arg("full"), timeout());
    let expected = format!(
        "cgpu: bundle {}: config.json: No space left on device (os error 28); make the bundle's \
         directory writable and give it space\n",
        small.display()
    );
    assert_eq!(created.exits(1).stderr, expected);
    assert_eq!(fs::read(small.join("config.json")).unwrap(), old);
    assert_eq!(names(&small), ["config.json".to_owned(), "filler".to_owned()].into());
    assert_eq!(host.records(), [].into());
    host.whole_gpu_can_be_had("after");
}
