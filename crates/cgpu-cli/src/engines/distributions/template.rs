//! The templates from which k3s and RKE2 make the file of their containerd: no TOML, so that
//! our runtime is a block between two lines of comment.

use crate::engines::config_text::EditError;
use crate::engines::runtime_name::NAME;

/// The templates next to a distribution's file: for version 2, and for version 3.
pub(crate) const NAMES: [&str; 2] = ["config.toml.tmpl", "config-v3.toml.tmpl"];

/// The template of a file of this version.
pub(crate) fn name(version: i64) -> &'static str {
    NAMES[usize::from(version >= 3)]
}

/// The line before our block.
const BEGIN: &str = "# cgpu: begin. Made by `cgpu setup`; `cgpu setup … --remove` takes it away.";

/// The line after it.
const END: &str = "# cgpu: end";

/// What a template begins with that adds to what the distribution writes by itself.
const BASE: &str = "{{ template \"base\" . }}";

/// A template with `block` at its end, in place of our block if it has one. Without a text
/// it adds to what the distribution writes.
///
/// # Errors
///
/// If the rest has a runtime `cgpu`.
pub fn add(text: Option<&str>, block: &str) -> Result<String, EditError> {
    let rest = text.map_or_else(|| format!("{BASE}\n"), without);
    let names = |line: &str| {
        line.trim_start().starts_with('[') && line.contains(&format!("runtimes.{NAME}]"))
    };
    if rest.lines().any(names) {
        let program = "what it says, outside of what setup writes".to_owned();
        return Err(EditError::Taken { program });
    }
    let gap = match rest.as_str() {
        "" => "",
        rest if rest.ends_with('\n') => "\n",
        _ => "\n\n",
    };
    Ok(format!("{rest}{gap}{BEGIN}\n{}\n{END}\n", block.trim()))
}

/// Whether a template has our block.
#[must_use]
pub fn is_in(text: &str) -> bool {
    text.lines().any(|line| line == BEGIN)
}

/// A template without our block; `None` if only the line is left with which setup began it.
#[must_use]
pub fn remove(text: &str) -> Option<String> {
    let rest = without(text);
    (rest.trim() != BASE).then_some(rest)
}

/// The text before and after our block, and without the blank line before it.
fn without(text: &str) -> String {
    let (Some(begin), Some(end)) = (text.find(BEGIN), text.find(END)) else {
        return text.to_owned();
    };
    let before = &text[..begin];
    let before = before.strip_suffix("\n\n").map_or(before, |_| &before[..before.len() - 1]);
    let after = text[end..].split_once('\n').map_or("", |(_, after)| after);
    format!("{before}{after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_our_block_changes() {
        let made = add(None, "[x]\na = 1\n").unwrap();
        assert_eq!(made, format!("{BASE}\n\n{BEGIN}\n[x]\na = 1\n{END}\n"));
        assert_eq!(remove(&made), None);
        for own in ["", "{{ template \"base\" . }}\n[y]\n", "version = 2\n{{ if . }}\n{{ end }}"] {
            let added = add(Some(own), "[x]").unwrap();
            assert!(is_in(&added) && !is_in(own));
            assert_eq!(add(Some(&added), "[x]").unwrap(), added);
            assert!(add(Some(&added), "[z]").unwrap().contains("\n[z]\n"));
            let removed = remove(&added).unwrap();
            assert_eq!(removed.trim_end(), own.trim_end());
        }
        let taken = "{{ template \"base\" . }}\n[plugins.x.containerd.runtimes.cgpu]\n";
        assert!(matches!(add(Some(taken), "[x]"), Err(EditError::Taken { .. })));
    }
}
