//! What fits into a cell: texts cut to columns of a terminal, bars, figures. Pure.

use std::borrow::Cow;

use cgpu_cli::commands::table::printable;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

/// What is shown where nothing is known.
pub(crate) const UNKNOWN: &str = "-";

/// The signs of which frames and bars are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Signs {
    /// For terminals that show UTF-8.
    Unicode,
    /// For all others.
    Ascii,
}

impl Signs {
    /// What the terminal shows, by the variables of the locale: the first that is set and not empty.
    pub(crate) fn of_locale(variables: [Option<&str>; 3]) -> Self {
        let locale = variables.into_iter().flatten().find(|value| !value.is_empty());
        let is_utf8 = locale.is_some_and(|locale| {
            let locale = locale.to_ascii_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        if is_utf8 { Signs::Unicode } else { Signs::Ascii }
    }

    /// The sign that says that something was cut off.
    fn cut(self) -> char {
        if self == Signs::Unicode { '…' } else { '~' }
    }
}

/// The columns that `text` takes.
pub(crate) fn columns(text: &str) -> usize {
    text.width()
}

/// Which end of a text is kept where it is too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    /// Its beginning.
    Start,
    /// Its end: of `namespace/pod/container` the last part says most.
    End,
}

/// `text` as it is shown in `width` columns, with no sign in it that moves a cursor.
pub(crate) fn cut(text: &str, width: usize, keep: Keep, signs: Signs) -> String {
    let safe = printable(text);
    if columns(&safe) <= width {
        return safe;
    }
    if width == 0 {
        return String::new();
    }
    let mut left = width - 1;
    let mut fits = |sign: &char| {
        let wide = sign.width().unwrap_or(0);
        let fits = wide <= left;
        left = if fits { left - wide } else { 0 };
        fits
    };
    match keep {
        Keep::Start => safe.chars().take_while(|sign| fits(sign)).chain([signs.cut()]).collect(),
        Keep::End => {
            let mut retained: Vec<char> =
                safe.chars().rev().take_while(|sign| fits(sign)).collect();
            retained.push(signs.cut());
            retained.into_iter().rev().collect()
        }
    }
}

/// `text`, which fits, with blanks up to `width` columns.
pub(crate) fn padded(text: &str, width: usize, right: bool) -> String {
    let blanks = " ".repeat(width.saturating_sub(columns(text)));
    if right { format!("{blanks}{text}") } else { format!("{text}{blanks}") }
}

/// A bar of `width` columns that is full to `part` of `whole`; of nothing known it is empty. What is
/// used at all shows.
pub(crate) fn bar(part: Option<u64>, whole: u64, width: usize, signs: Signs) -> String {
    /// Eighths of a column, from one to eight.
    const EIGHTHS: [char; 8] = ['▏', '▎', '▍', '▌', '▋', '▊', '▉', '█'];
    let steps = if signs == Signs::Unicode { 8 } else { 1 };
    let all = width * steps;
    let part = u128::from(part.unwrap_or(0).min(whole));
    let full = part * all as u128 / u128::from(whole.max(1));
    let full = usize::try_from(full).unwrap_or(all).max(usize::from(part > 0)).min(all);
    let mut bar: String = match signs {
        Signs::Unicode => "█".repeat(full / 8),
        Signs::Ascii => "#".repeat(full),
    };
    if signs == Signs::Unicode && !full.is_multiple_of(8) {
        bar.push(EIGHTHS[full % 8 - 1]);
    }
    let empty = if signs == Signs::Unicode { "░" } else { "." };
    let blanks = width.saturating_sub(columns(&bar));
    bar + &empty.repeat(blanks)
}

/// Whole MiB of so many bytes.
pub(crate) fn mib(bytes: Option<u64>) -> Cow<'static, str> {
    known(bytes.map(cgpu_core::units::bytes_to_mib))
}

/// A number, or the sign for what isn't known.
pub(crate) fn known(number: Option<impl ToString>) -> Cow<'static, str> {
    number.map_or(Cow::Borrowed(UNKNOWN), |number| Cow::Owned(number.to_string()))
}

/// Seconds as people say them: the two largest units, `3d4h`, `12m`, `45s`.
pub(crate) fn age(seconds: Option<u64>) -> Cow<'static, str> {
    let Some(seconds) = seconds else { return Cow::Borrowed(UNKNOWN) };
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    Cow::Owned(match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m"),
        (0, ..) => format!("{hours}h{:02}m", minutes % 60),
        (1..=99, ..) => format!("{days}d{:02}h", hours % 24),
        _ => format!("{days}d"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text is cut to columns, and moves no cursor.
    #[test]
    fn text_is_cut_to_columns_and_escaped() {
        let unicode = |text, width, keep| cut(text, width, keep, Signs::Unicode);
        assert_eq!(unicode("web", 3, Keep::Start), "web");
        assert_eq!(unicode("website", 4, Keep::Start), "web…");
        assert_eq!(unicode("default/web-0/main", 9, Keep::End), "…b-0/main");
        assert_eq!(cut("website", 4, Keep::Start, Signs::Ascii), "web~");
        // A wide sign takes two columns, and is not cut in half.
        assert_eq!(unicode("模型服务", 5, Keep::Start), "模型…");
        assert_eq!(unicode("模型服务", 4, Keep::Start), "模…");
        assert_eq!(unicode("模型服务", 4, Keep::End), "…务");
        assert_eq!(unicode("web", 0, Keep::Start), "");
        assert_eq!(unicode("\u{1b}[2J\u{202e}a\n", 40, Keep::Start), "\\u{1b}[2J\\u{202e}a\\n");
        for width in 0..8 {
            assert!(columns(&unicode("a模b型c\u{1b}", width, Keep::End)) <= width);
        }
    }

    #[test]
    fn bar_is_as_full_as_its_value() {
        let ascii = |part, whole| bar(part, whole, 10, Signs::Ascii);
        assert_eq!(ascii(Some(5), 10), "#####.....");
        assert_eq!(ascii(Some(0), 10), "..........");
        assert_eq!(ascii(None, 10), "..........");
        assert_eq!(ascii(Some(1), 1000), "#.........", "what is used at all shows");
        assert_eq!(ascii(Some(20), 10), "##########");
        assert_eq!(ascii(Some(1), 0), "..........");
        let unicode = |part| bar(Some(part), 80, 10, Signs::Unicode);
        assert_eq!(unicode(44), "█████▌░░░░");
        assert_eq!(unicode(80), "██████████");
        assert_eq!(bar(Some(u64::MAX), u64::MAX, 3, Signs::Unicode), "███");
        assert_eq!(bar(Some(1), 2, 0, Signs::Unicode), "");
    }

    #[test]
    fn an_age_has_its_two_largest_units() {
        let ages =
            [(5, "5s"), (65, "1m"), (3_700, "1h01m"), (90_000, "1d01h"), (9_000_000, "104d")];
        for (seconds, expected) in ages {
            assert_eq!(age(Some(seconds)), expected);
        }
        assert_eq!(age(None), "-");
    }

    #[test]
    fn the_locale_says_which_signs_a_terminal_shows() {
        let of = Signs::of_locale;
        assert_eq!(of([None, None, Some("en_US.UTF-8")]), Signs::Unicode);
        assert_eq!(of([Some("C"), None, Some("en_US.UTF-8")]), Signs::Ascii);
        assert_eq!(of([Some(""), Some("C.utf8"), None]), Signs::Unicode);
        assert_eq!(of([None; 3]), Signs::Ascii);
    }
}
