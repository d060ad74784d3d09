use proptest::prelude::*;

use super::containerd::{self, File, Reading, Release, imports};
use super::toml_values::parse;
use super::{crio, docker, hooks, podman};

proptest! {
    #[test]
    fn no_text_breaks_a_reader(text in ".{0,200}") {
        let _ = (docker::runtimes(&text), crio::runtimes(&text), podman::runtimes(&text), hooks::hook(&text), imports::imports(&text));
        let _ = (crio::model([text.as_str()].into_iter()), podman::default_programs([text.as_str()].into_iter()));
        if let Ok(table) = parse(&text) {
            for release in [None, Some((1, 7)), Some((2, 1)), Some((2, 3))] {
                let release = release.map(|(major, minor)| Release { major, minor });
                let file = File::of(&table);
                let _ = containerd::runtimes::runtimes(&[file, file], Reading::of(release, &[file.version; 2]));
            }
        }
    }
}
