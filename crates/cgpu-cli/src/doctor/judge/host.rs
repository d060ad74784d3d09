//! What the facts of kernel, backend, real runtimes and ourselves mean.
//!
//! Must not know the driver beyond whether there is one to wait for.

use super::super::facts::{
    Cgroups, Divisible, Isolation as Facts, Observed, Own, Records, Runtime,
};
use super::driver::Standing;
use super::{Cgpu, Error, Finding, Fine, Isolation, Note, Runtimes, Severity, Warning, listed};
use cgpu_core::plan::Kind;

/// The oldest versions that the tests know.
const OLDEST: [(&str, (u32, u32)); 2] = [("runc", (1, 1)), ("crun", (1, 8))];

/// The first releases of runc in each series that close three ways out of a container (November 2025).
const CLOSED_RUNC: [(u32, u32, u32); 2] = [(1, 2, 8), (1, 3, 3)];
const WAYS_OUT: &str = "CVE-2025-31133, CVE-2025-52565 and CVE-2025-52881";

/// The first release of crun whose handler for virtual machines writes no file of the host for an image.
const CLOSED_KRUN: (u32, u32, u32) = (1, 20, 0);
/// What crun's `--version` lists if it has that handler.
const KRUN: &str = "+LIBKRUN";

/// The first kernel on which listener and caller take turns on a processor.
const QUICK_KERNEL: (u32, u32) = (6, 6);

pub(super) fn isolation(facts: &Facts, driver: Standing, own: &Own) -> Vec<Finding> {
    vec![kernel(facts), cgroups(facts.cgroups), backend(facts, driver, own)]
}

fn kernel(facts: &Facts) -> Finding {
    let row =
        |severity, what| Finding::new(Isolation, "kernel", severity, what).of(facts.kernel.clone());
    // With another backend the gate's needs don't count.
    let bad = if facts.backend == Kind::Gate { Error } else { Note };
    if let Err(why) = &facts.ability {
        return row(bad, why.clone());
    }
    if !facts.listener {
        let what = format!("Linux {} takes no seccomp filter with a listener", facts.kernel);
        return row(bad, what).remedy(
            "look whether this is in a sandbox that forbids seccomp(2), or boot a kernel with \
             CONFIG_SECCOMP_FILTER",
        );
    }
    if let Err(why) = &facts.layout {
        let what = format!("Linux {} notifies in another form than ours: {why}", facts.kernel);
        return row(bad, what).remedy("install a cgpu that was built for this kernel");
    }
    let mut what = format!("Linux {}: seccomp notifies a listener", facts.kernel);
    if !facts.killable_wait {
        what.push_str("; interrupted calls are made again (5.19 waits)");
    }
    match leading(&facts.kernel) {
        Some(version) if version < QUICK_KERNEL => {
            let what = format!("{what}; calls to the driver are quicker from Linux 6.6 on");
            row(Note, what)
        }
        _ => row(Fine, what),
    }
}

/// The first two numbers in a text.
fn leading(text: &str) -> Option<(u32, u32)> {
    let at = text.find(|c: char| c.is_ascii_digit())?;
    let mut numbers = text.get(at..)?.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

/// A runtime's version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Release<'a> {
    numbers: (u32, u32, u32),
    /// What follows these: `-rc.1`, `+ds1`.
    suffix: &'a str,
}

impl<'a> Release<'a> {
    /// The first in a line.
    fn of(line: &'a str) -> Option<Self> {
        let word =
            line.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
        let end = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
        let (numbers, suffix) = word.split_at(end);
        let mut numbers = numbers.split('.').map(|number| number.parse().unwrap_or(0));
        let mut next = || numbers.next().unwrap_or(0);
        Some(Release { numbers: (next(), next(), next()), suffix })
    }

    /// Whether a distribution has made it of a release: it may have more than that release.
    fn is_revised(self) -> bool {
        let is_upstreams = |begin: &&str| self.suffix.starts_with(*begin);
        !self.suffix.is_empty() && !["-rc", "+dev", "-dev"].iter().any(is_upstreams)
    }

    /// Of runc: the first release that closes the ways out which this one has open.
    fn closed_by(self) -> Option<&'static str> {
        let [of_1_2, of_1_3] = CLOSED_RUNC;
        let early = ["-rc.1", "-rc.2"];
        match self.numbers {
            older if older < of_1_2 => Some("1.2.8"),
            (1, 3, _) if self.numbers < of_1_3 => Some("1.3.3"),
            (1, 4, 0) if early.iter().any(|rc| self.suffix.starts_with(rc)) => Some("1.4.0-rc.3"),
            _ => None,
        }
    }
}

fn cgroups(mounted: Cgroups) -> Finding {
    let row = |severity, what: &str| {
        Finding::new(Isolation, "cgroups", severity, what.to_owned()).of("/sys/fs/cgroup")
    };
    match mounted {
        Cgroups::V2 => row(Fine, "v2"),
        Cgroups::V1 => row(Fine, "v1"),
        Cgroups::Hybrid => row(Fine, "hybrid: v1, and v2 beside it"),
        Cgroups::Nowhere => row(Warning, "none at /sys/fs/cgroup: no runtime can make a container")
            .remedy("mount them, as systemd or `cgroupfs-mount` do"),
    }
}

