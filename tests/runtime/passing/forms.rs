//! Every way to name a bundle, a root and a configuration: what the real runtime makes of
//! it, and that cgpu makes the same of it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::host::{ENGINES, Engine, Host, asking, assert_same, borrowed, config_bytes, said, uuid};
use crate::support::{Bundle, Outcome, run_with_timeout, timeout};

/// What the real runtime makes of a command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// The bundle in `b`, which asks for GPU 1; the one in `a` asks for GPU 0.
    B,
    /// The file `b/other.json` with the root file system of `a`; it asks for GPU 2.
    Other,
    /// None: it refuses.
    No,
}

const IN_BOTH: &[(&str, Reads)] = &[
    ("run -b b id", Reads::B),
    ("run --bundle b id", Reads::B),
    ("run --bundle=b id", Reads::B),
    ("run --b b id", Reads::B),
    ("run --b=b id", Reads::B),
    ("run -b a -b b id", Reads::B),
    ("run --bundle a --bundle b id", Reads::B),
    ("run -b b -- id", Reads::B),
    ("-- run -b b id", Reads::B),
    ("run --no-pivot -b ./b/ id", Reads::B),
    ("run -b a/../b id", Reads::B),
    ("run -b link id", Reads::B),
    ("run --pid-file p -b b id", Reads::B),
    ("run --preserve-fds 0 -b b id", Reads::B),
    ("run -b b create", Reads::B),
    ("run -b b run", Reads::B),
    ("run -b b -", Reads::B),
    ("run -b b", Reads::No),
    ("run -b b one two", Reads::No),
    ("run -b -b b id", Reads::No),
    ("run -- id -b b", Reads::No),
    ("run -- -b b id", Reads::No),
    ("run -b", Reads::No),
    ("run -b b --unknown id", Reads::No),
    ("run -b nowhere id", Reads::No),
    ("run -b b/config.json id", Reads::No),
    ("run id", Reads::No),
    ("run -b b ---b id", Reads::No),
];

const IN_RUNC: &[(&str, Reads)] = &[
    ("run -b=b id", Reads::B),
    ("run -bundle b id", Reads::B),
    ("run -bundle=b id", Reads::B),
    ("run id -b b", Reads::B),
    ("run id --bundle=b", Reads::B),
    ("run id --keep=false -b b", Reads::B),
    ("--help=false run -b b id", Reads::B),
    ("--version=0 run -b b id", Reads::B),
    ("run -b b -h=false id", Reads::B),
    ("--rootless false run -b b id", Reads::B),
    ("-debug=false run -b b id", Reads::B),
    ("run -b=a id --pid-file", Reads::No),
    ("run -b b --bundle b id", Reads::No),
    ("run -b b -bb id", Reads::No),
    ("run -b b --bund b id", Reads::No),
    ("run -f b/other.json -b a id", Reads::No),
    ("run -d id -b b", Reads::No),
    ("run id -- -b b", Reads::No),
    ("run --no-pivot b -b a id", Reads::No),
];

const IN_CRUN: &[(&str, Reads)] = &[
    ("run -bb id", Reads::B),
    ("run --bund b id", Reads::B),
    ("run --bun=b id", Reads::B),
    ("run -b a --bundle b id", Reads::B),
    ("run --pid p -b b id", Reads::B),
    ("run -b b --program-name=x id", Reads::B),
    ("run -f b/other.json -b a id", Reads::Other),
    ("run --config ./b/other.json -b a id", Reads::Other),
    ("run --conf=b/other.json --bundle=a id", Reads::Other),
    ("run -fb/other.json -ba id", Reads::Other),
    ("run -f config.json -b b id", Reads::B),
    ("run -f other.json -b b id", Reads::No),
    ("run -b=b id", Reads::No),
    ("run -bundle b id", Reads::No),
    ("run -b= id", Reads::No),
    ("run id -b b", Reads::No),
    ("run -b b -h id", Reads::No),
    ("run --con x -b b id", Reads::No),
];

/// A host with the two bundles, their configurations as they were, and a link to `b`.
struct Bundles {
    host: Host,
    a: Bundle,
    b: Bundle,
    originals: [Vec<u8>; 3],
}

