//! The seccomp section of a bundle, with the monitor's traps in it: [`merge`].
//!
//! Owns the changes of `linux.seccomp` that bring a container's driver calls to a listener. Pure: a section in, a
//! section out. It knows no files, no runtimes, and no meaning of a call. Fields that it does not know stay. Merging
//! a merged section changes nothing.
//!
//! Of the calls that are to be trapped, a call that the section permits (`ALLOW`, `LOG`, `TRACE`) notifies the
//! listener, and a call that it denies stays denied. Every other call is treated as the section says. This holds in
//! whatever order rules are looked at, because added rules with different actions never overlap: libseccomp sorts
//! rules its own way, ignores a rule beside an unconditional one, and refuses a rule that begins like another. So
//! `ioctl` is removed from the list of permitted calls, and the requests outside the trapped set are permitted again
//! bit by bit ([`cube::outside`]). Where a section contradicts itself, the denial wins.
//!
//! libseccomp has further surprises with rules on several arguments, which are not modelled here (2.5.4 loses some
//! rules). The rules are shaped so that a lost one fails closed; `tests/seccomp.rs` checks that on the filters that
//! libseccomp makes of random sections.
//!
//! The kernel reads 32 bits of an ioctl's request; libseccomp compares 64 bits in a 64-bit program. Rules on the
//! request that overlap the trapped set are rewritten to compare the lower half, so garbage in the upper half is no
//! way around them.
//!
//! The kernel has other entries. `ioctl` and i386's `mmap2` have their arguments at x86-64's places, and are trapped
//! alike. i386's old `mmap` takes a pointer to its arguments, which no filter can read. x32's offset has 64 bits, of
//! which libseccomp compares 32. Rules go by name, so a rule can't tell these two `mmap`s from x86-64's, with one
//! exception: in a filter for 32-bit programs, a comparison of an upper half alone compares nothing, and a rule
//! without comparisons replaces all other rules of its call. The rule "a length with bit 63 fails with `ENOMEM`" is
//! what the kernel does to a 64-bit program anyway. For i386 and x32 programs, that rule refuses every `mmap`
//! ([`refuse_mmap`]): 32-bit programs have used `mmap2` for decades, and x32 programs can't start. `mmap` is refused
//! and not trapped, because the arguments behind the pointer could change after the monitor had read them. aarch64
//! has no such entry.

mod cube;

mod error;

mod region;

mod rule;

mod trap;

use serde_json::{Map, Value, json};

pub use self::error::SectionError;
use self::region::Inexpressible;
use self::rule::{Action, Rule, field};
use self::trap::{LENGTH, Trapped, trapped};
use super::filter::Machine;

/// Where the runtime sends the listener of trapped calls.
#[derive(Debug, Clone, Copy)]
pub struct ListenerPath<'a> {
    /// The Unix socket that the runtime connects to.
    pub path: &'a str,
    /// What the runtime says on the socket besides the container's state.
    pub metadata: &'a str,
}

/// `ENOMEM`, the kernel's answer to a length with bit 63. Where `ENOMEM` is the section's default, `EINVAL` is used,
/// because runtimes drop rules that say what the default says.
const REFUSALS: [u64; 2] = [12, 22];

/// The kernel's answer to a call that it does not know.
const ENOSYS: u64 = 38;

/// Returns the section that a bundle gets in the place of `section`, which may be missing.
///
/// # Errors
///
/// Where the section has another listener, is not what the specification says, or has rules on the trapped system
/// calls that can't be kept.
pub fn merge(
    section: Option<&Value>,
    machine: Machine,
    listener: &ListenerPath<'_>,
) -> Result<Value, SectionError> {
    merge_trapping(section, machine, listener, &trapped())
}

