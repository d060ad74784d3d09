use proptest::prelude::*;

use super::fixtures::*;
use super::*;

#[test]
fn windows_line_ends_stay() {
    let old = DAEMON.replace('\n', "\r\n");
    let new = add(Format::Docker, &old, ADD);
    assert_eq!(new.matches('\n').count(), new.matches("\r\n").count());
    let old = OWN.replace('\n', "\r\n");
    let new = add(V3, &old, ADD);
    assert_eq!(new.matches('\n').count(), new.matches("\r\n").count());
    assert!(new.len() > old.len());
}

#[test]
fn containerd_gets_the_handler_in_the_table_of_its_version() {
    for (format, plugin) in [
        (V1, "cri"),
        (V2, "\"io.containerd.grpc.v1.cri\""),
        (V3, "\"io.containerd.cri.v1.runtime\""),
    ] {
        let new = add(format, "", DEFAULT);
        let expected = format!(
            "[plugins.{plugin}.containerd]\ndefault_runtime_name = \"cgpu\"\n\n\
             [plugins.{plugin}.containerd.runtimes.runc]\n\
             runtime_type = \"io.containerd.runc.v2\"\n\n\
             [plugins.{plugin}.containerd.runtimes.cgpu]\n\
             runtime_type = \"io.containerd.runc.v2\"\npod_annotations = [\"aliyun.com/*\", \"cgpu/*\"]\n\n\
             [plugins.{plugin}.containerd.runtimes.cgpu.options]\n\
             BinaryName = \"/usr/bin/cgpu-runtime\"\n"
        );
        assert_eq!(new.trim_start(), expected);
        assert_eq!(add(format, &new, DEFAULT), new);
        assert_eq!(remove(format, &new, None), "");
    }
    assert_eq!(
        edit(Format::Containerd { version: 5, reading: Reading::Later }, "", ADD),
        Err(EditError::Version { version: 5 })
    );
}

#[test]
fn containerds_handler_is_like_its_model_but_for_the_program() {
    let model = r#"
        runtime_type = "io.containerd.runc.v2"
        runtime_path = ""
        privileged_without_host_devices = true
        pod_annotations = ["a.io/*"]
        container_annotations = []
        snapshotter = "nydus"
        cni_max_conf_num = 2
        [options]
        BinaryName = "/usr/bin/nvidia-container-runtime"
        Root = ""
        SystemdCgroup = true
        ShimCgroup = "/x"
    "#;
    let wish = Wish::Add { program: PROGRAM, default: false, model, beside: false };
    for format in [V1, V2, V3] {
        let new = add(format, "", wish);
        let top: toml::Table = new.parse().unwrap();
        let Format::Containerd { version, reading } = format else { unreachable!() };
        let [(_, plugin)] = reading.written(version) else { unreachable!() };
        let ours = top["plugins"][*plugin]["containerd"]["runtimes"]["cgpu"].as_table().unwrap();
        let mut expected: toml::Table = model.parse().unwrap();
        expected.remove("runtime_path");
        expected.remove("container_annotations");
        expected["pod_annotations"] = vec!["a.io/*", "aliyun.com/*", "cgpu/*"].into();
        expected["options"].as_table_mut().unwrap().remove("Root");
        expected["options"]["BinaryName"] = PROGRAM.into();
        assert_eq!(*ours, expected);
        assert_eq!(add(format, &new, wish), new);
        assert_eq!(remove(format, &new, None), "");
        // One that setup made before it copied anything.
        let old = add(format, "", ADD);
        let mended = add(format, &old, wish);
        assert_eq!(added(&old, &mended), ["SystemdCgroup = true"]);
        let own = old.replace("BinaryName", "SystemdCgroup = false\nBinaryName");
        assert_eq!(add(format, &own, wish), own, "what somebody wrote stays");
    }
    let all = model.replace("a.io/*", "*");
    let new =
        add(V2, "", Wish::Add { program: PROGRAM, default: false, model: &all, beside: false });
    assert!(new.contains("pod_annotations = [\"*\"]"), "{new}");
}

