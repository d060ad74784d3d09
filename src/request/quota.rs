//! What one source, the variables or the annotations, asks of memory and compute.
//!
//! Knows numbers, lists and units. Must not know the size of any GPU: what an amount
//! comes to is `plan`'s arithmetic. Invariants of a [`Quota`]: it has at least one
//! amount, no amount is zero, and no share is more than the whole.

use std::fmt;

use super::RequestError;
use super::name::{DISABLE, HIGH_PRIO, MEM_CONTAINER, MEM_DEV, MEM_UNIT, Name, SCHD_WEIGHT};
use super::setting::Setting;
use crate::units::MIB;

/// Bytes in one GiB.
pub(crate) const GIB: u64 = MIB << 10;

/// Where something is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// `process.env`.
    Env,
    /// The bundle's annotations.
    Annotations,
}

/// What a source comes to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// A quota.
    Quota(Quota),
    /// None, and why.
    Off(Off),
}

/// A quota as asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Quota {
    /// Who asks.
    pub(crate) source: Source,
    /// The memory list, for messages.
    pub(crate) memory: Setting,
    /// The memory list: the n-th amount belongs to the n-th shared GPU, the last repeats.
    pub(crate) amounts: Vec<u64>,
    /// What an amount counts in.
    pub(crate) measure: Measure,
    /// Bytes of the unit that its source names, or of a GiB if it names none that can be meant.
    pub(crate) unit_bytes: u128,
    /// The compute weight, where given.
    pub(crate) weight: Option<Weight>,
    /// What asks for high priority, if anything does.
    pub(crate) high_priority: Option<Setting>,
}

impl Quota {
    /// Takes weight and priority of annotations that ask for no quota themselves, if variables say nothing
    /// of them.
    pub(super) fn complete_shares(
        &mut self,
        get: impl Fn(Name) -> Option<Setting>,
    ) -> Result<(), RequestError> {
        if self.source == Source::Annotations {
            return Ok(());
        }
        if self.weight.is_none() {
            self.weight = get(SCHD_WEIGHT).map(read_weight).transpose()?.flatten();
        }
        if self.high_priority.is_none() {
            self.high_priority = high_priority(get(HIGH_PRIO))?;
        }
        Ok(())
    }

    /// What asks for a weight above 1 or for high priority by a variable, which an image may have set.
    pub(super) fn share_by_variable(&self) -> Option<Setting> {
        let weight = self.weight.as_ref().filter(|weight| weight.value > 1);
        let settings = weight.map(|weight| &weight.setting).into_iter().chain(&self.high_priority);
        let names = [SCHD_WEIGHT, HIGH_PRIO].map(|name| name.variable);
        settings.into_iter().find(|setting| names.contains(&&*setting.name)).cloned()
    }
}

/// What an amount of memory counts in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Measure {
    /// So many equal parts of the GPU's memory, at least 1.
    Parts(u64),
    /// Units of so many bytes, at least one MiB.
    UnitBytes(u128),
}

/// A compute weight as asked for, at least 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Weight {
    /// For messages.
    pub(crate) setting: Setting,
    /// The number; no `max_inst` has been looked at.
    pub(crate) value: u64,
}

/// Why a source asks for no quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Off {
    /// There is no memory list.
    NotSet(&'static str),
    /// The memory list is empty.
    Empty(Setting),
    /// The memory list has a zero.
    Zero(Setting),
    /// It says so. The memory list that it lifts, if there is one that would count.
    Disabled(Setting, Option<Setting>),
    /// The annotations are a pod's, and this is its sandbox. The memory list, if there is one.
    Sandbox(Setting, Option<Setting>),
    /// The configuration doesn't trust the source. The memory list, if there is one that would count.
    Untrusted(&'static str, Option<Setting>),
}

impl Off {
    /// The memory list that asks for a quota and doesn't count, and the key by which it doesn't.
    pub(super) fn memory(&self) -> Option<(&Setting, &'static str)> {
        match self {
            Off::Untrusted(key, memory) => Some((memory.as_ref()?, key)),
            Off::Sandbox(_, memory) => Some((memory.as_ref()?, "")),
            _ => None,
        }
    }
}

impl fmt::Display for Off {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Off::NotSet(name) => write!(f, "{name} is not set"),
            Off::Empty(memory) => write!(f, "{} is empty", memory.name),
            Off::Zero(memory) if memory.value.contains(',') => {
                write!(f, "{memory} contains a zero")
            }
            Off::Zero(setting) | Off::Disabled(setting, _) => write!(f, "{setting}"),
            Off::Sandbox(setting, _) => write!(f, "{setting}: a pod's sandbox uses no GPU"),
            Off::Untrusted(key, Some(memory)) => {
                write!(f, "{memory} doesn't count ({key} is false)")
            }
            Off::Untrusted(key, None) => write!(f, "{key} is false"),
        }
    }
}

