//! The profiles of tests name tests that there are: one that was renamed is in silence run twice, or nowhere.

use std::fs;
use std::path::Path;

use crate::words;

/// The patterns `test(/PATTERN/)` of a configuration of nextest.
fn patterns(configuration: &str) -> Vec<&str> {
    let parts = configuration.split("test(/").skip(1);
    parts.map(|part| part.split_once("/)").expect("a pattern ends").0).collect()
}

/// Whether a pattern is in a test's path: at its beginning after `^`, anywhere else.
fn matches(pattern: &str, path: &str) -> bool {
    match pattern.strip_prefix('^') {
        Some(beginning) => path.starts_with(beginning),
        None => path.contains(pattern),
    }
}

/// The paths of the tests of the programs in `tests/`, and of those that a macro makes in a module their module's.
fn paths(tests: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for file in words::files(tests) {
        if file.extension().is_none_or(|is| is != "rs") {
            continue;
        }
        let below = file.strip_prefix(tests).expect("it lies below").with_extension("");
        // First comes the program.
        let parts = below.iter().skip(1).map(|part| part.to_string_lossy().into_owned());
        let module: String =
            parts.filter(|part| part != "mod" && part != "main").map(|part| part + "::").collect();
        let source = fs::read_to_string(&file).expect("sources are text");
        let inner = source.lines().filter_map(|line| {
            let name = line.trim().strip_prefix("mod ")?.strip_suffix(" {")?;
            Some(format!("{module}{name}::"))
        });
        found.extend(inner);
        found.extend(words::test_names(&source).iter().map(|name| format!("{module}{name}")));
    }
    found
}

#[test]
fn profiles_name_tests_that_there_are() {
    let configuration = words::root().join(".config/nextest.toml");
    let text = fs::read_to_string(configuration).expect("it can be read");
    let patterns = patterns(&text);
    assert!(patterns.len() > 20, "{patterns:?}");
    let paths = paths(&words::root().join("tests"));
    let unmatched: Vec<_> = patterns
        .iter()
        .filter(|pattern| !paths.iter().any(|path| matches(pattern, path)))
        .collect();
    assert!(unmatched.is_empty(), "no test is called so: {unmatched:?}");
}

#[test]
fn patterns_match_as_nextest_does() {
    assert_eq!(patterns("not (test(/^a::b_/)\n | test(/c_/))"), ["^a::b_", "c_"]);
    assert!(matches("^a::b_", "a::b_c") && !matches("^a::b_", "x::a::b_c"));
    assert!(matches("c_", "a::of_c_is") && !matches("c_", "a::c"));
}