/// As kubespray writes it: keys in lower camel, which containerd takes as well.
#[test]
fn keys_are_containerds_in_whichever_case() {
    let kubespray = "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd]\n\
        Default_Runtime_Name = \"runc\"\n\
        [plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.runc.options]\n\
        binaryName = \"/usr/local/bin/runc\"\nsystemdCgroup = true\n";
    let new = add(V3, kubespray, DEFAULT);
    assert_eq!(new.matches("BinaryName").count(), 1, "{new}");
    assert!(new.contains("Default_Runtime_Name = \"cgpu\""), "{new}");
    assert!(!new.contains("default_runtime_name"), "{new}");
    assert_eq!(remove(V3, &new, Some(kubespray)), kubespray);
    // What an earlier setup left: two spellings, of which the last one counted.
    let ours = "BinaryName = \"/usr/bin/cgpu-runtime\"";
    let twice = new.replace(ours, &format!("binaryName = \"/usr/local/bin/runc\"\n{ours}"));
    assert_ne!(twice, new);
    assert_eq!(add(V3, &twice, DEFAULT), new);
    let alone = new.replace(ours, "binaryname = \"/opt/cgpu-runtime\"");
    assert_eq!(
        add(V3, &alone, DEFAULT),
        new.replace("BinaryName = \"/usr/bin/cgpu", "binaryname = \"/usr/bin/cgpu")
    );
    let two = format!("{kubespray}[plugins.\"io.containerd.cri.v1.runtime\".Containerd]\n");
    assert!(matches!(edit(V3, &two, ADD), Err(EditError::Twice { .. })));
}

/// Who reads it isn't known: containerd 1 looks at one part, containerd 2 at another.
#[test]
fn a_file_without_a_version_says_it_for_every_release() {
    let dockers = "disabled_plugins = [\"cri\"]\n#root = \"/x\"\n";
    for (reading, plugins) in [
        (Reading::Unknown, &["cri", "\"io.containerd.cri.v1.runtime\""][..]),
        (Reading::One, &["cri"]),
        (Reading::Two { older: false }, &["\"io.containerd.cri.v1.runtime\""]),
    ] {
        let format = Format::Containerd { version: 1, reading };
        let new = add(format, dockers, DEFAULT);
        for plugin in ["cri", "\"io.containerd.cri.v1.runtime\""] {
            let header = format!("[plugins.{plugin}.containerd.runtimes.cgpu]");
            assert_eq!(new.contains(&header), plugins.contains(&plugin), "{new}");
        }
        assert_eq!(add(format, &new, DEFAULT), new);
        assert_eq!(remove(format, &new, None), dockers);
    }
}

#[test]
fn crios_handler_is_like_its_model_and_podmans_lists_name_ours() {
    let model = "runtime_path = \"/usr/libexec/crio/crun\"\nruntime_root = \"/run/crun\"\n\
                 monitor_path = \"/usr/libexec/crio/conmon\"\nmonitor_env = [\"A=b\"]\n\
                 allowed_annotations = [\"io.containers.trace-syscall\"]\n\
                 privileged_without_host_devices = true\n";
    let wish = Wish::Add { program: PROGRAM, default: false, model, beside: false };
    let new = add(Format::Crio, "", wish);
    let top: toml::Table = new.parse().unwrap();
    let ours = top["crio"]["runtime"]["runtimes"]["cgpu"].as_table().unwrap();
    let mut expected: toml::Table = model.parse().unwrap();
    expected["runtime_path"] = PROGRAM.into();
    expected.insert("runtime_type".into(), "oci".into());
    assert_eq!(*ours, expected);
    assert_eq!(remove(Format::Crio, &new, None), "");

    let model =
        "runtime_supports_json = [\"crun\", \"runc\", \"kata\", \"runsc\", \"youki\", \"krun\"]\n";
    let wish = Wish::Add { program: PROGRAM, default: false, model, beside: false };
    for text in [
        "",
        "[engine]\nevents_logger = \"file\"\n",
        "[engine]\nruntime_supports_json = [\"crun\", {append=true}]\n",
    ] {
        let new = add(Format::Podman, text, wish);
        let top: toml::Table = new.parse().unwrap();
        let names = top["engine"]["runtime_supports_json"].as_array().unwrap();
        for name in ["cgpu", "cgpu-runtime", "crun"] {
            assert!(names.contains(&name.into()), "{new}");
        }
        assert!(!new.contains("nocgroups"));
        assert_eq!(add(Format::Podman, &new, wish), new);
        assert_eq!(remove(Format::Podman, &new, Some(text)), text);
    }
}

