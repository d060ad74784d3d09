//! The documents say what the programs do (`pages`), and the architecture rules that no compiler knows hold
//! (`architecture`).

mod architecture;
mod pages;
