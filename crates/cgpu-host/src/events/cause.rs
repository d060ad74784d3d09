//! Why a container isn't made, in one word of few: [`Cause`]. Pure.

use serde::{Deserialize, Serialize};

/// What kept a container from being made: to be counted, where the event's reason is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    /// Too little memory of a GPU is left, or it never had so much.
    Memory,
    /// A GPU has as many containers as `max_inst` allows.
    Containers,
    /// Too little compute weight of a GPU is left.
    Weight,
    /// A GPU is one container's alone, or would have to be.
    Exclusive,
    /// What is asked for can't be meant, or isn't there.
    Request,
    /// The driver: GPUs, nodes or files that can't be had.
    Driver,
    /// The quota would not be enforced.
    Isolation,
    /// cgpu's own files, the configuration, the bundle or the runtime.
    Host,
    /// Of a version to come.
    #[serde(other)]
    Other,
}

impl Cause {
    /// The word, as events and metrics have it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Cause::Memory => "memory",
            Cause::Containers => "containers",
            Cause::Weight => "weight",
            Cause::Exclusive => "exclusive",
            Cause::Request => "request",
            Cause::Driver => "driver",
            Cause::Isolation => "isolation",
            Cause::Host => "host",
            Cause::Other => "other",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A cause is written as it is called, and one that is unknown is read as other.
    #[test]
    fn cause_round_trips_and_unknown_one_is_other() {
        for cause in [
            Cause::Memory,
            Cause::Containers,
            Cause::Weight,
            Cause::Exclusive,
            Cause::Request,
            Cause::Driver,
            Cause::Isolation,
            Cause::Host,
        ] {
            let text = serde_json::to_value(cause).unwrap();
            assert_eq!(text, cause.name());
            assert_eq!(serde_json::from_value::<Cause>(text).unwrap(), cause);
        }
        assert_eq!(serde_json::from_str::<Cause>("\"quota\"").unwrap(), Cause::Other);
    }
}
