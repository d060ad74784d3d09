//! A container that comes into being during a check for exited containers.
//!
//! Two programs are stopped at places of [`failpoint::ALL`], and let go on in the order that the
//! test wants: the creator before it becomes the runtime, with its record written and no state of
//! the container there yet; the check between two of its questions.

use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};

use cgpu_host::failpoint;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::host::{Host, TOTAL_MIB, state};
use crate::support::{Bundle, timeout, wait_until};

/// A program that has stopped at a place; it's killed when it is dropped.
struct Stopped {
    child: Child,
    /// What it has said, on both streams.
    said: fs::File,
}

/// What became of one that went on.
struct Ended {
    status: ExitStatus,
    said: String,
}

impl Stopped {
    #[track_caller]
    fn at(place: &str, command: &mut Command) -> Self {
        let said = tempfile::tempfile().expect("a temporary file can be made");
        let stream = || said.try_clone().expect("a descriptor can be duplicated");
        command.env(failpoint::STOP_VARIABLE, place).stdin(Stdio::null());
        let child = command.stdout(stream()).stderr(stream()).spawn().expect("it can be started");
        let stopped = Stopped { child, said };
        let file = format!("/proc/{}/stat", stopped.child.id());
        let is = |state: &str| fs::read_to_string(&file).is_ok_and(|stat| stat.contains(state));
        assert!(
            wait_until(timeout(), || is(") T ") || is(") Z ")),
            "{place}: it neither stops nor ends"
        );
        assert!(is(") T "), "{place} isn't reached");
        stopped
    }

    fn send(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid fits");
        let _ = kill(Pid::from_raw(pid), signal); // it's ours and not reaped
    }

    #[track_caller]
    fn goes_on(mut self) -> Ended {
        self.send(Signal::SIGCONT);
        let mut status = None;
        wait_until(timeout(), || {
            status = self.child.try_wait().expect("it is a child of ours");
            status.is_some()
        });
        let mut said = String::new();
        let read =
            self.said.seek(SeekFrom::Start(0)).and_then(|_| self.said.read_to_string(&mut said));
        read.expect("a temporary file can be read");
        let status = status.unwrap_or_else(|| panic!("it doesn't end: {said}"));
        Ended { status, said }
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.send(Signal::SIGKILL);
        let _ = self.child.wait();
    }
}

/// `cgpu` with that verb.
fn cgpu(host: &Host, verb: &str) -> Command {
    let mut command =
        host.scratch.command(crate::support::sibling(env!("CARGO_BIN_EXE_cgpu-runtime"), "cgpu"));
    command.arg("--config").arg(host.config()).arg(verb);
    command
}

/// Has `check` stop at each place while a container is made; it goes on when the container is there
/// and its creator has exited. `judge` says whether it has seen right.
fn while_it_checks(
    host: &Host,
    name: &str,
    check: impl Fn(&Bundle) -> Command,
    judge: impl Fn(&Ended),
) {
    for place in ["state-read", "holder-asked"] {
        let bundle = host.asking(&format!("{name}-{place}"), TOTAL_MIB);
        let runtime = host.runtime();
        let creator = Stopped::at("before-exec", &mut runtime.create_command(&bundle));
        let checks = Stopped::at(place, &mut check(&bundle));
        let made = creator.goes_on();
        assert!(made.status.success(), "{name} {place}: {}", made.said);
        let seen = checks.goes_on();
        judge(&seen);
        assert_eq!(host.registered(), [bundle.id.clone()].into(), "{name} {place}: {}", seen.said);
        assert_eq!(host.records().len(), 1, "{name} {place}");
        assert_eq!(host.gc(), "", "{name} {place}");
        runtime.delete(&bundle).ok();
        assert_eq!(host.records(), [].into(), "{name} {place}");
    }
}

/// With each runtime, whose states of a container are different files.
fn with_each_runtime(test: impl Fn(&Host)) {
    let mut host = Host::new();
    test(&host);
    let crun = host.scratch.crun_program();
    host.wrap(crun);
    test(&host);
}

/// A collection takes nothing from a container that has just been created.
#[test]
fn collection_takes_nothing_from_new_container() {
    with_each_runtime(|host| {
        while_it_checks(
            host,
            "gc",
            |_| cgpu(host, "gc"),
            |seen| {
                assert!(seen.status.success() && seen.said.is_empty(), "collected: {}", seen.said);
            },
        );
    });
}

#[test]
fn a_list_shows_what_has_just_been_made() {
    with_each_runtime(|host| {
        while_it_checks(
            host,
            "ps",
            |_| cgpu(host, "ps"),
            |seen| {
                assert!(
                    seen.status.success() && seen.said.contains("ps-"),
                    "not listed: {}",
                    seen.said
                );
            },
        );
    });
}

#[test]
fn creation_cannot_get_what_another_just_reserved() {
    with_each_runtime(|host| {
        let other = host.asking("other", 1);
        while_it_checks(
            host,
            "full",
            |_| host.runtime().create_command(&other),
            |seen| {
                assert_eq!(seen.status.code(), Some(1), "admitted: {}", seen.said);
                assert!(seen.said.contains("held by full-"), "{}", seen.said);
            },
        );
    });
}

/// A late hook takes nothing from a container that has just been created.
#[test]
fn late_hook_takes_nothing_from_new_container() {
    with_each_runtime(|host| {
        let check = |bundle: &Bundle| {
            let mut command = host.scratch.command(env!("CARGO_BIN_EXE_cgpu-hook"));
            command.arg("poststop").args(host.key_words(&bundle.id));
            command.arg("--config").arg(host.config());
            let reported = host.scratch.file("reported", state(&bundle.id, 0, &bundle.directory));
            let mut shell = host.scratch.command("sh");
            // The state comes on standard input; the shell becomes the hook.
            shell.args(["-c", "exec \"$0\" \"$@\" < \"$STATE\""]).arg(command.get_program());
            shell.args(command.get_args()).env("STATE", reported);
            shell
        };
        while_it_checks(host, "hook", check, |seen| {
            assert!(seen.status.success(), "{}", seen.said)
        });
    });
}

#[test]
fn program_stopped_at_failpoint_is_not_killed_there() {
    let host = Host::new();
    host.runtime().create(&host.asking("looked-at", 1)).ok();
    let ended = Stopped::at("holder-asked", &mut cgpu(&host, "ps")).goes_on();
    assert_eq!((ended.status.signal(), ended.status.code()), (None, Some(0)), "{}", ended.said);
}
