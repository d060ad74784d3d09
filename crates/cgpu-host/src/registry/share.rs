//! What containers have of a GPU's computing time: a file a GPU in `STATE_DIR/shares`, by its UUID.
//!
//! Derived from the records and what was set of the GPUs, and written again whenever these change;
//! monitors follow it. A GPU on which no container has a quota has no file. Owns the file's form.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::{Deserialize, Serialize};

use super::error::failed;
use super::notice::Notice;
use super::{Locked, RegistryError};
use crate::atomic_file::replace;
use cgpu_core::plan::GpuRules;
use cgpu_core::sched::{Frame, Idle, Period, Span, Tenant, Turn, frame, part, periods};

/// The directory's name in the state directory.
pub const DIR: &str = "shares";

/// What all containers have of one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The policy that is held, 0 to 5.
    pub policy: u32,
    /// By short id.
    pub rounds: BTreeMap<String, Period>,
    /// When each may run, where not all may always.
    #[serde(default)]
    pub turns: Option<Turns>,
}

/// When containers may run on a GPU: spans of a frame that comes again and again, on the host's clock.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Turns {
    /// The frame's length, in microseconds.
    pub frame_us: u64,
    /// By short id.
    pub spans: BTreeMap<String, Vec<Span>>,
}

impl Share {
    /// What the container with that short id has.
    #[must_use]
    pub fn round(&self, short_id: &str) -> Option<Period> {
        self.rounds.get(short_id).copied()
    }

    /// When the container with that short id may run: the frame's length in microseconds, and its spans;
    /// `None` where it may always.
    #[must_use]
    pub fn turns(&self, short_id: &str) -> Option<(u64, &[Span])> {
        let turns = self.turns.as_ref()?;
        let spans = turns.spans.get(short_id)?;
        let is_always = part(turns.frame_us, spans) >= 1.0;
        (!is_always).then_some((turns.frame_us, spans.as_slice()))
    }

    /// The part of the GPU that the container with that short id has while all have work, from 0 to 1.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "microseconds of a fraction of a second")]
    pub fn part(&self, short_id: &str) -> Option<f64> {
        let own = self.round(short_id)?.us as f64;
        let Some(turns) = &self.turns else {
            // The file may say anything: its sums stop at the largest number.
            let all = self.rounds.values().map(|round| round.us).fold(0, u64::saturating_add);
            return Some(own / all.max(1) as f64);
        };
        // A container that is never off shares with the one whose time window it is.
        let is_always = |short_id: &str| self.turns(short_id).is_none();
        let of = |(short_id, round): (&String, &Period)| is_always(short_id).then_some(round.us);
        let always = self.rounds.iter().filter_map(of).fold(0, u64::saturating_add);
        if is_always(short_id) {
            let others = self.rounds.keys().find(|short_id| !is_always(short_id));
            let low = others.and_then(|short_id| self.round(short_id)).map_or(0, |round| round.us);
            return Some(own / always.saturating_add(low).max(1) as f64);
        }
        let spans = turns.spans.get(short_id)?;
        Some(part(turns.frame_us, spans) * own / (own + always as f64).max(1.0))
    }
}

/// Where the files are.
#[must_use]
pub fn dir(state_dir: &Path) -> PathBuf {
    state_dir.join(DIR)
}

