//! `cgpu events`: what happened to containers, and what happens now.

use std::io::{self, Write};
use std::time::{Duration, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::table::printable;
use cgpu::container_names;
use cgpu::host::Host;
use cgpu_host::events::{Event, Filter, Follower, Names, Store};

/// How often new events are polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Most characters of a name, and of an id, in a line.
const LONGEST_NAME: usize = 60;
const LONGEST_ID: usize = 12;

/// Of whom, and how to print.
#[derive(Debug, Args)]
pub struct Events {
    /// Of one container alone, which may be gone: its name, its id, or the beginning of that.
    pub container: Option<String>,
    /// Go on with what happens from now on.
    #[arg(long, short)]
    pub follow: bool,
    /// A line of JSON for each.
    #[arg(long)]
    pub json: bool,
}

/// Prints the events that are kept, and where that is asked for those that come.
///
/// # Errors
///
/// Where they can't be read, or there is none of that container.
pub fn run(host: &Host, events: &Events, out: &mut dyn Write) -> Result<()> {
    until_reader_leaves(print(host, events, out))
}

/// A reader of our output that has closed its end has read enough: that is no failure.
pub(super) fn until_reader_leaves(done: Result<()>) -> Result<()> {
    let is_pipe = |error: &anyhow::Error| {
        let error = error.downcast_ref::<io::Error>();
        error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    match done {
        Err(error) if is_pipe(&error) => Ok(()),
        done => done,
    }
}

fn print(host: &Host, asked: &Events, out: &mut dyn Write) -> Result<()> {
    let word = asked.container.as_deref();
    let registered = registered(host, word)?;
    let (mut follower, events) = read(host)?;
    let mut filter = Filter::new(word, registered.as_deref(), &events);
    if !filter.has_any() && !asked.follow {
        bail!(unknown(word.unwrap_or_default()));
    }
    let mut names = Names::default();
    let mut show = |events: Vec<Event>, out: &mut dyn Write| -> io::Result<()> {
        for event in events {
            // Names are learnt of all.
            let name = names.of(&event);
            if filter.takes(&event) {
                match asked.json {
                    true => writeln!(out, "{}", event.json())?,
                    false => writeln!(out, "{}", line(&event, name.as_deref()))?,
                }
            }
        }
        out.flush()
    };
    show(events, out)?;
    while asked.follow && is_read() {
        show(follower.read().context("cannot read events")?, out)?;
    }
    Ok(())
}

/// What is said where nothing is known of that container.
pub(super) fn unknown(word: &str) -> String {
    format!(
        "no event of a container {:?} is kept; `cgpu events` shows all that are",
        printable(word)
    )
}

/// The id of the container that is registered and that `word` means now.
///
/// # Errors
///
/// If the registry can't be read; for a user other than root the error says so.
pub(super) fn registered(host: &Host, word: Option<&str>) -> Result<Option<String>> {
    let registry = host.check_registry()?;
    let Some(word) = word else { return Ok(None) };
    // More than one is no error here: the events of all are shown.
    let chosen = container_names::chosen(word, registry.living()?).ok();
    Ok(chosen.map(|record| record.container_id().to_owned()))
}

/// All events, and the follower that reads on.
///
/// # Errors
///
/// Where they can't be read.
pub(super) fn read(host: &Host) -> Result<(Follower, Vec<Event>)> {
    let follower = Follower::new(Store::of(&host.config.state_dir));
    let mut follower = follower.context("cannot read events")?;
    let events = follower.read().context("cannot read events")?;
    Ok((follower, events))
}

/// Waits a moment; whether our output is still read.
fn is_read() -> bool {
    let stdout = io::stdout();
    // With no event asked for, poll reports the end of the pipe all the same.
    let mut asked = [PollFd::new(&stdout, PollFlags::empty())];
    match poll(&mut asked, Timespec::try_from(POLL_INTERVAL).ok().as_ref()) {
        Ok(0) => true,
        Ok(_) => false,
        // A signal.
        Err(_) => {
            std::thread::sleep(POLL_INTERVAL);
            true
        }
    }
}

/// An event as people read it.
pub(super) fn line(event: &Event, name: Option<&str>) -> String {
    let at = UNIX_EPOCH.checked_add(Duration::from_micros(event.at_us)).unwrap_or(UNIX_EPOCH);
    let time = humantime::format_rfc3339_seconds(at);
    let short = |text: &str, most| printable(text).chars().take(most).collect::<String>();
    let id = short(&event.id, LONGEST_ID);
    let who = match name {
        Some(name) => format!("{} ({id})", short(name, LONGEST_NAME)),
        None if id.is_empty() => "-".to_owned(),
        None => id,
    };
    format!("{time} {who}: {}", event.sentence())
}

#[cfg(test)]
mod tests {
    use super::*;
    use cgpu_host::config::Config;
    use cgpu_host::events::Kind;

    fn host(dir: &std::path::Path) -> Host {
        let config = Config { state_dir: dir.to_owned(), ..Config::default() };
        Host::new(config, None)
    }

    fn asked(container: Option<&str>, json: bool) -> Events {
        Events { container: container.map(str::to_owned), follow: false, json }
    }

    /// A removed container is found by its name, and its later events, which lack the name, show it
    /// too.
    #[test]
    fn events_of_a_removed_container_match_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::of(dir.path());
        let web = |kind, name| Event::new(kind).of("3f2a00000000ffff", name, "/run/runc");
        for event in [
            web(Kind::Created, Some("web")),
            Event::new(Kind::Created).of("4b00", Some("db"), "/run/runc"),
            web(Kind::Removed, None),
        ] {
            store.append(&event).unwrap();
        }
        let mut out = Vec::new();
        run(&host(dir.path()), &asked(Some("web"), false), &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "1970-01-01T00:00:00Z web (3f2a00000000): created: no GPU, backend unknown\n\
             1970-01-01T00:00:00Z web (3f2a00000000): removed\n"
        );
        let mut out = Vec::new();
        run(&host(dir.path()), &asked(None, true), &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let events: Vec<_> = text.lines().filter_map(Event::parse).map(|event| event.id).collect();
        assert_eq!(events, ["3f2a00000000ffff", "4b00", "3f2a00000000ffff"]);
        let error = run(&host(dir.path()), &asked(Some("x\u{1b}"), false), &mut Vec::new());
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("no event of a container \"x"), "{error}");
        assert!(!error.contains('\u{1b}'));
    }

    #[test]
    fn a_reader_that_has_enough_is_no_error() {
        struct Enough;
        impl Write for Enough {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let dir = tempfile::tempdir().unwrap();
        Store::of(dir.path()).append(&Event::new(Kind::Created).of("a", None, "")).unwrap();
        run(&host(dir.path()), &asked(None, false), &mut Enough).unwrap();
    }
}
