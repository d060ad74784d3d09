//! `cgpu-monitor`: answers the driver calls of one container. Started by `cgpu-runtime`.

use std::io;
use std::process::ExitCode;

use cgpu::hook::deregister;
use cgpu_host::registry::Key;
use cgpu_monitor::daemon::{self, Gone};

fn served(gone: io::Result<Option<Gone>>) -> io::Result<()> {
    if let Some(Gone { id, root, config }) = gone? {
        deregister(config.as_deref(), &Key { root, id });
    }
    Ok(())
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let done = match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["serve"] => served(daemon::serve()),
        ["resume", snapshot] => served(daemon::resume(snapshot)),
        ["check"] => daemon::check(),
        _ => {
            eprintln!("cgpu-monitor: cgpu-runtime starts this program, one for each container");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // No process reads the standard error of a monitor that serves.
            tracing::error!("{error}");
            eprintln!("cgpu-monitor: {error}");
            ExitCode::FAILURE
        }
    }
}
