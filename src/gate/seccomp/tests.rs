//! Evaluates the rules as runtimes and libseccomp do, and compares the result with what the rules should say.

use super::trap::ioctl;
use super::*;
use proptest::prelude::*;
use std::sync::LazyLock;

const LISTENER: ListenerPath<'_> = ListenerPath { path: "/run/cgpu/gate.sock", metadata: "abc" };

/// Calls of the resource manager that matter, as (mask, value).
const REQUESTS: &[(u32, u32)] = &[
    sized(0x27, 56),
    sized(0x29, 16),
    sized(0x2a, 32),
    sized(0x2b, 32),
    sized(0x2b, 48),
    sized(0x34, 28),
    sized(0x4a, 184),
    sized(0xd3, 16),
];

/// Bits 0–7 and 16–29 of a request, as the resource manager reads it: any type, any direction.
const fn sized(number: u8, size: u16) -> (u32, u32) {
    (0x3fff_00ff, (size as u32) << 16 | number as u32)
}

/// The trapped calls, with `requests` for `ioctl`.
fn calls(requests: &[(u32, u32)]) -> Vec<Trapped> {
    let mut calls = trapped();
    assert_eq!(calls[0].name, "ioctl");
    calls[0] = ioctl(requests);
    calls
}

const DOCKER: &str = include_str!("../../../tests/fixtures/seccomp/docker.json");
const CONTAINERD: &str = include_str!("../../../tests/fixtures/seccomp/containerd.json");

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// Merges twice, and checks that the second merge changes nothing.
#[track_caller]
fn merged(section: Option<&Value>, calls: &[Trapped]) -> Value {
    let once = super::merge_trapping(section, Machine::X86_64, &LISTENER, calls).unwrap();
    let twice = super::merge_trapping(Some(&once), Machine::X86_64, &LISTENER, calls);
    assert_eq!(twice.as_ref(), Ok(&once));
    once
}

/// A system call entry of the kernel, as libseccomp sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    /// Arguments of 64 bits.
    Wide,
    /// Arguments of 32 bits, as far as the filter looks.
    Narrow,
}

/// What the section does with a call. An entry matches where all of its conditions hold; two matching entries that
/// disagree are a fault of the section. Written after runc's `matchCall` and libseccomp's `db_rule_add`, and shares
/// no code with [`merge`].
fn simulate(section: &Value, name: &str, entry: Entry, args: [u64; 6]) -> Result<String, String> {
    let action = |value: &Value, name: &str, errno: &str| {
        let errno = value.get(errno).and_then(Value::as_u64).unwrap_or(1);
        match value[name].as_str().unwrap() {
            name @ ("SCMP_ACT_ERRNO" | "SCMP_ACT_TRACE") => format!("{name} {errno}"),
            name => name.to_owned(),
        }
    };
    let default = action(section, "defaultAction", "defaultErrnoRet");
    let mut rules: Vec<(&Value, &[Value])> = Vec::new();
    for call in section["syscalls"].as_array().into_iter().flatten() {
        if !call["names"].as_array().unwrap().iter().any(|n| n == name) {
            continue;
        }
        let args = call.get("args").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let index = |at: usize| &args[at]["index"];
        if (1..args.len()).any(|at| (0..at).any(|before| index(before) == index(at))) {
            rules.extend(args.iter().map(|arg| (call, std::slice::from_ref(arg))));
        } else {
            rules.push((call, args));
        }
    }
    // A rule with the default action does nothing.
    let of_rule =
        |call: &Value| Some(action(call, "action", "errnoRet")).filter(|of| *of != default);
    let number = |arg: &Value, name: &str| arg.get(name).and_then(Value::as_u64).unwrap_or(0);
    let width = if entry == Entry::Wide { u64::MAX } else { u32::MAX.into() };
    let blank =
        |arg: &Value| arg["op"] == "SCMP_CMP_MASKED_EQ" && number(arg, "value") & width == 0;
    let mut blanks = rules.iter().filter(|(_, args)| args.iter().all(blank));
    if let Some(action) = blanks.find_map(|(call, _)| of_rule(call)) {
        return Ok(action);
    }
    let passes = |arg: &Value| {
        let given = args[usize::try_from(number(arg, "index")).unwrap()] & width;
        let (value, second) = (number(arg, "value") & width, number(arg, "valueTwo") & width);
        match arg["op"].as_str().unwrap() {
            "SCMP_CMP_EQ" => given == value,
            "SCMP_CMP_NE" => given != value,
            "SCMP_CMP_LT" => given < value,
            "SCMP_CMP_LE" => given <= value,
            "SCMP_CMP_GE" => given >= value,
            "SCMP_CMP_GT" => given > value,
            "SCMP_CMP_MASKED_EQ" => given & value == second & value,
            other => panic!("{other}"),
        }
    };
    let passed = rules.iter().filter(|(_, args)| args.iter().all(passes));
    let mut said = passed.filter_map(|(call, _)| of_rule(call));
    let Some(first) = said.next() else { return Ok(default) };
    match said.find(|other| *other != first) {
        Some(other) => Err(format!("{first} and {other}")),
        None => Ok(first),
    }
}

