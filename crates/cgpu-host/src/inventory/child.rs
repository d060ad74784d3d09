//! `cgpu gpus --refresh` as a child, or `cgpu gpus` for a user who can write no cache: how the runtime
//! learns of GPUs without loading NVML.
//!
//! Owns the child's words, its list and the sentences about its end; [`crate::child`] owns its life.
//! Must not know how the child finds GPUs.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;

use super::{FileError, LoadError, Settings, cached, file};
use crate::child::{self, Bounds, Ended, RunError, Stdout};
use cgpu_core::gpu::Inventory;

/// Why there is no inventory after all.
#[derive(Debug, Error)]
pub enum ChildError {
    /// The file, or the absence of a driver.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The child can't be started.
    #[error(
        "can't run {} to list the GPUs; install it, and run `cgpu gpus --refresh` manually to see",
        program.display()
    )]
    Start {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The child can't be watched.
    #[error("lost sight of {} gpus --refresh; run `cgpu gpus --refresh` manually to see", program.display())]
    Watch {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    /// It took too long.
    #[error(
        "{} gpus --refresh did not list the GPUs within {limit:?} and was killed{}{}; run `cgpu \
         gpus --refresh` manually to see",
        program.display(),
        if *reaped { "" } else { " but does not end: the driver hangs, see the kernel's log" },
        quoted(said)
    )]
    TooSlow {
        program: PathBuf,
        /// How long it had.
        limit: Duration,
        /// Whether it has exited.
        reaped: bool,
        /// What it printed on standard error.
        said: String,
    },
    /// It failed.
    #[error(
        "{} gpus --refresh failed ({status}){}; run `cgpu gpus --refresh` manually to see",
        program.display(),
        quoted(said)
    )]
    Failed {
        program: PathBuf,
        status: ExitStatus,
        /// What it printed on standard error.
        said: String,
    },
    /// It succeeded, and printed no list.
    #[error(
        "{} gpus --format json printed no list of GPUs{}; run `cgpu gpus` manually to see",
        program.display(),
        quoted(said)
    )]
    NoList {
        program: PathBuf,
        /// What it printed on standard error.
        said: String,
        /// What is wrong with what it printed.
        #[source]
        source: Box<FileError>,
    },
    /// It succeeded, and the cache still doesn't hold.
    #[error(
        "{} gpus --refresh left no inventory of the present GPUs in {}{}; run `cgpu gpus \
         --refresh` manually to see, and whether it uses the same state_dir",
        program.display(),
        state_dir.display(),
        quoted(said)
    )]
    InVain {
        program: PathBuf,
        /// Where the cache should be.
        state_dir: PathBuf,
        /// What it printed on standard error.
        said: String,
    },
}

/// The GPUs: those that are [`cached`], else those that `CGPU [CONFIG_ARGS…] gpus
/// --refresh` finds within `limit`.
///
/// # Errors
///
/// Where there is no driver or no valid inventory file (no child is started then); where
/// the child can't be started, fails, or takes longer.
pub fn refreshed(
    settings: &Settings,
    cgpu: &Path,
    config_args: &[OsString],
    limit: Duration,
) -> Result<Inventory, ChildError> {
    if let Some(inventory) = cached(settings)? {
        return Ok(inventory);
    }
    let said = run(cgpu, config_args, &["gpus", "--refresh"], Stdio::null(), limit)?;
    cached(settings)?.ok_or_else(|| ChildError::InVain {
        program: cgpu.to_owned(),
        state_dir: settings.state_dir.clone(),
        said,
    })
}