impl Bundles {
    fn new(engine: Engine) -> Self {
        let host = Host::new(engine);
        let line = "echo $NAME; echo $NVIDIA_VISIBLE_DEVICES";
        let bundle = |name: &str, gpu: &str| {
            let mut env = asking("3", gpu).to_vec();
            env.push(format!("NAME={name}"));
            host.bundle(name, &borrowed(&env), line)
        };
        let (a, b) = (bundle("a", "0"), bundle("b", "1"));
        let mut other = a.config();
        let env = other["process"]["env"].as_array_mut().expect("we wrote a list");
        env.extend(["NAME=other".into(), "NVIDIA_VISIBLE_DEVICES=2".into()]);
        let other = serde_json::to_vec(&other).expect("a value can be written");
        fs::write(b.directory.join("other.json"), &other).expect("a bundle can be written to");
        symlink("b", host.path("link")).expect("a link can be made");
        let originals = [config_bytes(&a), config_bytes(&b), other];
        Bundles { host, a, b, originals }
    }

    fn now(&self) -> [Vec<u8>; 3] {
        let other = fs::read(self.b.directory.join("other.json")).expect("it is there");
        [config_bytes(&self.a), config_bytes(&self.b), other]
    }

    fn restore(&self) {
        for (bundle, original) in [(&self.a, &self.originals[0]), (&self.b, &self.originals[1])] {
            fs::write(bundle.directory.join("config.json"), original).expect("it can be written");
        }
        fs::write(self.b.directory.join("other.json"), &self.originals[2]).expect("so can this");
    }

    fn call(&self, program: &Path, line: &str) -> Outcome {
        let mut command = self.host.command(program);
        let command = command.arg("--root").arg(self.host.path("root")).args(line.split(' '));
        run_with_timeout(command, timeout())
    }

    /// The same bundle is used, and the quota is that bundle's; what is refused is refused
    /// in the same words.
    #[track_caller]
    fn check(&self, line: &str, reads: Reads) {
        self.restore();
        let bare = self.call(self.host.real(), line);
        assert_eq!(self.now(), self.originals);
        let wrapped = self.call(self.host.ours(), line);
        let changed = [0, 1, 2].map(|at| self.now()[at] != self.originals[at]);
        let (name, gpu) = match reads {
            Reads::B => ("b", 1),
            Reads::Other => ("other", 2),
            Reads::No => {
                assert_ne!(bare.status.code(), Some(0), "{bare}");
                assert_same(&bare, &wrapped);
                assert!(self.host.registered().is_empty(), "{line}");
                assert!(self.host.listed().is_empty(), "{line}");
                return;
            }
        };
        let expected = |gpus: &str| (Some(0), format!("{name}\n{gpus}\n"), String::new());
        assert_eq!(said(&bare), expected(&gpu.to_string()), "{bare}");
        assert_eq!(said(&wrapped), expected(&uuid(gpu)), "{wrapped}");
        assert_eq!(changed, [0, 1, 2].map(|at| at == gpu), "{line}");
        assert!(self.host.registered().is_empty(), "{line}");
    }
}

/// From every form of the command line, runc and cgpu read the same bundle.
#[test]
fn runc_and_cgpu_resolve_every_bundle_form_alike() {
    let bundles = Bundles::new(Engine::Runc);
    IN_BOTH.iter().chain(IN_RUNC).for_each(|(line, reads)| bundles.check(line, *reads));
}

/// From every form of the command line, crun and cgpu read the same bundle.
#[test]
fn crun_and_cgpu_resolve_every_bundle_form_alike() {
    let bundles = Bundles::new(Engine::Crun);
    IN_BOTH.iter().chain(IN_CRUN).for_each(|(line, reads)| bundles.check(line, *reads));
}

/// An unknown flag may name the bundle, so that none elsewhere is no reason to go on.
#[test]
fn unknown_flag_with_missing_bundle_is_refused() {
    let bundles = Bundles::new(Engine::Runc);
    for line in ["run -bb id", "run --new-bundle b id"] {
        let outcome = bundles.call(bundles.host.ours(), line).exits(1);
        let expected = "cgpu: bundle .: config.json: No such file or directory (os error 2); give \
                        the bundle's directory with --bundle\n";
        assert_eq!((&*outcome.stdout, &*outcome.stderr), ("", expected), "{line}");
    }
}

#[test]
fn the_working_directory_is_the_default_bundle() {
    for engine in ENGINES {
        let bundles = Bundles::new(engine);
        let host = &bundles.host;
        for words in [&["run", "id"][..], &["run", "-b", ".", "id"], &["run", "-b", "../a", "id"]] {
            bundles.restore();
            let mut command = host.command(host.ours());
            command.current_dir(&bundles.a.directory).arg("--root").arg(host.path("root"));
            let said = said(&run_with_timeout(command.args(words), timeout()));
            assert_eq!(said, (Some(0), format!("a\n{}\n", uuid(0)), String::new()), "{words:?}");
        }
    }
    // runc takes an empty name for none.
    let bundles = Bundles::new(Engine::Runc);
    let host = &bundles.host;
    let mut command = host.command(host.ours());
    command.current_dir(&bundles.a.directory).arg("--root").arg(host.path("root"));
    let outcome = run_with_timeout(command.args(["run", "-b", "", "id"]), timeout()).ok();
    assert!(outcome.has_line(&uuid(0)), "{outcome}");
}

