//! Full screen: collects in a thread of its own, draws what that found, and does what keys say.
//!
//! Owns the terminal, which is as it was when this ends, whatever ends it. Must not decide what keys
//! mean: see [`state`].

mod state;

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use cgpu_cli::view::Snapshot;
use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyEventKind};
use ratatui::layout::Rect;
use ratatui::style::Stylize;
use ratatui::text::{Line, Text};
use ratatui::widgets::{Clear, Paragraph};
use std::io::{self, IsTerminal};

use crate::args::Args;
use crate::cells::Signs;
use crate::collector::Collector;
use crate::environment::{now, signs};
use crate::sheet::{PageStyle, sheet};
use state::{After, HELP, State};

/// How often it polls, if the command line doesn't say.
const PAUSE: Duration = Duration::from_secs(1);

/// How long a key may wait to be seen while nothing else happens.
const KEY_PAUSE: Duration = Duration::from_millis(50);

/// Shows the host until the user ends it.
///
/// # Errors
///
/// If there is no terminal, or the host can't be inspected in the beginning.
pub(crate) fn run(mut collector: Collector, args: &Args) -> Result<()> {
    if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        bail!("--watch needs a terminal; use --loop to print again and again");
    }
    // What is wrong from the beginning is said as it always is.
    let first = collector.collect_without_driver()?;
    let (poll_now, poll_requests) = mpsc::channel();
    let (send, checked) = mpsc::channel();
    let pause = args.r#loop.unwrap_or(PAUSE);
    thread::spawn(move || collect_again(collector, pause, &poll_requests, &send));
    let mut state = State::new(first, args.processes, now());
    ratatui::run(|terminal| {
        let signs = signs();
        let mut is_new = true;
        loop {
            if is_new {
                terminal.draw(|frame| draw(frame, &mut state, signs))?;
                is_new = false;
            }
            // All that has come since, and one key at most.
            while let Ok(found) = checked.try_recv() {
                is_new = true;
                match found {
                    Ok(snapshot) => state.take(snapshot, now()),
                    Err(reason) => state.fail(reason),
                }
            }
            if event::poll(KEY_PAUSE)? {
                is_new = true;
                match event::read()? {
                    Event::Key(key) if key.kind != KeyEventKind::Release => {
                        match state.press(key) {
                            After::End => return Ok(()),
                            // A thread that has ended will say why.
                            After::Poll => drop(poll_now.send(())),
                            After::Draw => {}
                        }
                    }
                    _ => {}
                }
            }
        }
    })
}

/// Collects until the screen has ended.
fn collect_again(
    mut collector: Collector,
    pause: Duration,
    poll_requests: &Receiver<()>,
    send: &Sender<Result<Snapshot, String>>,
) {
    loop {
        if send.send(collector.collect().map_err(|error| format!("{error:#}"))).is_err() {
            return;
        }
        if poll_requests.recv_timeout(pause) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    }
}

fn draw(frame: &mut Frame<'_>, state: &mut State, signs: Signs) {
    let area = frame.area();
    let shown = state.shown();
    let page_style = PageStyle {
        width: usize::from(area.width),
        signs,
        time: state.time(),
        processes: state.processes,
        marked: state.marked.as_ref().map(|id| (id, state.open)),
        history: &state.history,
    };
    let page = sheet(&shown, &page_style);
    let body = Rect { height: area.height.saturating_sub(1), ..area };
    let rows = page.rows.iter().map(|(id, line)| (id.clone(), *line)).collect();
    state.place(rows, page.lines.len(), usize::from(body.height));
    let from = u16::try_from(state.top).unwrap_or(u16::MAX);
    frame.render_widget(Paragraph::new(page.lines).scroll((from, 0)), body);
    let foot = Rect { y: area.height.saturating_sub(1), height: area.height.min(1), ..area };
    frame.render_widget(Line::from(state.foot()).reversed(), foot);
    if state.helps {
        let lines: Vec<Line<'_>> = HELP.iter().map(|line| Line::from(*line)).collect();
        let wide = HELP.iter().map(|line| line.len()).max().unwrap_or_default();
        let (wide, high) = (wide.min(area.width.into()), HELP.len().min(area.height.into()));
        let over = Rect {
            x: 0,
            y: 0,
            width: u16::try_from(wide).unwrap_or(area.width),
            height: u16::try_from(high).unwrap_or(area.height),
        };
        frame.render_widget(Clear, over);
        frame.render_widget(Paragraph::new(Text::from(lines)), over);
    }
}
