//! `cgpu-runtime`: the OCI runtime. Its command line is the real runtime's, plus
//! `--cgpu-config FILE` among the global flags.

use std::process::ExitCode;

fn main() -> ExitCode {
    // Returns only where the call failed; the engine has been told why.
    cgpu::runtime::main(std::env::args_os().skip(1).collect());
    ExitCode::FAILURE
}
