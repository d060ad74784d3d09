//! The documents say what the programs do (`pages`), the architecture rules that no compiler knows hold
//! (`architecture`), texts have the field's words (`words`), and the profiles of tests choose tests (`test_profiles`).

mod architecture;
mod pages;
mod test_profiles;
mod words;
