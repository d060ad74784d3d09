//! `cgpu-record --driver VERSION --output FILE -- PROGRAM…`: runs a program, and records what it asks
//! the driver.

mod trace;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use nvrm::Release;

/// Records a program's calls to the driver, scrubbed of addresses. Prints what it recorded as JSON;
/// ends as the program does.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    /// The driver's version, by which its structs are read.
    #[arg(long)]
    driver: String,
    /// Where the driver's nodes are.
    #[arg(long, default_value = "/dev")]
    dev: PathBuf,
    /// The file to write.
    #[arg(long)]
    output: PathBuf,
    /// A text to hide: the host's name, a GPU's UUID or serial number; repeat for more.
    #[arg(long)]
    hide: Vec<String>,
    /// What to run.
    #[arg(last = true, required = true)]
    program: Vec<String>,
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    let release = Release::of(arguments.driver.parse()?)?;
    let dev = arguments.dev.canonicalize().context("--dev")?;
    let recorded = trace::record(&trace::Order {
        release,
        dev,
        output: arguments.output,
        hide: arguments.hide,
        driver: arguments.driver,
        program: arguments.program,
    })?;
    println!(
        "{}",
        serde_json::json!({
            "recorded": recorded.seen,
            "repeated": recorded.repeated,
            "cut_off": recorded.cut_off,
            "bytes": recorded.bytes,
            "exit": recorded.exit,
        })
    );
    Ok(u8::try_from(recorded.exit).map_or(ExitCode::FAILURE, ExitCode::from))
}
