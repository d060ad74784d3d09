//! `cgpu gpus --refresh` as a child, or `cgpu gpus` for a user who can write no cache: how the runtime
//! learns of GPUs without loading NVML.
//!
//! Owns the child's life: what it inherits, how long it may take, its end. Must not know
//! what it does. The child leads a process group of its own, so that whatever it has
//! started ends with it, and can neither fill a pipe nor hold one open against us.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use rustix::fs::{MemfdFlags, memfd_create};
use thiserror::Error;

use super::{FileError, LoadError, Settings, cached, file};
use cgpu_core::gpu::Inventory;

/// Most bytes kept of what the child prints on standard error: the last ones.
const SAID_BYTES_MAX: usize = 4 << 10;

/// How long a killed child may take to end. One that is stuck inside the driver never
/// does, and must not take us with it.
const REAP_LIMIT: Duration = Duration::from_millis(500);

/// Longest pause between two looks at the child.
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// What the child gets of our environment. The engine's, and a caller's, may hold
/// `LD_PRELOAD`, `LD_LIBRARY_PATH`, `LD_AUDIT` and more of that kind.
const RETAINED_VARIABLES: [&str; 2] = ["PATH", "CGPU_CONFIG"];

/// Why there is no inventory after all.
#[derive(Debug, Error)]
pub enum ChildError {
    /// The file, or the absence of a driver.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The child can't be started.
    #[error(
        "can't run {} to list the GPUs; install it, and run `cgpu gpus --refresh` by hand to see",
        program.display()
    )]
    Start {
        /// The program.
        program: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// The child can't be watched.
    #[error("lost sight of {} gpus --refresh; run `cgpu gpus --refresh` by hand to see", program.display())]
    Watch {
        /// The program.
        program: PathBuf,
        /// What the kernel said.
        #[source]
        source: io::Error,
    },
    /// It took too long.
    #[error(
        "{} gpus --refresh did not list the GPUs within {limit:?} and was killed{}{}; run `cgpu \
         gpus --refresh` by hand to see",
        program.display(),
        if *reaped { "" } else { " but does not end: the driver hangs, see the kernel's log" },
        quoted(said)
    )]
    TooSlow {
        /// The program.
        program: PathBuf,
        /// How long it had.
        limit: Duration,
        /// Whether it is gone.
        reaped: bool,
        /// What it printed on standard error.
        said: String,
    },
    /// It failed.
    #[error(
        "{} gpus --refresh failed ({status}){}; run `cgpu gpus --refresh` by hand to see",
        program.display(),
        quoted(said)
    )]
    Failed {
        /// The program.
        program: PathBuf,
        /// How it ended.
        status: ExitStatus,
        /// What it printed on standard error.
        said: String,
    },
    /// It succeeded, and printed no list.
    #[error(
        "{} gpus --format json printed no list of GPUs{}; run `cgpu gpus` by hand to see",
        program.display(),
        quoted(said)
    )]
    NoList {
        /// The program.
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
         --refresh` by hand to see, and whether it uses the same state_dir",
        program.display(),
        state_dir.display(),
        quoted(said)
    )]
    InVain {
        /// The program.
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

/// The GPUs, for who can't write the cache: those that are [`cached`], else those that `CGPU [CONFIG_ARGS…]
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
    // A pipe would have to be emptied meanwhile.
    let printed = memfd_create("gpus", MemfdFlags::CLOEXEC).map_err(|error| start(error.into()))?;
    let stdout = printed.try_clone().map_err(start)?;
    let said = run(cgpu, config_args, &["gpus", "--format", "json"], stdout.into(), limit)?;
    let path = format!("/proc/self/fd/{}", printed.as_raw_fd());
    let not_listed = |source| ChildError::NoList { program, said, source: Box::new(source) };
    file::load(Path::new(&path)).map_err(not_listed)
}

