//! The page that people read: [`sheet`], a block for each GPU and a row for each container. Pure.
//!
//! Owns what stands where, in as many columns as the terminal has. Must not know whether it is
//! printed once or shown full screen, nor where the figures come from.

mod columns;
#[cfg(test)]
pub(crate) mod fixture;
mod flow;

use cgpu_cli::view::{ContainerView, GpuView, Mode, ShareView, Snapshot, State};
use ratatui::style::{Color, Modifier, Style, Stylize};
use ratatui::text::{Line, Span};

use crate::cells::{self, Keep, Signs, cut, known, mib, padded};
use crate::history::History;
use columns::Table;

/// The narrowest page, in columns; on a narrower terminal it is cut off.
const LEAST_WIDTH: usize = 20;

/// From this per cent on, what is used of a quota is shown as a warning, and as nearly all.
const WARN_PERCENT: u64 = 75;
const FULL_PERCENT: u64 = 95;

/// A page's layout.
#[derive(Debug, Clone)]
pub(crate) struct PageStyle<'a> {
    /// Columns of the terminal.
    pub(crate) width: usize,
    /// What it shows.
    pub(crate) signs: Signs,
    /// The time, as the page has it in its first line.
    pub(crate) time: &'a str,
    /// Whether all containers show their processes.
    pub(crate) processes: bool,
    /// The row that is marked, and whether it shows its processes.
    pub(crate) marked: Option<(&'a RowId, bool)>,
    /// How much of each GPU was in use lately.
    pub(crate) history: &'a History,
}

/// Which row: a container's part of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RowId {
    /// The container's short id.
    pub(crate) short_id: String,
    /// The GPU's UUID; `None` of a container that has none.
    pub(crate) gpu: Option<String>,
}

/// A page.
#[derive(Debug, Default)]
pub(crate) struct Sheet {
    pub(crate) lines: Vec<Line<'static>>,
    /// The rows of containers, each with its line.
    pub(crate) rows: Vec<(RowId, usize)>,
}

/// A container's part of a GPU, as a row shows it; no part of one that has no GPU.
#[derive(Debug, Clone, Copy)]
struct Row<'a> {
    container: &'a ContainerView,
    share: Option<&'a ShareView>,
}

impl Row<'_> {
    fn id(&self) -> RowId {
        RowId {
            short_id: self.container.short_id.clone(),
            gpu: self.share.map(|share| share.gpu.uuid.clone()),
        }
    }
}

/// `snapshot` as people read it.
pub(crate) fn sheet(snapshot: &Snapshot, page_style: &PageStyle<'_>) -> Sheet {
    let page_style = PageStyle { width: page_style.width.max(LEAST_WIDTH), ..page_style.clone() };
    let mut page = Page { page_style: &page_style, sheet: Sheet::default() };
    page.head(snapshot);
    // One table for all blocks, so that columns stand under each other.
    let rows: Vec<Row<'_>> = snapshot.containers.iter().flat_map(rows).collect();
    let table = Table::fitting(&rows, page_style.width.saturating_sub(4), page_style.signs);
    for gpu in &snapshot.gpus {
        let on_it = |row: &&Row<'_>| row.share.is_some_and(|share| share.gpu.uuid == gpu.uuid);
        let its: Vec<Row<'_>> = rows.iter().filter(on_it).copied().collect();
        page.gpu(gpu, &table, &its);
    }
    let without: Vec<Row<'_>> = rows.iter().filter(|row| row.share.is_none()).copied().collect();
    if !without.is_empty() {
        page.open(vec![Span::raw("no GPU")]);
        page.table(&table, &without);
        page.close();
    }
    if snapshot.gpus.is_empty() {
        page.sentence("no GPU is known", Style::new());
    }
    if snapshot.containers.is_empty() {
        page.sentence("no container uses a GPU by cgpu", Style::new());
    }
    page.notes(snapshot);
    page.sheet
}

fn rows(container: &ContainerView) -> Vec<Row<'_>> {
    if container.shares.is_empty() {
        return vec![Row { container, share: None }];
    }
    container.shares.iter().map(|share| Row { container, share: Some(share) }).collect()
}

/// A page that is being written.
struct Page<'a> {
    page_style: &'a PageStyle<'a>,
    sheet: Sheet,
}

/// The four corners and the line of a frame.
struct Frame {
    corners: [&'static str; 4],
    across: &'static str,
    down: &'static str,
}

impl Page<'_> {
    fn frame(&self) -> Frame {
        match self.page_style.signs {
            Signs::Unicode => {
                Frame { corners: ["╭", "╮", "╰", "╯"], across: "─", down: "│" }
            }
            Signs::Ascii => Frame { corners: ["+"; 4], across: "-", down: "|" },
        }
    }

    fn inner(&self) -> usize {
        self.page_style.width.saturating_sub(4)
    }

