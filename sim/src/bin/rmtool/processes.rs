//! Children that work at the same time, and report a number each.

use std::io::{Read as _, Write as _};
use std::os::fd::OwnedFd;

use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, fork, pipe};

/// Runs `work` in so many children, which begin together, and keeps them until all are
/// done, with what they hold.
pub(crate) fn together<K>(count: u32, work: impl Fn(u32) -> (u64, K)) -> anyhow::Result<Vec<u64>> {
    let (start, go) = pipe()?;
    let (stay, end) = pipe()?;
    let mut reports = Vec::new();
    let mut children = Vec::new();
    std::io::stdout().flush()?;
    for number in 0..count {
        let (report, answer) = pipe()?;
        // SAFETY: this program has one thread here.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => {
                children.push(child);
                reports.push(report);
            }
            ForkResult::Child => {
                drop(std::mem::take(&mut reports));
                child(number, [start, stay], [go, end], answer, &work);
            }
        }
    }
    drop((start, stay));
    // Closing is what they all wait for.
    drop(go);
    let mut numbers = Vec::new();
    for report in reports {
        let mut text = [0; 8];
        let got = std::fs::File::from(report).read_exact(&mut text);
        numbers.push(got.map_or(0, |()| u64::from_le_bytes(text)));
    }
    drop(end);
    for child in children {
        waitpid(child, None)?;
    }
    Ok(numbers)
}

fn child<K>(
    number: u32,
    waits: [OwnedFd; 2],
    ends: [OwnedFd; 2],
    answer: OwnedFd,
    work: impl Fn(u32) -> (u64, K),
) -> ! {
    drop(ends);
    let [start, stay] = waits;
    let until_closed = |fd: OwnedFd| {
        let _ = std::fs::File::from(fd).read(&mut [0]);
    };
    until_closed(start);
    let (got, retained) = work(number);
    let _ = std::fs::File::from(answer).write_all(&got.to_le_bytes());
    until_closed(stay);
    drop(retained);
    // SAFETY: ends this process at once; what it shares with its parent stays as it is.
    unsafe { libc::_exit(0) }
}
