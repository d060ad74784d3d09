//! The tree of files: live, checked, applied when a write returns, and of no use to a container.

#![allow(clippy::unwrap_used, reason = "a test that can't go on may panic")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use crate::gated::{FIRST_MIB, Gated, MIB, RUNTIME, stop};
use crate::host::{Host, TOTAL_MIB, ask};
use crate::km_standin::StandIn;
use crate::support::{eventually, run_with_timeout, timeout};

/// The tree of a host, mounted until this is dropped.
struct Tree {
    served: Child,
    dir: PathBuf,
}

fn command(host: &Host, dir: &Path) -> Command {
    let mut command = host.scratch.command(Path::new(RUNTIME).with_file_name("cgpu"));
    // It becomes cgpu-tree.
    command.arg("--config").arg(host.config()).arg("mount").arg(dir);
    command
}

impl Tree {
    fn mount(host: &Host) -> Self {
        let dir = host.scratch.path().join("km");
        let mut served = command(host, &dir).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(served.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("mounted on {}\n", dir.display()));
        Tree { served, dir }
    }

    /// What a file says, once the monitor has answered in time: on a busy machine it may not.
    fn read(&self, file: &str) -> String {
        let mut read = Ok(String::new());
        eventually(|| {
            read = fs::read_to_string(self.dir.join(file));
            let errno = read.as_ref().err().and_then(std::io::Error::raw_os_error);
            errno != Some(Errno::ETIMEDOUT as i32)
        });
        read.unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    fn write(&self, file: &str, text: &str) -> Result<(), Errno> {
        let opened = fs::OpenOptions::new().write(true).open(self.dir.join(file));
        let written = opened.and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| Errno::from_raw(error.raw_os_error().unwrap()))
    }

    /// Stops it: a thread that hasn't stopped yet would take a request, and the caller that waits for
    /// the answer could not be killed.
    fn stop(&self) {
        stop(Pid::from_raw(self.served.id().cast_signed()));
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.served.id().cast_signed()), signal).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        // One that was waited for before has no pid any more.
        if let Ok(None) = self.served.try_wait() {
            let _ = kill(Pid::from_raw(self.served.id().cast_signed()), Signal::SIGTERM);
            let _ = self.served.wait();
        }
        let _ = nix::mount::umount2(&self.dir, nix::mount::MntFlags::MNT_DETACH);
    }
}

fn mib(mib: u64) -> String {
    (mib * MIB).to_string()
}

