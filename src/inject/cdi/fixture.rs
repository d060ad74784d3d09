//! Specifications for tests: those of `tests/fixtures/cdi`, and the shortest one.

use std::fs;
use std::path::Path;

/// A device and an edit for each container; every part can be replaced.
pub(super) const MINIMAL: &str = "\
cdiVersion: 0.5.0
kind: nvidia.com/gpu
containerEdits:
  env: [A=b]
devices:
  - name: \"0\"
    containerEdits: {deviceNodes: [{path: /dev/nvidia0}]}
";

/// A fixture by its file's name.
pub(super) fn text(name: &str) -> String {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/cdi");
    fs::read_to_string(directory.join(name)).unwrap()
}
