//! How the engine and its user learn what went wrong.
//!
//! A line of JSON (or text, as the engine asked) at the end of `--log`'s file, whose
//! last error docker shows to its user, and the same sentence on standard error. The
//! file is shared by all calls for a container, so nothing else is ever written there.

use std::error::Error;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde_json::json;

/// What each sentence begins with: an engine shows it among its own.
const PREFIX: &str = "cgpu: ";

/// Where the engine wants errors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ErrorLog {
    /// The file of `--log`.
    pub path: Option<PathBuf>,
    /// Whether `--log-format` is `json`.
    pub json: bool,
    /// Whether the engine puts our name before what it shows.
    pub is_named: bool,
}

/// An error in one line: what it says, and of its causes what it doesn't say itself. What
/// it quotes, an id perhaps, has nothing left in it that moves a terminal's cursor.
#[must_use]
pub fn sentence(error: &dyn Error) -> String {
    let mut text = format!("{PREFIX}{error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        let said = error.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        cause = error.source();
    }
    text.replace(char::is_control, " ")
}

/// Reports to the engine and on standard error.
pub fn report(error: &dyn Error, log: &ErrorLog) {
    let mut text = sentence(error);
    if log.is_named {
        text = text.replacen(PREFIX, "", 1);
    }
    if let Some(path) = &log.path {
        // The engine reads standard error if its own file can't be written.
        let _ = append(path, &line(&text, log.json, SystemTime::now()));
    }
    // If this fails, there is no place left to report it; `eprintln` would panic.
    let _ = writeln!(io::stderr(), "{text}");
}

/// One line of the log, as logrus writes it.
fn line(text: &str, json: bool, now: SystemTime) -> String {
    let time = humantime::format_rfc3339_seconds(now).to_string();
    if json {
        format!("{}\n", json!({"level": "error", "msg": text, "time": time}))
    } else {
        format!("time=\"{time}\" level=error msg={text:?}\n")
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    OpenOptions::new().append(true).create(true).open(path)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[derive(Debug, thiserror::Error)]
    #[error("outer{}", if *.0 { ": inner" } else { "" })]
    struct Outer(bool, #[source] Inner);

    #[derive(Debug, thiserror::Error)]
    #[error("inner")]
    struct Inner;

    #[test]
    fn error_cause_is_reported_once() {
        assert_eq!(sentence(&Outer(true, Inner)), "cgpu: outer: inner");
        assert_eq!(sentence(&Outer(false, Inner)), "cgpu: outer: inner");
    }

    #[test]
    fn a_sentence_is_one_line_without_terminal_escapes() {
        #[derive(Debug, thiserror::Error)]
        #[error("no {0}; retry")]
        struct Quoting(&'static str);
        let text = sentence(&Quoting("a\nb\r\x1b[2Jc\u{9b}1m"));
        assert_eq!(text, "cgpu: no a b  [2Jc 1m; retry");
    }

    #[test]
    fn the_log_has_what_docker_reads() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        assert_eq!(
            line("cgpu: \"x\"", true, now),
            "{\"level\":\"error\",\"msg\":\"cgpu: \\\"x\\\"\",\"time\":\"2023-11-14T22:13:20Z\"}\n"
        );
        assert_eq!(
            line("cgpu: x", false, now),
            "time=\"2023-11-14T22:13:20Z\" level=error msg=\"cgpu: x\"\n"
        );
    }

    #[test]
    fn lines_are_appended() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.json");
        std::fs::write(&path, "first\n").unwrap();
        for is_named in [false, true] {
            report(&Inner, &ErrorLog { path: Some(path.clone()), json: true, is_named });
        }
        let text = std::fs::read_to_string(path).unwrap();
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("{\"level\":\"error\",\"msg\":\"cgpu: inner\""), "{text}");
        assert!(lines[2].starts_with("{\"level\":\"error\",\"msg\":\"inner\""), "{text}");
        assert_eq!((lines[0], lines.len()), ("first", 3));
    }
}
