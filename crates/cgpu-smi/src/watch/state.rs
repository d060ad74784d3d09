//! What is shown full screen, and what keys do to it: [`State`]. Pure.

use cgpu_cli::view::{ContainerView, Snapshot};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use crate::history::History;
use crate::sheet::RowId;

/// The keys; `nvitop`'s, and `htop`'s where it has none.
pub(super) const HELP: &[&str] = &[
    " up, down, k, j      mark a container      ",
    " page up, page down  a page up, down       ",
    " home, end, g, G     the first, the last   ",
    " enter               its processes         ",
    " t                   processes of all      ",
    " , .                 sort by another figure",
    " /                   the other way round   ",
    " f, \\                filter by id and name ",
    " esc                 unmark, no filter     ",
    " r                   look now              ",
    " space               hold, go on           ",
    " h, ?                these lines           ",
    " q                   end                   ",
];

/// What is to be done after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    Draw,
    /// Poll, and draw.
    Poll,
    End,
}

/// By what containers are sorted on their GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    Natural,
    Name,
    Used,
    Quota,
    Utilization,
    Age,
}

const ORDERS: [Order; 6] =
    [Order::Natural, Order::Name, Order::Used, Order::Quota, Order::Utilization, Order::Age];

impl Order {
    fn name(self) -> &'static str {
        match self {
            Order::Natural => "runtime and id",
            Order::Name => "name",
            Order::Used => "memory in use",
            Order::Quota => "quota",
            Order::Utilization => "utilisation",
            Order::Age => "age",
        }
    }
}

/// What is shown.
#[derive(Debug)]
pub(super) struct State {
    snapshot: Snapshot,
    time: String,
    /// Why the last poll failed.
    failure: Option<String>,
    pub(super) history: History,
    /// Whether all containers show their processes.
    pub(super) processes: bool,
    /// The marked row, and whether it shows its processes.
    pub(super) marked: Option<RowId>,
    pub(super) open: bool,
    pub(super) helps: bool,
    held: bool,
    order: usize,
    reversed: bool,
    filter: String,
    /// Whether keys go into the filter.
    types: bool,
    /// The first line that is shown.
    pub(super) top: usize,
    /// The rows of the page drawn last, each with its line; its lines, and how many fit.
    rows: Vec<(RowId, usize)>,
    lines: usize,
    fit: usize,
}

impl State {
    pub(super) fn new(snapshot: Snapshot, processes: bool, time: String) -> Self {
        let mut history = History::default();
        history.add(&snapshot);
        State {
            snapshot,
            time,
            failure: None,
            history,
            processes,
            marked: None,
            open: false,
            helps: false,
            held: false,
            order: 0,
            reversed: false,
            filter: String::new(),
            types: false,
            top: 0,
            rows: Vec::new(),
            lines: 0,
            fit: 0,
        }
    }

    /// Takes what was found; nothing while it is held.
    pub(super) fn take(&mut self, snapshot: Snapshot, time: String) {
        self.failure = None;
        if !self.held {
            self.history.add(&snapshot);
            self.snapshot = snapshot;
            self.time = time;
        }
    }

    /// The last poll failed.
    pub(super) fn fail(&mut self, reason: String) {
        self.failure = Some(reason);
    }

    pub(super) fn time(&self) -> &str {
        &self.time
    }

    /// What is shown of what was found: filtered, and in order.
    pub(super) fn shown(&self) -> Snapshot {
        let mut shown = self.snapshot.clone();
        let wanted = self.filter.to_lowercase();
        let is_wanted = |container: &ContainerView| {
            let name = container.name.as_deref().unwrap_or_default();
            [&container.id, name].iter().any(|text| text.to_lowercase().contains(&wanted))
        };
        shown.containers.retain(is_wanted);
        let used = |container: &ContainerView| -> u64 {
            container.shares.iter().filter_map(|share| share.memory_used_bytes).sum()
        };
        let quota = |container: &ContainerView| -> u64 {
            let quotas = container.shares.iter().map(|share| share.gpu.memory_limit_bytes);
            quotas.map(|bytes| bytes.unwrap_or(u64::MAX)).fold(0, u64::saturating_add)
        };
        let busy = |container: &ContainerView| -> u32 {
            container.shares.iter().filter_map(|share| share.utilization_percent).sum()
        };
        let all = &mut shown.containers;
        // Names from a, figures from the largest; the sort is stable.
        match ORDERS[self.order] {
            Order::Natural => {}
            Order::Name => all.sort_by(|one, other| one.name.cmp(&other.name)),
            Order::Used => all.sort_by_key(|container| std::cmp::Reverse(used(container))),
            Order::Quota => all.sort_by_key(|container| std::cmp::Reverse(quota(container))),
            Order::Utilization => all.sort_by_key(|container| std::cmp::Reverse(busy(container))),
            Order::Age => all.sort_by_key(|container| std::cmp::Reverse(container.age_s)),
        }
        if self.reversed {
            all.reverse();
        }
        shown
    }

