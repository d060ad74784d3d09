//! `cgpu-monitor`: answers the driver calls of one container. Started by `cgpu-runtime`.

use std::process::ExitCode;

use cgpu::monitor::{keeper, worker};

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let done = match words.next().as_deref() {
        Some("keep") => keeper::main(),
        Some("work") => worker::main(worker::Former::of(words.next().as_deref())),
        _ => {
            eprintln!("cgpu-monitor: cgpu-runtime starts this program, one for each container");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Nobody reads its standard error.
            tracing::error!("{error}");
            eprintln!("cgpu-monitor: {error}");
            ExitCode::FAILURE
        }
    }
}