/// Reads of the tree are live, and writes are applied when they return.
#[test]
fn tree_reads_are_live_and_writes_apply_synchronously() {
    let gated = Gated::new();
    let tree = Tree::mount(&gated.host);
    assert_eq!(tree.read("version").trim(), env!("CARGO_PKG_VERSION"));
    assert_eq!((&*tree.read("0/max_inst"), &*tree.read("0/free_weight")), ("20\n", "20\n"));
    let bundle = gated.sleeping("shown", 1000);
    let of = |name: &str| format!("0/shown_______/{name}");
    assert_eq!(tree.read("0/free_weight"), "19\n");
    assert_eq!(tree.read(&of("id")), "shown\n");
    assert_eq!(tree.read(&of("memsize")), mib(1000) + "\n");
    assert_eq!(tree.read(&of("meminfo")), format!("Free: {}\n", mib(1000)));
    let mut holding = gated.start(&bundle, &["hold", "300MiB"]);
    gated.soon_accounts("shown", 300);
    let meminfo = tree.read(&of("meminfo"));
    let lines: Vec<&str> = meminfo.lines().collect();
    assert_eq!(lines[0], format!("Free: {}", mib(700)));
    assert!(lines[1].starts_with("PID: ") && lines[1].ends_with(&format!(" Mem: {}", mib(300))));
    // A quota: applied at once, never below what is in use, never more than there is.
    assert_eq!(tree.write(&of("memsize"), &(mib(500) + "\n")), Ok(()));
    assert_eq!(
        (gated.host.limits_mib("shown"), tree.read(&of("memsize"))),
        (vec![500], mib(500) + "\n")
    );
    gated.fills(&bundle, 200);
    assert_eq!(tree.write(&of("memsize"), &mib(200)), Err(Errno::EBUSY));
    assert_eq!(tree.write(&of("memsize"), &mib(FIRST_MIB + 1)), Err(Errno::ENOSPC));
    assert_eq!(tree.write(&of("memsize"), "lots"), Err(Errno::EINVAL));
    assert_eq!(gated.host.limits_mib("shown"), [500]);
    // A GPU's settings, and what it can't have.
    assert_eq!(tree.write("0/max_inst", "3"), Ok(()));
    assert_eq!((&*tree.read("0/max_inst"), &*tree.read("0/free_weight")), ("3\n", "2\n"));
    assert_eq!(tree.write("0/max_inst", "0"), Err(Errno::EINVAL));
    assert_eq!(tree.write("0/policy", "5"), Ok(()));
    assert_eq!((tree.write("0/policy", "3"), &*tree.read("0/policy")), (Ok(()), "3\n"));
    assert_eq!((tree.write("0/policy", "2"), &*tree.read("0/policy")), (Ok(()), "2\n"));
    assert_eq!(tree.write(&of("weight"), "4"), Err(Errno::EINVAL), "more than max_inst");
    assert_eq!((tree.write(&of("weight"), "2"), &*tree.read(&of("weight"))), (Ok(()), "2\n"));
    assert_eq!(tree.read("0/free_weight"), "1\n");
    assert_eq!(tree.write("0/free_weight", "1"), Err(Errno::EACCES));
    assert_eq!(tree.read("default_memsize"), "0\n");
    assert_eq!(tree.write("default_memsize", &mib(1000)), Ok(()));
    assert_eq!(tree.read("default_memsize"), mib(1000) + "\n");
    assert_eq!(tree.write("default_memsize", "4GiB"), Err(Errno::EINVAL));
    assert_eq!(tree.write("default_memsize", "1"), Err(Errno::EINVAL));
    assert_eq!(tree.read("default_memsize"), mib(1000) + "\n");
    assert_eq!(tree.write("default_memsize", "0"), Ok(()));
    assert!(gated.host.log().contains("max_inst=0 is not possible"), "the log has the reason");
    // Instances are created with their containers and end with them.
    assert_eq!(tree.write("inst_ctl", "0shown_______"), Ok(()), "it is there");
    assert_eq!(tree.write("inst_ctl", "0absent______"), Err(Errno::ENOENT));
    assert_eq!(tree.write("inst_ctl", "9shown_______"), Err(Errno::EINVAL));
    assert_eq!(tree.write("inst_ctl", "0short"), Err(Errno::EINVAL));
    assert_eq!(tree.write("inst_ctl", "-shown_______"), Err(Errno::EBUSY));
    assert_eq!(tree.write("inst_ctl", "-absent______"), Ok(()));
    assert_eq!(tree.write("upgrade", "1\n"), Ok(()));
    assert!(gated.host.log().contains("a newer program goes on in the monitor"), "it was updated");
    // Retained over a restart of the tree.
    drop(tree);
    let tree = Tree::mount(&gated.host);
    assert_eq!((&*tree.read("0/max_inst"), tree.read(&of("memsize"))), ("3\n", mib(500) + "\n"));
    holding.kill().unwrap();
    holding.wait().unwrap();
    gated.host.runtime().delete(&bundle).ok();
    assert!(eventually(|| !tree.dir.join("0/shown_______").exists()));
    gated.soon_is_empty();
}

#[test]
fn container_with_the_tree_reads_but_cannot_write() {
    let gated = Gated::new();
    let tree = Tree::mount(&gated.host);
    container_has_the_tree(&gated, &tree);
    let reported = gated.host.log().matches("refused to all but the host's root").count();
    assert_eq!(reported, 1, "it fills no log");
}

fn container_has_the_tree(gated: &Gated, tree: &Tree) {
    let script = "cat /km/0/inside______/memsize; echo 9999999999 > /km/0/inside______/memsize; \
                  echo 25 > /km/0/max_inst";
    let bundle = gated.bundle_with("inside", |config| {
        ask(config, 1000);
        config["process"]["args"] = json!(["sh", "-c", script]);
        config["mounts"].as_array_mut().unwrap().push(json!({
            "destination": "/km", "type": "bind", "source": tree.dir, "options": ["rbind", "rw"],
        }));
    });
    let outcome = gated.host.runtime().run(&bundle);
    let _ = gated.host.runtime().delete(&bundle);
    assert!(outcome.stdout.contains(&mib(1000)), "{outcome}");
    assert_eq!(outcome.stderr.matches("Operation not permitted").count(), 2, "{outcome}");
    assert_eq!(tree.read("0/max_inst"), "20\n");
    gated.soon_is_empty();
}

