//! The documents say what the programs do (`pages`), the architecture rules that no compiler knows hold
//! (`architecture`), and texts have the field's words (`words`).

mod architecture;
mod pages;
mod words;
