//! Memory that UVM has mapped, as the mapped ranges into which its mappings were cut.
//!
//! UVM keeps a tree for each file and each GPU that maps. A new mapping takes the place of what it overlaps, and an
//! unmap cuts out a range. What is left of a mapping on either side keeps all of its memory alive
//! (`uvm_map_external.c`, `uvm_unmap_external_in_range`, `uvm_ext_gpu_map_split`). The ledger has the same trees, but
//! its mapped ranges may overlap: a range that may be mapped or not lies next to the range that it may have replaced.
//! This file doesn't know how many bytes memory has.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use super::{ChargeId, Ledger};

/// A tree of mappings: those of one UVM file for one GPU. What belongs to the file alone has a number for `gpu`
/// that no GPU has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Tree {
    /// The file, by a number that no other file has while this one has mapped ranges.
    pub file: u32,
    /// The GPU, by its number in the container's order.
    pub gpu: u16,
}

/// A range of addresses, both ends included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// The first address.
    pub first: u64,
    /// The last address, not below the first.
    pub last: u64,
}

impl Span {
    /// `length` bytes from `base` on; `None` where `length` is 0 or the range passes the highest address.
    #[must_use]
    pub fn of(base: u64, length: u64) -> Option<Self> {
        let last = base.checked_add(length.checked_sub(1)?)?;
        Some(Self { first: base, last })
    }

    /// All addresses.
    pub const ALL: Self = Self { first: 0, last: u64::MAX };
}

/// A change of a charge's references.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reference {
    Made(ChargeId),
    Ended(ChargeId),
}

#[derive(Debug, Default)]
pub(super) struct MappedRanges {
    /// The last address of each mapped range, by tree, first address and charge.
    all: BTreeMap<(Tree, u64, ChargeId), u64>,
    /// The largest difference between a mapped range's last and first address so far.
    longest: u64,
}

impl MappedRanges {
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (Tree, Span, ChargeId)> {
        self.all
            .iter()
            .map(|((tree, first, id), last)| (*tree, Span { first: *first, last: *last }, *id))
    }

    /// The mapped ranges of a file.
    pub(super) fn of_file(&self, file: u32) -> impl Iterator<Item = (Tree, Span, ChargeId)> {
        let first = (Tree { file, gpu: 0 }, 0, ChargeId(0));
        let last = (Tree { file, gpu: u16::MAX }, u64::MAX, ChargeId(u64::MAX));
        self.all
            .range(first..=last)
            .map(|((tree, first, id), last)| (*tree, Span { first: *first, last: *last }, *id))
    }

    /// The mapped ranges that overlap a span.
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

    /// Whether a mapped range of the charge begins at `first`.
    pub(super) fn contains(&self, tree: Tree, first: u64, id: ChargeId) -> bool {
        self.all.contains_key(&(tree, first, id))
    }

    /// Adds a mapped range next to those that exist. If a range of the same charge begins at the same address, that
    /// range becomes as long as the longer of both, and the answer is `None`.
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

    /// Removes a mapped range.
    #[must_use]
    fn remove(&mut self, tree: Tree, first: u64, id: ChargeId) -> Option<Reference> {
        self.all.remove(&(tree, first, id)).map(|_| Reference::Ended(id))
    }

    /// Cuts a span out of all mapped ranges of a tree. A range that would become two when there are `most` ranges is
    /// not cut: too much is held then, not too little.
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
            // The rest of the mapped range is added before the range is removed: otherwise the charge would have no
            // reference between the two.
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
    /// Adds a mapped range next to those that exist: memory is mapped in the span, or may be. The caller must not map
    /// if there are as many holds as [`Bounds`](super::Bounds) allows.
    pub fn map(&mut self, tree: Tree, span: Span, charge: ChargeId) {
        if self.charges.contains_key(&charge) {
            let made = self.ranges.add(tree, span, charge);
            self.apply(made);
        }
    }

    /// Adds a mapped range that replaces all others in the span: memory is mapped there, and nothing else.
    pub fn map_alone(&mut self, tree: Tree, span: Span, charge: ChargeId) {
        // The mapped range that is cut may have the last reference on the charge.
        self.reference(charge, false);
        self.unmap(tree, span);
        self.map(tree, span, charge);
        self.dereference(charge, false);
    }

    /// Removes a mapped range that [`Ledger::map`] added: the memory was not mapped.
    pub fn unmap_range(&mut self, tree: Tree, first: u64, charge: ChargeId) {
        let ended = self.ranges.remove(tree, first, charge);
        self.apply(ended);
    }

    /// Cuts a span out of all mapped ranges: nothing is mapped there. What is left of a mapping next to the span keeps
    /// all of its memory alive.
    pub fn unmap(&mut self, tree: Tree, span: Span) {
        let most = self.bounds.holds.saturating_sub(self.holds.len());
        let changes = self.ranges.cut(tree, span, most);
        self.apply(changes);
    }

    /// Removes all mapped ranges of a UVM file: the file is closed.
    pub fn close_file(&mut self, file: u32) {
        let trees: Vec<Tree> = self.ranges.of_file(file).map(|(tree, ..)| tree).collect();
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
