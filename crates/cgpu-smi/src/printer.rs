//! Prints a page, with colours or without.

use std::io::{self, Write};

use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;

/// Whether a page has colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Colours {
    /// It has.
    On,
    /// It hasn't.
    Off,
}

impl Colours {
    /// On a terminal, where `NO_COLOR` isn't set to anything (<https://no-color.org>).
    pub(crate) fn wanted(is_terminal: bool, no_color: Option<&std::ffi::OsStr>) -> Self {
        let is_off = no_color.is_some_and(|value| !value.is_empty());
        if is_terminal && !is_off { Colours::On } else { Colours::Off }
    }
}

/// Prints `lines`, without blanks at their ends.
///
/// # Errors
///
/// Where `out` takes no more.
pub(crate) fn print(lines: &[Line<'_>], colours: Colours, out: &mut dyn Write) -> io::Result<()> {
    for line in lines {
        if colours == Colours::Off {
            writeln!(out, "{}", line.to_string().trim_end())?;
            continue;
        }
        for span in &line.spans {
            match sequence(span.style) {
                start if start.is_empty() => write!(out, "{}", span.content)?,
                start => write!(out, "\u{1b}[{start}m{}\u{1b}[0m", span.content)?,
            }
        }
        writeln!(out)?;
    }
    out.flush()
}

/// The parameters of `SGR` (ECMA-48, 8.3.117) for the few styles that a page has.
fn sequence(style: Style) -> String {
    let modifiers = [(Modifier::BOLD, 1), (Modifier::DIM, 2), (Modifier::REVERSED, 7)];
    let has = |modifier: &Modifier| style.add_modifier.contains(*modifier);
    let colour = match style.fg {
        Some(Color::Red) => Some(31),
        Some(Color::Green) => Some(32),
        Some(Color::Yellow) => Some(33),
        Some(Color::Cyan) => Some(36),
        _ => None,
    };
    let on = modifiers.iter().filter(|(modifier, _)| has(modifier)).map(|(_, number)| *number);
    on.chain(colour).map(|number| number.to_string()).collect::<Vec<_>>().join(";")
}

/// Whether an error says that the reader of our output has closed it.
#[must_use]
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::style::Stylize;
    use ratatui::text::Span;

    /// Colours are printed on a terminal, unless NO_COLOR says that they are unwanted.
    #[test]
    fn colours_need_a_terminal_and_no_opt_out() {
        assert_eq!(Colours::wanted(true, None), Colours::On);
        assert_eq!(Colours::wanted(true, Some("".as_ref())), Colours::On);
        assert_eq!(Colours::wanted(true, Some("1".as_ref())), Colours::Off);
        assert_eq!(Colours::wanted(false, None), Colours::Off);
        let line = Line::from(vec![Span::raw("a "), "b".red().bold(), Span::raw("  ")]);
        let printed = |colours| {
            let mut out = Vec::new();
            print(std::slice::from_ref(&line), colours, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(printed(Colours::Off), "a b\n");
        assert_eq!(printed(Colours::On), "a \u{1b}[1;31mb\u{1b}[0m  \n");
    }
}
