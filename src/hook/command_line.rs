//! The command line of `cgpu-hook`, of which its man page is made, too.

use std::path::PathBuf;

use clap::Parser;

use crate::hook::Stage;

/// Turns a container's GPU isolation on and off. Standard input: its OCI state, or configuration.
#[derive(Debug, Parser)]
#[command(name = "cgpu-hook", version)]
pub struct Hook {
    /// When it is called.
    #[arg(value_enum)]
    pub stage: Stage,
    /// The configuration [default: $CGPU_CONFIG, else /etc/cgpu/config.toml].
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// The runtime's root; set by cgpu-runtime.
    #[arg(long, requires = "id")]
    pub root: Option<String>,
    /// The container's id; set by cgpu-runtime.
    #[arg(long, requires = "root", allow_hyphen_values = true)]
    pub id: Option<String>,
    /// The reservation; set by precreate.
    #[arg(long, conflicts_with = "id")]
    pub reservation: Option<String>,
    /// Nothing holds the container.
    #[arg(long)]
    pub whole: bool,
}
