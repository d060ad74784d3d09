//! NVML, the driver's management library: which GPUs it knows.
//!
//! It takes a second or more to load where nothing keeps the GPUs open, and can hang with the driver. So only `cgpu` and the
//! programs that show GPUs use it; the runtime reads the cache that [`refresh()`] writes
//! ([`cached`](cgpu_host::inventory::cached)), or has `cgpu` write it.

mod refresh;

mod session;

pub use refresh::{RefreshError, probe, refresh};
pub use session::ProbeError;
pub(crate) use session::Session;
