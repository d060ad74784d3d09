//! How long tests wait. Tests of other packages include this file by its path.

#![allow(unreachable_pub, reason = "a module of some, and a part of what others include")]

use std::time::Duration;

/// How long a test waits for one command of an engine, or for one thing to happen, until it fails: half a minute, times the
/// factor that `CGPU_TEST_PATIENCE` says, for machines that are slow or busy.
pub fn timeout() -> Duration {
    let factor = std::env::var("CGPU_TEST_PATIENCE").ok().and_then(|factor| factor.parse().ok());
    Duration::from_secs(30) * factor.unwrap_or(1)
}
