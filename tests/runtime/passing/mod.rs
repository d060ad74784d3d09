//! `cgpu-runtime` on the real runc and the real crun, called as engines call it.
//!
//! `pass_through`: what is not ours stays the real runtime's to the byte. `forms`: every
//! way to name a bundle, a root and a configuration. `life`: containers with a quota from
//! create to delete. `refusals`: what can't be had, and how the engine learns of it.
//! `rootless`: what users have who aren't root. Each test has a host of its own
//! ([`host::Host`]); the GPUs come from a file, and nothing enforces quotas, so that no driver is
//! needed.

mod forms;
mod host;
mod life;
mod pass_through;
mod refusals;
mod rootless;
