//! `cgpu doctor`: what of this host keeps containers from their GPUs, and what to do.
//!
//! Facts are gathered first ([`inspect()`], the edge: it reads files, asks two runtimes for
//! their versions and the kernel for its flags, and changes nothing), then judged
//! ([`judge()`], pure). Must not know how findings are shown. Everything is looked for
//! under roots that are given, so that tests, and a container with the host's files
//! mounted, can look at another host. What can't be read is a finding, never a failure.

pub mod facts;

mod collector;

mod driver;

mod host;

mod engines;

mod own;

mod judge;

pub use collector::{Roots, inspect};
pub use judge::judge;

use serde::Serialize;

/// How much a finding matters. The order is that of severity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing is wrong.
    Note,
    /// Something will not work, or not as it could.
    Warning,
    /// Containers that ask for GPUs are refused, or have none that works.
    Error,
}

/// What a finding is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Section {
    /// NVIDIA's driver.
    Driver,
    /// Kernel and backend.
    Isolation,
    /// The real runtimes.
    Runtimes,
    /// Who starts containers.
    Engines,
    /// NVIDIA's container toolkit.
    Toolkit,
    /// Ourselves.
    Cgpu,
}

/// One thing that was checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is about.
    pub section: Section,
    /// What was checked, by a name that stays.
    pub name: &'static str,
    /// How much it matters.
    pub severity: Severity,
    /// What was found, as a sentence.
    pub what: String,
    /// The file, program or device that it was found of; empty where it is the host.
    pub subject: String,
    /// What to do; `None` where there is nothing to do.
    pub remedy: Option<String>,
}

impl Finding {
    fn new(section: Section, name: &'static str, severity: Severity, what: String) -> Self {
        Finding { section, name, severity, what, subject: String::new(), remedy: None }
    }

    fn of(self, subject: impl Into<String>) -> Self {
        Finding { subject: subject.into(), ..self }
    }

    fn remedy(self, remedy: impl Into<String>) -> Self {
        Finding { remedy: Some(remedy.into()), ..self }
    }
}

/// An error with its causes, as a finding has it.
fn sentence(error: &dyn std::error::Error) -> String {
    cgpu_host::report::sentence(error).replacen("cgpu: ", "", 1)
}

/// The severest of `findings`.
#[must_use]
pub fn worst(findings: &[Finding]) -> Severity {
    findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok)
}
