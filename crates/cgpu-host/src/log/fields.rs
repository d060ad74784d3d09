//! How the fields of a line are written.

use std::fmt;

use tracing_subscriber::field::RecordFields;
use tracing_subscriber::fmt::FormatFields;
use tracing_subscriber::fmt::format::{DefaultFields, Writer};

/// How fields are written: as usual, and behind them the id of the container that this process is
/// for, where no other is among them.
#[derive(Debug)]
pub(super) struct Fields {
    usual: DefaultFields,
    id: Option<String>,
}

impl Fields {
    pub(super) fn of(id: Option<&str>) -> Self {
        Fields { usual: DefaultFields::new(), id: id.map(str::to_owned) }
    }

    pub(super) fn id(&self) -> Option<&str> {
        self.id.as_deref()
    }
}

impl<'writer> FormatFields<'writer> for Fields {
    fn format_fields<R: RecordFields>(
        &self,
        mut writer: Writer<'writer>,
        fields: R,
    ) -> fmt::Result {
        let Some(id) = &self.id else { return self.usual.format_fields(writer, fields) };
        let mut text = String::new();
        self.usual.format_fields(Writer::new(&mut text), fields)?;
        writer.write_str(&text)?;
        match text.contains(" id=\"") {
            true => Ok(()),
            false => write!(writer, " id={id:?}"),
        }
    }
}
