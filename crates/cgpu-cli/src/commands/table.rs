//! Aligned tables for people, with nothing in them that could move a cursor.

/// `rows` (the first is the header) with their columns under each other; those of
/// `numbers` to the right. A row may end before the header does, not after.
#[must_use]
pub fn aligned<R: AsRef<[String]>>(rows: &[R], numbers: &[usize]) -> String {
    let columns = rows.first().map_or(0, |header| header.as_ref().len());
    let cells = |column| rows.iter().filter_map(move |row| row.as_ref().get(column));
    let width = |column| cells(column).map(|text: &String| text.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or_default()).collect();
    let mut table = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (text, &width)) in row.as_ref().iter().zip(&widths).enumerate() {
            let cell = if numbers.contains(&column) {
                format!("{text:>width$}  ")
            } else {
                format!("{text:<width$}  ")
            };
            line.push_str(&cell);
        }
        table.push_str(line.trim_end());
        table.push('\n');
    }
    table
}

/// `-` in the place of nothing.
pub(super) fn or_dash(text: String) -> String {
    if text.is_empty() { "-".to_owned() } else { text }
}

/// `text` with all that could move a cursor or hide something written out.
#[must_use]
pub fn printable(text: &str) -> String {
    text.chars().map(escape).collect()
}

fn escape(c: char) -> String {
    if matches!(c, '"' | '\'') { c.to_string() } else { c.escape_debug().to_string() }
}