fn permits(action: &str) -> bool {
    ["SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE"].iter().any(|name| action.starts_with(name))
}

fn is_trapped(request: u64, requests: &[(u32, u32)]) -> bool {
    requests.iter().any(|&(mask, value)| request & u64::from(mask) == u64::from(value))
}

/// Checks a call before and after the merge: a trapped call notifies where it was permitted, every other call has its
/// old action, or the action of the same request without garbage.
#[track_caller]
fn check_ioctl(before: &Value, after: &Value, requests: &[(u32, u32)], args: [u64; 6]) {
    const HALF: u64 = u32::MAX as u64;
    for entry in [Entry::Wide, Entry::Narrow] {
        let now = simulate(after, "ioctl", entry, args).unwrap();
        // A value of more than 32 bits means for both entries what it means in a 64-bit program.
        let args = if entry == Entry::Wide { args } else { args.map(|arg| arg & HALF) };
        let said = |args| simulate(before, "ioctl", Entry::Wide, args);
        let clean = [args[0], args[1] & HALF, args[2], args[3], args[4], args[5]];
        let context = || format!("{args:x?} {entry:?}: {:?} → {now}", said(clean));
        if is_trapped(args[1], requests) {
            match said(clean) {
                Ok(said) if permits(&said) => assert_eq!(now, "SCMP_ACT_NOTIFY", "{}", context()),
                // A section that contradicts itself: the call is denied or notifies, and is never permitted.
                _ => assert!(!permits(&now), "{}", context()),
            }
        } else {
            match (said(args), said(clean)) {
                (Ok(one), Ok(two)) => assert!(now == one || now == two, "{}", context()),
                _ => assert_ne!(now, "SCMP_ACT_NOTIFY", "{}", context()),
            }
        }
    }
}

fn none() -> Value {
    json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": []})
}

/// The section that [`merge`] starts with where a bundle has none.
fn permissive() -> Value {
    let mut section = Map::new();
    permit_everything(&mut section, Machine::X86_64);
    section.into()
}

fn compare(op: &str, index: u64, value: u64, second: u64) -> Value {
    json!({"index": index, "value": value, "valueTwo": second, "op": format!("SCMP_CMP_{op}")})
}

fn section(default: &str, rules: &[(&str, &str, &[Value])]) -> Value {
    let syscalls = rules.iter().map(|(name, action, args)| {
        json!({"names": ["read", name], "action": format!("SCMP_ACT_{action}"), "args": args})
    });
    json!({
        "defaultAction": format!("SCMP_ACT_{default}"),
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
        "syscalls": Value::from_iter(syscalls),
    })
}

