//! An OCI runtime called as engines call it, without an engine.
//!
//! The same methods drive bare runc, crun and any wrapper of theirs, so a test can put one bundle
//! through two of them and compare. State lies in the scratch, one root for each program, never in
//! `/run/runc`.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Bundle, Outcome, Scratch, run_with_timeout, timeout, wait_until};

/// A program that takes runc's arguments.
#[derive(Debug, Clone)]
pub struct Runtime<'scratch> {
    scratch: &'scratch Scratch,
    program: PathBuf,
    environment: Vec<(String, String)>,
}

impl<'scratch> Runtime<'scratch> {
    pub(super) fn new(scratch: &'scratch Scratch, program: PathBuf) -> Self {
        Self { scratch, program, environment: Vec::new() }
    }

    /// Sets a variable for every command.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    pub fn program(&self) -> &Path {
        &self.program
    }

    /// The state directory, which every command is given as `--root`.
    pub fn root(&self) -> PathBuf {
        let name = self.program.file_name().unwrap_or_default().to_string_lossy();
        self.scratch.path().join(format!("{name}-root"))
    }

    /// The command line up to and including `--root`.
    pub fn command(&self) -> Command {
        let mut command = self.scratch.command(&self.program);
        command
            .arg("--root")
            .arg(self.root())
            .envs(self.environment.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Any command, by its arguments after `--root`.
    #[must_use]
    #[track_caller]
    pub fn call(&self, args: &[&str]) -> Outcome {
        run_with_timeout(self.command().args(args), timeout())
    }

    /// Runs the bundle's process to its end, and shows what it wrote.
    #[must_use]
    #[track_caller]
    pub fn run(&self, bundle: &Bundle) -> Outcome {
        run_with_timeout(
            self.command().arg("run").arg("--bundle").arg(&bundle.directory).arg(&bundle.id),
            timeout(),
        )
    }

    /// The same by a program, with arguments, that starts this one in circumstances of its own.
    #[must_use]
    #[track_caller]
    pub fn run_by(&self, words: &[&str], bundle: &Bundle) -> Outcome {
        let inner = self.command();
        let mut command = self.scratch.command(words[0]);
        command.args(&words[1..]).arg(inner.get_program()).args(inner.get_args());
        command.args(["run", "--bundle"]).arg(&bundle.directory).arg(&bundle.id);
        for (name, value) in inner.get_envs() {
            command.env(name, value.unwrap_or_default());
        }
        run_with_timeout(&mut command, timeout())
    }

    /// Creates the container as an engine would: from the bundle's directory, with log and pid file
    /// in it.
    #[must_use]
    #[track_caller]
    pub fn create(&self, bundle: &Bundle) -> Outcome {
        run_with_timeout(&mut self.create_command(bundle), timeout())
    }

    /// The command that [`create`](Self::create) runs.
    pub fn create_command(&self, bundle: &Bundle) -> Command {
        let mut command = self.logging(bundle);
        command.args(["create", "--bundle"]).arg(&bundle.directory);
        command.args(["--pid-file", "init.pid", &bundle.id]);
        command
    }

    /// The command line up to its verb, from the bundle's directory and with a log in it.
    fn logging(&self, bundle: &Bundle) -> Command {
        let mut command = self.command();
        let log = ["--log", "log.json", "--log-format", "json"];
        command.current_dir(&bundle.directory).args(log);
        command
    }

    /// Runs a program in a running container as an engine would, with a log next to the bundle.
    #[must_use]
    #[track_caller]
    pub fn logged_exec(&self, bundle: &Bundle, args: &[&str]) -> Outcome {
        run_with_timeout(self.logging(bundle).args(["exec", &bundle.id]).args(args), timeout())
    }

    /// Starts a created container.
    #[must_use]
    #[track_caller]
    pub fn start(&self, bundle: &Bundle) -> Outcome {
        self.call(&["start", &bundle.id])
    }

    /// Runs a program in a running container.
    #[must_use]
    #[track_caller]
    pub fn exec(&self, bundle: &Bundle, args: &[&str]) -> Outcome {
        run_with_timeout(self.command().args(["exec", &bundle.id]).args(args), timeout())
    }

    /// Sends a signal to the container's first process.
    #[must_use]
    #[track_caller]
    pub fn kill(&self, bundle: &Bundle, signal: &str) -> Outcome {
        self.call(&["kill", &bundle.id, signal])
    }

    /// Deletes the container, by force where need be. On a busy machine runc 1.3 may give up before the last thread of a
    /// killed process has left the cgroup; the container is there still, and is deleted by another call.
    #[must_use]
    #[track_caller]
    pub fn delete(&self, bundle: &Bundle) -> Outcome {
        let mut outcome = None;
        wait_until(timeout(), || {
            let deleted = self.call(&["delete", "--force", &bundle.id]);
            let busy = "unable to remove container's cgroup: ";
            let done = deleted.status.success() || !deleted.stderr.contains(busy);
            outcome = Some(deleted);
            done
        });
        outcome.expect("it was called")
    }

    /// The container's status: `created`, `running`, `stopped`.
    #[track_caller]
    pub fn status(&self, bundle: &Bundle) -> String {
        self.call(&["state", &bundle.id]).ok().json()["status"]
            .as_str()
            .unwrap_or_default()
            .to_owned()
    }
}