/// [`merge`], with `calls` as the trapped calls.
fn merge_trapping(
    section: Option<&Value>,
    machine: Machine,
    listener: &ListenerPath<'_>,
    calls: &[Trapped],
) -> Result<Value, SectionError> {
    let mut section = object(section)?.cloned().unwrap_or_default();
    let is_own = has_own_listener(&section, listener)?;
    let mut rules = match section.get_mut("syscalls").map(Value::take) {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(rules)) => rules,
        Some(_) => return Err(misshapen("linux.seccomp.syscalls", "a list")),
    };
    if rules.is_empty() && text(&section, "defaultAction").is_empty() {
        permit_everything(&mut section, machine);
    }
    let default = default_action(&section)?;
    refuse_other_notifications(&rules, is_own, default, calls)?;
    for call in calls {
        trap(&mut rules, call, default)?;
    }
    if has_unreadable_mmap(&section) {
        refuse_mmap(&mut rules, default);
    }
    refuse_remapping(&mut rules, default);
    section.insert("syscalls".into(), rules.into());
    section.insert("listenerPath".into(), listener.path.into());
    section.insert("listenerMetadata".into(), listener.metadata.into());
    Ok(Value::Object(section))
}

/// Checks that a section has no listener: a container can have one, and that is the monitor's.
///
/// # Errors
///
/// Where the section has a listener or notifies one, or is not what the specification says.
pub fn check_no_listener(section: Option<&Value>) -> Result<(), SectionError> {
    let Some(section) = object(section)? else { return Ok(()) };
    if let path @ [_, ..] = text(section, "listenerPath").as_bytes() {
        return Err(SectionError::OtherListener {
            path: String::from_utf8_lossy(path).into_owned(),
        });
    }
    let notifies = |value: &Value| value == "SCMP_ACT_NOTIFY";
    let field = |field: String| Err(SectionError::Notifies { field });
    if section.get("defaultAction").is_some_and(notifies) {
        return field("linux.seccomp.defaultAction".into());
    }
    let rules = section.get("syscalls").and_then(Value::as_array);
    match rules.into_iter().flatten().position(|rule| notifies(&rule["action"])) {
        Some(place) => field(format!("{}.action", rule::field(place))),
        None => Ok(()),
    }
}

/// The section's fields; `None` where there is no section.
fn object(section: Option<&Value>) -> Result<Option<&Map<String, Value>>, SectionError> {
    match section {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Object(section)) => Ok(Some(section)),
        Some(_) => Err(misshapen("linux.seccomp", "an object")),
    }
}

fn misshapen(field: &str, expected: &'static str) -> SectionError {
    SectionError::Misshapen { field: field.to_owned(), expected }
}

fn text<'a>(section: &'a Map<String, Value>, name: &str) -> &'a str {
    section.get(name).and_then(Value::as_str).unwrap_or_default()
}

/// Whether the section's listener is `listener`, from an earlier merge.
fn has_own_listener(
    section: &Map<String, Value>,
    listener: &ListenerPath<'_>,
) -> Result<bool, SectionError> {
    match text(section, "listenerPath") {
        "" => Ok(false),
        path if path == listener.path => Ok(true),
        path => Err(SectionError::OtherListener { path: path.to_owned() }),
    }
}