    fn head(&mut self, snapshot: &Snapshot) {
        let plural = |count: usize, what: &str| {
            format!("{count} {what}{}", if count == 1 { "" } else { "s" })
        };
        let driver = match &snapshot.driver_version {
            Some(version) => format!("driver {version}"),
            None => "no driver".to_owned(),
        };
        let items = [
            format!("cgpu-smi {}", snapshot.cgpu_version),
            snapshot.hostname.clone(),
            driver,
            plural(snapshot.gpus.len(), "GPU"),
            plural(snapshot.containers.len(), "container"),
            self.page_style.time.to_owned(),
        ];
        let items: Vec<_> = items
            .into_iter()
            .filter(|item| !item.is_empty())
            .map(|item| vec![item.bold()])
            .collect();
        for line in flow::flow(items, self.page_style.width, self.page_style.signs) {
            self.sheet.lines.push(line);
        }
    }

    /// Opens a block; its title is cut to what there is.
    fn open(&mut self, title: Vec<Span<'static>>) {
        let Frame { corners: [left, right, ..], across, .. } = self.frame();
        let mut available = self.page_style.width.saturating_sub(6);
        let mut line = vec![Span::raw(format!("{left}{across} "))];
        for span in title {
            let text = cut(&span.content, available, Keep::Start, self.page_style.signs);
            available = available.saturating_sub(cells::columns(&text));
            line.push(Span::styled(text, span.style));
        }
        line.push(Span::raw(format!(" {}{across}{right}", across.repeat(available))));
        self.sheet.lines.push(Line::from(line));
    }

    fn close(&mut self) {
        let Frame { corners: [.., left, right], across, .. } = self.frame();
        let across = across.repeat(self.page_style.width.saturating_sub(2));
        self.sheet.lines.push(Line::from(format!("{left}{across}{right}")));
    }

    /// A line within a block.
    fn line(&mut self, spans: Vec<Span<'static>>) {
        let down = self.frame().down;
        let used: usize = spans.iter().map(|span| cells::columns(&span.content)).sum();
        let blanks = " ".repeat(self.inner().saturating_sub(used));
        let mut line = vec![Span::raw(format!("{down} "))];
        line.extend(spans);
        line.push(Span::raw(format!("{blanks} {down}")));
        self.sheet.lines.push(Line::from(line));
    }

