//! Real engines for integration tests, each private to the test that asked for it.
//!
//! A test binary says `mod support;` and starts what it needs:
//!
//! ```ignore
//! let docker = Docker::builder().runtime(env!("CARGO_BIN_EXE_cgpu-runtime")).start();
//! docker.run(&["--rm", "--runtime=cgpu", IMAGE, "env"]).ok();
//! ```
//!
//! Everything an engine makes lies in its [`Scratch`] directory or carries that directory's name:
//! sockets, roots, bundles, cgroups, an environment variable. Dropping the scratch kills, unmounts
//! and removes whatever carries the name, and the [`warden`] does the same when the test binary
//! ends in any other way. So an engine may also live in a static and serve a whole test binary:
//! `static DOCKER: LazyLock<Docker> = LazyLock::new(|| Docker::builder().start());`.
//!
//! This module must know nothing of cgpu: a test passes the path of the runtime to wrap. It never
//! touches the engines that the machine itself may run, and it never skips: without its
//! [`prerequisites`] it panics and says what to install.

#![allow(dead_code, unused_imports, reason = "every test binary uses another part of the harness")]
#![allow(
    unreachable_pub,
    reason = "private to each test binary: `pub` marks what tests are meant to use"
)]

mod cgroup;
mod command;
mod containerd;
mod cri;
mod docker;
pub mod driver;
mod image;
mod patience;
mod podman;
mod prerequisites;
mod runtime;
mod scratch;
mod traces;
mod tree;
pub mod userland;
pub mod warden;

pub use cgroup::{is_unified as cgroups_are_unified, members as cgroup_members};
pub use command::{Outcome, Running, run_with_input, run_with_timeout, sibling, start};
pub use containerd::Containerd;
pub use cri::{Cri, Executed};
pub use docker::{Docker, Restart};
pub use image::{IMAGE, Image};
pub use patience::timeout;
pub use podman::Podman;
pub use prerequisites::{prerequisites, program};
pub use runtime::Runtime;
pub use scratch::{Bundle, Scratch};
pub use traces::Traces;

use std::time::{Duration, Instant};

/// Waits for what has to come, however busy the machine is; says whether it came.
pub fn eventually(condition: impl FnMut() -> bool) -> bool {
    wait_until(timeout(), condition)
}

/// Asks `condition` every few milliseconds until it holds, at most for `limit`; says whether it
/// held.
pub fn wait_until(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if start.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