/// One profile of each kind, with what is peculiar about it.
fn profiles() -> Vec<(&'static str, Value)> {
    const TIOCSTI: u64 = 0x5412;
    let not_tiocsti = compare("NE", 1, TIOCSTI, 0);
    let tiocsti = compare("MASKED_EQ", 1, u32::MAX.into(), TIOCSTI);
    vec![
        ("docker's", parsed(DOCKER)),
        ("containerd's", parsed(CONTAINERD)),
        ("none", none()),
        ("none, made by us", permissive()),
        ("allows but one", section("ALLOW", &[("ioctl", "ERRNO", std::slice::from_ref(&tiocsti))])),
        ("denies but one", section("KILL", &[("ioctl", "ALLOW", &[compare("EQ", 1, 0x5401, 0)])])),
        ("allows all but one", section("ERRNO", &[("ioctl", "ALLOW", &[not_tiocsti])])),
        ("allows a trapped one", {
            section("ERRNO", &[("ioctl", "ALLOW", &[compare("EQ", 1, 0xc030_462b, 0)])])
        }),
        ("denies a trapped one", {
            section("ALLOW", &[("ioctl", "KILL", &[compare("EQ", 1, 0xc030_462b, 0)])])
        }),
        ("ranges", section("ERRNO", &[("ioctl", "ALLOW", &[compare("GT", 1, 0x8000_0000, 0)])])),
        (
            "forbidden ranges",
            section("LOG", &[("ioctl", "ERRNO", &[compare("LE", 1, 0xc0ff_ffff, 0)])]),
        ),
        ("by descriptor", {
            section(
                "ERRNO",
                &[
                    ("ioctl", "ALLOW", &[compare("LE", 0, 2, 0)]),
                    ("ioctl", "ERRNO", &[compare("EQ", 0, 1, 0), compare("GE", 1, 0x5400, 0)]),
                ],
            )
        }),
        ("contradicts itself", {
            section(
                "KILL_PROCESS",
                &[("ioctl", "ALLOW", &[compare("NE", 2, 0, 0)]), ("ioctl", "TRAP", &[tiocsti])],
            )
        }),
        ("unconditional beside conditional", {
            section(
                "ERRNO",
                &[("ioctl", "KILL", &[compare("EQ", 1, TIOCSTI, 0)]), ("ioctl", "LOG", &[])],
            )
        }),
        ("alternatives", {
            let args =
                [compare("EQ", 1, 1, 0), compare("EQ", 1, 0xc020_462a, 0), compare("EQ", 0, 7, 0)];
            section("ERRNO", &[("ioctl", "ALLOW", &args)])
        }),
        ("traces", section("TRACE", &[("ioctl", "ALLOW", &[compare("EQ", 1, 0x5401, 0)])])),
        ("logs", section("LOG", &[])),
        ("denies everything", section("ERRNO", &[])),
        (
            "garbage is allowed",
            section("ERRNO", &[("ioctl", "ALLOW", &[compare("EQ", 1, 5 << 32 | 0xc020_462a, 0)])]),
        ),
    ]
}

/// The section with its rules on that call alone, so that no other rules are searched for each call.
fn only(section: &Value, name: &str) -> Value {
    let mut section = section.clone();
    if let Some(calls) = section["syscalls"].as_array_mut() {
        calls.retain(|call| call["names"].as_array().unwrap().iter().any(|known| known == name));
        calls.iter_mut().for_each(|call| call["names"] = json!([name]));
    }
    section
}

/// What the sections of [`MERGED`] say of `ioctl`, before and after.
static IOCTLS: LazyLock<Vec<(Value, Value)>> = LazyLock::new(|| {
    MERGED.iter().map(|(_, before, after)| (only(before, "ioctl"), only(after, "ioctl"))).collect()
});

static MERGED: LazyLock<Vec<(&str, Value, Value)>> = LazyLock::new(|| {
    let merged = |(kind, before)| {
        let after = merged(Some(&before), &calls(REQUESTS));
        (kind, before, after)
    };
    profiles().into_iter().map(merged).collect()
});

/// Requests at which a rule is likely to be wrong: trapped requests with other types, directions and garbage, their
/// neighbours by one bit, and any number.
fn requests(trapped: &[(u32, u32)]) -> impl Strategy<Value = u64> + use<> {
    let near: Vec<u64> = trapped
        .iter()
        .map(|&(_, value)| value.into())
        .chain([0x5401, 0x5412, 0x5421, 0xc030_462b])
        .collect();
    let near = (proptest::sample::select(near), any::<u64>(), 0..64u32, any::<bool>()).prop_map(
        |(request, noise, bit, flip)| {
            let garbage = noise & !0x3fff_00ff;
            let request = if noise & 1 == 0 { request } else { request | garbage };
            if flip { request ^ 1 << bit } else { request }
        },
    );
    prop_oneof![3 => near, 1 => any::<u64>(), 1 => any::<u32>().prop_map(u64::from)]
}

