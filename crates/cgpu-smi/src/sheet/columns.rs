//! The columns of the containers' table: which of them fit, how wide each is. Pure.

use ratatui::style::{Color, Style};
use ratatui::text::Span;

use super::{Row, fill, percent, quota};
use crate::cells::{self, Keep, Signs, cut, known, mib, padded};
use cgpu_cli::view::{Mode, ShareView, State};

/// Blanks between columns.
const BETWEEN: usize = 2;

/// The widest bar and name, in columns.
const WIDEST_BAR: usize = 16;
const WIDEST_NAME: usize = 40;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    Container,
    Name,
    Bar,
    Used,
    Quota,
    Share,
    Held,
    Utilization,
    Weight,
    Priority,
    Processes,
    Mode,
    State,
    Backend,
    Age,
}

/// All of them, from left to right.
const ALL: [Column; 15] = [
    Column::Container,
    Column::Name,
    Column::Bar,
    Column::Used,
    Column::Quota,
    Column::Share,
    Column::Held,
    Column::Utilization,
    Column::Weight,
    Column::Priority,
    Column::Processes,
    Column::Mode,
    Column::State,
    Column::Backend,
    Column::Age,
];

/// Those that go if there is no space, the first one first. What each container uses stays.
const DISPENSABLE: [Column; 13] = [
    Column::Backend,
    Column::Priority,
    Column::Weight,
    Column::Age,
    Column::Mode,
    Column::Bar,
    Column::Processes,
    Column::Share,
    Column::Utilization,
    Column::Held,
    Column::State,
    Column::Name,
    Column::Quota,
];

impl Column {
    fn title(self) -> &'static str {
        match self {
            Column::Container => "CONTAINER",
            Column::Name => "NAME",
            Column::Bar => "MEMORY",
            Column::Used => "USED",
            Column::Quota => "QUOTA MiB",
            Column::Share => "SHARE",
            Column::Held => "HELD",
            Column::Utilization => "UTIL",
            Column::Weight => "WEIGHT",
            Column::Priority => "PRIO",
            Column::Processes => "PROCS",
            Column::Mode => "MODE",
            Column::State => "STATE",
            Column::Backend => "BACKEND",
            Column::Age => "AGE",
        }
    }

    fn is_number(self) -> bool {
        use Column::{Age, Held, Processes, Quota, Share, Used, Utilization, Weight};
        matches!(self, Used | Quota | Share | Held | Utilization | Weight | Processes | Age)
    }

    /// The columns without which it says nothing, where its texts are so wide.
    fn least(self, widest: usize) -> usize {
        match self {
            Column::Name => widest.min(20),
            Column::Bar => 6,
            _ => widest,
        }
    }

    fn most(self, widest: usize) -> usize {
        match self {
            Column::Name => widest.min(WIDEST_NAME),
            Column::Bar => WIDEST_BAR,
            _ => widest,
        }
    }

    fn text(self, row: &Row<'_>) -> String {
        let container = row.container;
        match self {
            Column::Container => container.id.chars().take(12).collect(),
            Column::Name => container.name.clone().unwrap_or_else(|| cells::UNKNOWN.to_owned()),
            Column::Bar => String::new(),
            Column::Used => mib(row.share.and_then(|share| share.memory_used_bytes)).into_owned(),
            Column::Quota => quota(row),
            Column::Share => {
                let share = row.share.and_then(ShareView::compute_per_cent);
                share.unwrap_or_else(|| cells::UNKNOWN.to_owned())
            }
            Column::Held => {
                let held = row.share.and_then(ShareView::held_per_cent);
                held.unwrap_or_else(|| cells::UNKNOWN.to_owned())
            }
            Column::Utilization => percent(row.share.and_then(|share| share.utilization_percent)),
            Column::Weight => container.weight.to_string(),
            Column::Priority => {
                (if container.high_priority { "high" } else { cells::UNKNOWN }).to_owned()
            }
            Column::Processes => known(container.process_count).into_owned(),
            Column::Mode => container.mode.name().to_owned(),
            Column::State => container.state.name().to_owned(),
            Column::Backend => container.backend.to_string(),
            Column::Age => cells::age(container.age_s).into_owned(),
        }
    }

    fn style(self, row: &Row<'_>) -> Style {
        let container = row.container;
        match self {
            Column::Bar => row.share.map_or(Style::new(), |share| {
                fill(share.memory_used_bytes, whole(row).unwrap_or(share.gpu.memory_total_bytes))
            }),
            Column::State => match container.state {
                State::Silent | State::Closed => Style::new().fg(Color::Red),
                State::Reserved | State::Created | State::Leaked => Style::new().fg(Color::Yellow),
                State::Active => Style::new(),
            },
            Column::Mode if container.mode == Mode::Unenforced => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        }
    }
}