/// The GPUs, for a caller that can't write the cache: those that are [`cached`], else those that `CGPU [CONFIG_ARGS…]
/// gpus` prints within `limit`.
///
/// # Errors
///
/// Those of [`refreshed`].
pub fn listed(
    settings: &Settings,
    cgpu: &Path,
    config_args: &[OsString],
    limit: Duration,
) -> Result<Inventory, ChildError> {
    if let Some(inventory) = cached(settings)? {
        return Ok(inventory);
    }
    let program = cgpu.to_owned();
    let start = |source| ChildError::Start { program: program.clone(), source };
    // The list is read like a file of an administrator's, when the child has exited.
    let printed = memfd_create("gpus", MemfdFlags::CLOEXEC).map_err(|error| start(error.into()))?;
    let stdout = printed.try_clone().map_err(start)?;
    let said = run(cgpu, config_args, &["gpus", "--format", "json"], stdout.into(), limit)?;
    let path = format!("/proc/self/fd/{}", printed.as_raw_fd());
    let not_listed = |source| ChildError::NoList { program, said, source: Box::new(source) };
    file::load(Path::new(&path)).map_err(not_listed)
}

/// Runs the child until it exits or `limit` is reached; what it printed on standard error.
fn run(
    cgpu: &Path,
    config_args: &[OsString],
    words: &[&str],
    stdout: Stdio,
    limit: Duration,
) -> Result<String, ChildError> {
    let program = cgpu.to_owned();
    let mut command = Command::new(cgpu);
    command.args(config_args).args(words);
    let bounds = Bounds {
        variables: &["PATH", "CGPU_CONFIG"],
        stdin: Stdio::null(),
        stdout: Stdout::To(stdout),
        limit,
    };
    match child::run(command, bounds) {
        Ok(Ended { status: Some(status), stderr, .. }) if !status.success() => {
            Err(ChildError::Failed { program, status, said: one_line(&stderr) })
        }
        // If the status is lost, the cache or the list shows whether it succeeded.
        Ok(ended) => Ok(one_line(&ended.stderr)),
        Err(RunError::Start(source)) => Err(ChildError::Start { program, source }),
        Err(RunError::Wait(source)) => Err(ChildError::Watch { program, source }),
        Err(RunError::TooSlow { reaped, stderr }) => {
            Err(ChildError::TooSlow { program, limit, reaped, said: one_line(&stderr) })
        }
    }
}

