//! The seccomp section of a bundle, with the monitor's calls in it: [`merge`].
//!
//! Owns what becomes of `linux.seccomp` so that the driver calls of a container go to a
//! listener. Pure: a section in, a section out; must not know files, runtimes or what a
//! call means. Fields it doesn't know stay; applied to its own result it changes nothing.
//!
//! What holds of the result, for calls that are trapped: a call that the section permits
//! (`ALLOW`, `LOG`, `TRACE`) notifies the listener, one that it denies stays denied; for
//! all others: what the section says. It holds whatever the order in which rules are
//! looked at, because rules with different actions never overlap where we write them:
//! libseccomp sorts rules its own way, forgets a rule next to an unconditional one, and
//! refuses one that begins like another. So `ioctl` is taken out of the list of what is
//! allowed, and what is outside the trapped set is said again bit by bit
//! ([`cube::outside`]). Where a section contradicts itself, the denial wins.
//!
//! libseccomp has more surprises with rules on several arguments than are worth modelling
//! (2.5.4 loses some). The rules are shaped so that a lost one fails closed, which
//! `tests/seccomp.rs` checks on the filters that libseccomp makes of random sections.
//!
//! The kernel reads 32 bits of an ioctl's request, libseccomp compares 64 in a 64-bit
//! program: rules on the request that meet the trapped set are rewritten to mean the
//! lower half, so garbage in the upper half is no way round.
//!
//! Other entries of the same kernel: `ioctl` and i386's `mmap2` have their arguments where
//! x86-64 has them and are trapped alike. The old `mmap` of i386 takes a pointer to its
//! arguments, which no filter can read; and libseccomp compares 32 bits of x32's offset,
//! which has 64. Rules go by name, so neither can be told from x86-64's `mmap`, but for one
//! thing: a comparison that looks at an upper half only is no comparison in a filter for
//! 32-bit programs, and a rule without comparisons replaces all others of its call. "A
//! length with bit 63 fails with `ENOMEM`" is what the kernel does anyway to a 64-bit
//! program, and to the other two it refuses `mmap` as a whole ([`refuse_mmap`]): 32-bit programs
//! use `mmap2` for decades, x32 ones can't start. Refused and not trapped, because what the
//! pointer shows could change after it was looked at. aarch64 has no such entry.

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

/// Who is told of trapped calls.
#[derive(Debug, Clone, Copy)]
pub struct ListenerPath<'a> {
    /// The Unix socket that the runtime connects to.
    pub path: &'a str,
    /// What the runtime says there besides the container's state.
    pub metadata: &'a str,
}

/// `ENOMEM`, what the kernel says to a length with bit 63; and `EINVAL`, where a section's
/// default is the former: runtimes drop rules that say what the default says.
const REFUSALS: [u64; 2] = [12, 22];

/// What the kernel says to a call that it doesn't know.
const ENOSYS: u64 = 38;

/// The section that a bundle has instead of `section`, which may be missing.
///
/// # Errors
///
/// Where the section has a listener already, isn't what the specification says, or has
/// rules on the trapped system calls that can't be kept.
pub fn merge(
    section: Option<&Value>,
    machine: Machine,
    listener: &ListenerPath<'_>,
) -> Result<Value, SectionError> {
    merge_trapping(section, machine, listener, &trapped())
}

/// The same with these calls trapped.
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

/// Sees that a section leaves the one listener that a container can have to us.
///
/// # Errors
///
/// Where it has one, or isn't what the specification says.
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

/// The section's fields, where there is one.
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

/// Whether the listener is ours already.
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

/// Where there was no section there is no filter: 32-bit programs run, and shall go on.
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

/// A listener that is ours may be told of what is trapped; nobody is told of anything else.
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

/// Makes the trapped calls of one system call notify wherever they were permitted.
fn trap(rules: &mut Vec<Value>, call: &Trapped, default: Action) -> Result<(), SectionError> {
    let mut read = Vec::new();
    for (place, entry) in rules.iter().enumerate() {
        if rule::has_name(entry, call.name) && !is_mmap_refusal(entry) {
            read.push(Rule::read(entry, place, call.request)?);
        }
    }
    // Runtimes drop rules that say what the default says, and libseccomp all but the first
    // unconditional one where there is one. What never counted must not begin to.
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
        // What another rule denies isn't said twice, or libseccomp refuses the second.
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

/// Whether programs may enter where a filter can't see the arguments of `mmap`.
fn has_unreadable_mmap(section: &Map<String, Value>) -> bool {
    let architectures = section.get("architectures").and_then(Value::as_array);
    architectures.into_iter().flatten().filter_map(Value::as_str).any(|name| {
        // crun takes them in any case, with and without the prefix.
        let name = name.to_ascii_uppercase();
        matches!(name.strip_prefix("SCMP_ARCH_").unwrap_or(&name), "X86" | "X32")
    })
}

/// `remap_file_pages` is mmap of a mapping's file, which nothing shows (see [`super::filter`]): it's
/// refused, whatever the section says of it, as by a kernel without it.
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
    // A program that was let call it isn't to be killed for it.
    if was_permitted && !is_refused && !matches!(default, Action::Errno(_)) {
        rules.push(refusal);
    }
}

/// The rule that refuses `mmap` to i386 and x32 programs and nothing to others.
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

/// Adds the rule where any `mmap` notifies, unless it's there.
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
