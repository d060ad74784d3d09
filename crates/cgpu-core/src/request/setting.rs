//! What a container said, word for word, and how it is quoted back: [`Setting`].
//!
//! A container's author writes these values, and messages quote them to the terminals
//! of others. Invariant: [`Quoted`] is printable ASCII of bounded length.

use alloc::borrow::Cow;
use alloc::string::String;
use core::fmt::{self, Write as _};

use super::RequestError;

/// Characters of a value that a message quotes; a UUID has 40.
const QUOTED_CHARS: usize = 64;

/// A variable or an annotation, with its value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The variable's or the annotation's name; one that isn't ours may be chosen by any program.
    pub name: Cow<'static, str>,
    /// What it was set to, as it came.
    pub value: String,
}

impl Setting {
    /// The value without whitespace around it.
    ///
    /// # Errors
    ///
    /// Where it is no text: a control character, or the U+FFFD that engines written in
    /// Go put in the place of bytes that are no UTF-8.
    pub(crate) fn text(&self) -> Result<&str, RequestError> {
        if self.value.contains(|c: char| c.is_control() || c == char::REPLACEMENT_CHARACTER) {
            return Err(RequestError::NotText { setting: self.clone() });
        }
        Ok(self.value.trim())
    }
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", Quoted(&self.name), Quoted(&self.value))
    }
}

/// A container's own words, fit for a terminal: bare where plain, else escaped in
/// quotation marks, and cut where long.
#[derive(Debug, Clone, Copy)]
pub struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.0.char_indices().nth(QUOTED_CHARS).map_or(self.0.len(), |(at, _)| at);
        let shown = &self.0[..end];
        let plain = !shown.is_empty()
            && shown.bytes().all(|b| b.is_ascii_graphic() && b != b'"' && b != b'\\');
        if plain {
            f.write_str(shown)?;
        } else {
            write!(f, "\"{}\"", shown.escape_default())?;
        }
        if end < self.0.len() {
            f.write_char('…')?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(value: &str) -> Setting {
        Setting { name: "CGPU_DISABLE".into(), value: value.to_owned() }
    }

    /// A plain value is quoted bare, and any other is escaped.
    #[test]
    fn plain_value_is_bare_and_any_other_escaped() {
        assert_eq!(setting("1,0,0").to_string(), "CGPU_DISABLE=1,0,0");
        assert_eq!(setting("").to_string(), "CGPU_DISABLE=\"\"");
        assert_eq!(setting("3 4").to_string(), "CGPU_DISABLE=\"3 4\"");
        assert_eq!(setting("\x1b[2J\n").to_string(), "CGPU_DISABLE=\"\\u{1b}[2J\\n\"");
        assert_eq!(setting("\u{202e}３").to_string(), "CGPU_DISABLE=\"\\u{202e}\\u{ff13}\"");
    }

    #[test]
    fn cuts_a_long_value() {
        let long = "7".repeat(100_000);
        assert_eq!(Quoted(&long).to_string(), format!("{}…", "7".repeat(QUOTED_CHARS)));
        assert_eq!(Quoted(&long[..QUOTED_CHARS]).to_string(), "7".repeat(QUOTED_CHARS));
    }

    #[test]
    fn control_characters_and_replaced_bytes_are_no_text() {
        assert_eq!(setting(" 1 ").text(), Ok("1"));
        for value in ["1\n", "\t", "1\0", "\u{fffd}", "\u{85}"] {
            let setting = setting(value);
            assert_eq!(setting.text(), Err(RequestError::NotText { setting: setting.clone() }));
        }
    }
}