/// Runs the child to its end, or to the end of `limit`; what it said.
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
    command.env_clear();
    command
        .envs(RETAINED_VARIABLES.iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
    command.stdin(Stdio::null()).stdout(stdout).stderr(Stdio::piped());
    command.process_group(0);
    let begun = Instant::now();
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(source) => return Err(ChildError::Start { program, source }),
    };
    let mut said = Said::of(child.stderr.take());
    let mut pause = Duration::from_millis(1);
    loop {
        said.listen();
        match child.try_wait() {
            Ok(Some(status)) => {
                said.listen();
                let said = said.text();
                return if status.success() {
                    Ok(said)
                } else {
                    Err(ChildError::Failed { program, status, said })
                };
            }
            // Our caller ignores SIGCHLD, so the kernel has reaped the child and its
            // status is gone; the cache will show whether it succeeded.
            Err(error) if error.raw_os_error() == Some(Errno::ECHILD as i32) => {
                said.listen();
                return Ok(said.text());
            }
            Err(source) => {
                end(&mut child);
                return Err(ChildError::Watch { program, source });
            }
            Ok(None) => {}
        }
        let Some(left) = limit.checked_sub(begun.elapsed()).filter(|left| !left.is_zero()) else {
            let reaped = end(&mut child);
            said.listen();
            return Err(ChildError::TooSlow { program, limit, reaped, said: said.text() });
        };
        sleep(pause.min(left));
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Kills the child with all it started; whether it is gone.
fn end(child: &mut Child) -> bool {
    // Not reaped when last looked at, so the number is still the child's, and its
    // group's as long as any of them lives.
    let leader = i32::try_from(child.id()).map(Pid::from_raw);
    if leader.is_err() || leader.is_ok_and(|leader| killpg(leader, Signal::SIGKILL).is_err()) {
        // All that is left is to look whether it ends.
        let _ = child.kill();
    }
    let killed = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(_)) => return true,
            Err(error) => return error.raw_os_error() == Some(Errno::ECHILD as i32),
            Ok(None) if killed.elapsed() >= REAP_LIMIT => return false,
            Ok(None) => sleep(Duration::from_millis(1)),
        }
    }
}

/// What the child prints on standard error, as far as it is kept.
#[derive(Debug)]
struct Said {
    pipe: Option<ChildStderr>,
    bytes: Vec<u8>,
}

impl Said {
    /// Listens without waiting; where that can't be had, it doesn't listen.
    fn of(pipe: Option<ChildStderr>) -> Self {
        let pipe = pipe.filter(|pipe| {
            let flags = fcntl(pipe, FcntlArg::F_GETFL).map(OFlag::from_bits_retain);
            flags.is_ok_and(|flags| {
                fcntl(pipe, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK)).is_ok()
            })
        });
        Said { pipe, bytes: Vec::new() }
    }

    /// Takes what is there, at most as much as a pipe holds: a child that never stops
    /// printing must not keep us from looking at the clock.
    fn listen(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut buffer = [0; SAID_BYTES_MAX];
        for _ in 0..16 {
            match pipe.read(&mut buffer) {
                Ok(0) => {
                    self.pipe = None;
                    return;
                }
                Ok(length) => {
                    self.bytes.extend_from_slice(&buffer[..length]);
                    let surplus = self.bytes.len().saturating_sub(SAID_BYTES_MAX);
                    self.bytes.drain(..surplus);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    /// It as one line, without control characters.
    fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.bytes);
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let line = lines.collect::<Vec<_>>().join("; ");
        line.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
    }
}

/// `said` as the part of a sentence, or nothing where nothing was said.
fn quoted(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(", saying \"{said}\"") }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
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
        /// test beside this one forks, running it would fail with ETXTBSY.
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
                 \"waiting\"; run `cgpu gpus --refresh` by hand to see",
                host.proc.beside("cgpu").display()
            )
        );
        for pid in fs::read_to_string(pids).unwrap().split_whitespace() {
            // The second was the child's child: it dies when it next runs, and whoever
            // inherits it reaps it in time.
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
                 run `cgpu gpus --refresh` by hand to see",
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
        assert!(error.contains("xlast words\"; run") && error.len() < SAID_BYTES_MAX + 1000);
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
        nix::sys::signal::kill(Pid::from_raw(left), Signal::SIGKILL).unwrap();
    }

    #[test]
    fn child_that_leaves_no_cache_has_failed() {
        let host = Host::new();
        let error = host.refreshed("exit 0", PLENTY).unwrap_err().to_string();
        assert_eq!(
            error,
            format!(
                "{} gpus --refresh left no inventory of the present GPUs in {}; run `cgpu gpus \
                 --refresh` by hand to see, and whether it uses the same state_dir",
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
             --refresh` by hand to see: No such file or directory (os error 2)"
        );
    }
}