/// What a bar is full of: the quota, else the GPU's memory.
fn whole(row: &Row<'_>) -> Option<u64> {
    let share = row.share?;
    Some(share.gpu.memory_limit_bytes.unwrap_or(share.gpu.memory_total_bytes))
}

/// The columns that fit, each with its width.
#[derive(Debug)]
pub(super) struct Table {
    columns: Vec<(Column, usize)>,
}

impl Table {
    /// The columns for `rows` in `width` columns of a terminal.
    pub(super) fn fitting(rows: &[Row<'_>], width: usize, signs: Signs) -> Self {
        let widest = |column: Column| {
            let texts = rows.iter().map(|row| column.text(row));
            let widths =
                texts.map(|text| cells::columns(&cut(&text, WIDEST_NAME, Keep::End, signs)));
            widths.chain([column.title().len()]).max().unwrap_or_default()
        };
        let mut columns: Vec<(Column, usize, usize)> = ALL
            .into_iter()
            .map(|column| {
                let widest = widest(column);
                (column, column.least(widest), column.most(widest))
            })
            .collect();
        let sum = |columns: &[(Column, usize, usize)]| {
            let widths: usize = columns.iter().map(|(_, least, _)| least).sum();
            widths + BETWEEN * columns.len().saturating_sub(1)
        };
        for dispensable in DISPENSABLE {
            if sum(&columns) <= width {
                break;
            }
            columns.retain(|(column, ..)| *column != dispensable);
        }
        // Of ids their beginnings tell containers apart.
        let over = sum(&columns).saturating_sub(width);
        for (_, wide, _) in columns.iter_mut().filter(|(column, ..)| *column == Column::Container) {
            *wide = wide.saturating_sub(over);
        }
        // What is left goes to names first, then to bars.
        let mut left = width.saturating_sub(sum(&columns));
        for wants in [Column::Name, Column::Bar] {
            for (_, wide, most) in columns.iter_mut().filter(|(column, ..)| *column == wants) {
                let more = most.saturating_sub(*wide).min(left);
                *wide += more;
                left -= more;
            }
        }
        Table { columns: columns.into_iter().map(|(column, wide, _)| (column, wide)).collect() }
    }

    pub(super) fn header(&self) -> String {
        let titles = self.columns.iter().map(|(column, wide)| {
            let title = cut(column.title(), *wide, Keep::Start, Signs::Ascii);
            padded(&title, *wide, column.is_number())
        });
        titles.collect::<Vec<_>>().join(&" ".repeat(BETWEEN))
    }

    /// A row's cells.
    pub(super) fn row(&self, row: &Row<'_>, signs: Signs) -> Vec<Span<'static>> {
        let mut spans = Vec::new();
        for (column, wide) in &self.columns {
            if !spans.is_empty() {
                spans.push(Span::raw(" ".repeat(BETWEEN)));
            }
            let text = match (column, row.share) {
                (Column::Bar, Some(share)) => {
                    let whole = whole(row).unwrap_or_default();
                    cells::bar(share.memory_used_bytes, whole, *wide, signs)
                }
                _ => {
                    let keep = if *column == Column::Name { Keep::End } else { Keep::Start };
                    cut(&column.text(row), *wide, keep, signs)
                }
            };
            let text = padded(&text, *wide, column.is_number());
            spans.push(Span::styled(text, column.style(row)));
        }
        spans
    }
}