    /// Where rows are on the page as it is drawn now, of so many lines, of which so many fit. What
    /// is marked is brought into sight.
    pub(super) fn place(&mut self, rows: Vec<(RowId, usize)>, lines: usize, fit: usize) {
        (self.rows, self.lines, self.fit) = (rows, lines, fit);
        let marked = self.marked.as_ref();
        let line = self.rows.iter().find(|(id, _)| Some(id) == marked).map(|(_, line)| *line);
        match line {
            Some(line) if line < self.top => self.top = line,
            Some(line) if line >= self.top + fit => self.top = (line + 1).saturating_sub(fit),
            Some(_) => {}
            // It is gone.
            None => self.marked = None,
        }
        self.top = self.top.min(lines.saturating_sub(fit));
    }

    /// The last line of the screen.
    pub(super) fn foot(&self) -> String {
        if self.types {
            return format!(" filter: {}_   enter: done   esc: none", printable(&self.filter));
        }
        let mut parts = vec![format!(" sorted by {}", ORDERS[self.order].name())];
        if self.reversed {
            parts.push("reversed".to_owned());
        }
        if !self.filter.is_empty() {
            parts.push(format!("filter {}", printable(&self.filter)));
        }
        if self.held {
            parts.push("held: space goes on".to_owned());
        }
        if let Some(failure) = &self.failure {
            parts.push(format!("not looked: {}", printable(failure)));
        }
        parts.push("q ends, ? helps ".to_owned());
        parts.join(" | ")
    }

    /// Does what a key says.
    pub(super) fn press(&mut self, key: KeyEvent) -> After {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        if control {
            return if key.code == KeyCode::Char('c') { After::End } else { After::Draw };
        }
        if self.types {
            self.type_filter(key.code);
            return After::Draw;
        }
        if self.helps {
            self.helps = false;
            return if key.code == KeyCode::Char('q') { After::End } else { After::Draw };
        }
        match key.code {
            KeyCode::Char('q') => return After::End,
            KeyCode::Char('r') => return After::Poll,
            KeyCode::Up | KeyCode::Char('k') => self.mark(-1),
            KeyCode::Down | KeyCode::Char('j') => self.mark(1),
            KeyCode::Home | KeyCode::Char('g') => self.mark(isize::MIN),
            KeyCode::End | KeyCode::Char('G') => self.mark(isize::MAX),
            KeyCode::PageUp => self.scroll(false),
            KeyCode::PageDown => self.scroll(true),
            KeyCode::Enter => self.open = self.marked.is_some() && !self.open,
            KeyCode::Char('t') => self.processes = !self.processes,
            KeyCode::Char(',') => self.order = (self.order + ORDERS.len() - 1) % ORDERS.len(),
            KeyCode::Char('.') => self.order = (self.order + 1) % ORDERS.len(),
            KeyCode::Char('/') => self.reversed = !self.reversed,
            KeyCode::Char('f' | '\\') => self.types = true,
            KeyCode::Char(' ') => self.held = !self.held,
            KeyCode::Char('h' | '?') => self.helps = true,
            KeyCode::Esc => {
                self.marked = None;
                self.open = false;
                self.filter.clear();
            }
            _ => {}
        }
        After::Draw
    }

    fn type_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Enter => self.types = false,
            KeyCode::Esc => {
                self.types = false;
                self.filter.clear();
            }
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(sign) => self.filter.push(sign),
            _ => {}
        }
    }

    /// Marks the row so many below the marked one; the first where none is.
    fn mark(&mut self, by: isize) {
        let Some(last) = self.rows.len().checked_sub(1) else { return };
        let marked = self.marked.as_ref();
        let now = self.rows.iter().position(|(id, _)| Some(id) == marked);
        let next = match now {
            Some(now) => now.saturating_add_signed(by).min(last),
            None if by == isize::MAX => last,
            None => 0,
        };
        self.marked = Some(self.rows[next].0.clone());
    }

    /// Turns a page; what is marked goes along.
    fn scroll(&mut self, down: bool) {
        let page = self.fit.saturating_sub(1).max(1);
        let most = self.lines.saturating_sub(self.fit);
        self.top = if down { (self.top + page).min(most) } else { self.top.saturating_sub(page) };
        if self.marked.is_some() {
            let in_sight = |line: usize| (self.top..self.top + self.fit).contains(&line);
            let found = self.rows.iter().find(|(_, line)| in_sight(*line));
            self.marked = found.map(|(id, _)| id.clone());
        }
    }
}

