//! How a TOML document indents its tables: what setup adds is indented as its neighbours are. Pure.

use toml_edit::{DocumentMut, Item, Table};

/// How a document indents the tables of its runtimes.
#[derive(Debug)]
pub(super) struct Style {
    /// Before the header of a runtime's table.
    header: String,
    /// What a nested table and a table's keys have more than the header of theirs.
    step: String,
}

impl Style {
    /// The style of the tables around the one at `path`.
    pub(super) fn of(path: &[&str], document: &DocumentMut) -> Self {
        let mut nearest = Style { header: String::new(), step: String::new() };
        let mut item = document.as_item();
        for key in path {
            let Some(inner) = item.get(key) else { break };
            item = inner;
            let Some(table) = item.as_table() else { break };
            // The neighbours at the depth of our first table.
            let neighbour = table.iter().find_map(|(_, item)| item.as_table());
            let own = header_indent(table);
            if let Some(indent) = neighbour.and_then(header_indent) {
                let step = own.as_deref().and_then(|own| indent.strip_prefix(own));
                nearest.step = step.unwrap_or_default().to_owned();
                nearest.header = indent;
            } else if let Some(own) = own {
                nearest.header = format!("{own}{}", nearest.step);
            }
        }
        nearest
    }

    /// Puts a blank line before a new header.
    pub(super) fn head(&self, table: &mut Table) {
        table.decor_mut().set_prefix(format!("\n{}", self.header));
    }

    /// Indents a new runtime's table, its keys and its options.
    pub(super) fn indent(&self, table: &mut Table) {
        self.head(table);
        let keys = format!("{}{}", self.header, self.inner());
        for (mut key, item) in table.iter_mut() {
            match item {
                Item::Table(options) => {
                    options.decor_mut().set_prefix(format!("\n{keys}"));
                    let deeper = format!("{keys}{}", self.inner());
                    for (mut key, _) in options.iter_mut() {
                        key.leaf_decor_mut().set_prefix(deeper.clone());
                    }
                }
                _ => key.leaf_decor_mut().set_prefix(keys.clone()),
            }
        }
    }

    /// A document that isn't indented has keys without indentation.
    pub(super) fn inner(&self) -> &str {
        match (self.header.is_empty(), self.step.is_empty()) {
            (false, true) => "  ",
            _ => &self.step,
        }
    }
}

/// The spaces before a table's header, if it has one.
pub(super) fn header_indent(table: &Table) -> Option<String> {
    if table.is_implicit() || table.is_dotted() {
        return None;
    }
    let prefix = table.decor().prefix().and_then(|prefix| prefix.as_str()).unwrap_or_default();
    let line = prefix.rsplit('\n').next().unwrap_or_default();
    Some(line.chars().take_while(|letter| letter.is_whitespace()).collect())
}

pub(super) fn first_key_indent(table: &Table) -> Option<String> {
    let (key, _) = table.iter().find(|(_, item)| item.is_value())?;
    let prefix = table.key(key)?.leaf_decor().prefix().and_then(|prefix| prefix.as_str())?;
    let line = prefix.rsplit('\n').next().unwrap_or_default();
    Some(line.chars().take_while(|letter| letter.is_whitespace()).collect())
}
