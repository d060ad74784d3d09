//! One event: its fields, its line of JSON, its sentence. Pure.
//!
//! What a container chose (its name, its program's name) is made plain and short before it is kept,
//! and a line never has more than [`MOST_LINE_BYTES`] bytes.

use std::fmt::Write;

use serde::{Deserialize, Serialize};

use super::Cause;
use cgpu_core::plan::Plan;
use cgpu_core::units::bytes_to_mib;

/// Most bytes of an event's line, its end included: less than `PIPE_BUF`.
pub const MOST_LINE_BYTES: usize = 4000;

/// Most characters of a text that is kept, but for a reason.
const MOST_TEXT: usize = 256;

/// Most characters of a reason.
const MOST_REASON: usize = 1200;

/// It took memory that the monitor didn't give.
const PAST_THE_MONITOR: &str = "killed: it used memory past the quota's monitor";

/// It has a file that a process opened which is dead.
const AS_SUCCESSOR: &str = "killed: it kept GPU memory of a process that has ended";

/// It is a process outside the container.
const OPENED_INSIDE: &str =
    "killed: it has a descriptor of the driver's that was opened in the container";

/// A container has ended, and a program of the host has a descriptor of it.
const LEAKED: &str = "has a descriptor of the driver's that was opened in the container: the container has ended, \
    and its quota stays reserved until that descriptor is closed";

/// A container had memory past the monitor, by a descriptor that a program of the host has.
const ENDED_FOR_LEAK: &str = "has a descriptor of the driver's that was opened in the container, and memory was \
    taken past the quota: the container was ended";

/// The driver refused memory that the quota would have left.
const REFUSED_BY_DRIVER: &str = "the quota has memory left and the driver has none: it keeps some for itself, and \
    programs of the host and containers with an unlimited GPU take what they want; see which process has it \
    (nvidia-smi), or raise admission.reserve";

/// A monitor has ended before its container.
const MONITOR_LOST: &str = "the monitor is lost, and the container's driver calls fail from now on: {why}; create the \
    container again";

/// Why a monitor is lost that has reported nothing itself.
pub const MONITOR_KILLED: &str = "it was killed, or the host has no memory left";

/// A program took over a monitor's process.
const MONITOR_REPLACED: &str = "a newer program goes on in the monitor";

/// Sentences of events that are warnings in the log.
pub const WARNINGS: [&str; 6] =
    [PAST_THE_MONITOR, AS_SUCCESSOR, OPENED_INSIDE, LEAKED, ENDED_FOR_LEAK, MONITOR_LOST];

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A container got what it asked for, and is about to be made.
    Created,
    /// A container isn't made, for `reason`.
    Refused,
    /// Something of a container's bundle keeps quotas from being enforced, or nearly means something:
    /// `reason` says what.
    Warned,
    /// A container that was registered as `former_id` is known by its id now.
    Named,
    /// The quota on `gpu` is another.
    Resized,
    /// The weight or the priority is another.
    Changed,
    /// A program asked for more memory than its container's quota leaves.
    AllocationRefused,
    /// A process was ended, for `reason`.
    Killed,
    /// A program outside the container has a descriptor of the driver's that was opened in it; `reason` says what
    /// follows.
    Leaked,
    /// A newer program goes on in the container's monitor.
    MonitorReplaced,
    /// The monitor has ended before its container, for `reason`: the container's driver calls fail from then on.
    MonitorLost,
    /// The container is no longer registered.
    Removed,
    /// A setting of `gpu` is another; of no container.
    GpuChanged,
    /// A setting of the host is another; of no container.
    HostChanged,
    /// Of a version to come.
    #[serde(other)]
    Unknown,
}

/// What a container has of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The driver's index.
    pub index: u32,
    /// `GPU-` or `MIG-` and a UUID.
    pub uuid: String,
    /// The quota; `None` if the container's GPU is unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
}

