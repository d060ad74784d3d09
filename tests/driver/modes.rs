//! The ways by which the driver's files come: `[driver] inject`.

use std::fs;

use super::*;

#[test]
fn auto_finds_them_by_itself_where_nobody_else_brings_them() {
    let mut host = DriverHost::new();
    host.host.set("driver.inject", "auto");
    host.host.keep_log();
    let image = host.image(Userland::Distroless, Search::Usual);
    host.lacks_only_the_kernel(&image);
    assert!(host.host.log().contains("driver_files=\"native\""), "{}", host.host.log());
}

#[test]
fn auto_goes_without_where_there_is_no_driver_and_native_does_not() {
    let empty = support::Scratch::new();
    let mut host = DriverHost::with(&empty.directory("root"));
    let image = host.image(Userland::Distroless, Search::Usual);
    let outcome = host.run(&image, &["/probe", "libcuda.so.1"]).exits(1);
    assert!(outcome.stderr.starts_with("cgpu: no driver libraries below /"), "{outcome}");
    assert!(outcome.stderr.contains("or set inject = \"off\" under [driver]"), "{outcome}");
    host.host.set("driver.inject", "auto");
    host.host.keep_log();
    host.run(&image, &["/probe", "libcuda.so.1"]).exits(NOT_LOADED);
    let log = host.host.log();
    assert!(log.contains("this container gets device nodes only"), "{log}");
}

#[test]
fn auto_leaves_it_to_who_has_brought_them_before() {
    let mut host = DriverHost::new();
    host.host.set("driver.inject", "auto");
    let image = host.image(Userland::Debian12, Search::Usual);
    let hook = host.host.scratch.script("nvidia-container-runtime-hook", "#!/bin/sh\n");
    let bundle = host.bundle_with(&image, &["true"], |config| {
        config["hooks"] = json!({"prestart": [{"path": hook, "args": ["hook", "prestart"]}]});
    });
    host.host.runtime().run(&bundle).ok();
    assert!(!mounts(&bundle).iter().any(|(to, _)| to == "/usr/local/nvidia"));

    let library = host.root.join("usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so");
    let bundle = host.bundle_with(&image, &["true"], |config| {
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/usr/lib64/libcuda.so.1", "type": "bind", "options": ["bind"],
            "source": fs::canonicalize(&library).unwrap(),
        }));
    });
    host.host.runtime().run(&bundle).ok();
    assert!(!mounts(&bundle).iter().any(|(to, _)| to == "/usr/local/nvidia"));
}

#[test]
fn a_mount_of_the_user_s_own_is_left_alone() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let own = host.host.scratch.directory("own");
    fs::write(own.join("mine"), "").unwrap();
    let bundle = host.bundle_with(&image, &["ls", "/usr/local/nvidia"], |config| {
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/usr/local/nvidia", "type": "bind", "options": ["bind"], "source": own,
        }));
    });
    assert_eq!(host.host.runtime().run(&bundle).ok().stdout, "mine\n");
}

