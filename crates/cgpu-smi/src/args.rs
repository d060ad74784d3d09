//! The command line: [`Args`]. Names and meanings are `nvidia-smi`'s where it has them.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Parser, ValueEnum};

/// Shows the GPUs of this host and the containers that share them.
#[derive(Debug, Parser)]
#[command(name = "cgpu-smi", version)]
#[command(group = ArgGroup::new("what").args(["list_gpus", "query", "query_gpu", "query_container", "watch", "serve"]))]
pub struct Args {
    /// The configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// These GPUs alone: indices, UUIDs or PCI addresses, with commas between.
    #[arg(short, long, value_name = "GPUS", value_delimiter = ',')]
    pub id: Vec<String>,
    /// Show the processes of each container.
    #[arg(short, long)]
    pub processes: bool,
    /// List the GPUs, a line each.
    #[arg(short = 'L', long)]
    pub list_gpus: bool,
    /// Show all that is known, a line for each figure.
    #[arg(short, long)]
    pub query: bool,
    /// Print these figures of each GPU; `help` lists them.
    #[arg(long, value_name = "FIELDS", value_delimiter = ',')]
    pub query_gpu: Vec<String>,
    /// Print these figures of each container on each of its GPUs; `help` lists them.
    #[arg(long, value_name = "FIELDS", value_delimiter = ',')]
    pub query_container: Vec<String>,
    /// How to print: `json`, or for queries `csv` with `noheader` and `nounits`.
    #[arg(long, value_name = "FORMAT", value_delimiter = ',')]
    pub format: Vec<Format>,
    /// Print again after so many seconds, until interrupted.
    #[arg(short, long, value_name = "SECONDS", value_parser = seconds)]
    pub r#loop: Option<Duration>,
    /// Show it full screen, as it changes; `q` ends, `?` lists the keys.
    #[arg(short, long)]
    pub watch: bool,
    /// Let the group that the configuration names under `[view]` look without being root, until
    /// ended; for the service cgpu-view.
    #[arg(long)]
    pub serve: bool,
    /// Ask nothing of NVIDIA's driver: faster, without utilisation, temperature and power.
    #[arg(long)]
    pub no_nvml: bool,
}

/// A part of `--format`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Values with commas between.
    Csv,
    /// Without the line of names.
    Noheader,
    /// Without units.
    Nounits,
    /// For programs: all that is known.
    Json,
}

impl Args {
    /// Whether `--format` has that part.
    pub(crate) fn has(&self, format: Format) -> bool {
        self.format.contains(&format)
    }
}

/// A time of at least a tenth of a second, and at most a day.
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write it as a number of seconds".to_owned())?;
    if !(0.1..=86_400.0).contains(&seconds) {
        return Err("it must be from 0.1 to 86400".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    const OPERATIONS: &str = include_str!("../../../docs/operations.md");

    #[test]
    fn every_option_is_documented_and_documented_lines_parse() {
        for argument in Args::command().get_arguments() {
            let long = argument.get_long().unwrap_or_default();
            let is_known = ["help", "version"].contains(&long);
            assert!(is_known || OPERATIONS.contains(&format!("--{long}")), "--{long}");
        }
        let lines = OPERATIONS.lines().filter(|line| line.starts_with("    cgpu-smi"));
        let mut parsed = 0;
        for line in lines {
            let line = line.split(" #").next().unwrap_or(line);
            Args::try_parse_from(line.split_whitespace()).unwrap_or_else(|e| panic!("{line}: {e}"));
            parsed += 1;
        }
        assert!(parsed >= 5, "only {parsed} lines");
    }

    #[test]
    fn a_pause_is_neither_nothing_nor_for_ever() {
        let pause =
            |text| Args::try_parse_from(["cgpu-smi", "--loop", text]).map(|args| args.r#loop);
        assert_eq!(pause("0.5").unwrap(), Some(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "inf", "x", "1e9"] {
            assert!(pause(text).is_err(), "{text}");
        }
    }
}
