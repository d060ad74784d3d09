//! A simulation in a process of its own, by the program `cgpu-sim`.
//!
//! For callers that must not be its process: those that are killed in the middle, or that measure.

use std::fs;
use std::io::{self, BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::fault::Fault;
use crate::spec::SimOptions;
use crate::state::State;

/// A running `cgpu-sim`; ended when dropped.
#[derive(Debug)]
pub struct Program {
    dir: PathBuf,
    child: Child,
}

impl Program {
    /// Starts the program and waits until it serves.
    ///
    /// # Errors
    ///
    /// Where it can't be started, or ends before it serves; its reason is on standard error.
    pub fn start(program: &Path, options: &SimOptions) -> io::Result<Self> {
        let mut command = Command::new(program);
        command.arg("--dir").arg(&options.dir).arg("--driver").arg(options.driver.to_string());
        for gpu in &options.gpus {
            command.arg("--gpu").arg(format!("{}-{}", gpu.memory_bytes, gpu.reserved_bytes));
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        if let Some(output) = child.stdout.take() {
            BufReader::new(output).read_line(&mut line)?;
        }
        if line != "ready\n" {
            let status = child.wait()?;
            return Err(io::Error::other(format!("{} ended with {status}", program.display())));
        }
        Ok(Program { dir: options.dir.clone(), child })
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it holds now.
    ///
    /// # Errors
    ///
    /// Where it doesn't answer.
    pub fn state(&self) -> io::Result<State> {
        let text = fs::read_to_string(self.dir.join("sim/state"))?;
        serde_json::from_str(&text).map_err(io::Error::other)
    }

    /// Puts a fault in, or takes all back.
    ///
    /// # Errors
    ///
    /// Where it doesn't take it.
    pub fn fault(&self, fault: &Fault) -> io::Result<()> {
        fs::write(self.dir.join("sim/faults"), format!("{fault}\n"))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.fault(&Fault::Clear);
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let _ = self.child.wait();
    }
}