    fn gpu(&mut self, gpu: &GpuView, table: &Table, rows: &[Row<'_>]) {
        let dot = if self.page_style.signs == Signs::Unicode { " · " } else { ", " };
        let mut title = vec![format!("GPU {}", gpu.index).bold()];
        for part in [&gpu.name, &gpu.bus_id].into_iter().filter(|part| !part.is_empty()) {
            title.push(Span::raw(format!("{dot}{part}")));
        }
        if gpu.lost {
            title.push(Span::raw(dot));
            title.push("lost".red().bold());
        }
        self.open(title);
        self.memory(gpu);
        for line in flow::flow(usage(gpu), self.inner(), self.page_style.signs) {
            self.line(line.spans);
        }
        self.lately(gpu);
        self.table(table, rows);
        self.close();
    }

    /// The GPU's memory: a bar as long as there is space for, and its figures.
    fn memory(&mut self, gpu: &GpuView) {
        let usage = format!(
            "{} of {} MiB in use",
            mib(gpu.memory_used_bytes),
            mib(Some(gpu.memory_total_bytes))
        );
        let width = self.inner().saturating_sub(cells::columns(&usage) + 2).min(40);
        let signs = self.page_style.signs;
        let style = fill(gpu.memory_used_bytes, gpu.memory_total_bytes);
        let mut line = Vec::new();
        if width >= 6 {
            let bar = cells::bar(gpu.memory_used_bytes, gpu.memory_total_bytes, width, signs);
            line.push(Span::styled(bar, style));
            line.push(Span::raw("  "));
        }
        line.push(Span::raw(cut(&usage, self.inner(), Keep::Start, signs)));
        self.line(line);
    }

    /// How much of the GPU was in use in the moments before.
    fn lately(&mut self, gpu: &GpuView) {
        let moments = self.page_style.history.of(&gpu.uuid);
        if moments.is_empty() || self.inner() < 30 {
            return;
        }
        const TITLE: &str = "lately  ";
        let available = self.inner() - TITLE.len();
        let from = moments.len().saturating_sub(available);
        let steps: Vec<char> = match self.page_style.signs {
            Signs::Unicode => "▁▂▃▄▅▆▇█".chars().collect(),
            Signs::Ascii => "_.-=+*%#".chars().collect(),
        };
        let step = |percent: u32| steps[(percent.min(100) as usize * (steps.len() - 1) + 50) / 100];
        let graph: String = moments[from..].iter().map(|moment| moment.map_or(' ', step)).collect();
        self.line(vec![Span::raw(TITLE).dim(), Span::raw(graph).fg(Color::Cyan)]);
    }

    fn table(&mut self, table: &Table, rows: &[Row<'_>]) {
        if rows.is_empty() {
            return;
        }
        self.line(vec![Span::raw(table.header()).add_modifier(Modifier::DIM)]);
        for row in rows {
            let id = row.id();
            let marked = self.page_style.marked.filter(|(marked, _)| **marked == id);
            let mut spans = table.row(row, self.page_style.signs);
            if marked.is_some() {
                let used: usize = spans.iter().map(|span| cells::columns(&span.content)).sum();
                spans.push(Span::raw(" ".repeat(self.inner().saturating_sub(used))));
                for span in &mut spans {
                    span.style = span.style.add_modifier(Modifier::REVERSED);
                }
            }
            self.sheet.rows.push((id, self.sheet.lines.len()));
            self.line(spans);
            if self.page_style.processes || marked.is_some_and(|(_, open)| open) {
                self.processes(row);
            }
        }
    }

    /// The processes of a row's container, and their memory on its GPU.
    fn processes(&mut self, row: &Row<'_>) {
        let container = row.container;
        for process in &container.processes {
            let name = process.name.as_deref().unwrap_or(cells::UNKNOWN);
            let on_it = |share: &ShareView| {
                let found = process.memory.iter().find(|(index, _)| *index == share.gpu.index);
                found.map(|(_, bytes)| *bytes)
            };
            let bytes = row.share.and_then(on_it);
            let usage = format!("{} MiB", padded(&mib(bytes), 7, true));
            let available = self.inner().saturating_sub(2 + 9 + usage.len() + 1);
            let name = cut(name, available, Keep::Start, self.page_style.signs);
            let text = format!("  {} {usage} {name}", padded(&process.pid.to_string(), 8, true));
            let text = cut(&text, self.inner(), Keep::Start, self.page_style.signs);
            self.line(vec![Span::raw(text).dim()]);
        }
        let rest =
            container.process_count.map_or(0, |all| all.saturating_sub(container.processes.len()));
        if rest > 0 {
            let text = cut(
                &format!("  and {rest} more"),
                self.inner(),
                Keep::Start,
                self.page_style.signs,
            );
            self.line(vec![Span::raw(text).dim()]);
        }
    }

    /// What else is to be known, below all blocks.
    fn notes(&mut self, snapshot: &Snapshot) {
        for container in &snapshot.containers {
            let beginning: String = container.id.chars().take(12).collect();
            let id = container.name.as_deref().unwrap_or(&beginning);
            let note = match container.state {
                State::Closed => "its monitor has ended, so its driver calls fail: create it again",
                State::Silent => "its monitor does not answer, so its figures are unknown",
                State::Leaked => "it has ended, and its quota stays reserved: see `cgpu ps`",
                State::Reserved | State::Created | State::Active => continue,
            };
            self.sentence(&format!("{id}: {note}"), Style::new().fg(Color::Red));
        }
        for gap in &snapshot.gaps {
            self.sentence(gap, Style::new().fg(Color::Yellow));
        }
    }

    /// A sentence on lines of its own, below blocks.
    fn sentence(&mut self, text: &str, style: Style) {
        let text = cgpu_cli::commands::table::printable(text);
        let words = text.split(' ').filter(|word| !word.is_empty());
        let words = words.map(|word| vec![Span::styled(word.to_owned(), style)]).collect();
        self.sheet.lines.extend(flow::flow_words(
            words,
            self.page_style.width,
            self.page_style.signs,
        ));
    }
}

/// The style of something that is full to `part` of `whole`.
fn fill(part: Option<u64>, whole: u64) -> Style {
    let percent = u128::from(part.unwrap_or(0)) * 100 / u128::from(whole.max(1));
    let color = match u64::try_from(percent).unwrap_or(u64::MAX) {
        FULL_PERCENT.. => Color::Red,
        WARN_PERCENT.. => Color::Yellow,
        _ => Color::Green,
    };
    Style::new().fg(color)
}

/// The names of the policies.
fn policy(number: u32) -> &'static str {
    match number {
        0 => "fair share",
        1 => "preemptive",
        2 => "weighted",
        3 => "fixed",
        4 => "soft",
        _ => "native",
    }
}

/// A GPU's figures besides its memory in use.
fn usage(gpu: &GpuView) -> Vec<Vec<Span<'static>>> {
    let figure =
        |name: &'static str, value: String| vec![name.dim(), Span::raw(" "), Span::raw(value)];
    let watts = |watts: Option<f64>| known(watts.map(|watts| format!("{watts:.0}")));
    let mut usage = vec![
        figure("promised", format!("{} MiB", mib(Some(gpu.memory_promised_bytes)))),
        figure("util", percent(gpu.utilization_percent)),
        figure("temp", format!("{} C", known(gpu.temperature_celsius))),
        figure("power", format!("{} / {} W", watts(gpu.power_watts), watts(gpu.power_limit_watts))),
        figure(
            "policy",
            known(gpu.policy.map(|number| format!("{number} {}", policy(number)))).into(),
        ),
        figure("containers", format!("{} / {}", gpu.shared_containers, known(gpu.max_inst))),
        figure("free weight", known(gpu.free_weight).into()),
    ];
    if gpu.other_containers > 0 {
        usage.push(figure("without quota", gpu.other_containers.to_string()));
    }
    usage
}

