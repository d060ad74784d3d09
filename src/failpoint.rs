//! Places where tests end the process as SIGKILL, a crash or the OOM killer would.
//!
//! Only in builds with debug assertions: a release has none of it. The list is public
//! so that a test can prove that it reached each one.

/// Every place, in the order of one create and its hooks.
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
];

/// The environment variable that names the place.
pub const VARIABLE: &str = "CGPU_FAILPOINT";

/// Ends the process at once, uncatchably, if it was asked to fail here.
#[cfg(debug_assertions)]
pub fn failpoint(place: &str) {
    debug_assert!(ALL.contains(&place), "{place} is not in failpoint::ALL");
    if std::env::var_os(VARIABLE).is_some_and(|asked| asked == place) {
        let _ = nix::sys::signal::raise(nix::sys::signal::SIGKILL);
    }
}

/// Nothing.
#[cfg(not(debug_assertions))]
#[inline(always)]
pub fn failpoint(_place: &str) {}