/// A fact. Fields that don't belong to its kind, or aren't known, are absent in JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// When, in microseconds since 1970.
    pub at_us: u64,
    pub kind: Kind,
    #[serde(default)]
    pub id: String,
    /// What its engine called it then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Its runtime's root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<String>,
    /// The id under which it was registered before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former_id: Option<String>,
    /// What it has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub gpus: Vec<Share>,
    /// The settings that its quotas come from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_by: Option<String>,
    /// The backend that enforces its quotas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Why that one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<String>,
    /// How the driver's files come into it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver_files: Option<String>,
    /// Its short id, where that isn't the beginning of its id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub short_id: Option<String>,
    /// What it asked for and nothing holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_held: Option<String>,
    /// Index of the GPU that this is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
    /// The process, by the host's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The process, by the container's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container_pid: Option<i32>,
    /// The process's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asked_bytes: Option<u64>,
    /// What was in use then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_bytes: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// What the process had past the monitor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub excess_bytes: Option<u64>,
    /// The quota before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub former_quota_bytes: Option<u64>,
    /// The setting of a GPU and its value, as `cgpu set gpu` takes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub setting: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u32>,
    /// The priority.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_priority: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The same in one word, of a container that isn't made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
    /// How many events of this kind and container were not written since the one before.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// `text` with nothing in it that moves a cursor or hides something, and at most `most` characters.
#[must_use]
pub fn plain(text: &str, most: usize) -> String {
    let safe = |c: char| if is_safe(c) { c } else { '\u{fffd}' };
    text.chars().take(most).map(safe).collect()
}

fn is_safe(c: char) -> bool {
    matches!(c, '"' | '\'' | '\\') || c.escape_debug().len() == 1
}

fn text(text: &str) -> String {
    plain(text, MOST_TEXT)
}

fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes_to_mib(bytes))
}

/// What is more than whole MiB counts as one.
fn mib_up(bytes: u64) -> String {
    format!("{} MiB", bytes.div_ceil(cgpu_core::units::MIB))
}

impl Event {
    /// One of that kind of which nothing else is known yet.
    #[must_use]
    pub fn new(kind: Kind) -> Self {
        Event {
            at_us: 0,
            kind,
            id: String::new(),
            name: None,
            root: None,
            former_id: None,
            gpus: Vec::new(),
            quota_by: None,
            backend: None,
            chosen: None,
            driver_files: None,
            short_id: None,
            not_held: None,
            gpu: None,
            gpu_uuid: None,
            pid: None,
            container_pid: None,
            program: None,
            asked_bytes: None,
            used_bytes: None,
            quota_bytes: None,
            excess_bytes: None,
            former_quota_bytes: None,
            setting: None,
            weight: None,
            high_priority: None,
            reason: None,
            cause: None,
            left_out: 0,
        }
    }

    /// Of that container.
    #[must_use]
    pub fn of(mut self, id: &str, name: Option<&str>, root: &str) -> Self {
        self.id = text(id);
        self.name = name.map(text);
        self.root = Some(text(root)).filter(|root| !root.is_empty());
        self
    }

    /// It has what `plan` gives.
    #[must_use]
    pub fn having(mut self, plan: &Plan) -> Self {
        let share = |gpu: &cgpu_core::plan::PlannedGpu| Share {
            index: gpu.index,
            uuid: text(gpu.given_uuid()),
            quota_bytes: gpu.memory_limit_bytes,
        };
        self.gpus = plan.gpus.iter().map(share).collect();
        self.backend = Some(plan.backend.to_string());
        self.quota_by = plan.caveats.quota_by.as_deref().map(text);
        self
    }

    /// For that reason.
    #[must_use]
    pub fn because(mut self, reason: &str) -> Self {
        self.reason = Some(plain(reason, MOST_REASON));
        self
    }

    /// By that process: its number on the host, in its container, and its name.
    #[must_use]
    pub fn by(mut self, pid: i32, container_pid: Option<i32>, program: Option<&str>) -> Self {
        self.pid = Some(pid);
        self.container_pid = container_pid;
        self.program = program.map(text);
        self
    }

    /// An allocation was refused, for the quota, or by the driver though the quota had memory left.
    #[must_use]
    pub fn allocation_refused(by_driver: bool) -> Self {
        let event = Event::new(Kind::AllocationRefused);
        if by_driver { event.because(REFUSED_BY_DRIVER) } else { event }
    }

