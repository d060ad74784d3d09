//! Which process initialized which UVM file. This file knows only the numbers of files and processes.
//!
//! A file is bound to the memory of the process that initializes it. The kernel finds that process in the call itself,
//! and reports it to no process. So calls that may initialize a file are passed through one at a time: a file that is
//! initialized and was not before was initialized by the call that was in progress.

use std::collections::BTreeMap;

use crate::snapshot::{Creator, Record};
use cgpu_core::ledger::Process;

/// The most files. Each needs a descriptor.
pub(crate) const MOST_FILES: usize = 1024;

/// A call that was passed through and may not have finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Initialization {
    /// The file that the call is to initialize.
    pub(crate) file: u32,
    /// The thread that made the call.
    pub(crate) tid: u32,
    pub(crate) creator: Creator,
    /// The id of the call's notification; 0 if it was received before an update.
    pub(crate) id: u64,
}

/// The creator of a file, and whether the file is bound to one memory and has had a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct MadeFile {
    creator: Creator,
    is_bound: bool,
}

/// The creators that are known.
#[derive(Debug, Default)]
pub(crate) struct Creators {
    made: BTreeMap<u32, MadeFile>,
    in_progress: Option<Initialization>,
}

impl Creators {
    /// The call that is in progress.
    pub(crate) fn in_progress(&self) -> Option<Initialization> {
        self.in_progress
    }

    /// Sets the id of the notification of the call that is in progress.
    pub(crate) fn set_notification(&mut self, id: u64) {
        if let Some(in_progress) = &mut self.in_progress {
            in_progress.id = id;
        }
    }

    /// The creator of a file; `None` if it isn't known.
    pub(crate) fn of(&self, file: u32) -> Option<Creator> {
        self.made.get(&file).map(|made| made.creator)
    }

    /// The files that end with a process.
    pub(crate) fn bound_to(&self, process: Process) -> impl Iterator<Item = u32> {
        let made = self.made.iter();
        let theirs = made.filter(move |(_, made)| made.is_bound && made.creator.process == process);
        theirs.map(|(file, _)| *file)
    }

    /// Whether a file is bound to one memory, and has had a GPU.
    pub(crate) fn is_bound(&self, file: u32) -> bool {
        self.made.get(&file).is_some_and(|made| made.is_bound)
    }

    pub(crate) fn replay(&mut self, record: Record) {
        match record {
            Record::Initialize { file, tid, creator } => {
                self.in_progress = Some(Initialization { file, tid, creator, id: 0 });
            }
            Record::Initialized { done } => {
                if let Some(Initialization { file, creator, .. }) =
                    self.in_progress.take().filter(|_| done)
                {
                    self.made.insert(file, MadeFile { creator, is_bound: false });
                }
            }
            Record::Bound { file } => {
                if let Some(made) = self.made.get_mut(&file) {
                    made.is_bound = true;
                }
            }
            _ => {}
        }
    }

    pub(crate) fn close(&mut self, file: u32) {
        self.made.remove(&file);
    }

    /// The records that recreate these creators.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> {
        let made = self.made.iter().flat_map(|(file, made)| {
            let (file, creator) = (*file, made.creator);
            let bound = made.is_bound.then_some(Record::Bound { file });
            let done = Record::Initialized { done: true };
            [Record::Initialize { file, tid: 0, creator }, done].into_iter().chain(bound)
        });
        let in_progress = self.in_progress.map(|Initialization { file, tid, creator, .. }| {
            Record::Initialize { file, tid, creator }
        });
        made.chain(in_progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Creator = Creator { process: Process(1), image: 11 };
    const B: Creator = Creator { process: Process(2), image: 22 };

    fn after(records: &[Record]) -> Creators {
        let mut creators = Creators::default();
        records.iter().for_each(|record| creators.replay(*record));
        creators
    }

    /// The process that asked to initialize a file is its creator if that was done.
    #[test]
    fn initializing_process_becomes_the_creator_on_success() {
        let asked = Record::Initialize { file: 7, tid: 3, creator: A };
        assert_eq!(after(&[asked]).of(7), None);
        assert_eq!(after(&[asked, Record::Initialized { done: false }]).of(7), None);
        let made = after(&[asked, Record::Initialized { done: true }]);
        assert_eq!((made.of(7), made.in_progress()), (Some(A), None));
    }

    #[test]
    fn they_are_made_from_their_records() {
        let mut creators = after(&[
            Record::Initialize { file: 7, tid: 3, creator: A },
            Record::Initialized { done: true },
            Record::Bound { file: 7 },
            Record::Initialize { file: 8, tid: 4, creator: B },
            Record::Initialized { done: true },
            Record::Initialize { file: 9, tid: 5, creator: B },
        ]);
        let again = after(&creators.records().collect::<Vec<_>>());
        assert_eq!((again.of(7), again.of(8), again.of(9)), (Some(A), Some(B), None));
        assert_eq!((again.is_bound(7), again.is_bound(8)), (true, false));
        assert_eq!(
            again.in_progress(),
            Some(Initialization { file: 9, tid: 5, creator: B, id: 0 })
        );
        creators.close(7);
        assert_eq!((creators.of(7), creators.is_bound(7)), (None, false));
    }
}
