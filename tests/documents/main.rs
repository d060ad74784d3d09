//! The documents say what the programs do (`pages`), and the house rules that no compiler knows hold (`house`).

mod house;
mod pages;
