//! The stand-in for NVML, `nvml.c`, compiled.
//!
//! Test programs that need it use it by `#[path = "standin/nvml.rs"] mod nvml_standin;`.
//! Each host of a test needs a copy of the library, because the loader takes one file
//! under two names for one library; next to the copy lies what it says, in `nvml.txt`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The library's name as drivers install it.
pub(crate) const LIBRARY: &str = "libnvidia-ml.so.1";

/// The stand-in, compiled once.
///
/// # Panics
///
/// Where there is no C compiler.
pub(crate) fn compiled() -> &'static Path {
    static STANDIN: OnceLock<PathBuf> = OnceLock::new();
    STANDIN.get_or_init(|| compile("nvml", &[]))
}

/// The same as a driver before 510 has it, which reports a GPU's memory by the question's first
/// form alone.
///
/// # Panics
///
/// Where there is no C compiler.
#[allow(dead_code, reason = "not every test program has such a driver")]
pub(crate) fn compiled_before_510() -> &'static Path {
    static STANDIN: OnceLock<PathBuf> = OnceLock::new();
    STANDIN.get_or_init(|| compile("nvml-before-510", &["-DBEFORE_510"]))
}

fn compile(name: &str, options: &[&str]) -> PathBuf {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let library = directory.join(format!("{name}.so"));
    let fresh = directory.join(format!("{name}-{}.so", std::process::id()));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/standin/nvml.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"])
        .args([&fresh, &source])
        .args(options)
        .arg("-ldl")
        .status()
        .expect("these tests need a C compiler by the name of cc");
    assert!(compiled.success(), "tests/standin/nvml.c does not compile");
    fs::rename(fresh, &library).expect("the target directory can be written");
    library
}
