//! What the editor of TOML tables needs of an engine: the place of its runtimes, and the
//! syntax of one. Pure.

use std::fmt::Debug;

use toml::{Table as Plain, Value as PlainValue};
use toml_edit::Item;

use super::toml_style::Style;

/// The place of an engine's runtimes in a file, and their syntax.
#[derive(Debug)]
pub(super) struct Layout {
    /// The keys of the table that has both the default runtime and the table of the runtimes.
    pub(super) section: Vec<&'static str>,
    /// How many of them lead to the part of the engine that a later file replaces as a whole.
    pub(super) part_keys: usize,
    /// The key of the default runtime, below the section.
    pub(super) default: &'static str,
    pub(super) syntax: &'static dyn RuntimeSyntax,
}

/// The key of the table of the runtimes, below the section.
pub(super) const RUNTIMES: &str = "runtimes";

impl Layout {
    pub(super) fn part(&self) -> &[&'static str] {
        &self.section[..self.part_keys]
    }

    pub(super) fn runtimes_path(&self) -> Vec<&'static str> {
        self.section.iter().copied().chain([RUNTIMES]).collect()
    }
}

/// How an engine describes one runtime.
pub(super) trait RuntimeSyntax: Debug + Sync {
    fn program<'a>(&self, runtime: &'a PlainValue) -> Option<&'a str>;

    /// A new entry, which is like `model` but for its program.
    fn entry(&self, program: &str, model: &Plain) -> Item;

    /// Changes the program of our entry; its other values stay.
    fn repoint(&self, entry: &mut Item, program: &str, model: &Plain);

    /// The runtime that the engine has as long as its files name none.
    fn built_in(&self) -> Option<BuiltIn> {
        None
    }

    /// Whether runtimes are values of their table, which then needs its header.
    fn entries_are_values(&self) -> bool {
        false
    }

    /// Adds our runtime to the section's lists of runtimes, those that `model` has.
    fn list(&self, _section: &mut Item, _model: &Plain, _style: &Style) {}

    /// Removes our runtime from these lists.
    fn unlist(&self, _section: &mut Item) {}

    /// The same for a section that is only compared.
    fn unlist_plain(&self, _section: &mut Plain) {}
}

/// A runtime that an engine has without being configured.
#[derive(Debug, Clone, Copy)]
pub(super) struct BuiltIn {
    pub(super) name: &'static str,
    pub(super) runtime_type: &'static str,
}

impl BuiltIn {
    /// Whether a runtime has the built-in one's settings alone.
    pub(super) fn is(self, runtime: &Item) -> bool {
        let only = runtime.as_table_like().is_some_and(|table| table.len() == 1);
        only && runtime.get("runtime_type").and_then(Item::as_str) == Some(self.runtime_type)
    }

    pub(super) fn is_plain(self, runtime: &PlainValue) -> bool {
        let only = runtime.as_table().is_some_and(|table| table.len() == 1);
        only && runtime.get("runtime_type").and_then(PlainValue::as_str) == Some(self.runtime_type)
    }
}