/// A tree that was killed is mounted again, and a directory in use is reported.
#[test]
fn killed_tree_is_remounted_and_busy_directory_reported() {
    let host = Host::new();
    let mut tree = Tree::mount(&host);
    let again = run_with_timeout(&mut command(&host, &tree.dir), timeout()).exits(1);
    assert!(again.stderr.contains("the tree is mounted on"), "{again}");
    // One that is stopped blocks no caller either.
    tree.stop();
    let again = run_with_timeout(&mut command(&host, &tree.dir), timeout()).exits(1);
    assert!(again.stderr.contains("the tree is mounted on"), "{again}");
    tree.signal(Signal::SIGCONT);
    // A process that reads meanwhile gets an error, and does not hang.
    let open = fs::File::open(tree.dir.join("version")).unwrap();
    tree.signal(Signal::SIGKILL);
    tree.served.wait().unwrap();
    assert!(std::io::read_to_string(open).is_err());
    let dir = tree.dir.clone();
    let tree = Tree::mount(&host);
    assert_eq!(tree.dir, dir);
    assert_eq!(tree.read("0/policy"), "5\n");
    // If it is signalled to exit while a process has it open, it exits.
    let open = fs::File::open(tree.dir.join("version")).unwrap();
    tree.signal(Signal::SIGTERM);
    let mut tree = tree;
    let ended = tree.served.wait().unwrap();
    assert!(ended.success(), "{ended}");
    assert!(std::io::read_to_string(open).is_err());
    drop(tree);
    let tree = Tree::mount(&host);
    // Unmounted manually, it exits.
    nix::mount::umount2(&tree.dir, nix::mount::MntFlags::MNT_DETACH).unwrap();
    let mut tree = tree;
    assert!(tree.served.wait().unwrap().success());
    let file = host.scratch.file("plain", "");
    let refused = run_with_timeout(&mut command(&host, &file), timeout()).exits(1);
    assert!(refused.stderr.contains("is no directory"), "{refused}");
    let full = host.scratch.directory("full");
    fs::write(full.join("file"), "").unwrap();
    let refused = run_with_timeout(&mut command(&host, &full), timeout()).exits(1);
    assert!(refused.stderr.contains("is not empty"), "{refused}");
    let refused = run_with_timeout(&mut command(&host, Path::new("/proc")), timeout()).exits(1);
    assert!(refused.stderr.contains("something is mounted on /proc already (proc)"), "{refused}");
}

/// A tree in the background is there when the command returns, and another command unmounts it.
#[test]
fn detached_tree_is_ready_on_return_and_unmountable() {
    let host = Host::new();
    let dir = host.scratch.path().join("km");
    let unmount = || host.cgpu(&["unmount", dir.to_str().unwrap()]);
    let none = unmount().exits(1);
    assert!(none.stderr.contains("no tree is mounted on"), "{none}");
    let mounted = run_with_timeout(command(&host, &dir).arg("--detach"), timeout()).ok();
    assert_eq!(mounted.stdout, format!("mounted on {}\n", dir.display()));
    assert_eq!(fs::read_to_string(dir.join("0/policy")).unwrap(), "5\n");
    let again = run_with_timeout(command(&host, &dir).arg("--detach"), timeout()).exits(1);
    assert!(again.stderr.contains("the tree is mounted on"), "{again}");
    unmount().ok();
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 0);
    // Of several at once one gets the place, and the others report that.
    let mut all: Vec<Child> = (0..4)
        .map(|_| {
            let mut command = command(&host, &dir);
            command.arg("--detach").stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
        })
        .collect();
    let ended: Vec<bool> = all.iter_mut().map(|child| child.wait().unwrap().success()).collect();
    assert_eq!(ended.iter().filter(|mounted| **mounted).count(), 1, "{ended:?}");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert_eq!(mounts.matches(&format!(" {} ", dir.display())).count(), 1);
    unmount().ok();
}

