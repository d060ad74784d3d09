//! Aligned tables for people, with nothing in them that could move a cursor.

/// `rows` (the first is the header) with their columns under each other; those of
/// `numbers` to the right.
pub(super) fn aligned<const N: usize>(rows: &[[String; N]], numbers: &[usize]) -> String {
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: [usize; N] = std::array::from_fn(|column| width(column).unwrap_or_default());
    let mut table = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, (text, width)) in row.iter().zip(widths).enumerate() {
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