#[test]
fn containerds_file_of_debian_only_grows_and_shrinks_back() {
    for wish in [ADD, DEFAULT] {
        let new = add(V2, DEBIAN, wish);
        let lines = added(DEBIAN, &new);
        assert!(lines.iter().filter(|line| !line.is_empty()).all(|line| line.starts_with("    ")));
        assert!(
            new.contains(
                "\n    [plugins.\"io.containerd.grpc.v1.cri\".containerd.runtimes.cgpu]\n"
            ),
            "{new}"
        );
        assert_eq!(add(V2, &new, wish), new);
        assert_eq!(remove(V2, &new, Some(DEBIAN)), DEBIAN);
        assert_eq!(remove(V2, &new, None), DEBIAN);
    }
    // containerd 1 would have no runc any more, and its CRI would not start.
    assert!(add(V2, DEBIAN, ADD).contains("runtimes.runc]\n"));
    assert!(!add(V3, OWN, ADD).contains("runtimes.runc]\n"), "its runtimes are the user's");
}

#[test]
fn containerds_comments_and_order_stay_and_the_default_comes_back() {
    let new = add(V3, OWN, DEFAULT);
    assert!(new.contains("default_runtime_name = \"cgpu\" # not runc\n"), "{new}");
    assert_eq!(added(&OWN.replace("'crun' #", "\"cgpu\" #"), &new).len(), 7, "{new}");
    assert_eq!(remove(V3, &new, Some(OWN)), OWN);
    let forgotten = remove(V3, &new, None);
    assert_eq!(forgotten, OWN.replace("default_runtime_name = 'crun' # not runc\n", ""));
    let other = new.replace("\"cgpu\" #", "'crun' #");
    assert_eq!(remove(V3, &other, None), OWN, "a default that isn't ours stays");
}

#[test]
fn a_header_that_setup_wrote_goes_and_one_of_the_user_stays() {
    let runtime = "[plugins.cri.containerd.runtimes.runc]\nruntime_type = 'x'\n";
    let with_header = format!("[plugins.cri.containerd]\n\n{runtime}");
    for own in [runtime, &with_header] {
        let new = add(V1, own, DEFAULT);
        assert!(new.contains("[plugins.cri.containerd]\n"));
        assert_eq!(remove(V1, &new, Some(own)), *own);
        let said = new.replace("runtimes.runc]\n", "runtimes.runc]\nsnapshotter = 'y'\n");
        let kept = own.replace("runtimes.runc]\n", "runtimes.runc]\nsnapshotter = 'y'\n");
        assert_eq!(remove(V1, &said, Some(own)), kept, "what came later stays");
    }
    let remark = add(V1, runtime, DEFAULT)
        .replace("[plugins.cri.containerd]", "# ours\n[plugins.cri.containerd]");
    assert!(remove(V1, &remark, Some(runtime)).contains("# ours\n[plugins.cri.containerd]"));
}

#[test]
fn inline_and_dotted_tables_are_edited_as_they_are() {
    let inline = "plugins.cri.containerd = { runtimes = { runc = { runtime_type = \"x\" } } }\n";
    let new = add(V1, inline, DEFAULT);
    assert_eq!(new.lines().count(), 1, "{new}");
    assert_eq!(remove(V1, &new, Some(inline)), inline);
    let dotted = "[plugins]\ncri.containerd.runtimes.runc.runtime_type = \"x\"\n";
    match edit(V1, dotted, DEFAULT) {
        Ok(new) => assert_eq!(remove(V1, &new, Some(dotted)), dotted),
        Err(error) => assert_eq!(error, EditError::Unsafe),
    }
}

#[test]
fn sections_of_other_versions_are_taken_out_too() {
    let both = format!("{}{}", add(V3, "version = 3\n", ADD), add(V2, "", ADD));
    assert_eq!(remove(V3, &both, None), "version = 3\n");
}

