//! `cgpu logs`: the lines of cgpu's log that are about one container.
//!
//! Of a log that is a file they are read there, and in the files that logrotate has made of it; of
//! journald's, `journalctl` prints them. Where no log is kept, the container's events are shown, which
//! say the same.

use std::fs;
use std::io::{self, BufRead, BufReader, Cursor, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use super::events::{self, until_reader_leaves};
use cgpu::host::Host;
use cgpu_host::events::{Event, Filter, Kind, Names, plain};
use cgpu_host::log::{self, Sink};

/// Most bytes of a line that are read.
const MOST_LINE_BYTES: u64 = 64 << 10;

/// Prints the lines about the container that `word` means, which may be gone.
///
/// # Errors
///
/// Where the log can't be read, or has nothing of it.
pub fn run(host: &Host, word: &str, out: &mut dyn Write) -> Result<()> {
    let registered = events::registered(host, Some(word))?;
    let registered = registered.as_deref();
    until_reader_leaves(match Sink::of(&host.config.log) {
        Sink::File(path) => from_file(path, word, registered, out),
        Sink::Journald => from_journald(host, word, registered),
        Sink::None | Sink::Stderr => from_events(host, word, registered, out),
    })
}

fn from_file(path: &Path, word: &str, registered: Option<&str>, out: &mut dyn Write) -> Result<()> {
    let files = with_rotated(path);
    // As they stand in the log.
    let (word, registered) = (log::escaped(word), registered.map(log::escaped));
    let mut about = Vec::new();
    for file in &files {
        each_line(&mut opened(file)?, |line| {
            about.extend(subject(line));
            Ok(())
        })?;
    }
    let mut filter = Filter::new(Some(&word), registered.as_deref(), &about);
    if !about.iter().any(|event| filter.takes(event)) {
        bail!("{} has no line about a container {word:?}; see `cgpu events`", path.display());
    }
    for file in &files {
        each_line(&mut opened(file)?, |line| match subject(line) {
            Some(event) if filter.takes(&event) => writeln!(out, "{}", plain(line, usize::MAX)),
            _ => Ok(()),
        })?;
    }
    Ok(out.flush()?)
}

/// The log and the files that logrotate has made of it (`cgpu.log.2.gz`, `cgpu.log.1`), the oldest first.
fn with_rotated(path: &Path) -> Vec<PathBuf> {
    let begin = path.file_name().map(|name| format!("{}.", name.to_string_lossy()));
    let entries = path.parent().and_then(|directory| fs::read_dir(directory).ok());
    let number = |name: &str| {
        let rest = name.strip_prefix(begin.as_deref()?)?;
        rest.strip_suffix(".gz").unwrap_or(rest).parse::<u32>().ok()
    };
    let mut rotated: Vec<(u32, PathBuf)> = entries
        .into_iter()
        .flatten()
        .filter_map(|entry| {
            let entry = entry.ok()?;
            Some((number(entry.file_name().to_str()?)?, entry.path()))
        })
        .collect();
    rotated.sort_by(|one, other| other.cmp(one));
    rotated.into_iter().map(|(_, path)| path).chain([path.to_owned()]).collect()
}

/// A file of the log; gzip unpacks what is packed.
fn opened(path: &Path) -> Result<Box<dyn BufRead>> {
    let file =
        log::open_to_read(path).with_context(|| format!("cannot read {}", path.display()))?;
    if path.extension().is_none_or(|extension| extension != "gz") {
        return Ok(Box::new(BufReader::new(file)));
    }
    let unpacked = Command::new("gzip").arg("-cd").stdin(file).output();
    let unpacked = unpacked.with_context(|| format!("gzip can't be run for {}", path.display()))?;
    let said = String::from_utf8_lossy(&unpacked.stderr);
    ensure!(unpacked.status.success(), "{} can't be unpacked: {}", path.display(), said.trim());
    Ok(Box::new(Cursor::new(unpacked.stdout)))
}

/// Calls `each` with every line of a log.
fn each_line(
    log: &mut impl BufRead,
    mut each: impl FnMut(&str) -> io::Result<()>,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        if io::Read::take(&mut *log, MOST_LINE_BYTES).read_until(b'\n', &mut bytes)? == 0 {
            return Ok(());
        }
        each(String::from_utf8_lossy(&bytes).trim_end())?;
    }
}

/// Whom a line is about, as an event of nothing else: its id and its name, escaped as they stand
/// there.
fn subject(line: &str) -> Option<Event> {
    let mut event = Event::new(Kind::Unknown);
    event.id = value(line, "id")?.to_owned();
    event.name = value(line, "name").map(str::to_owned);
    if let Some(former) = value(line, "former_id") {
        event.kind = Kind::Named;
        event.former_id = Some(former.to_owned());
    }
    Some(event)
}