#[test]
fn container_has_one_key_however_root_is_written() {
    let host = Host::new(Engine::Runc);
    let bundle = host.bundle("held", &borrowed(&asking("3", "0")), "exec sleep 1000");
    fs::create_dir(host.path("root")).expect("a directory can be made");
    symlink("root", host.path("root-link")).expect("a link can be made");
    let dir = bundle.directory.to_string_lossy().into_owned();
    let root = host.path("root").to_string_lossy().into_owned();
    for given in ["root", "./root/", "root-link", "root-link/", "root/../root-link"] {
        let call = |args: &[&str]| {
            let mut command = host.command(host.ours());
            run_with_timeout(command.args(["--root", given]).args(args), timeout())
        };
        call(&["create", "-b", &dir, "held"]).ok();
        let registered = host.registered();
        assert_eq!(registered.len(), 1, "{given}");
        assert_eq!(registered[0]["root"], *root, "{given}");
        call(&["delete", "--force", "held"]).ok();
        assert!(host.registered().is_empty(), "{given}");
    }
}

/// The flag of cgpu wins over the variable, and never reaches the real runtime.
#[test]
fn cgpu_flag_overrides_variable_and_is_never_forwarded() {
    for engine in ENGINES {
        let host = Host::new(engine);
        host.configure("flag.toml", host.real(), "flag-state");
        let flag = host.path("flag.toml").to_string_lossy().into_owned();
        let equals = format!("--cgpu-config={flag}");
        for (at, own) in
            [&["--cgpu-config", &flag][..], &[&equals], &["--cgpu-config", "flag.toml"]]
                .iter()
                .enumerate()
        {
            let id = format!("id{at}");
            let env = asking("3", "1");
            host.bundle(&id, &borrowed(&env), "echo $NVIDIA_VISIBLE_DEVICES");
            let mut command = host.command(host.ours());
            command.args(*own).arg("--root").arg(host.path("root"));
            let outcome = run_with_timeout(command.args(["run", "-b", &id, &id]), timeout());
            assert_eq!(said(&outcome), (Some(0), format!("{}\n", uuid(1)), String::new()));
            assert!(host.path("flag-state").exists() && !host.has_state());
        }
        let version = |args: &[&str]| {
            run_with_timeout(host.command(host.ours()).args(args).arg("--version"), timeout())
        };
        assert_eq!(version(&[]).ok().stdout, version(&["--cgpu-config", &flag]).ok().stdout);
        // Behind the command it is the container's word.
        let args = ["exec", "nowhere", "x", "--cgpu-config", "y"];
        assert_same(&host.bare(&args), &host.wrapped(&args));
    }
}

#[test]
fn missing_named_configuration_stops_only_gpu_requests() {
    let host = Host::new(Engine::Runc);
    let bundle = host.bundle("id", &["NVIDIA_VISIBLE_DEVICES=0"], "exec sleep 1000");
    let dir = bundle.directory.to_string_lossy().into_owned();
    let root = host.path("root").to_string_lossy().into_owned();
    let without = |variable: &str, args: &[&str]| {
        let mut command = host.command(host.ours());
        command.env("CGPU_CONFIG", variable);
        run_with_timeout(command.args(args), timeout())
    };
    let message = "cgpu: configuration /nowhere.toml: No such file or directory (os error 2); \
                   correct the path, or remove it to use the defaults\n";
    let create = ["--root", &root, "create", "-b", &dir, "id"];
    let refused = without("/nowhere.toml", &create).exits(1);
    assert_eq!((&*refused.stdout, &*refused.stderr), ("", message));
    let flagged = [&["--cgpu-config", "/nowhere.toml"], &create[..]].concat();
    assert_eq!(without("", &flagged).exits(1).stderr, message);
    assert!(host.listed().is_empty());

    let plain = host.bundle("plain", &["PATH=/bin"], "exec sleep 1000");
    let dir = plain.directory.to_string_lossy().into_owned();
    without("/nowhere.toml", &["--root", &root, "create", "-b", &dir, "id"]).ok();
    for args in [&["state", "id"][..], &["start", "id"], &["kill", "id", "KILL"]] {
        let args = [&["--root", &root], args].concat();
        without("/nowhere.toml", &args).ok();
    }
    without("", &["--cgpu-config=/nowhere.toml", "--root", &root, "delete", "--force", "id"]).ok();
    assert!(host.listed().is_empty());
}