fn backend(facts: &Facts, driver: Standing, own: &Own) -> Finding {
    let row = |severity, what| Finding::new(Isolation, "backend", severity, what);
    let chosen = format!("{} ({})", facts.backend, facts.why);
    let why = match &facts.usable {
        Ok(()) if facts.backend == Kind::None => return row(Note, chosen),
        Ok(()) => return row(Fine, format!("{chosen}: holds {}", facts.backend.holds())),
        Err(why) => why,
    };
    if facts.backend == Kind::Gate && facts.ability.is_err() {
        return row(Error, format!("{chosen} can't be used, for what is said of the kernel"));
    }
    // Nothing but the driver is missing: that is reported where it belongs.
    let waits = facts.backend == Kind::Gate && driver != Standing::Loaded && own.missing.is_empty();
    match waits {
        true => {
            row(Note, format!("{chosen}: holds {}, once there is a driver", facts.backend.holds()))
        }
        false => row(Error, format!("{chosen} can't be used: {why}")),
    }
}

pub(super) fn runtimes(runtimes: &[Runtime], cgroups: Cgroups) -> Vec<Finding> {
    let there: Vec<&Runtime> = runtimes.iter().filter(|runtime| runtime.path.is_some()).collect();
    if there.is_empty() {
        let names: Vec<String> = runtimes.iter().map(|runtime| runtime.name.clone()).collect();
        let what = format!("no real runtime: none of {} is there", listed(&names));
        let found = Finding::new(Runtimes, "real", Error, what);
        return vec![
            found.remedy("install runc or crun, or set [runtime] candidates in the configuration"),
        ];
    }
    // What is wrong with a runtime that isn't used is only worth knowing.
    let ranks = std::iter::once(("real", Warning)).chain(std::iter::repeat(("other", Note)));
    there.iter().zip(ranks).map(|(found, rank)| runtime(rank, found, cgroups)).collect()
}

