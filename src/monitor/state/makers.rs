//! Which process may initialize which file of UVM's. This file knows only the numbers of files and processes.

use std::collections::BTreeMap;

use crate::ledger::Process;
use crate::monitor::journal::{Maker, Record};

/// The most files. Each needs a descriptor of the worker's and one of the keeper's.
pub(crate) const MOST_FILES: usize = 1024;

/// The process to which a file is granted, and whether the file is bound to one memory and has had a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Grant {
    maker: Maker,
    is_bound: bool,
}

/// The files that are granted.
#[derive(Debug, Default)]
pub(crate) struct Makers {
    granted: BTreeMap<u32, Grant>,
}

impl Makers {
    /// The process to which a file is granted; `None` if none has asked for it.
    pub(crate) fn of(&self, file: u32) -> Option<Maker> {
        self.granted.get(&file).map(|grant| grant.maker)
    }

    /// The files that end with a process.
    pub(crate) fn bound_to(&self, process: Process) -> impl Iterator<Item = u32> {
        let granted = self.granted.iter();
        let theirs =
            granted.filter(move |(_, grant)| grant.is_bound && grant.maker.process == process);
        theirs.map(|(file, _)| *file)
    }

    /// Whether a file is bound to one memory, and has had a GPU.
    pub(crate) fn is_bound(&self, file: u32) -> bool {
        self.granted.get(&file).is_some_and(|grant| grant.is_bound)
    }

    pub(crate) fn replay(&mut self, record: Record) {
        match record {
            Record::Grant { file, maker } => {
                self.granted.entry(file).or_insert(Grant { maker, is_bound: false });
            }
            Record::Bound { file } => {
                if let Some(grant) = self.granted.get_mut(&file) {
                    grant.is_bound = true;
                }
            }
            _ => {}
        }
    }

    pub(crate) fn close(&mut self, file: u32) {
        self.granted.remove(&file);
    }

    /// The records that make these makers from nothing.
    pub(crate) fn records(&self) -> impl Iterator<Item = Record> {
        self.granted.iter().flat_map(|(file, Grant { maker, is_bound })| {
            let grant = Record::Grant { file: *file, maker: *maker };
            [grant].into_iter().chain(is_bound.then_some(Record::Bound { file: *file }))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Maker = Maker { process: Process(1), image: 11 };
    const B: Maker = Maker { process: Process(2), image: 22 };

    fn after(records: &[Record]) -> Makers {
        let mut makers = Makers::default();
        records.iter().for_each(|record| makers.replay(*record));
        makers
    }

    #[test]
    fn a_file_is_granted_once() {
        let first = Record::Grant { file: 7, maker: A };
        assert_eq!(after(&[first, Record::Grant { file: 7, maker: B }]).of(7), Some(A));
        assert_eq!(after(&[first]).of(8), None);
    }

    #[test]
    fn makers_are_made_from_their_records() {
        let mut makers = after(&[
            Record::Grant { file: 7, maker: A },
            Record::Bound { file: 7 },
            Record::Grant { file: 8, maker: B },
        ]);
        let again = after(&makers.records().collect::<Vec<_>>());
        assert_eq!((again.of(7), again.of(8)), (Some(A), Some(B)));
        assert_eq!((again.is_bound(7), again.is_bound(8)), (true, false));
        makers.close(7);
        assert_eq!((makers.of(7), makers.is_bound(7)), (None, false));
    }
}