fn percent(percent: Option<u32>) -> String {
    match percent {
        Some(percent) => format!("{percent}%"),
        None => cells::UNKNOWN.to_owned(),
    }
}

/// The quota of a part, or how it is had without one.
fn quota(row: &Row<'_>) -> String {
    match row.share {
        None => cells::UNKNOWN.to_owned(),
        Some(share) => match share.gpu.memory_limit_bytes {
            Some(bytes) => mib(Some(bytes)).into_owned(),
            None => Mode::Whole.name().to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(snapshot: &Snapshot, width: usize, signs: Signs) -> Vec<String> {
        let page_style = PageStyle {
            width,
            signs,
            time: "",
            processes: true,
            marked: None,
            history: &History::default(),
        };
        sheet(snapshot, &page_style).lines.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_line_fits_any_width_and_content() {
        let mut hostile = fixture::host(1, 2);
        hostile.containers[0].name = Some("\u{1b}[31mred\n模型服务模型服务模型服务".repeat(20));
        hostile.containers[1].processes[0].name = Some("\u{7}".repeat(60));
        hostile.gpus[0].name = "\u{1b}]0;title\u{7}".repeat(9);
        hostile.gaps.push("a\u{1b}[2J".repeat(50));
        let empty = fixture::host(0, 0);
        for snapshot in [hostile, empty, fixture::host(1, 0), fixture::host(8, 25)] {
            for width in [20, 21, 33, 40, 60, 80, 81, 100, 120, 200, 400] {
                for signs in [Signs::Unicode, Signs::Ascii] {
                    for line in text(&snapshot, width, signs) {
                        assert!(cells::columns(&line) <= width, "{width}: {line:?}");
                        assert!(!line.chars().any(char::is_control), "{line:?}");
                        assert!(signs == Signs::Unicode || line.is_ascii() || line.contains('模'));
                    }
                }
            }
        }
    }

    #[test]
    fn page_lists_each_gpu_above_its_containers() {
        let lines = text(&fixture::host(2, 1), 140, Signs::Ascii);
        insist(&lines, "cgpu-smi");
        let first = lines.iter().position(|line| line.contains("GPU 0, Tesla V100, 0000:07:00.0"));
        let second = lines.iter().position(|line| line.contains("GPU 1")).unwrap();
        let (first, own) = (first.unwrap(), position(&lines, "pod-0-0"));
        assert!(first < own && own < second && second < position(&lines, "pod-1-0"), "{lines:#?}");
        let row = &lines[own];
        for part in ["c00000000000", "1024", "2048", "gate", "1h01m", "25%", "31%", "37%", "active"]
        {
            assert!(row.contains(part), "{part}: {row}");
        }
        insist(&lines, "8192 of 16384 MiB in use");
        insist(&lines, "promised 2048 MiB");
        insist(&lines, "python");
    }

    #[test]
    fn narrow_page_still_shows_each_containers_usage() {
        let lines = text(&fixture::host(1, 1), 20, Signs::Ascii);
        let row = lines.iter().find(|line| line.contains("1024")).unwrap();
        assert!(row.contains("c0000"), "{row}");
    }

    /// A container whose quota is not enforced, or whose monitor does not answer, is reported.
    #[test]
    fn silent_or_ended_monitors_are_reported() {
        let mut host = fixture::host(1, 2);
        host.containers[0].state = State::Silent;
        host.containers[0].shares[0].memory_used_bytes = None;
        host.containers[1].state = State::Closed;
        let lines = text(&host, 100, Signs::Ascii);
        insist(&lines, "pod-0-0/main: its monitor does not answer");
        insist(&lines, "pod-0-1/main: its monitor has ended");
        let lines = text(&fixture::host(0, 0), 60, Signs::Ascii);
        insist(&lines, "no GPU is known");
        insist(&lines, "no container uses a GPU by cgpu");
    }

    fn position(lines: &[String], part: &str) -> usize {
        let found = lines.iter().position(|line| line.contains(part));
        found.unwrap_or_else(|| panic!("{part}: {lines:#?}"))
    }

    fn insist(lines: &[String], part: &str) {
        position(lines, part);
    }
}