    /// A process was killed that took memory past the monitor.
    #[must_use]
    pub fn killed_past_the_monitor() -> Self {
        Event::new(Kind::Killed).because(PAST_THE_MONITOR)
    }

    /// A process was killed that has a file of the driver's by which memory outlives its creator.
    #[must_use]
    pub fn killed_for_dead_client() -> Self {
        Event::new(Kind::Killed).because(AS_SUCCESSOR)
    }

    /// A process outside the container was killed that has a descriptor of the container's.
    #[must_use]
    pub fn killed_outside() -> Self {
        Event::new(Kind::Killed).because(OPENED_INSIDE)
    }

    /// A container has ended, and a program of the host has a descriptor of it.
    #[must_use]
    pub fn leaked() -> Self {
        Event::new(Kind::Leaked).because(LEAKED)
    }

    /// A container was ended because memory was taken by a descriptor that a program of the host has.
    #[must_use]
    pub fn ended_for_leak() -> Self {
        Event::new(Kind::Leaked).because(ENDED_FOR_LEAK)
    }

    /// A newer program goes on in the container's monitor.
    #[must_use]
    pub fn monitor_replaced() -> Self {
        Event::new(Kind::MonitorReplaced).because(MONITOR_REPLACED)
    }

    /// The container's monitor has ended before the container; `why` says for what.
    #[must_use]
    pub fn monitor_lost(why: &str) -> Self {
        Event::new(Kind::MonitorLost).because(&MONITOR_LOST.replace("{why}", why))
    }

    /// Whether the log has it as a warning: somebody has to find out why.
    #[must_use]
    pub fn is_warning(&self) -> bool {
        matches!(self.kind, Kind::Warned | Kind::MonitorLost)
            || self.reason.as_deref().is_some_and(|reason| WARNINGS.contains(&reason))
    }

    /// Its line, the end of the line included; never more than [`MOST_LINE_BYTES`] bytes. Where it
    /// would have more, the longest texts are cut.
    #[must_use]
    pub fn line(&self) -> String {
        let mut event = self.clone();
        loop {
            let mut line = event.json();
            if line.len() < MOST_LINE_BYTES {
                line.push('\n');
                return line;
            }
            event.shrink();
        }
    }

    /// It as JSON, in which what isn't safe to print is escaped. All such characters are in strings.
    #[must_use]
    pub fn json(&self) -> String {
        let json = serde_json::to_string(self).unwrap_or_default();
        if json.chars().all(is_safe) {
            return json;
        }
        let mut escaped = String::with_capacity(json.len());
        for c in json.chars() {
            if is_safe(c) {
                escaped.push(c);
                continue;
            }
            for unit in c.encode_utf16(&mut [0; 2]) {
                let _ = write!(escaped, "\\u{unit:04x}"); // a string takes all
            }
        }
        escaped
    }

    /// Takes away half of the longest text, or half of the GPUs.
    fn shrink(&mut self) {
        self.gpus.truncate(self.gpus.len() / 2);
        let texts = [
            Some(&mut self.id),
            self.name.as_mut(),
            self.root.as_mut(),
            self.former_id.as_mut(),
            self.quota_by.as_mut(),
            self.chosen.as_mut(),
            self.program.as_mut(),
            self.reason.as_mut(),
        ];
        if let Some(longest) = texts.into_iter().flatten().max_by_key(|text| text.len()) {
            let half = longest.chars().count() / 2;
            *longest = longest.chars().take(half).collect();
        }
    }

