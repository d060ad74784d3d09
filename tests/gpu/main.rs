//! Proof on a real GPU, as far as it can be proved without one: that `tests/gpu/run` asks and judges
//! rightly (`table`), that who schedules programs leaves nothing behind (`steer`), and that every driver
//! call of the programs recorded in `corpus` is decided on (`replay`), as what others call (`workloads`).

#[path = "../support/mod.rs"]
mod support;

mod replay;
mod steer;
mod table;
mod workloads;
