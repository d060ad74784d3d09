//! The reasons for which nothing is planned.

use std::path::PathBuf;

use thiserror::Error;

use crate::engines::config_file::ReadError;
use crate::engines::config_text::EditError;

/// Why nothing is planned.
#[derive(Debug, Error)]
pub enum PlanError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("{} {source}", path.display())]
    Edit {
        path: PathBuf,
        #[source]
        source: EditError,
    },
    #[error("{} isn't there or can't be executed; install cgpu, or name it with --runtime", path.display())]
    NoRuntime { path: PathBuf },
    /// The path of our runtime can't be written into a configuration.
    #[error("{} is no absolute path in UTF-8; name the runtime by such a path", path.display())]
    InvalidRuntimePath { path: PathBuf },
    #[error("{} is written by {by} at each of its starts; use `cgpu setup {by}`", path.display())]
    Generated { path: PathBuf, by: String },
    #[error("{} is a template; use `cgpu setup k3s` or `cgpu setup rke2`", path.display())]
    Template { path: PathBuf },
    #[error("{} isn't there: {by} writes it when it starts; start it once, then run this again", path.display())]
    NotStarted { path: PathBuf, by: &'static str },
    #[error(
        "the default runtime of {by} isn't named in {}, which adds to what {by} writes; put \
         `default-runtime: cgpu` into /etc/rancher/{by}/config.yaml and run this without --default",
        template.display()
    )]
    DefaultOfTemplate { template: PathBuf, by: &'static str },
    #[error("{} makes {name} the default runtime and is read after {}; change it there first", path.display(), target.display())]
    Overruled {
        path: PathBuf,
        name: String,
        /// The file that setup would have edited.
        target: PathBuf,
    },
}