/// What `source` asks for, where `get` answers what it says under a name.
///
/// # Errors
///
/// Where a value that matters can't be meant; what a quota that is off would have been
/// is not looked at.
pub(super) fn read(
    source: Source,
    get: impl Fn(Name) -> Option<Setting>,
) -> Result<Ask, RequestError> {
    if let Some(setting) = get(DISABLE)
        && is_disabled(&setting)?
    {
        return Ok(Ask::Off(Off::Disabled(setting, memory_asked(&get))));
    }
    let Some(memory) = get(MEM_CONTAINER) else {
        return Ok(Ask::Off(Off::NotSet(source.name(MEM_CONTAINER))));
    };
    if memory.text()?.is_empty() {
        return Ok(Ask::Off(Off::Empty(memory)));
    }
    let amounts = read_amounts(&memory)?;
    if amounts.contains(&0) {
        return Ok(Ask::Off(Off::Zero(memory)));
    }
    Ok(Ask::Quota(Quota {
        source,
        measure: read_measure(source, &get, &memory, &amounts)?,
        unit_bytes: get(MEM_UNIT)
            .and_then(|unit| unit_bytes(source, unit).ok())
            .unwrap_or(GIB.into()),
        weight: get(SCHD_WEIGHT).map(read_weight).transpose()?.flatten(),
        high_priority: high_priority(get(HIGH_PRIO))?,
        memory,
        amounts,
    }))
}

/// The memory list of a source whose quota doesn't count for another reason; `None` if it asks for none.
/// One that can't be meant asks for something.
pub(super) fn memory_asked(get: impl Fn(Name) -> Option<Setting>) -> Option<Setting> {
    let asks = |memory: &Setting| {
        let is_none =
            |text: &str| text.is_empty() || text.split(',').any(|n| number(n.trim()) == Some(0));
        !memory.text().is_ok_and(is_none)
    };
    get(MEM_CONTAINER).filter(asks)
}

impl Source {
    /// What `name` is called here.
    pub(crate) fn name(self, name: Name) -> &'static str {
        match self {
            Source::Env => name.variable,
            Source::Annotations => name.annotation,
        }
    }
}

fn is_disabled(setting: &Setting) -> Result<bool, RequestError> {
    match setting.text()?.to_ascii_lowercase().as_str() {
        "true" | "1" => Ok(true),
        "false" | "0" | "" => Ok(false),
        _ => Err(RequestError::BadSwitch { setting: setting.clone() }),
    }
}

fn high_priority(setting: Option<Setting>) -> Result<Option<Setting>, RequestError> {
    let Some(setting) = setting else { return Ok(None) };
    match setting.text()? {
        "1" => Ok(Some(setting)),
        "0" | "" => Ok(None),
        _ => Err(RequestError::BadPriority { setting }),
    }
}

fn read_amounts(memory: &Setting) -> Result<Vec<u64>, RequestError> {
    let bad =
        |item: &str| RequestError::BadMemory { setting: memory.clone(), item: item.to_owned() };
    let items = memory.text()?.split(',').map(str::trim);
    items.map(|item| number(item).ok_or_else(|| bad(item))).collect()
}

fn read_measure(
    source: Source,
    get: impl Fn(Name) -> Option<Setting>,
    memory: &Setting,
    amounts: &[u64],
) -> Result<Measure, RequestError> {
    let total = match get(MEM_DEV) {
        Some(setting) if !setting.text()?.is_empty() => setting,
        _ => {
            let unit = get(MEM_UNIT).map(|setting| unit_bytes(source, setting));
            return Ok(Measure::UnitBytes(unit.unwrap_or(Ok(GIB.into()))?));
        }
    };
    let Some(parts) = number(total.text()?).filter(|&parts| parts > 0) else {
        return Err(RequestError::BadTotal { setting: total, memory: source.name(MEM_CONTAINER) });
    };
    match amounts.iter().copied().max() {
        Some(amount) if amount > parts => {
            Err(RequestError::MoreThanTotal { memory: memory.clone(), amount, total })
        }
        _ => Ok(Measure::Parts(parts)),
    }
}

/// Bytes of the unit; schedulers write `GB` where they mean GiB.
fn unit_bytes(source: Source, setting: Setting) -> Result<u128, RequestError> {
    let unit = setting.text()?.to_ascii_lowercase();
    match unit.as_str() {
        "" | "gib" | "gb" | "g" | "gi" => return Ok(GIB.into()),
        "mib" | "mb" | "m" | "mi" => return Ok(MIB.into()),
        _ => {}
    }
    match unit.strip_suffix("mib").and_then(number) {
        // A u64 of MiB is far from the end of u128.
        Some(mib) if mib > 0 => Ok(u128::from(mib) * u128::from(MIB)),
        _ => Err(RequestError::BadUnit { setting, total: source.name(MEM_DEV) }),
    }
}

fn read_weight(setting: Setting) -> Result<Option<Weight>, RequestError> {
    let text = setting.text()?;
    if text.is_empty() {
        return Ok(None);
    }
    match number(text) {
        Some(value) if value > 0 => Ok(Some(Weight { setting, value })),
        _ => Err(RequestError::BadWeight { setting }),
    }
}

/// The number that `text`, ASCII digits and nothing else, stands for.
fn number(text: &str) -> Option<u64> {
    // `parse` alone would take "+3".
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}