/// The text of a field. Fields stand behind the message, which may quote anything; a quote in a text
/// is escaped.
fn value<'a>(line: &'a str, field: &str) -> Option<&'a str> {
    let (_, after) = line.rsplit_once(&format!(" {field}=\""))?;
    let mut is_escaped = false;
    let end = after.find(|c| {
        let is_end = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_end
    })?;
    after.get(..end)
}

fn from_journald(host: &Host, word: &str, registered: Option<&str>) -> Result<()> {
    let (_, all) = events::read(host)?;
    let filter = Filter::new(Some(word), registered, &all);
    // After a boot there may be lines where no event is kept any more.
    let mut matches: Vec<String> = filter.ids().map(|id| format!("CGPU_ID={id}")).collect();
    if matches.is_empty() {
        matches = vec![format!("CGPU_ID={word}"), "+".into(), format!("CGPU_NAME={word}")];
    }
    let mut command = Command::new("journalctl");
    command.args(["--no-pager", "--output=short-iso", "SYSLOG_IDENTIFIER=cgpu"]);
    let status = command.args(matches).stdin(Stdio::null()).status();
    let status = status.context("the log is journald's, and journalctl can't be run")?;
    if !status.success() {
        bail!("journalctl failed: {status}");
    }
    Ok(())
}

fn from_events(
    host: &Host,
    word: &str,
    registered: Option<&str>,
    out: &mut dyn Write,
) -> Result<()> {
    let (_, all) = events::read(host)?;
    let mut filter = Filter::new(Some(word), registered, &all);
    if !filter.has_any() {
        bail!(events::unknown(word));
    }
    let mut names = Names::default();
    for event in all {
        let name = names.of(&event);
        if filter.takes(&event) {
            writeln!(out, "{}", events::line(&event, name.as_deref()))?;
        }
    }
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
2026-11-25T10:00:00Z  INFO registered id=\"3f2a\" root=\"/run/runc\" gpus=GPU 0 1 MiB name=\"web\"
2026-11-25T10:00:00Z  INFO registered id=\"4b00\" root=\"/run/runc\" name=\"db\"
2026-11-25T10:00:01Z  INFO refused: says id=\"3f2a\" pid=7 id=\"4b00\"
2026-11-25T10:00:02Z  INFO refused: control 7 pid=7 id=\"3f2a\"
2026-11-25T10:00:03Z  WARN a line without an id
2026-11-25T10:00:04Z  INFO released id=\"a\\\"b\"
";

    fn shown(word: &str) -> Result<String> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cgpu.log");
        std::fs::write(&path, LOG).unwrap();
        let mut out = Vec::new();
        from_file(&path, word, None, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    /// The lines of a container are those with its id, whatever text a message quotes.
    #[test]
    fn container_log_lines_match_the_id_field_alone() {
        let web = shown("web").unwrap();
        assert_eq!(web, shown("3f").unwrap());
        let lines: Vec<&str> = LOG.lines().collect();
        assert_eq!(web.lines().collect::<Vec<_>>(), [lines[0], lines[3]]);
        assert_eq!(shown("4b00").unwrap().lines().count(), 2);
        assert_eq!(shown("a\"b").unwrap().lines().collect::<Vec<_>>(), [lines[5]]);
        let error = shown("absent").unwrap_err().to_string();
        assert!(error.contains("has no line about a container \"absent\""), "{error}");
    }

    #[test]
    fn lines_before_the_last_rotation_come_first() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cgpu.log");
        let lines = [
            "one id=\"3f2a\" name=\"web\"",
            "two id=\"3f2a\"",
            "three id=\"3f2a\"",
            "no id=\"4b\"",
        ];
        std::fs::write(dir.path().join("cgpu.log.10"), format!("{}\n", lines[0])).unwrap();
        std::fs::write(dir.path().join("cgpu.log.1"), format!("{}\n", lines[3])).unwrap();
        std::fs::write(dir.path().join("cgpu.log.old"), "id=\"3f2a\" name=\"web\"\n").unwrap();
        std::fs::write(&path, format!("{}\n", lines[2])).unwrap();
        let packed = dir.path().join("cgpu.log.2");
        std::fs::write(&packed, format!("{}\n", lines[1])).unwrap();
        assert!(Command::new("gzip").arg(&packed).status().unwrap().success());
        let mut out = Vec::new();
        from_file(&path, "web", None, &mut out).unwrap();
        assert_eq!(String::from_utf8(out).unwrap().lines().collect::<Vec<_>>(), lines[..3]);
        std::fs::write(dir.path().join("cgpu.log.3.gz"), "no gzip").unwrap();
        let error = from_file(&path, "web", None, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("cgpu.log.3.gz can't be unpacked"), "{error}");
    }

    /// A log line that would move the cursor is escaped.
    #[test]
    fn log_output_escapes_control_characters() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cgpu.log");
        std::fs::write(&path, b"a \x1b[2J\xff id=\"1\"\n").unwrap();
        let mut out = Vec::new();
        from_file(&path, "1", None, &mut out).unwrap();
        assert!(out.iter().all(|byte| *byte != 0x1b), "{out:?}");
    }
}
