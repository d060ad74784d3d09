//! Runs in turn, and how their figures are printed.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What the columns are, of which the second is measured and the first is its peer.
pub(crate) fn header(peer: &str, measured: &str) {
    println!("{:<44} {peer:>9} {measured:>9} {:>9} {:>7}  budget", "medians", "more", "ratio");
}

/// The middle of all.
pub(crate) fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

/// As a table has it.
pub(crate) fn ms(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}

/// A row of runs in turn: what is more is the median of the pairs' differences.
pub(crate) fn row(what: &str, bare: Vec<Duration>, ours: Vec<Duration>, budget: &str) {
    let ns = |time: &Duration| i64::try_from(time.as_nanos()).expect("it took no centuries");
    let mut more: Vec<i64> =
        bare.iter().zip(&ours).map(|(bare, ours)| ns(ours) - ns(bare)).collect();
    more.sort_unstable();
    let more = format!("{:.2} ms", more[more.len() / 2] as f64 / 1e6);
    let (bare, ours) = (median(bare), median(ours));
    let ratio = ours.as_secs_f64() / bare.as_secs_f64();
    println!("{what:<44} {:>9} {:>9} {more:>9} {ratio:>6.2}×  {budget}", ms(bare), ms(ours));
}

/// How long a command takes that succeeds.
pub(crate) fn timed(command: &mut Command) -> Duration {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    let start = Instant::now();
    let status = command.status().expect("the program can be started");
    let time = start.elapsed();
    assert!(status.success(), "{command:?}: {status}");
    time
}

/// Runs both `runs` times, each first in every other turn: what one leaves behind, the next one's
/// time has in it. Both get the turn's number.
pub(crate) fn in_turn(
    runs: usize,
    mut peer: impl FnMut(usize) -> Duration,
    mut measured: impl FnMut(usize) -> Duration,
) -> (Vec<Duration>, Vec<Duration>) {
    let turn = |turn: usize| match turn % 2 {
        0 => {
            let peer = peer(turn);
            (peer, measured(turn))
        }
        _ => {
            let measured = measured(turn);
            (peer(turn), measured)
        }
    };
    (0..runs).map(turn).unzip()
}
