//! Proof on a real GPU, as far as it can be proved without one: that every driver call of the programs
//! recorded in `corpus` is decided on (`replay`).

mod replay;
