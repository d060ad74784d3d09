//! Columns under each other: [`aligned`].

use std::io::Write;

use tabwriter::TabWriter;

/// `rows` with their columns under each other, two spaces between them.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let mut writer = TabWriter::new(Vec::new()).padding(2);
    for row in rows {
        // Into memory; nothing of it can fail.
        let _ = writeln!(writer, "{}", row.join("\t"));
    }
    let bytes = writer.into_inner().unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
