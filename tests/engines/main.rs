//! Real engines: containers under each (`starts`), the harness itself (`harness`), their configurations (`setup`,
//! `configurations`, `doctor`), and that a removed package leaves no container behind (`package_removal`).

#[path = "../host/mod.rs"]
mod host;
#[path = "../support/mod.rs"]
mod support;

mod configurations;
mod doctor;
mod harness;
mod package_removal;
mod setup;
mod starts;
