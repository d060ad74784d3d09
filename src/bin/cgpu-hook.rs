//! `cgpu-hook`: the OCI hook. It gets the container's state on standard input.

use std::{io, process::ExitCode};

use cgpu::hook::command_line::Hook;
use cgpu::hook::{self, HookError, Stage};
use cgpu::host::Host;
use cgpu_host::report::{ErrorLog, report};
use clap::Parser;

fn run(args: Hook) -> Result<(), HookError> {
    let caller = hook::caller(args.root, args.id, args.reservation);
    match Host::load(args.config.as_deref().map(AsRef::as_ref)) {
        Ok(host) => hook::run(&host, args.stage, &caller, &mut io::stdin(), &mut io::stdout()),
        Err(error) => hook::run_unconfigured(
            (args.stage, &caller),
            error,
            &mut io::stdin(),
            &mut io::stdout(),
        ),
    }
}

fn main() -> ExitCode {
    let parsed = Hook::try_parse();
    // One that fails keeps runc from calling the others.
    let is_poststop = match &parsed {
        Ok(args) => args.stage == Stage::Poststop,
        Err(_) => std::env::args_os().nth(1).is_some_and(|stage| stage == "poststop"),
    };
    let failed = match parsed.map(run) {
        Ok(Ok(())) => return ExitCode::SUCCESS,
        Ok(Err(error)) => {
            report(&error, &ErrorLog::default());
            ExitCode::FAILURE
        }
        Err(usage) => {
            let _ = usage.print(); // if this fails, there is nowhere left to report it
            u8::try_from(usage.exit_code()).map_or(ExitCode::FAILURE, ExitCode::from)
        }
    };
    if is_poststop { ExitCode::SUCCESS } else { failed }
}