fn runtime((name, bad): (&'static str, Severity), runtime: &Runtime, cgroups: Cgroups) -> Finding {
    let path = runtime.path.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let row =
        |severity, what: String| Finding::new(Runtimes, name, severity, what).of(path.clone());
    let said = match &runtime.version {
        Ok(said) => said,
        Err(why) => return row(Note, format!("{path}; its version is unknown: {why}")),
    };
    let line = said.lines().next().unwrap_or_default();
    let known = OLDEST.iter().find(|(name, _)| line.starts_with(name));
    let what = format!("{line} ({path})");
    let (Some((program, (major, minor))), Some(release)) = (known, Release::of(line)) else {
        return match known {
            Some(_) => row(Fine, what),
            None => row(Note, format!("{what} is neither runc nor crun")),
        };
    };
    if (release.numbers.0, release.numbers.1) < (*major, *minor) {
        let what = format!("{what} is older than {major}.{minor}, the oldest that is tested");
        return row(bad, what).remedy(format!("update {program}"));
    }
    if *program == "crun" {
        if cgroups == Cgroups::Hybrid {
            return row(bad, format!("{what} refuses hybrid cgroups")).remedy("use runc here");
        }
        if release.numbers < CLOSED_KRUN && said.contains(KRUN) {
            let what = format!(
                "{what} is older than 1.20: by its handler krun an image can write files of the host \
                 (CVE-2025-24965), unless your distribution has brought the fix back"
            );
            return row(bad, what).remedy("update crun to 1.20 or later");
        }
    } else if let Some(closed) = release.closed_by() {
        let what = format!(
            "{what} is older than {closed}: a container can escape ({WAYS_OUT}), unless your \
             distribution has brought the fixes back"
        );
        let severity = if release.is_revised() { Note } else { bad };
        return row(severity, what).remedy(
            "update runc to 1.2.8, 1.3.3 or 1.4, or to your distribution's security update",
        );
    }
    row(Fine, what)
}

pub(super) fn own(facts: &Own) -> Vec<Finding> {
    let mut findings =
        vec![programs(facts), config(facts), state(facts), log(facts), records(facts)];
    findings.extend(facts.records.iter().flat_map(lost));
    findings.extend(facts.warned.iter().flatten().map(|warning| {
        Finding::new(Cgpu, "warned", Note, warning.clone())
            .remedy("correct the container's settings; `cgpu events` shows all warnings")
    }));
    if !facts.divisible.is_empty() {
        findings.push(memory(&facts.divisible));
    }
    findings.extend(facts.short.iter().flatten().map(|short| {
        Finding::new(Cgpu, "short", Warning, short.clone()).remedy(
            "lower the quotas, or raise admission.reserve; `nvidia-smi` shows who has memory",
        )
    }));
    if !facts.root {
        let what = "not run as the host's root: what only root may read is missing here".to_owned();
        findings.push(Finding::new(Cgpu, "rights", Note, what).remedy("`sudo cgpu doctor`"));
    }
    findings
}

fn memory(gpus: &[Divisible]) -> Finding {
    let of = |gpu: &Divisible| {
        let shared = gpu.total_mib.saturating_sub(gpu.reserved_mib);
        format!("{shared} of {} MiB of GPU {}", gpu.total_mib, gpu.index)
    };
    let gpus: Vec<String> = gpus.iter().map(of).collect();
    Finding::new(Cgpu, "memory", Fine, format!("quotas share {}", listed(&gpus)))
}

fn programs(facts: &Own) -> Finding {
    let directory = facts.directory.display().to_string();
    let row = |severity, what| Finding::new(Cgpu, "programs", severity, what).of(directory.clone());
    let missing: Vec<String> = facts.missing.iter().map(ToString::to_string).collect();
    match missing.is_empty() {
        true => row(Fine, format!("all in {directory}")),
        false => row(Error, format!("{directory} lacks {}", listed(&missing)))
            .remedy("`make install` puts them in one directory"),
    }
}

fn config(facts: &Own) -> Finding {
    let row = |severity, what| Finding::new(Cgpu, "config", severity, what);
    match &facts.config {
        Ok(Some(path)) => row(Fine, path.display().to_string()).of(path.display().to_string()),
        Ok(None) => row(Fine, "the defaults: there is no file".to_owned()),
        Err(why) => row(Error, why.clone())
            .remedy("correct it; until then the rest here is judged by the defaults"),
    }
}

fn state(facts: &Own) -> Finding {
    let path = facts.state_dir.display().to_string();
    let row = |severity, what| Finding::new(Cgpu, "state", severity, what).of(path.clone());
    match facts.state {
        Observed::Absent => row(Fine, format!("{path} is made by the first create")),
        Observed::Unreadable(ref why) => row(Error, format!("{path} can't be looked at: {why}"))
            .remedy("run as root; else set another state_dir"),
        Observed::Present(mode) if mode & 0o077 != 0 => {
            let what = format!("{path} has mode {mode:04o}: others may enter it");
            row(Warning, what).remedy(format!("`chmod 0700 {path}`"))
        }
        Observed::Present(mode) => row(Fine, format!("{path}, mode {mode:04o}")),
    }
}

fn log(facts: &Own) -> Finding {
    let path = facts.log.display().to_string();
    let row = |severity, what| Finding::new(Cgpu, "log", severity, what).of(path.clone());
    match &facts.log_open {
        _ if path.is_empty() => row(Fine, "none (configured)".to_owned()),
        Ok(()) if path == "stderr" => {
            let what = "standard error, which monitors don't have: what they say is lost";
            row(Note, what.to_owned()).remedy("set log to a file, or to \"journald\"")
        }
        Ok(()) => row(Fine, path.clone()),
        // Whose it is, is reported below.
        Err(why) if !facts.root => row(Note, format!("{path}: {why}")),
        Err(why) => row(Warning, format!("{path} can't be written: {why}; nothing is logged"))
            .remedy("make it writable for root, set log to another file, or log = \"\" for none"),
    }
}

/// What a loss left.
fn lost(records: &Records) -> Vec<Finding> {
    let row = |severity, what| Finding::new(Cgpu, "lost", severity, what);
    let mut findings = Vec::new();
    if !records.unregistered.is_empty() {
        let what = format!(
            "a monitor serves {}, of which there is no record: what they hold isn't counted",
            listed(&records.unregistered)
        );
        findings.push(row(Error, what).remedy("remove these containers, and create them again"));
    }
    if !records.closed.is_empty() {
        let what =
            format!("the monitor of {} has ended: driver calls fail", listed(&records.closed));
        findings.push(row(Warning, what).remedy("remove these containers, and create them again"));
    }
    for unstarted in &records.unstarted {
        let (id, minutes) = (&unstarted.id, unstarted.age_s / 60);
        let what = format!("{id} was created {minutes} min ago and never started: it holds memory");
        let remedy = format!("if its engine has forgotten it: `{}`", unstarted.deletion);
        findings.push(row(Note, what).remedy(remedy));
    }
    match records.leftovers {
        0 => {}
        left => {
            let what = format!("{left} monitors without a record left their directory");
            findings.push(row(Note, what).remedy("`cgpu gc` removes it"));
        }
    }
    findings
}

fn records(facts: &Own) -> Finding {
    let row = |severity, what| Finding::new(Cgpu, "records", severity, what);
    match &facts.records {
        // It says itself what to do; a user other than root gets that below.
        Err(why) if facts.root => row(Error, why.clone()),
        Err(why) => row(Note, why.clone()),
        Ok(records) => {
            let (total, stale) = (records.total, records.stale);
            let what = match total {
                0 => "no container is registered".to_owned(),
                1 => "1 registered container".to_owned(),
                _ => format!("{total} registered containers"),
            };
            match stale {
                0 => row(Fine, what),
                _ => row(Note, format!("{what}, {stale} of them gone; the next create collects"))
                    .remedy("`cgpu gc` does it now"),
            }
        }
    }
}