    /// The event in a line of the file; `None` where that holds none. What a full disk tore off is
    /// left out: a line's last event is the one that counts.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        // It can't be in a string, where quotes are escaped.
        let begin = line.rfind("{\"at_us\":")?;
        serde_json::from_str(line.get(begin..)?).ok()
    }

    /// What it has, as [`Plan`] prints it.
    #[must_use]
    pub fn shares(&self) -> String {
        let share = |share: &Share| match share.quota_bytes {
            Some(bytes) => format!("GPU {} {}", share.index, mib(bytes)),
            None => format!("GPU {} whole", share.index),
        };
        match self.gpus.as_slice() {
            [] => "no GPU".to_owned(),
            gpus => gpus.iter().map(share).collect::<Vec<_>>().join(", "),
        }
    }

    /// What the log says first; fields follow there.
    #[must_use]
    pub fn headline(&self) -> String {
        let reason = || self.reason.clone().unwrap_or_default();
        match self.kind {
            Kind::Created => match &self.not_held {
                Some(asked) => format!("registered; nothing holds its {asked}"),
                None => "registered".to_owned(),
            },
            Kind::Removed => self.reason.clone().unwrap_or_else(|| "released".to_owned()),
            Kind::Refused => format!("create refused: {}", reason()),
            Kind::Named => "its id is known".to_owned(),
            Kind::Resized | Kind::Changed => format!("changed: {}", self.change()),
            Kind::AllocationRefused => format!("out of memory: {}", self.refusal()),
            Kind::Killed => match (self.excess_bytes, self.gpu) {
                (Some(bytes), Some(gpu)) => format!("{}: {} of GPU {gpu}", reason(), mib_up(bytes)),
                _ => reason(),
            },
            Kind::Leaked | Kind::MonitorReplaced | Kind::MonitorLost | Kind::Warned => reason(),
            Kind::GpuChanged => {
                format!(
                    "GPU {}: {}",
                    self.gpu.unwrap_or_default(),
                    self.setting.as_deref().unwrap_or_default()
                )
            }
            Kind::HostChanged => {
                format!("host: {}", self.setting.as_deref().unwrap_or_default())
            }
            Kind::Unknown => "an event of a newer version".to_owned(),
        }
    }

    /// What became of a quota, a weight or a priority.
    fn change(&self) -> String {
        let quota = self.quota_bytes.map(|bytes| {
            let before = self
                .former_quota_bytes
                .map_or(String::new(), |bytes| format!(" instead of {}", mib(bytes)));
            let gpu = self.gpu.unwrap_or_default();
            format!("the quota on GPU {gpu} is {}{before}", mib(bytes))
        });
        let weight = self.weight.map(|weight| format!("the weight is {weight}"));
        let priority = self.high_priority.map(|high| match high {
            true => "the priority is high".to_owned(),
            false => "the priority is normal".to_owned(),
        });
        quota.into_iter().chain(weight).chain(priority).collect::<Vec<_>>().join(", ")
    }

    /// Why an allocation was refused.
    fn refusal(&self) -> String {
        let (Some(asked), Some(used), Some(quota)) =
            (self.asked_bytes, self.used_bytes, self.quota_bytes)
        else {
            return "more allocations over the quota were refused".to_owned();
        };
        let who = match (&self.program, self.container_pid.or(self.pid)) {
            (Some(program), Some(pid)) => format!("{program} (process {pid})"),
            (None, Some(pid)) => format!("process {pid}"),
            _ => "a process".to_owned(),
        };
        let gpu = self.gpu.map_or(String::new(), |gpu| format!(" of GPU {gpu}"));
        let why = self.reason.as_ref().map_or(String::new(), |reason| format!("; {reason}"));
        format!(
            "{who} asked for {}{gpu}; {} of the quota of {} are in use{why}",
            mib_up(asked),
            mib_up(used),
            mib(quota)
        )
    }

    /// The event as people read it, without time and container.
    #[must_use]
    pub fn sentence(&self) -> String {
        let mut sentence = match self.kind {
            Kind::Created => {
                let backend = self.backend.as_deref().unwrap_or("unknown");
                let not_held = self.not_held.as_ref();
                let more =
                    not_held.map_or(String::new(), |asked| format!("; nothing holds its {asked}"));
                format!("created: {}, backend {backend}{more}", self.shares())
            }
            Kind::Removed => match &self.reason {
                Some(reason) => format!("removed: {reason}"),
                None => "removed".to_owned(),
            },
            Kind::Killed | Kind::Leaked => {
                let pid = self.pid.map_or(String::new(), |pid| format!(" (process {pid})"));
                let program = self.program.as_deref().unwrap_or("a process");
                format!("{program}{pid} {}", self.headline())
            }
            Kind::Warned => format!("warning: {}", self.headline()),
            Kind::MonitorReplaced => format!("monitor: {}", self.headline()),
            _ => self.headline(),
        };
        if self.left_out > 0 {
            let _ = write!(sentence, " (and {} more since the line before)", self.left_out);
        }
        plain(&sentence, usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn refused() -> Event {
        Event {
            at_us: 1_700_000_000_000_001,
            gpu: Some(0),
            gpu_uuid: Some("GPU-1".into()),
            asked_bytes: Some((1001 << 20) + 1),
            used_bytes: Some(300 << 20),
            quota_bytes: Some(1000 << 20),
            left_out: 7,
            ..Event::new(Kind::AllocationRefused).of("3f2a", Some("web"), "/run/runc").by(
                4711,
                Some(7),
                Some("python3"),
            )
        }
    }

    /// An event is read as it was written, and absent fields are left out.
    #[test]
    fn event_round_trips_without_its_absent_fields() {
        let event = refused();
        let line = event.line();
        assert_eq!(Event::parse(&line), Some(event));
        assert!(line.ends_with("}\n") && line.matches('\n').count() == 1, "{line}");
        assert!(!line.contains("null") && !line.contains("weight"), "{line}");
        let removed = Event::new(Kind::Removed).of("a", None, "");
        assert_eq!(removed.line(), "{\"at_us\":0,\"kind\":\"removed\",\"id\":\"a\"}\n");
        for kind in ["created", "refused", "warned", "allocation_refused", "monitor_replaced"] {
            let read = Event::parse(&format!("{{\"at_us\":1,\"kind\":\"{kind}\",\"more\":{{}}}}"));
            assert_ne!(read.unwrap().kind, Kind::Unknown, "{kind}");
        }
        assert_eq!(Event::parse("{\"at_us\":1,\"kind\":\"x\"}").unwrap().kind, Kind::Unknown);
    }

    /// The sentence of a refused allocation has all that its user needs.
    #[test]
    fn allocation_sentence_names_process_gpu_and_quota() {
        assert_eq!(
            refused().sentence(),
            "out of memory: python3 (process 7) asked for 1002 MiB of GPU 0; 300 MiB of the quota \
             of 1000 MiB are in use (and 7 more since the line before)"
        );
        let late = Event { left_out: 3, ..Event::new(Kind::AllocationRefused) };
        assert!(late.sentence().contains("more allocations over the quota were refused (and 3"));
    }

    /// A line that a full disk tore loses no other event.
    #[test]
    fn torn_line_loses_no_other_event() {
        let line = refused().line();
        let torn = format!("{}{line}", &line[..line.len() / 2]);
        assert_eq!(Event::parse(&torn), Some(refused()));
        assert_eq!(Event::parse(&line[..line.len() / 2]), None);
        assert_eq!(Event::parse(""), None);
    }

    /// What a container chose moves no cursor, neither in the line nor in the sentence.
    #[test]
    fn event_text_escapes_strings_of_a_container() {
        let evil = "a\u{1b}[2J\u{9b}1m\u{202e}\n{\"at_us\":1";
        let event = refused().of(evil, Some(evil), evil).by(1, None, Some(evil)).because(evil);
        for text in [event.line().trim_end().to_owned(), event.sentence()] {
            assert!(text.chars().all(is_safe), "{text:?}");
        }
        // Also of what another wrote into the file.
        let event = Event { name: Some(evil.into()), ..refused() };
        assert!(event.json().chars().all(is_safe), "{}", event.json());
        assert_eq!(Event::parse(&event.line()).unwrap().name.as_deref(), Some(evil));
        assert_eq!(plain("a\\b\"c' ü", 99), "a\\b\"c' ü");
    }

    proptest! {
        #[test]
        fn no_line_is_longer_than_it_may_be(text in "\\PC{0,1500}|.{0,1500}", gpus in 0_usize..40) {
            let share = || Share { index: 7, uuid: text.clone(), quota_bytes: Some(u64::MAX) };
            let mut event = refused().of(&text, Some(&text), &text).because(&text);
            event.gpus = (0..gpus).map(|_| share()).collect();
            event.chosen = Some(text.clone());
            event.quota_by = Some(text.clone());
            let line = event.line();
            prop_assert!(line.len() <= MOST_LINE_BYTES, "{} bytes", line.len());
            prop_assert_eq!(Event::parse(&line).map(|read| read.at_us), Some(event.at_us));
        }
    }
}
