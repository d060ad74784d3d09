//! Items next to each other on as many lines as they need. Pure.

use ratatui::text::{Line, Span};

use crate::cells::{Keep, Signs, columns, cut};

/// Blanks between items.
const BETWEEN: usize = 3;

/// `items` on lines of `width` columns.
pub(super) fn flow(
    items: Vec<Vec<Span<'static>>>,
    width: usize,
    signs: Signs,
) -> Vec<Line<'static>> {
    spread(items, width, BETWEEN, signs)
}

/// Words on lines of `width` columns.
pub(super) fn flow_words(
    words: Vec<Vec<Span<'static>>>,
    width: usize,
    signs: Signs,
) -> Vec<Line<'static>> {
    spread(words, width, 1, signs)
}

fn spread(
    items: Vec<Vec<Span<'static>>>,
    width: usize,
    between: usize,
    signs: Signs,
) -> Vec<Line<'static>> {
    let mut lines: Vec<Vec<Span<'static>>> = Vec::new();
    let mut used = width;
    for item in items {
        let mut available = width;
        let item: Vec<Span<'static>> = item
            .into_iter()
            .map(|span| {
                let text = cut(&span.content, available, Keep::Start, signs);
                available -= columns(&text);
                Span::styled(text, span.style)
            })
            .collect();
        let wide = width - available;
        match lines.last_mut().filter(|_| used + between + wide <= width) {
            Some(line) => {
                line.push(Span::raw(" ".repeat(between)));
                line.extend(item);
                used += between + wide;
            }
            None => {
                lines.push(item);
                used = wide;
            }
        }
    }
    lines.into_iter().map(Line::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflowing_items_wrap_to_the_next_line() {
        let items = |words: &[&str]| {
            let item = |word: &&str| vec![Span::raw((*word).to_owned())];
            let lines = flow(words.iter().map(item).collect(), 10, Signs::Ascii);
            lines.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(items(&["abc", "defg", "h"]), ["abc   defg", "h"]);
        assert_eq!(items(&["abcdefghijkl", "m"]), ["abcdefghi~", "m"]);
        assert!(items(&[]).is_empty());
    }
}