/// A program in the place of NVIDIA's runtime that does what that does to the order of things:
/// it looks at the bundle, and becomes runc with the same arguments.
#[test]
fn nvidia_s_runtime_is_called_for_containers_with_gpus_and_for_no_other() {
    let mut host = DriverHost::new();
    let runc = support::program("runc").display().to_string();
    let script = "#!/bin/sh\n{ echo \"$@\"; grep -o 'NVIDIA_VISIBLE_DEVICES=[^\"]*' \
                  \"$BUNDLE/config.json\"; } >> \"$SEEN\"\nexec RUNC \"$@\"\n"
        .replace("RUNC", &runc);
    let program = host.host.scratch.script("nvidia-container-runtime", &script);
    let seen = host.host.scratch.path().join("seen");
    host.host.set("driver.inject", "nvidia-runtime");
    host.host.set("driver.nvidia_runtime", program.display().to_string());
    let image = host.image(Userland::Debian12, Search::Usual);
    let run = |bundle: &Bundle| {
        let directory = bundle.directory.display().to_string();
        let runtime = host.host.runtime().env("BUNDLE", directory);
        runtime.env("SEEN", seen.display().to_string()).run(bundle)
    };
    let bundle = host.bundle(&image, &["echo", "made"]);
    assert_eq!(run(&bundle).ok().stdout, "made\n");
    let told = fs::read_to_string(&seen).unwrap();
    let lines: Vec<_> = told.lines().collect();
    assert!(lines[0].contains(" run ") && lines[0].contains(&bundle.id), "{told}");
    assert_eq!(lines[1], format!("NVIDIA_VISIBLE_DEVICES={UUID_0}"));
    assert!(!mounts(&bundle).iter().any(|(to, _)| to == "/usr/local/nvidia"));

    fs::remove_file(&seen).unwrap();
    let plain = host.host.bundle("plain", |config| {
        image.use_in(config);
        config["process"]["args"] = json!(["echo", "plain"]);
    });
    assert_eq!(run(&plain).ok().stdout, "plain\n");
    assert!(!seen.exists());
}

#[test]
fn nvidia_s_runtime_that_isn_t_there_is_said_by_its_name() {
    let mut host = DriverHost::new();
    host.host.set("driver.inject", "nvidia-runtime");
    host.host.set("driver.nvidia_runtime", "no-such-runtime");
    let image = host.image(Userland::Debian12, Search::Usual);
    let outcome = host.run(&image, &["true"]).exits(1);
    let expected = "cgpu: inject = \"nvidia-runtime\", and no-such-runtime is no executable file";
    assert!(outcome.stderr.starts_with(expected), "{outcome}");
    assert!(host.host.records().is_empty());
}

#[test]
fn an_image_that_demands_another_driver_is_refused() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let run = |variables: &[(&str, &str)]| {
        let bundle = host.bundle_with(&image, &["true"], |config| {
            for (name, value) in variables {
                set_env(config, name, value);
            }
        });
        host.host.runtime().run(&bundle)
    };
    run(&[("NVIDIA_REQUIRE_CUDA", "cuda>=12.2 brand=tesla,driver>=470")]).ok();
    let demand = ("NVIDIA_REQUIRE_CUDA", "cuda>=12.4 driver>=550,driver<551");
    let outcome = run(&[demand]).exits(1);
    for said in ["NVIDIA_REQUIRE_CUDA", "12.2", "NVIDIA_DISABLE_REQUIRE"] {
        assert!(outcome.stderr.contains(said), "{said}: {outcome}");
    }
    run(&[demand, ("NVIDIA_DISABLE_REQUIRE", "true")]).ok();
    assert!(host.host.records().is_empty());
}

#[test]
fn a_process_that_an_engine_starts_later_has_the_variables_too() {
    let host = DriverHost::new();
    let image = host.image(Userland::Debian12, Search::Usual);
    let bundle = host.bundle(&image, &["sleep", "60"]);
    let runtime = host.host.runtime();
    runtime.create(&bundle).ok();
    runtime.start(&bundle).ok();
    // As engines write it: the image's variables, and none of ours.
    let process = json!({
        "cwd": "/", "args": ["env"], "user": {"uid": 0, "gid": 0},
        "env": ["PATH=/usr/bin:/bin", "LD_LIBRARY_PATH=/opt/x"],
    });
    let file = host.host.scratch.file("process.json", process.to_string());
    let mut command = runtime.command();
    command.args(["exec", "--process"]).arg(&file).arg(&bundle.id);
    let outcome = support::run_with_timeout(&mut command, support::PATIENCE).ok();
    let has = |line: &str| outcome.stdout.lines().any(|there| there == line);
    assert!(has("LD_LIBRARY_PATH=/opt/x:/usr/local/nvidia/lib64"), "{outcome}");
    assert!(has("PATH=/usr/bin:/bin:/usr/local/nvidia/bin"), "{outcome}");
    runtime.delete(&bundle).ok();
}