/// A write reaches the container of that directory, even if another container has its id.
#[test]
fn write_reaches_directory_container_despite_shared_id() {
    let gated = Gated::new();
    let tree = Tree::mount(&gated.host);
    let one = gated.sleeping("twin", 1000);
    let other = gated.bundle("other", 2000, &["sleep", "1000"]);
    let root = gated.host.scratch.directory("other-root");
    let runtime = |words: &[&str]| {
        let mut command = gated.host.scratch.command(RUNTIME);
        command.arg("--cgpu-config").arg(gated.host.config()).arg("--root").arg(&root);
        run_with_timeout(command.args(words).current_dir(&other.directory), timeout()).ok()
    };
    runtime(&["create", "--pid-file", "init.pid", "twin"]);
    runtime(&["start", "twin"]);
    let sizes = || {
        let names =
            fs::read_dir(tree.dir.join("0")).unwrap().map(|entry| entry.unwrap().file_name());
        let names = names.map(|name| name.to_string_lossy().into_owned());
        let twins = names.filter(|name| tree.dir.join("0").join(name).is_dir());
        twins.map(|name| (tree.read(&format!("0/{name}/memsize")), name)).collect::<Vec<_>>()
    };
    let two = sizes().into_iter().find(|(size, _)| *size == mib(2000) + "\n").unwrap().1;
    assert_eq!(tree.read(&format!("0/{two}/id")), "twin\n");
    assert_eq!(tree.write(&format!("0/{two}/memsize"), &mib(1500)), Ok(()));
    let mut after: Vec<_> = sizes().into_iter().map(|(size, _)| size).collect();
    after.sort();
    assert_eq!(after, [mib(1000) + "\n", mib(1500) + "\n"]);
    runtime(&["delete", "--force", "twin"]);
    gated.host.runtime().delete(&one).ok();
    gated.soon_is_empty();
}

/// A silent monitor delays the readers of its own container alone, and an unenforced container has
/// no meminfo.
#[test]
fn silent_monitor_delays_only_its_meminfo_readers() {
    let gated = Gated::new();
    let tree = Tree::mount(&gated.host);
    let errno = |file: &str| {
        let error = fs::read_to_string(tree.dir.join(file)).unwrap_err();
        Errno::from_raw(error.raw_os_error().unwrap())
    };
    let silent = gated.sleeping("silent", 1000);
    let other = gated.sleeping("other", 1000);
    let monitor = gated.monitor("silent______");
    stop(monitor);
    assert_eq!(errno("0/silent______/meminfo"), Errno::ETIMEDOUT);
    assert_eq!(tree.read("0/silent______/memsize"), mib(1000) + "\n");
    assert_eq!(tree.read("0/other_______/meminfo"), format!("Free: {}\n", mib(1000)));
    assert_eq!(tree.read("0/free_weight"), "18\n");
    kill(monitor, Signal::SIGCONT).unwrap();
    assert!(eventually(|| fs::read_to_string(tree.dir.join("0/silent______/meminfo")).is_ok()));
    for bundle in [&silent, &other] {
        gated.host.runtime().delete(bundle).ok();
    }
    gated.soon_is_empty();
    // Without isolation a quota is what was asked for, and use is not counted.
    let host = Host::new();
    let tree = Tree::mount(&host);
    let bundle = host.asking("unheld", TOTAL_MIB / 4);
    host.runtime().create(&bundle).ok();
    assert_eq!(tree.read("0/unheld______/memsize"), mib(TOTAL_MIB / 4) + "\n");
    let error = fs::read_to_string(tree.dir.join("0/unheld______/meminfo")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::ENODATA as i32));
    assert_eq!(tree.write("0/unheld______/memsize", &mib(1)), Err(Errno::EPERM));
    host.runtime().delete(&bundle).ok();
    host.soon_releases_all();
}

/// A script for the vendor's original tree works with another prefix.
#[test]
fn vendor_script_works_with_another_prefix() {
    let standin = StandIn::mount(&[0]);
    let mut host = Host::new();
    host.use_km(standin.path());
    let id = "012b2edccd7a".to_owned() + &"0".repeat(52);
    let bundle = host.asking(&id, TOTAL_MIB / 4);
    host.runtime().create(&bundle).ok();
    let tree = Tree::mount(&host);
    // The lines of the original's document.
    let script = "set -e; dockerid=012b2edccd7a; ls $km/0/$dockerid; echo 2 > $km/0/policy; \
                  cat $km/0/policy; cat $km/0/free_weight; cat $km/0/$dockerid/weight; \
                  echo 4 > $km/0/$dockerid/weight; cat $km/0/$dockerid/weight; cat $km/0/free_weight";
    let mut shell = Command::new("sh");
    let said = run_with_timeout(shell.args(["-c", script]).env("km", &tree.dir), timeout()).ok();
    let lines: Vec<&str> = said.stdout.lines().collect();
    assert_eq!(
        lines,
        ["highprio", "id", "meminfo", "memsize", "weight", "2", "19", "1", "4", "16"]
    );
    // The module has it.
    let read = |file: &str| fs::read_to_string(standin.path().join(file)).unwrap();
    assert_eq!((&*read("0/policy"), &*read("0/012b2edccd7a/weight")), ("2\n", "4\n"));
    host.runtime().delete(&bundle).ok();
    host.soon_releases_all();
}
