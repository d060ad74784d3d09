//! The gate: the driver's ioctl boundary, held by seccomp user notification.
//!
//! Owns how calls come to a monitor and what becomes of them. A container's monitor is two
//! processes of `cgpu-monitor`: the *keeper* holds what must not be lost (the sockets, the
//! listeners, the ledger's journal), the *worker* answers calls and can be replaced at any
//! moment. Must not know OCI beyond the section that is merged into a bundle.

pub mod seccomp;

use self::seccomp::Request;
use crate::rm::Release;

/// The driver calls that a monitor has to see.
#[must_use]
pub fn traps(release: &Release) -> Vec<Request> {
    use crate::rm::Key;
    let calls = release.iter().flat_map(|(key, layouts)| {
        layouts.iter().filter_map(move |layout| match key {
            Key::Escape(number @ (0x27 | 0x29 | 0x2a | 0x2b | 0x34 | 0x4a | 211)) => {
                Some(Request::Sized {
                    number: u8::try_from(number).ok()?,
                    size: u16::try_from(layout.size()).ok()?,
                })
            }
            _ => None,
        })
    });
    calls.collect()
}

pub mod settings;

pub mod wire;

mod passing;

mod inherited;

pub mod launch;

pub mod client;

pub mod upgrade;

pub mod keeper;

pub mod worker;
