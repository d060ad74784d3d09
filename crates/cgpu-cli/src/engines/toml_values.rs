//! Values of engines' TOML files, as they are read: keys in any case, and of several files the
//! last one. Pure.

use toml::{Table, Value};

use super::config_text::one_line;
use super::runtime_name::{NAME, is_ours};

/// A file's table; why it can't be read.
pub(crate) fn parse(text: &str) -> Result<Table, String> {
    text.parse().map_err(|error: toml::de::Error| one_line(error.message()))
}

/// What a table has at `key`, however that is spelled there.
pub(crate) fn get<'a>(table: &'a Table, key: &str) -> Option<&'a Value> {
    let other = || table.iter().find(|(other, _)| other.eq_ignore_ascii_case(key));
    table.get(key).or_else(|| Some(other()?.1))
}

/// The table at `path`, its keys spelled as they are there.
pub(super) fn table_at<'a>(table: &'a Table, path: &[&str]) -> Option<&'a Table> {
    path.iter().try_fold(table, |table, key| table.get(*key)?.as_table())
}

/// The tables of those texts that can be read.
pub(super) fn parse_all<'a>(texts: impl Iterator<Item = &'a str>) -> Vec<Table> {
    texts.filter_map(|text| parse(text).ok()).collect()
}

/// The runtime that `key` of a section names in the last file that has it, if that isn't ours.
pub(super) fn last_named<'a>(files: &'a [Table], section: &[&str], key: &str) -> Option<&'a str> {
    let mut names = files.iter().filter_map(|file| table_at(file, section)?.get(key)?.as_str());
    names.rfind(|name| !is_ours(name) && *name != NAME)
}

/// The value at `path` in the last file that has it.
pub(super) fn last_value<'a>(files: &'a [Table], path: &[&str]) -> Option<&'a Value> {
    let (key, section) = path.split_last()?;
    files.iter().rev().find_map(|file| table_at(file, section)?.get(*key))
}