fn printable(text: &str) -> String {
    cgpu_cli::commands::table::printable(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sheet::fixture;

    fn state(gpus: u32, containers: u32) -> State {
        let mut state = State::new(fixture::host(gpus, containers), false, String::new());
        drawn(&mut state, 4);
        state
    }

    /// As if it had been drawn where `fit` lines fit: a line a row.
    fn drawn(state: &mut State, fit: usize) {
        let shown = state.shown();
        let rows = shown.containers.iter().flat_map(|container| {
            container.shares.iter().map(|share| RowId {
                short_id: container.short_id.clone(),
                gpu: Some(share.gpu.uuid.clone()),
            })
        });
        let rows: Vec<_> = rows.enumerate().map(|(line, id)| (id, line)).collect();
        let lines = rows.len();
        state.place(rows, lines, fit);
    }

    fn press(state: &mut State, keys: &str) {
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                '\u{8}' => KeyCode::Backspace,
                key => KeyCode::Char(key),
            };
            assert_ne!(state.press(KeyEvent::new(code, KeyModifiers::NONE)), After::End);
            drawn(state, 4);
        }
    }

    fn ids(state: &State) -> Vec<String> {
        state.shown().containers.iter().map(|container| container.id[..4].to_owned()).collect()
    }

    fn marked(state: &State) -> Option<&str> {
        state.marked.as_ref().map(|id| &id.short_id[..4])
    }

    #[test]
    fn marked_row_stays_visible_until_its_container_ends() {
        let mut state = state(1, 9);
        press(&mut state, "jj");
        assert_eq!((marked(&state), state.top), (Some("c001"), 0));
        press(&mut state, "jjjj");
        assert_eq!((marked(&state), state.top), (Some("c005"), 2));
        press(&mut state, "g");
        assert_eq!((marked(&state), state.top), (Some("c000"), 0));
        press(&mut state, "Gj");
        assert_eq!((marked(&state), state.top), (Some("c008"), 5));
        press(&mut state, "\n");
        assert!(state.open);
        // The container ends.
        state.take(fixture::host(1, 3), String::new());
        drawn(&mut state, 4);
        assert_eq!((marked(&state), state.top), (None, 0));
        let mut none = State::new(fixture::host(0, 0), false, String::new());
        press(&mut none, "jkgG\n");
        assert_eq!(marked(&none), None);
    }

    #[test]
    fn filter_shows_containers_matching_id_or_name() {
        let mut state = state(2, 3);
        press(&mut state, "fPOD-1-\u{8}-2\n");
        assert_eq!(ids(&state), ["c102"]);
        assert!(state.foot().contains("filter POD-1-2"));
        press(&mut state, "\u{1b}");
        assert_eq!(ids(&state).len(), 6);
        press(&mut state, "\\c00q\n");
        assert!(ids(&state).is_empty(), "letters that are keys elsewhere are letters here");
        press(&mut state, "f\u{1b}");
        assert_eq!(ids(&state).len(), 6);
    }

    #[test]
    fn containers_are_sorted_and_figures_come_largest_first() {
        let mut state = state(1, 3);
        let mut host = fixture::host(1, 3);
        host.containers[0].name = Some("z".into());
        host.containers[1].shares[0].memory_used_bytes = Some(5 << 30);
        host.containers[2].age_s = Some(9_999);
        state.take(host, String::new());
        let mut orders = Vec::new();
        for _ in ORDERS {
            orders.push((ORDERS[state.order].name(), ids(&state)[0].clone()));
            press(&mut state, ".");
        }
        let first = |order: &str| orders.iter().find(|(name, _)| *name == order).unwrap().1.clone();
        assert_eq!(first("name"), "c001");
        assert_eq!(first("memory in use"), "c001");
        assert_eq!(first("age"), "c002");
        assert_eq!(first("runtime and id"), "c000");
        press(&mut state, "/");
        assert_eq!(ids(&state)[0], "c002");
        press(&mut state, ",");
        assert_eq!(ORDERS[state.order].name(), "age");
    }

    /// A view that is paused stays, and a failure is shown until the next poll.
    #[test]
    fn paused_view_stays_and_failures_show_until_repolled() {
        let mut state = state(1, 2);
        press(&mut state, " ");
        state.take(fixture::host(1, 5), "later".into());
        assert_eq!((ids(&state).len(), state.time()), (2, ""));
        press(&mut state, " ");
        state.fail("no\n registry".into());
        assert!(state.foot().contains("not looked: no\\n registry"));
        state.take(fixture::host(1, 5), "later".into());
        assert_eq!((ids(&state).len(), state.time()), (5, "later"));
        assert!(!state.foot().contains("not looked"));
    }

    #[test]
    fn q_and_control_c_end_it() {
        let mut state = state(1, 1);
        let end = |state: &mut State, code, modifiers| state.press(KeyEvent::new(code, modifiers));
        assert_eq!(end(&mut state, KeyCode::Char('q'), KeyModifiers::NONE), After::End);
        press(&mut state, "f");
        let control_c = end(&mut state, KeyCode::Char('c'), KeyModifiers::CONTROL);
        assert_eq!(control_c, After::End, "while a filter is typed, too");
        press(&mut state, "\n?");
        assert!(state.helps);
        press(&mut state, "x");
        assert!(!state.helps);
        let after = end(&mut state, KeyCode::Char('r'), KeyModifiers::NONE);
        assert_eq!(after, After::Poll);
    }
}
