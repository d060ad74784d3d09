//! `tests/gpu/run` against the simulated driver: its questions are asked by the same programs and the
//! same containers as on a GPU, with a stand-in for libcuda (`standin/cuda.c`).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use cgpu_sim::{Sim, SimOptions};
use serde_json::Value;

use crate::support::{Outcome, Scratch, run_with_timeout};

/// A run takes a few seconds; with all tests at once, more.
const PATIENCE: Duration = Duration::from_secs(240);

/// A simulated driver, and what a run on it wrote down.
struct Seen {
    outcome: Outcome,
    head: Value,
    rows: BTreeMap<String, Value>,
    // The driver's files are unmounted before the scratch goes.
    _sim: Sim,
    _scratch: Scratch,
}

impl Seen {
    /// What `tests/gpu/run` sees with these further words.
    fn of(words: &[&str]) -> Self {
        let scratch = Scratch::new();
        let sim = Sim::start(SimOptions {
            dir: scratch.directory("sim"),
            gpus: vec!["16130MiB".parse().expect("a size")],
            driver: "535.161.08".parse().expect("a version"),
        });
        let sim = sim.expect("the simulated driver starts: root and /dev/fuse");
        let out = scratch.directory("out");
        let programs =
            Path::new(env!("CARGO_BIN_EXE_cgpu-runtime")).parent().expect("it lies somewhere");
        let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/gpu/run");
        let mut command = scratch.command("python3");
        command.arg(run).arg("--simulated").arg(scratch.path().join("sim")).arg("--out").arg(&out);
        command.arg("--programs").arg(programs).args(["--quota-mib", "1024"]).args(words);
        let outcome = run_with_timeout(command.env("TMPDIR", scratch.path()), PATIENCE);
        let text = fs::read_to_string(out.join("table.jsonl"));
        let text = text.unwrap_or_else(|error| panic!("no table: {error}; {outcome}"));
        let mut lines =
            text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line is JSON"));
        let head = lines.next().expect("a table has a head")["head"].clone();
        let number = |row: &Value| row["number"].as_str().expect("a number is text").to_owned();
        let rows: BTreeMap<String, Value> = lines.map(|row| (number(&row), row)).collect();
        let markdown =
            fs::read_to_string(out.join("table.md")).expect("there is a table to be read");
        for row in rows.values() {
            assert!(
                markdown.contains(row["question"].as_str().expect("text")),
                "{row} is not in {markdown}"
            );
        }
        Seen { outcome, head, rows, _sim: sim, _scratch: scratch }
    }

    /// The answers to these questions.
    #[track_caller]
    fn answers(&self, numbers: &[&str]) -> Vec<&Value> {
        let row = |number| {
            self.rows.get(number).unwrap_or_else(|| panic!("no {number}: {}", self.outcome))
        };
        numbers.iter().copied().map(row).collect()
    }

    /// That these were answered so.
    #[track_caller]
    fn all_are(&self, numbers: &[&str], answer: &str) {
        for row in self.answers(numbers) {
            assert_eq!(row["answer"], answer, "{row}\n{}", self.outcome);
            assert_ne!(row["seen"], "", "{row}");
        }
    }
}

/// Each path, and all else that memory comes by.
const MEMORY: [&str; 11] =
    ["1.3.1", "1.3.2", "1.3.3", "1.3.4", "1.3.5", "1.3.6", "1.3.7", "1.3.8", "1.4", "1.5", "1.9"];

#[test]
fn the_table_tells_what_the_gate_holds_and_what_it_did_not_ask() {
    let seen = Seen::of(&[]);
    seen.all_are(&MEMORY, "yes");
    seen.all_are(&["1.1", "1.6", "1.7", "1.8", "1.11", "2.1", "3.1", "3.2", "4.2"], "yes");
    let asked_elsewhere = [
        "0.1", "1.2", "1.10", "2.2", "2.3", "3.3", "3.4", "3.5", "3.6", "4.1", "4.3", "4.4", "5.1",
    ];
    seen.all_are(&asked_elsewhere, "not asked");
    assert_eq!(seen.rows.len(), MEMORY.len() + 9 + asked_elsewhere.len(), "{}", seen.outcome);
    let way = seen.head["programs ran in"].as_str().expect("text");
    assert!(way.starts_with("a container by runc"), "{way}");
    assert!(seen.head["driver"].as_str().is_some_and(|driver| driver.contains("simulated")));
    assert!(
        seen.answers(&["1.1"])[0]["seen"].as_str().is_some_and(|text| text.contains("1024 MiB"))
    );
    seen.outcome.ok();
}

#[test]
fn a_quota_that_does_not_hold_is_told_and_fails_the_run() {
    let seen = Seen::of(&["--leaking", "--only", "shown,paths,processes,managed,outside,unseen"]);
    seen.all_are(&MEMORY, "no");
    seen.all_are(&["1.1", "1.6", "2.1"], "no");
    for row in seen.answers(&MEMORY[..10]) {
        let told = row["seen"].as_str().expect("text");
        assert!(told.contains("MORE THAN THE QUOTA"), "{row}");
    }
    seen.outcome.exits(1);
}

#[test]
fn where_no_runtime_works_a_bare_process_is_behind_the_same_filter() {
    let seen = Seen::of(&["--way", "bare", "--only", "shown,paths,killed"]);
    seen.all_are(&MEMORY[..8], "yes");
    seen.all_are(&["1.1", "1.8"], "yes");
    let way = seen.head["programs ran in"].as_str().expect("text");
    assert!(way.starts_with("a bare process"), "{way}");
    seen.outcome.ok();
}
