//! Why a request can't be meant: [`RequestError`], in sentences that end in a remedy.

use thiserror::Error;

use super::name::MEM_CONTAINER;
use super::setting::{Quoted, Setting};

/// Why a request can't be meant, on whatever host.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RequestError {
    /// Control characters, or bytes that were no UTF-8.
    #[error(
        "{setting} is no text: it has control characters, or bytes that are not UTF-8; \
         write it anew in plain characters"
    )]
    NotText {
        /// What was said.
        setting: Setting,
    },
    /// The scheduler says in this way that it failed.
    #[error(
        "the scheduler found no GPU for this container: {setting}; \
         free GPU memory on this node or ask for less ({})",
        MEM_CONTAINER.variable
    )]
    NoGpuFound {
        /// What was said.
        setting: Setting,
    },
    /// `CGPU_DISABLE` is neither of its words.
    #[error("{setting} is neither yes nor no; write true or 1, false or 0")]
    BadSwitch {
        /// What was said.
        setting: Setting,
    },
    /// An item of the memory list is no number.
    #[error(
        "{setting}: {} is no whole number below 2^64; \
         write digits only, or a comma list of such numbers, one for each GPU",
        Quoted(.item)
    )]
    BadMemory {
        /// What was said.
        setting: Setting,
        /// The item that is no number.
        item: String,
    },
    /// The GPU's total is no number.
    #[error(
        "{setting} is not one whole number from 1; write the memory of each GPU, digits only, \
         in the unit of {memory}"
    )]
    BadTotal {
        /// What was said.
        setting: Setting,
        /// Name of the memory list.
        memory: &'static str,
    },
    /// More is asked for than a GPU has.
    #[error(
        "{memory} asks for {amount}, more than the whole GPU ({total}); \
         lower the one or correct the other"
    )]
    MoreThanTotal {
        /// What was said of the container.
        memory: Setting,
        /// The largest item of it.
        amount: u64,
        /// What was said of the GPU.
        total: Setting,
    },
    /// The unit is needed, and unknown.
    #[error(
        "{setting} is no known unit; write GiB, MiB or a number of MiB as 128MiB, or set {total}"
    )]
    BadUnit {
        /// What was said.
        setting: Setting,
        /// Name of the GPU's total, beside which no unit is needed.
        total: &'static str,
    },
    /// The weight is no number, or zero.
    #[error("{setting} is no whole number from 1; write the compute weight, digits only")]
    BadWeight {
        /// What was said.
        setting: Setting,
    },
    /// The priority is neither of its two.
    #[error("{setting} is neither 0 nor 1; write 1 for high priority")]
    BadPriority {
        /// What was said.
        setting: Setting,
    },
    /// An item of a list of GPUs names none.
    #[error(
        "{setting}: {} is no name of a GPU; write indices as 0,1 or UUIDs as GPU-… \
         (cgpu gpus shows them)",
        Quoted(.item)
    )]
    BadGpuName {
        /// What was said.
        setting: Setting,
        /// The item.
        item: String,
    },
}