/// What a child printed, as one line without control characters.
fn one_line(printed: &[u8]) -> String {
    let text = String::from_utf8_lossy(printed);
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines.collect::<Vec<_>>().join("; ");
    line.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// `said` as the part of a sentence, or nothing where nothing was said.
fn quoted(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(", saying \"{said}\"") }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::time::Instant;

    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;

    use super::*;
    use crate::child::STDERR_BYTES_MAX;
    use crate::inventory::fixture::{Proc, sentence};
    use crate::inventory::{Fingerprint, Source, cache};

    const PLENTY: Duration = Duration::from_secs(20);

    /// A host with one GPU whose cache is yet to be written.
    struct Host {
        proc: Proc,
        settings: Settings,
    }

    impl Host {
        fn new() -> Self {
            let proc = Proc::with_driver();
            proc.gpu("0000:00:07.0", "GPU-a", 0);
            let settings = Settings {
                state_dir: proc.state_dir(),
                proc_root: proc.root().to_owned(),
                ..Settings::default()
            };
            Host { proc, settings }
        }

        /// A program that stands for `cgpu`.
        ///
        /// Another process writes it: had we its descriptor open for writing while a
        /// test that runs next to this one forks, running it would fail with ETXTBSY.
        fn cgpu(&self, script: &str) -> PathBuf {
            let path = self.proc.beside("cgpu");
            let status = Command::new("/bin/sh")
                .args(["-c", r#"printf '#!/bin/sh\n%s\n' "$2" > "$1" && chmod 755 "$1""#, "sh"])
                .args([path.as_os_str(), script.as_ref()])
                .status()
                .unwrap();
            assert!(status.success());
            path
        }

        /// The commands that write the cache as `cgpu gpus --refresh` would.
        fn refreshing(&self) -> String {
            let inventory = Inventory::new(
                serde_json::from_str(r#"[{"index":0,"uuid":"GPU-a","memory_mib":16130}]"#).unwrap(),
            );
            let now = Fingerprint::read(self.proc.root()).unwrap();
            let prepared = self.proc.beside("prepared");
            cache::write(&prepared, now, &inventory.unwrap()).unwrap();
            let state = self.settings.state_dir.display();
            format!("mkdir -p {state} && cp {}/inventory.json {state}", prepared.display())
        }

        fn refreshed(&self, script: &str, limit: Duration) -> Result<Inventory, ChildError> {
            refreshed(&self.settings, &self.cgpu(script), &[], limit)
        }
    }

    #[test]
    fn a_valid_cache_needs_no_child() {
        let host = Host::new();
        assert!(host.refreshed(&host.refreshing(), PLENTY).is_ok());
        let inventory = host.refreshed("exit 1", PLENTY).unwrap();
        assert_eq!(inventory.gpus()[0].uuid, "GPU-a");
    }

    /// A user who can't write the cache reads what the child prints.
    #[test]
    fn unwritable_cache_is_replaced_by_childs_output() {
        let host = Host::new();
        let list = |script: &str| {
            listed(&host.settings, &host.cgpu(script), &["--config".into(), "/c".into()], PLENTY)
        };
        let gpu = r#"[{"index":0,"uuid":"GPU-a","memory_mib":16130}]"#;
        let script = format!("[ \"$*\" = \"--config /c gpus --format json\" ] && echo '{gpu}'");
        assert_eq!(list(&script).unwrap().gpus()[0].uuid, "GPU-a");
        assert!(!host.settings.state_dir.exists());
        let error = sentence(&list("echo x; echo y >&2").unwrap_err());
        assert!(
            error.contains("/cgpu gpus --format json printed no list of GPUs, saying \"y\"; run"),
            "{error}"
        );
        assert!(list("exit 3").unwrap_err().to_string().contains("exit status: 3"));
    }

    #[test]
    fn an_inventory_file_needs_no_child() {
        let mut host = Host::new();
        let path = host.proc.beside("gpus.json");
        fs::write(&path, r#"[{"index":0,"uuid":"GPU-f","memory_mib":1}]"#).unwrap();
        host.settings.source = Source::File(path);
        assert_eq!(host.refreshed("exit 1", PLENTY).unwrap().gpus()[0].uuid, "GPU-f");
    }

    #[test]
    fn without_a_driver_no_child_is_started() {
        let proc = Proc::without_driver();
        let settings = Settings { proc_root: proc.root().to_owned(), ..Settings::default() };
        let error = refreshed(&settings, Path::new("/nonexistent"), &[], PLENTY).unwrap_err();
        assert!(error.to_string().starts_with("no NVIDIA driver on this host: "), "{error}");
    }

    /// The child gets the configuration, and nothing that matters to the dynamic loader.
    #[test]
    fn child_gets_configuration_and_no_loader_variables() {
        let host = Host::new();
        let seen = host.proc.beside("seen");
        let script =
            format!("echo \"$@\" > {0}; env >> {0}; {1}", seen.display(), host.refreshing());
        let program = host.cgpu(&script);
        let config_args = ["--config".into(), "/etc/other.toml".into()];
        refreshed(&host.settings, &program, &config_args, PLENTY).unwrap();
        let seen = fs::read_to_string(seen).unwrap();
        let mut lines = seen.lines();
        assert_eq!(lines.next(), Some("--config /etc/other.toml gpus --refresh"));
        // PWD and the like are the shell's own. Cargo gives its tests LD_LIBRARY_PATH.
        for line in lines {
            assert!(
                ["PATH=", "CGPU_CONFIG=", "PWD=", "_=", "SHLVL=", "OLDPWD="]
                    .iter()
                    .any(|retained| line.starts_with(retained)),
                "{line}"
            );
        }
    }

    /// A child that takes too long is killed with all that it started.
    #[test]
    fn slow_child_is_killed_with_its_descendants() {
        let host = Host::new();
        let pids = host.proc.beside("pids");
        let script = format!("sleep 600 & echo $$ $! > {}; echo waiting >&2; wait", pids.display());
        let limit = Duration::from_millis(1500);
        let begun = Instant::now();
        let error = host.refreshed(&script, limit).unwrap_err();
        assert!(begun.elapsed() < PLENTY);
        assert_eq!(
            sentence(&error),
            format!(
                "{} gpus --refresh did not list the GPUs within 1.5s and was killed, saying \
                 \"waiting\"; run `cgpu gpus --refresh` manually to see",
                host.proc.beside("cgpu").display()
            )
        );
        for pid in fs::read_to_string(pids).unwrap().split_whitespace() {
            // The second was the child's child: it dies when it next runs, and the process
            // that inherits it reaps it in time.
            let status = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            let is_dead = |status: &str| {
                status.is_empty() || ["State:\tZ", "State:\tX"].iter().any(|s| status.contains(s))
            };
            while !is_dead(&status()) {
                assert!(begun.elapsed() < PLENTY, "{pid} lives:\n{}", status());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn a_failing_child_is_quoted() {
        let host = Host::new();
        let error = host.refreshed("echo 'cgpu: NVML\nis \tunwell' >&2; exit 3", PLENTY);
        assert_eq!(
            sentence(&error.unwrap_err()),
            format!(
                "{} gpus --refresh failed (exit status: 3), saying \"cgpu: NVML; is \u{fffd}unwell\"; \
                 run `cgpu gpus --refresh` manually to see",
                host.proc.beside("cgpu").display()
            )
        );
    }

    #[test]
    fn child_killed_by_a_signal_is_reported() {
        let error = Host::new().refreshed("kill -SEGV $$", PLENTY).unwrap_err();
        assert!(error.to_string().contains("failed (signal: 11 (SIGSEGV)"), "{error}");
    }

    #[test]
    fn last_words_of_a_verbose_child_are_retained() {
        let script = "head -c 300000 /dev/zero | tr '\\0' x >&2; echo last words >&2; exit 1";
        let error = Host::new().refreshed(script, PLENTY).unwrap_err().to_string();
        assert!(error.contains("xlast words\"; run") && error.len() < STDERR_BYTES_MAX + 1000);
    }

    #[test]
    fn endlessly_printing_child_is_ended_in_time() {
        let error = Host::new().refreshed("exec yes >&2", Duration::from_millis(200));
        assert!(matches!(error, Err(ChildError::TooSlow { reaped: true, .. })));
    }

    /// A process that outlives the child does not hold up the refresh.
    #[test]
    fn survivor_of_the_child_causes_no_delay() {
        let host = Host::new();
        let pid = host.proc.beside("pid");
        let script = format!("{}; sleep 600 & echo $! > {}", host.refreshing(), pid.display());
        assert!(host.refreshed(&script, PLENTY).is_ok());
        let left = fs::read_to_string(pid).unwrap().trim().parse().unwrap();
        kill(Pid::from_raw(left), Signal::SIGKILL).unwrap();
    }

    #[test]
    fn child_that_leaves_no_cache_has_failed() {
        let host = Host::new();
        let error = host.refreshed("exit 0", PLENTY).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{} gpus --refresh left no inventory of the present GPUs in {}; run `cgpu gpus \
                 --refresh` manually to see, and whether it uses the same state_dir",
                host.proc.beside("cgpu").display(),
                host.settings.state_dir.display()
            )
        );
    }

    #[test]
    fn a_missing_program_is_named() {
        let host = Host::new();
        let error = refreshed(&host.settings, Path::new("/nonexistent/cgpu"), &[], PLENTY);
        assert_eq!(
            sentence(&error.unwrap_err()),
            "can't run /nonexistent/cgpu to list the GPUs; install it, and run `cgpu gpus \
             --refresh` manually to see: No such file or directory (os error 2)"
        );
    }
}
