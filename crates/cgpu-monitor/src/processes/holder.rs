//! What becomes of a process outside the container that has one of the container's descriptors. Pure.
//!
//! A container can send a descriptor to any process that receives one: to another container's, which asked for it,
//! or to a program of the host that takes part in nothing, such as a message bus. The first is an accomplice and is
//! killed. To kill the second would let a container end what programs of the host it likes. So it lives unless the
//! driver itself shows that it takes memory; otherwise the container has to answer for what it gave away.

/// Why a process outside that has one of the container's descriptors is inspected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Evidence {
    /// The container's clients have memory that no process asked the monitor for.
    ContainerMemory,
    /// The process has memory itself, or could have. It may, where it has a GPU of its own.
    OwnMemory,
    /// Memory is in use that no living process is known to have: that of a client whose creator is dead, perhaps.
    Unexplained,
}

/// What is known of a process outside that has one of the container's descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HolderFacts {
    /// It is a program of the host: it is in the monitor's pid namespace.
    pub(crate) is_of_host: bool,
    /// It has opened files of the driver itself, too.
    pub(crate) has_own_file: bool,
    /// The driver shows memory for it.
    pub(crate) has_memory: bool,
    /// All processes of the container have ended.
    pub(crate) container_ended: bool,
}

/// What becomes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Consequence {
    Ignored,
    Killed,
    /// It lives, and the container is ended.
    ContainerEnds,
}

impl HolderFacts {
    pub(crate) fn consequence(self, evidence: Evidence) -> Consequence {
        let takes_memory = self.has_memory && !self.has_own_file;
        match evidence {
            _ if self.is_of_host && takes_memory => Consequence::Killed,
            Evidence::OwnMemory if self.is_of_host => Consequence::Ignored,
            Evidence::OwnMemory | Evidence::Unexplained if self.has_own_file => {
                Consequence::Ignored
            }
            _ if self.is_of_host && self.container_ended => Consequence::Ignored,
            _ if self.is_of_host => Consequence::ContainerEnds,
            _ => Consequence::Killed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Consequence::{ContainerEnds, Ignored, Killed};
    use super::Evidence::{ContainerMemory, OwnMemory, Unexplained};
    use super::*;

    const BUS: HolderFacts = HolderFacts {
        is_of_host: true,
        has_own_file: false,
        has_memory: false,
        container_ended: false,
    };

    #[test]
    fn host_program_is_killed_only_for_own_memory() {
        assert_eq!(BUS.consequence(OwnMemory), Ignored);
        // The memory may be its own, by a client whose creator is dead: the container has to answer for it.
        assert_eq!(BUS.consequence(Unexplained), ContainerEnds);
        assert_eq!(BUS.consequence(ContainerMemory), ContainerEnds);
        let ended = HolderFacts { container_ended: true, ..BUS };
        assert_eq!(ended.consequence(ContainerMemory), Ignored, "there is nothing left to end");
        for evidence in [OwnMemory, Unexplained, ContainerMemory] {
            assert_eq!(HolderFacts { has_memory: true, ..BUS }.consequence(evidence), Killed);
        }
        // One that opened the driver's files itself may have its memory by these.
        let uses_gpus = HolderFacts { has_memory: true, has_own_file: true, ..BUS };
        assert_eq!(uses_gpus.consequence(OwnMemory), Ignored);
        assert_eq!(uses_gpus.consequence(Unexplained), Ignored);
        assert_eq!(uses_gpus.consequence(ContainerMemory), ContainerEnds);
    }

    /// Another container's process is killed unless its memory may come from files of its own.
    #[test]
    fn foreign_process_is_killed_unless_own_files_explain() {
        let other = HolderFacts { is_of_host: false, ..BUS };
        for evidence in [OwnMemory, Unexplained, ContainerMemory] {
            assert_eq!(other.consequence(evidence), Killed);
        }
        let with_gpu = HolderFacts { has_own_file: true, ..other };
        assert_eq!(with_gpu.consequence(OwnMemory), Ignored);
        assert_eq!(with_gpu.consequence(Unexplained), Ignored);
        assert_eq!(with_gpu.consequence(ContainerMemory), Killed);
    }
}
