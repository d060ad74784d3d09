//! Memory that UVM has mapped, by the pieces that its mappings were cut into.
//!
//! As UVM keeps it: a tree for each file and each GPU that maps, in which a mapping takes the
//! place of what it overlaps, and an unmap cuts out a range; what is left of a mapping on
//! either side keeps the whole memory (`uvm_map_external.c`, `uvm_unmap_external_in_range`,
//! `uvm_ext_gpu_map_split`). Unlike there pieces may overlap: one that may be there, or not,
//! lies beside what it may have replaced. What memory costs is not known here.

use std::collections::BTreeMap;

use postcard::experimental::max_size::MaxSize;
use serde::{Deserialize, Serialize};

use super::{ChargeId, Ledger};

/// A tree of mappings: of one file of UVM's, by one GPU. What belongs to the file alone has a
/// GPU of its own, that there is none of.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, MaxSize,
)]
pub struct Tree {
    /// The file, by a number that no other has while there are pieces of it.
    pub file: u32,
    /// The GPU, by its number in the container's order.
    pub gpu: u16,
}

/// Addresses, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, MaxSize)]
pub struct Span {
    /// The first.
    pub first: u64,
    /// The last, not below the first.
    pub last: u64,
}

impl Span {
    /// `length` bytes from `base` on; `None` where there are none, or they don't end.
    #[must_use]
    pub fn of(base: u64, length: u64) -> Option<Self> {
        let last = base.checked_add(length.checked_sub(1)?)?;
        Some(Self { first: base, last })
    }

    /// All there are.
    pub const ALL: Self = Self { first: 0, last: u64::MAX };
}

/// How many references on a charge a change made, or ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reference {
    Made(ChargeId),
    Ended(ChargeId),
}

#[derive(Debug, Default)]
pub(super) struct Pieces {
    /// By tree, first address and memory: the last address.
    all: BTreeMap<(Tree, u64, ChargeId), u64>,
    /// No piece ends further behind its beginning.
    longest: u64,
}

impl Pieces {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Tree, Span, ChargeId)> {
        self.all
            .iter()
            .map(|((tree, first, id), last)| (*tree, Span { first: *first, last: *last }, *id))
    }

    /// The pieces of a file.
    pub(super) fn of_file(&self, file: u32) -> impl Iterator<Item = (Tree, Span, ChargeId)> {
        let first = (Tree { file, gpu: 0 }, 0, ChargeId(0));
        let last = (Tree { file, gpu: u16::MAX }, u64::MAX, ChargeId(u64::MAX));
        self.all
            .range(first..=last)
            .map(|((tree, first, id), last)| (*tree, Span { first: *first, last: *last }, *id))
    }

    /// The pieces that lie within a span, or reach into it.
    pub(super) fn overlapping(
        &self,
        tree: Tree,
        Span { first, last }: Span,
    ) -> impl Iterator<Item = (Span, ChargeId)> {
        let from = (tree, first.saturating_sub(self.longest), ChargeId(0));
        let to = (tree, last, ChargeId(u64::MAX));
        let touched = self.all.range(from..=to).filter(move |(_, end)| **end >= first);
        touched.map(|((_, first, id), last)| (Span { first: *first, last: *last }, *id))
    }

    /// Whether a piece of that memory begins there.
    pub(super) fn contains(&self, tree: Tree, first: u64, id: ChargeId) -> bool {
        self.all.contains_key(&(tree, first, id))
    }

    /// Puts a piece beside what is there; `None` where one of that memory begins there already,
    /// which is as long as the longer of both then.
    #[must_use]
    fn add(&mut self, tree: Tree, span: Span, id: ChargeId) -> Option<Reference> {
        self.longest = self.longest.max(span.last - span.first);
        let mut is_new = false;
        let last = self.all.entry((tree, span.first, id)).or_insert_with(|| {
            is_new = true;
            span.last
        });
        *last = span.last.max(*last);
        is_new.then_some(Reference::Made(id))
    }

    /// Takes a piece away.
    #[must_use]
    fn remove(&mut self, tree: Tree, first: u64, id: ChargeId) -> Option<Reference> {
        self.all.remove(&(tree, first, id)).map(|_| Reference::Ended(id))
    }

    /// Cuts a span out of all pieces of a tree. One that would fall into two where there are
    /// `most` stays as it is: rather too much is held than too little.
    #[must_use]
    fn cut(&mut self, tree: Tree, span: Span, most: usize) -> Vec<Reference> {
        let Span { first, last } = span;
        let touched: Vec<_> = self.overlapping(tree, span).collect();
        let mut changes = Vec::new();
        for (Span { first: begin, last: end }, id) in touched {
            let is_middle = begin < first && end > last;
            if is_middle && self.all.len() >= most {
                continue;
            }
            // What is left is entered before the rest goes, or the memory would go between.
            if let Some(after) = last.checked_add(1).filter(|after| *after <= end) {
                changes.extend(self.add(tree, Span { first: after, last: end }, id));
            }
            if begin < first {
                self.all.insert((tree, begin, id), first - 1);
            } else {
                changes.extend(self.remove(tree, begin, id));
            }
        }
        changes
    }
}

impl Ledger {
    /// Memory is mapped there, or may be: a piece of it lies beside what was there before.
    pub fn map(&mut self, tree: Tree, span: Span, charge: ChargeId) {
        if self.charges.contains_key(&charge) {
            let made = self.pieces.add(tree, span, charge);
            self.apply(made);
        }
    }

    /// Memory is mapped there, and nothing else is.
    pub fn map_alone(&mut self, tree: Tree, span: Span, charge: ChargeId) {
        // Its last reference may be what is cut.
        self.reference(charge, false);
        self.unmap(tree, span);
        self.map(tree, span, charge);
        self.dereference(charge, false);
    }

    /// It was not mapped after all.
    pub fn unmap_piece(&mut self, tree: Tree, first: u64, charge: ChargeId) {
        let ended = self.pieces.remove(tree, first, charge);
        self.apply(ended);
    }

    /// Nothing is mapped there. What is left of a mapping beside it keeps all its memory.
    pub fn unmap(&mut self, tree: Tree, span: Span) {
        let most = self.bounds.holds.saturating_sub(self.holds.len());
        let changes = self.pieces.cut(tree, span, most);
        self.apply(changes);
    }

    /// A file of UVM's is gone, with all that was mapped by it.
    pub fn close_file(&mut self, file: u32) {
        let trees: Vec<Tree> = self.pieces.of_file(file).map(|(tree, ..)| tree).collect();
        trees.into_iter().for_each(|tree| self.unmap(tree, Span::ALL));
    }

    fn apply(&mut self, changes: impl IntoIterator<Item = Reference>) {
        for change in changes {
            match change {
                Reference::Made(id) => self.reference(id, false),
                Reference::Ended(id) => self.dereference(id, false),
            }
        }
    }
}
