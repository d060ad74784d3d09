//! Which GPUs of the host a request means, and the quota on each.

use thiserror::Error;

use super::{Kind, Plan, Rules};
use crate::inventory::Inventory;
use crate::request::Request;

/// Why a request can't be met by any state of this host.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum ResolveError {}

/// The plan that `request` comes to on the GPUs of `inventory`.
///
/// # Errors
///
/// Where the request names what isn't there, or asks for what a GPU can't give.
pub fn resolve(
    _request: &Request,
    _inventory: &Inventory,
    backend: Kind,
    _rules: &Rules,
) -> Result<Plan, ResolveError> {
    Ok(Plan { backend, gpus: Vec::new(), weight: 1, high_priority: false })
}