#[test]
fn crio_and_podman_have_theirs_in_their_tables() {
    let new = add(Format::Crio, HEADER, DEFAULT);
    assert_eq!(
        new,
        format!(
            "{HEADER}\n[crio.runtime]\ndefault_runtime = \"cgpu\"\n\n\
             [crio.runtime.runtimes.cgpu]\nruntime_path = \"/usr/bin/cgpu-runtime\"\n\
             runtime_type = \"oci\"\n"
        )
    );
    assert!(is_bare(Format::Crio, &remove(Format::Crio, &new, None)));
    let new = add(Format::Podman, HEADER, DEFAULT);
    assert_eq!(
        new,
        format!(
            "{HEADER}\n[engine]\nruntime = \"cgpu\"\n\n\
             [engine.runtimes]\ncgpu = [\"/usr/bin/cgpu-runtime\"]\n"
        )
    );
    assert!(is_bare(Format::Podman, &remove(Format::Podman, &new, None)));
    let own = "[engine]\n# which one\nruntime = \"crun\"\n\n[engine.runtimes]\n# none yet\n\n[network]\na = 1\n";
    let new = add(Format::Podman, own, DEFAULT);
    assert_eq!(remove(Format::Podman, &new, Some(own)), own);
    let remarks = "# nothing here yet\n\n# [engine]\n";
    let new = add(Format::Podman, remarks, DEFAULT);
    assert!(new.starts_with(remarks), "{new}");
    assert_eq!(remove(Format::Podman, &new, Some(remarks)), remarks);
    assert_eq!(remove(Format::Podman, remarks, None), remarks);
    let moved =
        add(Format::Podman, "[engine.runtimes]\ncgpu = [\"/opt/cgpu-runtime\"] # here\n", ADD);
    assert_eq!(moved, "[engine.runtimes]\ncgpu = [\"/usr/bin/cgpu-runtime\"] # here\n");
}

#[test]
fn what_is_not_ours_is_refused() {
    let taken = |program: &str| Err(EditError::Taken { program: program.into() });
    let not_a_table = |key: &str| Err(EditError::NotATable { key: key.into() });
    let twice = |key: &str| Err(EditError::Twice { key: key.into() });
    for (format, text, refusal) in [
        (Format::Docker, r#"{"runtimes":{"cgpu":{"path":"/opt/x"}}}"#, taken("/opt/x")),
        (Format::Docker, r#"{"runtimes":{"cgpu":{"runtimeType":"io.x"}}}"#, taken("io.x")),
        (Format::Docker, r#"{"runtimes":{"cgpu":{}}}"#, taken("no program")),
        (Format::Docker, r#"{"runtimes":[]}"#, not_a_table("runtimes")),
        (Format::Docker, r#"{"runtimes":{},"runtimes":{}}"#, twice("runtimes")),
        (
            Format::Docker,
            r#"{"default-runtime":"a","default-runtime":"b"}"#,
            twice("default-runtime"),
        ),
        (Format::Crio, "[crio.runtime.runtimes.cgpu]\nruntime_path = \"/opt/x\"", taken("/opt/x")),
        (Format::Crio, "crio = 1", not_a_table("crio")),
        (Format::Podman, "[engine.runtimes]\ncgpu = [\"/opt/x\"]", taken("/opt/x")),
        (Format::Podman, "[engine]\nruntimes = 3", not_a_table("engine.runtimes")),
        (V1, "[plugins.cri.containerd.runtimes.cgpu]\nruntime_type = \"io.x\"", taken("io.x")),
        (V1, "[[plugins.cri]]", not_a_table("plugins.cri")),
    ] {
        for wish in [ADD, DEFAULT, Wish::Remove { former: None }] {
            assert_eq!(edit(format, text, wish), refusal, "{text}");
        }
    }
    for (format, text) in [
        (Format::Docker, "{"),
        (Format::Docker, "[]"),
        (Format::Docker, "{} // no comment"),
        (Format::Docker, "{\"a\": 1,}"),
        (Format::Docker, "\u{feff}{}"),
        (V2, "version = "),
        (V2, "a = 1\na = 2"),
        (Format::Podman, "[engine"),
    ] {
        assert!(matches!(edit(format, text, ADD), Err(EditError::Syntax { .. })), "{text}");
    }
}

proptest! {
    #[test]
    fn no_text_breaks_an_edit(text in "[\\[\\]{}a-c=.,\"\n :0-9]{0,60}", which in 0..6usize) {
        let format = [Format::Docker, Format::Crio, Format::Podman, V1, V2, V3][which];
        if let Ok(new) = edit(format, &text, DEFAULT) {
            prop_assert_eq!(edit(format, &new, DEFAULT), Ok(new.clone()));
            let back = edit(format, &new, Wish::Remove { former: Some(&text) }).unwrap();
            prop_assert!(!read(format, &back).unwrap().runtime);
        }
    }
}
