//! What the facts of a host mean: [`Facts`] to [`Finding`]s. Pure.
//!
//! Owns severities, sentences and remedies. Must not inspect anything itself. An error is
//! what has containers refused; a host that has no GPU has nothing wrong with it.

mod driver;

mod engines;

mod host;

use super::facts::Facts;
use super::{Finding, Section, Severity};

use Section::{Cgpu, Driver, Engines, Isolation, Runtimes, Toolkit};
use Severity::{Error, Note, Ok as Fine, Warning};

/// The findings, in the order of the screen.
#[must_use]
pub fn judge(facts: &Facts) -> Vec<Finding> {
    let mut findings = driver::judge(&facts.driver);
    findings.extend(host::isolation(&facts.isolation, driver::standing(&facts.driver), &facts.own));
    findings.extend(host::runtimes(&facts.runtimes, facts.isolation.cgroups));
    let hooks = engines::Hooks { files: &facts.hooks, backend: facts.isolation.backend };
    findings.extend(engines::judge(&facts.engines, hooks, &facts.own));
    findings.extend(engines::without_cdi(
        &facts.engines,
        facts.claims.as_deref(),
        &facts.toolkit.cdi,
    ));
    findings.push(engines::toolkit(&facts.toolkit));
    findings.extend(host::own(&facts.own));
    findings
}

/// `one, two and three`.
fn listed(items: &[String]) -> String {
    match items {
        [] => String::new(),
        [one] => one.clone(),
        [others @ .., last] => format!("{} and {last}", others.join(", ")),
    }
}

#[cfg(test)]
mod tests;