/// A bundle without a section has no filter. Its 32-bit programs run, and must go on running.
fn permit_everything(section: &mut Map<String, Value>, machine: Machine) {
    let architectures = match machine {
        Machine::X86_64 => json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86", "SCMP_ARCH_X32"]),
        Machine::Aarch64 => json!(["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]),
    };
    section.insert("defaultAction".into(), "SCMP_ACT_ALLOW".into());
    section.insert("architectures".into(), architectures);
}

fn default_action(section: &Map<String, Value>) -> Result<Action, SectionError> {
    let (name, errno) = (text(section, "defaultAction"), section.get("defaultErrnoRet"));
    Action::read(name, errno, || "linux.seccomp.defaultAction".into())
}

/// Checks that rules notify of trapped calls only, and only where the section's listener is the monitor's (`is_own`).
fn refuse_other_notifications(
    rules: &[Value],
    is_own: bool,
    default: Action,
    calls: &[Trapped],
) -> Result<(), SectionError> {
    if default == Action::Notify {
        return Err(SectionError::Notifies { field: "linux.seccomp.defaultAction".into() });
    }
    for (place, entry) in rules.iter().enumerate() {
        if rule::action(entry, place)? != Action::Notify {
            continue;
        }
        let known = |name: &Value| calls.iter().find(|call| name == call.name);
        let names = entry.get("names").and_then(Value::as_array);
        let all_trapped = names.into_iter().flatten().all(|name| {
            known(name).is_some_and(|call| {
                Rule::read(entry, place, call.request).is_ok_and(|rule| {
                    rule.exact && region::without(&rule.region, &call.region) == Ok(Vec::new())
                })
            })
        });
        if !(is_own && all_trapped) {
            return Err(SectionError::Notifies { field: format!("{}.action", field(place)) });
        }
    }
    Ok(())
}

/// Makes the trapped calls of one system call notify where the rules permit them.
fn trap(rules: &mut Vec<Value>, call: &Trapped, default: Action) -> Result<(), SectionError> {
    let mut read = Vec::new();
    for (place, entry) in rules.iter().enumerate() {
        if rule::has_name(entry, call.name) && !is_mmap_refusal(entry) {
            read.push(Rule::read(entry, place, call.request)?);
        }
    }
    // Runtimes drop rules that say what the default says. Where there is an unconditional rule, libseccomp drops all
    // others but the first unconditional one. A dropped rule must not count once the unconditional rule is rewritten.
    let counts = |rule: &Rule| rule.action != default;
    let unconditional = read.iter().position(|rule| counts(rule) && rule.unconditional);
    let (live, dead): (Vec<&Rule>, Vec<&Rule>) = match unconditional {
        Some(place) => (vec![&read[place]], read.iter().filter(|rule| counts(rule)).collect()),
        None => (read.iter().filter(|rule| counts(rule)).collect(), Vec::new()),
    };
    let at = |rule: &Rule, Inexpressible { argument }| SectionError::Inexpressible {
        field: field(rule.place),
        name: call.name,
        argument,
    };
    let mut permitted: region::Region = Vec::new();
    let (mut denied, mut notified): (Vec<&Rule>, region::Region) = (Vec::new(), Vec::new());
    for rule in &live {
        match rule.action {
            Action::Notify => notified.extend_from_slice(&rule.region),
            action if action.permits() => {
                let trapped = region::both(&call.region, &rule.region);
                permitted.extend(trapped.map_err(|problem| at(rule, problem))?);
            }
            _ => denied.push(rule),
        }
    }
    if default.permits() && unconditional.is_none() {
        permitted.clone_from(&call.region);
    }
    for rule in &denied {
        permitted =
            region::without(&permitted, &rule.region).map_err(|problem| at(rule, problem))?;
    }
    let no_rule = |Inexpressible { argument }| SectionError::Inexpressible {
        field: "linux.seccomp.syscalls".into(),
        name: call.name,
        argument,
    };
    let missing = region::without(&permitted, &notified).map_err(no_rule)?;

    let mut rewritten = Vec::new();
    let mut added = Vec::new();
    for &rule in &live {
        if rule.upper_only && rule.action.permits() {
            return Err(SectionError::UpperOnly { field: field(rule.place), name: call.name });
        }
        let trapped =
            region::both(&call.region, &rule.region).map_err(|problem| at(rule, problem))?;
        let stays = match rule.action {
            Action::Notify => true,
            action if action.permits() => trapped.is_empty() && rule.no_wider,
            _ => rule.unconditional || rule.exact || trapped.is_empty(),
        };
        if stays {
            continue;
        }
        let mut kept = rule.region.clone();
        let permits = rule.action.permits();
        if permits {
            kept = region::without(&kept, &call.region).map_err(|problem| at(rule, problem))?;
        }
        // A call that another rule denies is not named twice: libseccomp would refuse the second rule.
        let is_first = |denial: &Rule| permits || denial.place < rule.place;
        for denial in denied.iter().filter(|denial| is_first(denial)) {
            kept = region::without(&kept, &denial.region).map_err(|problem| at(denial, problem))?;
        }
        if let Value::Object(pattern) = &rules[rule.place] {
            added.extend(rule::entries(pattern, call.name, &kept, call.request));
        }
        rewritten.push(rule.place);
    }
    if !rewritten.is_empty() {
        rewritten.extend(dead.iter().map(|rule| rule.place));
    }
    let pattern = Map::from_iter([
        ("names".to_owned(), Value::Null),
        ("action".to_owned(), "SCMP_ACT_NOTIFY".into()),
    ]);
    added.extend(rule::entries(&pattern, call.name, &missing, call.request));

    let mut place = 0;
    rules.retain_mut(|entry| {
        place += 1;
        !rewritten.contains(&(place - 1)) || rule::remove_name(entry, call.name)
    });
    rules.extend(added);
    Ok(())
}

/// Whether the section admits programs of an entry whose `mmap` arguments a filter can't read.
fn has_unreadable_mmap(section: &Map<String, Value>) -> bool {
    let architectures = section.get("architectures").and_then(Value::as_array);
    architectures.into_iter().flatten().filter_map(Value::as_str).any(|name| {
        // crun takes the names in upper and lower case, with and without the prefix.
        let name = name.to_ascii_uppercase();
        matches!(name.strip_prefix("SCMP_ARCH_").unwrap_or(&name), "X86" | "X32")
    })
}

/// Refuses `remap_file_pages`, whatever the section says of it: with the section's default where that is an errno or
/// the call was denied, else with `ENOSYS`, as a kernel without that call does. The call maps a mapping's file anew,
/// and nothing shows which file (see `X86_64` in gate/syscall.rs).
fn refuse_remapping(rules: &mut Vec<Value>, default: Action) {
    const CALL: &str = "remap_file_pages";
    let refusal = json!({ "names": [CALL], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS });
    let is_refused = rules.contains(&refusal);
    let mut was_permitted = default.permits();
    rules.retain_mut(|entry| {
        let says = rule::has_name(entry, CALL) && *entry != refusal;
        let permits = || rule::action(entry, 0).is_ok_and(Action::permits);
        was_permitted |= says && permits();
        !says || rule::remove_name(entry, CALL)
    });
    // `ENOSYS` and not the default: a program that was permitted the call must not be killed for it.
    if was_permitted && !is_refused && !matches!(default, Action::Errno(_)) {
        rules.push(refusal);
    }
}

/// The rule that refuses every `mmap` of i386 and x32 programs, and nothing to other programs.
fn mmap_refusal(errno: u64) -> Value {
    json!({
        "names": ["mmap"],
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": errno,
        "args": [{
            "index": LENGTH,
            "value": 1u64 << 63,
            "valueTwo": 1u64 << 63,
            "op": "SCMP_CMP_MASKED_EQ",
        }],
    })
}

fn is_mmap_refusal(entry: &Value) -> bool {
    REFUSALS.iter().any(|&errno| *entry == mmap_refusal(errno))
}

/// Adds [`mmap_refusal`] where some `mmap` notifies, unless the rule is there already.
fn refuse_mmap(rules: &mut Vec<Value>, default: Action) {
    let notifies = |entry: &Value| {
        entry.get("action").is_some_and(|action| action == "SCMP_ACT_NOTIFY")
            && rule::has_name(entry, "mmap")
    };
    let effective = REFUSALS.iter().find(|&&errno| default != Action::Errno(errno));
    let Some(refusal) = effective.map(|&errno| mmap_refusal(errno)) else { return };
    if rules.iter().any(notifies) && !rules.contains(&refusal) {
        rules.push(refusal);
    }
}

#[cfg(test)]
mod tests;
