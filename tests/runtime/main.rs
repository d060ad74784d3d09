//! One call of `cgpu-runtime` or `cgpu-hook` over real runtimes: what passes through (`passing`), hooks (`hook`), GPUs without a
//! quota (`whole`), the vendor's module (`km`), whatever fails in between (`failures`), and changes (`set`).

#[path = "../host/mod.rs"]
mod host;
#[path = "../standin/km.rs"]
mod km_standin;
#[path = "../support/mod.rs"]
mod support;

mod failures;
mod hook;
mod km;
mod passing;
mod set;
mod whole;
