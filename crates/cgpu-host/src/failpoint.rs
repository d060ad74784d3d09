//! Places where tests end the process as SIGKILL, a crash or the OOM killer would, or stop it
//! until they let it go on: so an order of two processes' steps is forced, not hoped for.
//!
//! Only in builds with debug assertions: a release has none of it. The list is public
//! so that a test can prove that it reached each one.

/// Every place, in the order of one container creation and its hooks; those of readers come last.
pub const ALL: &[&str] = &[
    "recruited",
    "registry-locked",
    "index-dropped",
    "record-written",
    "record-linked",
    "index-written",
    "reserved",
    "launched",
    "bundle-written",
    "bundle-replaced",
    "before-exec",
    "hook-isolated",
    "hook-activated",
    "hook-deactivated",
    "record-removed",
    "state-read",
    "holder-asked",
];

/// The places of the DRA driver, in the order of a claim's life.
pub const OF_CLAIMS: &[&str] = &["claim-recorded", "claim-cdi-written", "claim-cdi-removed"];

/// The environment variable that names the place where the process is killed.
pub const VARIABLE: &str = "CGPU_FAILPOINT";

/// The environment variable that names the place where the process stops (SIGSTOP), the first
/// time that it comes there.
pub const STOP_VARIABLE: &str = "CGPU_STOPPOINT";

/// Ends the process at once, uncatchably, if it was asked to fail here; stops it, if it was asked
/// to stop here.
#[cfg(debug_assertions)]
pub fn failpoint(place: &str) {
    use rustix::process::{Signal, getpid, kill_process};

    debug_assert!([ALL, OF_CLAIMS].concat().contains(&place), "{place} is in no list here");
    if std::env::var_os(VARIABLE).is_some_and(|asked| asked == place) {
        let _ = kill_process(getpid(), Signal::KILL);
    }
    if std::env::var_os(STOP_VARIABLE).is_some_and(|asked| asked == place) {
        static STOPPED: std::sync::Once = std::sync::Once::new();
        STOPPED.call_once(|| {
            let _ = kill_process(getpid(), Signal::STOP);
        });
    }
}

/// Nothing.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn failpoint(_place: &str) {}