fn trap_sets() -> impl Strategy<Value = Vec<(u32, u32)>> {
    let sized = (any::<u8>(), prop_oneof![0..64u16, 0..0x4000u16])
        .prop_map(|(number, size)| sized(number, size));
    let exact = prop_oneof![0..80u32, any::<u32>()].prop_map(|request| (u32::MAX, request));
    proptest::collection::vec(prop_oneof![4 => sized, 1 => exact], 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_profile_notifies_of_exactly_what_is_trapped(
        requests_seen in proptest::collection::vec(requests(REQUESTS), 16),
        others in any::<[u64; 6]>(), small in 0..9u64,
    ) {
        for (before, after) in &*IOCTLS {
            for request in &requests_seen {
                let mut args = others;
                args[1] = *request;
                check_ioctl(before, after, REQUESTS, args);
                args[0] = small;
                check_ioctl(before, after, REQUESTS, args);
            }
        }
    }

    #[test]
    fn any_set_of_requests_can_be_trapped(
        (traps, seen) in trap_sets().prop_flat_map(|traps| {
            let seen = proptest::collection::vec(requests(&traps), 64);
            (Just(traps), seen)
        }),
    ) {
        for before in [none(), parsed(DOCKER)] {
            let after = merged(Some(&before), &calls(&traps));
            let (before, after) = (only(&before, "ioctl"), only(&after, "ioctl"));
            for request in &seen {
                check_ioctl(&before, &after, &traps, [3, *request, 0, 0, 0, 0]);
            }
        }
    }

    #[test]
    fn shared_mappings_with_an_offset_notify(
        flags in prop_oneof![0..64u64, any::<u64>()],
        offset in prop_oneof![Just(0u64), Just(1 << 32), any::<u64>()],
        others in any::<[u64; 6]>(),
    ) {
        let args = [others[0], others[1] >> 1, others[2], flags, others[4], offset];
        for (kind, before, after) in &*MERGED {
            let wide = simulate(after, "mmap", Entry::Wide, args).unwrap();
            let was = simulate(before, "mmap", Entry::Wide, args).unwrap();
            let trapped = flags & 1 == 1 && offset != 0 && permits(&was);
            prop_assert_eq!(wide, if trapped { "SCMP_ACT_NOTIFY".into() } else { was }, "{}", kind);
            let was = simulate(before, "mmap2", Entry::Narrow, args).unwrap();
            let narrow = simulate(after, "mmap2", Entry::Narrow, args).unwrap();
            let trapped = flags & 1 == 1 && offset & 0xffff_ffff != 0 && permits(&was);
            prop_assert_eq!(narrow, if trapped { "SCMP_ACT_NOTIFY".into() } else { was });
            if has_unreadable_mmap(after.as_object().unwrap()) {
                let blind = simulate(after, "mmap", Entry::Narrow, args).unwrap();
                prop_assert!(!permits(&blind), "{kind}: {blind}");
            }
        }
    }
}

proptest! {
    #[test]
    fn what_would_make_programs_alike_notifies(
        option in prop_oneof![Just(35), Just(15), Just(0x5356_4d41), any::<u64>()],
        bits in prop_oneof![Just(0), Just(8), Just(0x4_0000), Just(0xffff_ffff), any::<u64>()],
        upper in prop_oneof![Just(0), any::<u64>().prop_map(|upper| upper << 32)],
    ) {
        for (kind, before, after) in &*MERGED {
            for (name, number, is_trapped) in [
                ("prctl", option | upper, option & 0x3f == 35),
                ("personality", bits | upper, bits & 0x4_0000 != 0),
            ] {
                let args = [number, 0, 0, 0, 0, 0];
                for entry in [Entry::Wide, Entry::Narrow] {
                    let was = simulate(before, name, entry, args).unwrap();
                    let said = simulate(after, name, entry, args).unwrap();
                    // The kernel reads 32 bits, and docker's rule for a number compares 64.
                    let read = [number & 0xffff_ffff, 0, 0, 0, 0, 0];
                    let is_trapped =
                        is_trapped && permits(&simulate(before, name, entry, read).unwrap());
                    let wanted = if is_trapped { "SCMP_ACT_NOTIFY".into() } else { was };
                    prop_assert_eq!(said, wanted, "{} {} {:#x}", kind, name, number);
                }
            }
        }
    }
}

#[test]
fn nothing_becomes_a_section_that_allows_and_traps() {
    let after = merged(None, &calls(REQUESTS));
    assert_eq!(after, merged(Some(&Value::Null), &calls(REQUESTS)));
    assert_eq!(after, merged(Some(&json!({})), &calls(REQUESTS)));
    assert_eq!(after["defaultAction"], "SCMP_ACT_ALLOW");
    assert_eq!(
        after["architectures"],
        json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"])
    );
    assert_eq!(after["listenerPath"], "/run/cgpu/gate.sock");
    assert_eq!(after["listenerMetadata"], "abc");
    let rules = after["syscalls"].as_array().unwrap();
    assert_eq!(rules.iter().filter(|rule| rule::has_name(rule, "ioctl")).count(), REQUESTS.len());
    assert!(rules.contains(&mmap_refusal(12)));
    let arm = merge(None, Machine::Aarch64, &LISTENER).unwrap();
    assert_eq!(arm["architectures"], json!(["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]));
    assert!(!arm["syscalls"].as_array().unwrap().iter().any(is_mmap_refusal));
}

#[test]
fn mappings_are_mapped_anew_by_no_program() {
    for (kind, before, after) in &*MERGED {
        let said = simulate(after, "remap_file_pages", Entry::Wide, [0; 6]).unwrap();
        let was = simulate(before, "remap_file_pages", Entry::Wide, [0; 6]).unwrap();
        assert!(!permits(&said), "{kind}: {was} → {said}");
        let default = after["defaultAction"].as_str().unwrap();
        let is_ours = permits(&was) && default != "SCMP_ACT_ERRNO";
        assert_eq!(said == "SCMP_ACT_ERRNO 38", is_ours, "{kind}: {was} → {said}");
    }
}

#[test]
fn dockers_profile_loses_five_names_and_nothing_else() {
    let before = parsed(DOCKER);
    let after = merged(Some(&before), &trapped());
    let mut expected = before["syscalls"].as_array().unwrap().clone();
    for entry in &mut expected {
        for name in ["ioctl", "mmap", "mmap2", "prctl", "remap_file_pages"] {
            rule::remove_name(entry, name);
        }
    }
    // The rule that permits the question for the present personality goes: its number has the trapped bit.
    expected.retain(|entry| entry["args"][0]["value"] != u32::MAX);
    let rules = after["syscalls"].as_array().unwrap();
    assert_eq!(rules[..expected.len()], expected);
    assert!(rules.len() - expected.len() < 60, "{}", rules.len());
    for name in ["defaultAction", "architectures"] {
        assert_eq!(after[name], before[name]);
    }
}

#[test]
fn what_is_not_known_stays() {
    let before = json!({
        "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "x": 1.50,
        "archMap": [{"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]}],
        "architectures": ["SCMP_ARCH_X86_64"],
        "flags": ["SECCOMP_FILTER_FLAG_LOG"],
        "syscalls": [{"names": ["ioctl"], "action": "SCMP_ACT_ALLOW", "comment": "theirs"}],
    });
    let after = merged(Some(&before), &calls(REQUESTS));
    for name in ["defaultErrnoRet", "x", "archMap", "architectures", "flags"] {
        assert_eq!(after[name], before[name]);
    }
    for rule in after["syscalls"].as_array().unwrap() {
        assert_eq!(rule["action"] == "SCMP_ACT_ALLOW", rule["comment"] == "theirs", "{rule}");
    }
}

#[test]
fn a_section_leaves_the_one_listener_to_us_or_is_refused() {
    assert_eq!(check_no_listener(None), Ok(()));
    assert_eq!(check_no_listener(Some(&Value::Null)), Ok(()));
    let dockers = section("ERRNO", &[("ioctl", "ALLOW", &[]), ("mount", "KILL", &[])]);
    assert_eq!(check_no_listener(Some(&dockers)), Ok(()));
    let mut listening = dockers.clone();
    listening["listenerPath"] = json!("/run/other");
    let path = "/run/other".into();
    assert_eq!(check_no_listener(Some(&listening)), Err(SectionError::OtherListener { path }));
    let field = |field: &str| Err(SectionError::Notifies { field: field.into() });
    let notifying = section("ERRNO", &[("ioctl", "ALLOW", &[]), ("mount", "NOTIFY", &[])]);
    assert_eq!(check_no_listener(Some(&notifying)), field("linux.seccomp.syscalls[1].action"));
    let all = section("NOTIFY", &[]);
    assert_eq!(check_no_listener(Some(&all)), field("linux.seccomp.defaultAction"));
    assert!(matches!(check_no_listener(Some(&json!([]))), Err(SectionError::Misshapen { .. })));
}

#[test]
fn the_refusal_of_blind_mmap_differs_from_the_default() {
    let mut section = section("ERRNO", &[("mmap", "ALLOW", &[])]);
    section["defaultErrnoRet"] = json!(12);
    let after = merged(Some(&section), &calls(REQUESTS));
    assert!(after["syscalls"].as_array().unwrap().contains(&mmap_refusal(22)));
}

#[test]
fn without_traps_a_listener_is_added_and_remapping_refused() {
    let mut after = merged(Some(&parsed(DOCKER)), &[]);
    let section = after.as_object_mut().unwrap();
    section.shift_remove("listenerPath");
    section.shift_remove("listenerMetadata");
    let mut expected = parsed(DOCKER);
    for entry in expected["syscalls"].as_array_mut().unwrap() {
        rule::remove_name(entry, "remap_file_pages");
    }
    assert_eq!(after, expected);
}

#[test]
fn a_section_that_cannot_be_kept_is_refused_with_field_and_remedy() {
    let notify = section("ALLOW", &[("getpid", "NOTIFY", &[])]);
    let mut ours_and_theirs = merged(None, &calls(REQUESTS));
    ours_and_theirs["syscalls"].as_array_mut().unwrap().push(notify["syscalls"][0].clone());
    let mut listening = none();
    listening["listenerPath"] = json!("/run/theirs");
    let upper = [compare("MASKED_EQ", 0, 1 << 40, 0)];
    for (section, sentence) in [
        (
            listening,
            "linux.seccomp.listenerPath is /run/theirs, and a container can have one listener: \
             the quota's; choose a seccomp profile without a listener",
        ),
        (
            notify,
            "linux.seccomp.syscalls[0].action is SCMP_ACT_NOTIFY, and a container can have one \
             listener: the quota's; choose a seccomp profile that notifies nobody",
        ),
        (section("NOTIFY", &[]), "linux.seccomp.defaultAction is SCMP_ACT_NOTIFY, and"),
        (ours_and_theirs, "].action is SCMP_ACT_NOTIFY, and"),
        (section("WHAT", &[]), "linux.seccomp.defaultAction is not an action like SCMP_ACT_ERRNO"),
        (json!({"syscalls": [{"names": []}]}), "linux.seccomp.defaultAction is not an action"),
        (json!([]), "linux.seccomp is not an object; correct the seccomp profile"),
        (
            json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": {}}),
            "linux.seccomp.syscalls is not a list",
        ),
        (
            section("ERRNO", &[("ioctl", "ALLOW", &[json!({"index": 6, "op": "SCMP_CMP_EQ"})])]),
            "linux.seccomp.syscalls[0].args is not a list of {index, value, valueTwo, op}",
        ),
        (
            section("ERRNO", &[("mmap", "ALLOW", &[compare("GT", 3, 1, 0)])]),
            "linux.seccomp.syscalls[0] compares argument 3 of mmap in a way that can't be joined \
             with a quota's rules; compare it with SCMP_CMP_EQ or SCMP_CMP_MASKED_EQ and a mask",
        ),
        (
            section("ERRNO", &[("ioctl", "ALLOW", &upper)]),
            "linux.seccomp.syscalls[0] compares only upper halves of arguments of ioctl",
        ),
    ] {
        let refused = merge(Some(&section), Machine::X86_64, &LISTENER).unwrap_err();
        assert!(refused.to_string().contains(sentence), "{refused}");
    }
}

#[test]
fn a_forged_section_of_ours_is_no_way_round() {
    let mut forged = none();
    forged["listenerPath"] = json!(LISTENER.path);
    assert_eq!(merged(Some(&forged), &calls(REQUESTS))["syscalls"], {
        let mut honest = merged(Some(&none()), &calls(REQUESTS));
        honest["syscalls"].take()
    });
}