/// What the containers have of the GPU with that UUID; `None` where there is no file.
///
/// # Errors
///
/// Where it can't be read.
pub fn read(state_dir: &Path, uuid: &str) -> io::Result<Option<Share>> {
    match fs::read(dir(state_dir).join(uuid)) {
        Ok(bytes) => Ok(Some(serde_json::from_slice(&bytes)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Writes it, and notifies monitors; `None` removes it. The directory is there.
///
/// # Errors
///
/// Where it can't be written.
pub fn write(state_dir: &Path, uuid: &str, share: Option<&Share>) -> io::Result<()> {
    let dir = dir(state_dir);
    let path = dir.join(uuid);
    match share {
        None => match fs::remove_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            done => done?,
        },
        Some(share) => {
            replace(&path, &serde_json::to_vec(share)?, 0o600)?;
        }
    }
    Notice::open(&dir)?.report();
    Ok(())
}

impl Locked<'_> {
    /// Reports to the monitors of the containers on the GPU with that UUID what each has of its computing
    /// time, if that has changed; `rules_of` these containers gives the GPU's settings.
    ///
    /// # Errors
    ///
    /// If it can't be written; then they have what they had.
    pub fn share_out(
        &self,
        uuid: &str,
        idle: Idle,
        rules_of: impl FnOnce(&[Tenant]) -> GpuRules,
    ) -> Result<(), RegistryError> {
        let is_on = |entry: &&super::index::Entry| {
            let mut gpus = entry.holding.gpus.iter();
            entry.holding.weight > 0 && gpus.any(|(gpu, limit)| gpu == uuid && limit.is_some())
        };
        let (names, tenants): (Vec<&str>, Vec<Tenant>) = self
            .entries
            .iter()
            .filter(is_on)
            .map(|entry| {
                let holding = &entry.holding;
                let (weight, high_priority) = (holding.weight, holding.high_priority);
                (entry.short_id.as_str(), Tenant { weight, high_priority })
            })
            .unzip();
        let dir = &self.registry.dir;
        // What can't be read kept nothing for anybody.
        let before = read(dir, uuid).ok().flatten();
        let elsewhere = |name: &str| {
            let entry = self.entries.iter().find(|entry| entry.short_id == name)?;
            let others =
                entry.holding.gpus.iter().filter(|(gpu, limit)| gpu != uuid && limit.is_some());
            others.map(|(gpu, _)| gpu).find_map(|gpu| {
                let share = read(dir, gpu).ok().flatten()?;
                share.turns(name).map(|(frame_us, spans)| Turn { frame_us, spans: spans.to_vec() })
            })
        };
        let share = (!tenants.is_empty()).then(|| {
            share_of(rules_of(&tenants), idle, &names, &tenants, before.as_ref(), elsewhere)
        });
        if share.is_some() && share == before {
            return Ok(());
        }
        write(dir, uuid, share.as_ref()).map_err(failed("cannot write", &dir.join(DIR).join(uuid)))
    }
}

/// What these containers have, of which some had their turns before, and some have turns `elsewhere`.
fn share_of(
    rules: GpuRules,
    idle: Idle,
    names: &[&str],
    tenants: &[Tenant],
    before: Option<&Share>,
    elsewhere: impl Fn(&str) -> Option<Turn>,
) -> Share {
    let had = before.and_then(|before| before.turns.as_ref());
    let spans_of = |name: &&str| had.and_then(|had| had.spans.get(*name)).cloned();
    let before = Frame {
        us: had.map_or(0, |had| had.frame_us),
        spans: names.iter().map(|name| spans_of(name).unwrap_or_default()).collect(),
    };
    // Other GPUs' files are read only for containers that come here, if there are time windows.
    let has_turns = frame(rules, idle, tenants, &before, &[]).is_some();
    let comes = |name: &&&str| has_turns && spans_of(name).is_none();
    let elsewhere: Vec<Option<Turn>> = names
        .iter()
        .map(|name| Some(name).filter(comes).and_then(|name| elsewhere(name)))
        .collect();
    let frame = frame(rules, idle, tenants, &before, &elsewhere);
    let named = || names.iter().map(|name| (*name).to_owned());
    let rounds = periods(rules, frame.is_some(), tenants).unwrap_or_default();
    Share {
        policy: rules.policy,
        rounds: named().zip(rounds).collect(),
        turns: frame
            .map(|frame| Turns { frame_us: frame.us, spans: named().zip(frame.spans).collect() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is written is read back, and a torn file is an error.
    #[test]
    fn share_file_round_trips_and_torn_one_errs() {
        let state = tempfile::tempdir().unwrap();
        fs::create_dir(dir(state.path())).unwrap();
        assert_eq!(read(state.path(), "GPU-a").unwrap(), None);
        let round = |us| Period { us, each: false };
        let rounds = [("a".to_owned(), round(4096)), ("b".to_owned(), round(12288))];
        let share = Share { policy: 2, rounds: rounds.into(), turns: None };
        write(state.path(), "GPU-a", Some(&share)).unwrap();
        assert_eq!(read(state.path(), "GPU-a").unwrap().as_ref(), Some(&share));
        assert_eq!((share.part("b"), share.round("c")), (Some(0.75), None));
        fs::write(dir(state.path()).join("GPU-a"), "{").unwrap();
        assert!(read(state.path(), "GPU-a").is_err());
        write(state.path(), "GPU-a", None).unwrap();
        write(state.path(), "GPU-a", None).unwrap();
        assert_eq!(read(state.path(), "GPU-a").unwrap(), None);
    }

    /// Extreme values in a file give a part from 0 to 1 all the same.
    #[test]
    fn extreme_share_values_still_give_a_part() {
        let round = Period { us: u64::MAX, each: false };
        let rounds = ["a", "b"].map(|id| (id.to_owned(), round)).into();
        let mut share = Share { policy: 2, rounds, turns: None };
        assert_eq!(share.part("a"), Some(1.0));
        let spans = [("b".to_owned(), vec![Span { from_us: 0, to_us: 1 }])].into();
        share.turns = Some(Turns { frame_us: 2, spans });
        for id in ["a", "b"] {
            let part = share.part(id).unwrap();
            assert!((0.0..=1.0).contains(&part), "{id}: {part}");
        }
    }

    /// Parts of containers with time windows are those of the frame, less what high priority has.
    #[test]
    fn parts_match_time_windows_less_high_priority() {
        let rules = GpuRules { policy: 3, max_inst: 4, prio_ratio: 80 };
        let tenant = |weight, high_priority| Tenant { weight, high_priority };
        let tenants = [tenant(1, false), tenant(2, false)];
        let share = share_of(rules, Idle::Yield, &["a", "b"], &tenants, None, |_| None);
        assert_eq!(
            (share.part("a"), share.part("b"), share.part("c")),
            (Some(0.25), Some(0.5), None)
        );
        let (frame_us, of_b) = share.turns("b").unwrap();
        assert_eq!((frame_us, of_b.len()), (192_000, 1));
        // Another order, and one that came: each keeps its time.
        let tenants = [tenant(1, true), tenant(2, false), tenant(1, false)];
        let later =
            share_of(rules, Idle::Yield, &["high", "b", "a"], &tenants, Some(&share), |_| None);
        assert_eq!(later.turns("b"), share.turns("b"));
        assert_eq!(later.turns("a"), share.turns("a"));
        assert_eq!(later.turns("high"), None);
        let part = |name| (later.part(name).unwrap() * 1000.0).round();
        assert_eq!([part("a"), part("b"), part("high")], [50.0, 100.0, 800.0]);
    }
}
