//! What a published list says that workloads call (`workloads.tsv`): each is served, or is
//! in [`NOT_SERVED`] with the reason, which users can read.

use std::collections::BTreeSet;

use cgpu_monitor::decide::{Verdict, judge};
use nvrm::call::{Alloc, Object};
use nvrm::class::class_use;
use nvrm::control::{ControlKind, check};
use nvrm::{Call, Key, Release, uvm};

use crate::replay::UNTRAPPED;

const SURFACE: &str = "up to driver 555.58.02 it names whichever client it likes";
const MAPPER: &str = "a memory mapper keeps memory alive that no figure shows";
const MULTICAST: &str = "memory would outlive its charge in a multicast group";
const FABRIC: &str = "memory would outlive its charge in the fabric";
const PEERS: &str = "answered as made: no other driver (GPUDirect RDMA) may take memory";
const COLOURS: &str = "the GPU's table of clear colours is everybody's and never freed";

const TURNS: &str =
    "takes turns on the GPU that are others', or its own back; no recorded program asks";

/// Calls that are not served, and why.
const NOT_SERVED: &[(&str, u32, &str)] = &[
    ("class", 0xf8, FABRIC),
    ("class", 0xfd, MULTICAST),
    ("class", 0xfe, MAPPER),
    ("control", 0x00da_0002, SURFACE),
    ("control", 0x00f8_0103, FABRIC),
    ("control", 0x00fd_0102, MULTICAST),
    ("control", 0x00fd_0104, MULTICAST),
    ("control", 0x2080_110b, TURNS),
    ("control", 0x503c_0104, PEERS),
    ("control", 0x503c_0105, PEERS),
    ("control", 0x9096_0101, COLOURS),
    ("control", 0xa06c_0105, TURNS),
];

/// Whether it's made, by us or by the caller.
fn is_served(release: &Release, kind: &str, number: u32) -> bool {
    match kind {
        "class" => {
            let object = Object { client: 1, parent: 2, handle: 3 };
            let does = class_use(number).does;
            let (class, params_size) = (number, Some(8));
            let alloc = Alloc { object, class, does, params: 1, params_size, rights: 0 };
            // What the caller's own memory is described by comes by another call.
            let memory = Call::AllocMemory { object, class: number };
            let is_made = |call| !matches!(judge(release, &call), Verdict::Refuse(_));
            is_made(Call::Alloc(alloc)) || is_made(memory)
        }
        "control" => {
            !matches!(check(release, number, 0), Err(_) | Ok(ControlKind::FakedSuccess(_)))
        }
        "frontend" => {
            let is_read = !release.layouts(Key::Escape(number)).is_empty();
            is_read || UNTRAPPED.iter().any(|(untrapped, _)| *untrapped == number)
        }
        "uvm" => uvm::params_size(release, number)
            .is_ok_and(|size| uvm::decode(release, number, &vec![0; size]).is_ok()),
        kind => panic!("a kind {kind}"),
    }
}

fn workloads() -> Vec<(String, u32, String)> {
    let text = include_str!("workloads.tsv");
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let fields: Vec<&str> = line.split('\t').collect();
            let number = fields[1].strip_prefix("0x").expect("a number");
            let number = u32::from_str_radix(number, 16).expect("a number");
            (fields[0].to_owned(), number, fields[2].to_owned())
        })
        .collect()
}

#[test]
fn workload_calls_are_served_or_documented_as_refused() {
    let all = workloads();
    assert!(all.len() > 300, "{}", all.len());
    let mut wrong = BTreeSet::new();
    for driver in ["535.161.08", "550.54.14", "580.95.05", "595.45.04"] {
        let release = Release::of(driver.parse().expect("a version")).expect("it is supported");
        for (kind, number, name) in &all {
            let named = NOT_SERVED.iter().any(|(of, not, _)| (*of, *not) == (kind, *number));
            if is_served(&release, kind, *number) == named {
                wrong.insert(format!("{driver}: {kind} {number:#x} {name}: named: {named}\n"));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.into_iter().collect::<String>());
}

/// No refusal is named of a call that no workload makes.
#[test]
fn documented_refusals_are_calls_of_workloads() {
    let all = workloads();
    for (kind, number, why) in NOT_SERVED {
        assert!(!why.is_empty());
        let is_called =
            all.iter().any(|(of, called, _)| (of.as_str(), *called) == (*kind, *number));
        assert!(is_called, "{kind} {number:#x}");
    }
}
