//! What a page takes from its environment: the terminal's locale and the time.

use std::env;
use std::time::SystemTime;

use crate::cells::Signs;

/// What this terminal shows.
pub(crate) fn signs() -> Signs {
    let [all, ctype, lang] = ["LC_ALL", "LC_CTYPE", "LANG"].map(|name| env::var(name).ok());
    Signs::of_locale([all.as_deref(), ctype.as_deref(), lang.as_deref()])
}

/// The time, to the second, in UTC.
pub(crate) fn now() -> String {
    humantime::format_rfc3339_seconds(SystemTime::now()).to_string()
}
