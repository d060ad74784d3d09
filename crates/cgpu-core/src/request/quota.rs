//! What one source, the variables or the annotations, asks of memory and compute.
//!
//! Knows numbers, lists and units. Must not know the size of any GPU: what an amount results in is `plan`'s arithmetic.
//! Invariants of a [`Quota`]: it has at least one amount, no amount is zero, and no share is more than the total.
//!
//! A source may say the same thing in several ways, each a quota of its own: the smallest holds.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;

use super::RequestError;
use super::amount::{self, Amounts, BadAmount, GIB, Measure};
use super::setting::Setting;
use super::setting_names::{
    DISABLE, HIGH_PRIO, MEM_CONTAINER, MEM_DEV, MEM_UNIT, MEMORY, Name, PRIORITY, SCHD_WEIGHT,
    WEIGHT,
};
use crate::units::MIB;

/// Where something is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// `process.env`.
    Env,
    /// The bundle's annotations.
    Annotations,
}

/// In which of the ways a quota is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spelling {
    /// By the names of Alibaba Cloud cGPU: without a choice, on every GPU.
    Aliyun,
    /// By the neutral names: without a choice, on one GPU.
    Neutral,
    /// By NVIDIA's limit.
    Nvidia,
    /// By no setting of the container: the host's default of containers that name GPUs.
    HostDefault,
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
    /// In which way.
    pub(crate) spelling: Spelling,
    /// The memory list, for messages.
    pub(crate) memory: Setting,
    /// The memory list: the n-th amount belongs to the n-th shared GPU, the last repeats.
    pub(crate) amounts: Vec<u64>,
    /// What an amount counts in.
    pub(crate) measure: Measure,
    /// Bytes of the unit that its source names, or of a GiB if it names none that can be meant; `None` where
    /// each amount has its own unit.
    pub(crate) unit_bytes: Option<u128>,
    /// What its source asks for of computing time.
    pub(crate) shares: Shares,
}

/// What a source asks for of computing time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Shares {
    /// Compute weights, one for each way in which it is said; the smallest holds, and without one 1.
    pub(crate) weights: Vec<Weight>,
    /// What asks for high priority, if anything does and nothing next to it says otherwise.
    pub(crate) high_priority: Option<Setting>,
}

impl Shares {
    /// What a source says of computing time, where `get` answers what it says under a name.
    pub(super) fn read(get: impl Fn(Name) -> Option<Setting>) -> Result<Self, RequestError> {
        let weights = [
            get(WEIGHT).map(neutral_weight).transpose()?.flatten(),
            get(SCHD_WEIGHT).map(read_weight).transpose()?.flatten(),
        ];
        let neutral = get(PRIORITY).map(neutral_priority).transpose()?.flatten();
        let of_aliyun = high_priority(get(HIGH_PRIO))?;
        let high_priority = match neutral {
            Some((setting, true)) => Some(setting),
            Some((_, false)) => None,
            None => of_aliyun,
        };
        Ok(Shares { weights: weights.into_iter().flatten().collect(), high_priority })
    }

    /// These, and of what they don't say what annotations do, if `get` answers what these say.
    pub(super) fn completed(
        self,
        get: impl Fn(Name) -> Option<Setting>,
    ) -> Result<Self, RequestError> {
        let of_annotations = Shares::read(get)?;
        let is_silent = self.weights.is_empty();
        Ok(Shares {
            weights: if is_silent { of_annotations.weights } else { self.weights },
            high_priority: self.high_priority.or(of_annotations.high_priority),
        })
    }
}

impl Quota {
    /// The quota of `mib` on each GPU that a host gives by its rule `rule` if none is asked for, with `shares` of the
    /// computing time.
    pub(super) fn of_host(rule: &'static str, mib: u64, shares: Shares) -> Self {
        Quota {
            source: Source::Env,
            spelling: Spelling::HostDefault,
            memory: Setting { name: rule.into(), value: format!("{mib}MiB") },
            amounts: vec![mib],
            measure: Measure::UnitBytes(MIB.into()),
            unit_bytes: None,
            shares,
        }
    }

    /// Takes weight and priority of annotations that ask for no quota themselves, if variables say nothing
    /// of them.
    pub(super) fn complete_shares(
        &mut self,
        get: impl Fn(Name) -> Option<Setting>,
    ) -> Result<(), RequestError> {
        self.shares = core::mem::take(&mut self.shares).completed(get)?;
        Ok(())
    }

    /// What asks for a weight above 1 or for high priority by a variable, which an image may have set.
    pub(super) fn share_by_variable(&self) -> Option<Setting> {
        let is_more = |weight: &&Weight| weight.value != WeightValue::Number(1);
        let weights = self.shares.weights.iter().filter(is_more).map(|weight| &weight.setting);
        let mut settings = weights.chain(&self.shares.high_priority);
        let names = [SCHD_WEIGHT, HIGH_PRIO, WEIGHT, PRIORITY].map(|name| name.variable);
        settings.find(|setting| names.contains(&&*setting.name)).cloned()
    }
}

/// A compute weight as asked for, at least 1.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Weight {
    /// For messages.
    pub(crate) setting: Setting,
    /// What it says; no `max_inst` has been checked.
    pub(crate) value: WeightValue,
}

/// What a compute weight says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightValue {
    /// A number from 1.
    Number(u64),
    /// Hundredths of a per cent of a GPU's computing time, 1 to 10 000.
    Share(u64),
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

/// What `source` asks for, where `get` answers what it says under a name; `nvidias` is NVIDIA's limit. One for each way
/// in which it is said.
///
/// # Errors
///
/// If a value that matters can't be meant; what a quota that is off would have been is not checked.
pub(super) fn read(
    source: Source,
    get: impl Fn(Name) -> Option<Setting>,
    nvidias: Option<Setting>,
) -> Result<Vec<Ask>, RequestError> {
    if let Some(setting) = get(DISABLE)
        && is_disabled(&setting)?
    {
        return Ok(vec![Ask::Off(Off::Disabled(setting, memory_asked(&get, nvidias)))]);
    }
    let ways = [
        (Spelling::Neutral, get(MEMORY)),
        (Spelling::Aliyun, get(MEM_CONTAINER)),
        (Spelling::Nvidia, nvidias),
    ];
    let mut asks = Vec::new();
    for (spelling, memory) in ways {
        let Some(memory) = memory else { continue };
        let text = memory.text()?;
        if text.is_empty() {
            asks.push(Ask::Off(Off::Empty(memory)));
            continue;
        }
        let of_mib = Measure::UnitBytes(MIB.into());
        let Amounts { amounts, measure } = match spelling {
            Spelling::Neutral if number(text) == Some(0) => {
                Amounts { amounts: vec![0], measure: of_mib }
            }
            Spelling::Neutral => amount::read(text).map_err(|bad| bad_amount(&memory, bad))?,
            Spelling::Nvidia | Spelling::HostDefault => {
                let setting = memory.clone();
                let mib = number(text).ok_or(RequestError::BadNvidiaLimit { setting })?;
                Amounts { amounts: vec![mib], measure: of_mib }
            }
            Spelling::Aliyun => {
                let amounts = read_amounts(&memory)?;
                let is_off = amounts.contains(&0);
                let measure =
                    if is_off { of_mib } else { read_measure(source, &get, &memory, &amounts)? };
                Amounts { amounts, measure }
            }
        };
        if amounts.contains(&0) {
            asks.push(Ask::Off(Off::Zero(memory)));
            continue;
        }
        let named_unit = || get(MEM_UNIT).and_then(|unit| unit_bytes(source, unit).ok());
        let unit_bytes = (spelling == Spelling::Aliyun).then(|| named_unit().unwrap_or(GIB.into()));
        let shares = Shares::read(&get)?;
        asks.push(Ask::Quota(Quota {
            source,
            spelling,
            memory,
            amounts,
            measure,
            unit_bytes,
            shares,
        }));
    }
    if asks.is_empty() {
        asks.push(Ask::Off(Off::NotSet(source.name(MEM_CONTAINER))));
    }
    Ok(asks)
}

/// The memory list of a source whose quota doesn't count for another reason; `None` if it asks for none.
/// One that can't be meant asks for something. `nvidias` is NVIDIA's limit.
pub(super) fn memory_asked(
    get: impl Fn(Name) -> Option<Setting>,
    nvidias: Option<Setting>,
) -> Option<Setting> {
    let is_zero = |item: &str| {
        let item = item.trim();
        number(item) == Some(0) || amount::read(item).is_ok_and(|list| list.amounts == [0])
    };
    let asks = |memory: &Setting| {
        let is_none = |text: &str| text.is_empty() || text.split(',').any(is_zero);
        !memory.text().is_ok_and(is_none)
    };
    [get(MEMORY), get(MEM_CONTAINER), nvidias].into_iter().flatten().find(asks)
}

fn bad_amount(memory: &Setting, bad: BadAmount<'_>) -> RequestError {
    let setting = memory.clone();
    match bad {
        BadAmount::Bare(item) => RequestError::BareAmount { setting, item: item.to_owned() },
        BadAmount::Unreadable(item) => RequestError::BadAmount { setting, item: item.to_owned() },
        BadAmount::TooSmall(item) => RequestError::SmallAmount { setting, item: item.to_owned() },
        BadAmount::MoreThanAll(_) => RequestError::MoreThanAll { setting },
        BadAmount::Mixed => RequestError::MixedAmounts { setting },
    }
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
        Some(value) if value > 0 => Ok(Some(Weight { setting, value: WeightValue::Number(value) })),
        _ => Err(RequestError::BadWeight { setting }),
    }
}

/// A weight by its neutral name: a number, or per cent.
fn neutral_weight(setting: Setting) -> Result<Option<Weight>, RequestError> {
    let text = setting.text()?;
    if !text.ends_with('%') {
        return read_weight(setting);
    }
    match amount::read(text).as_ref().map(|list| &list.amounts[..]) {
        Ok(&[share]) if share > 0 => Ok(Some(Weight { setting, value: WeightValue::Share(share) })),
        _ => Err(RequestError::BadShare { setting }),
    }
}

/// What a priority by its neutral name says, and whether that is `high`.
fn neutral_priority(setting: Setting) -> Result<Option<(Setting, bool)>, RequestError> {
    match setting.text()?.to_ascii_lowercase().as_str() {
        "" => Ok(None),
        "high" => Ok(Some((setting, true))),
        "normal" => Ok(Some((setting, false))),
        _ => Err(RequestError::BadPriorityWord { setting }),
    }
}

/// The number that `text`, ASCII digits and nothing else, stands for.
fn number(text: &str) -> Option<u64> {
    // `parse` alone would take "+3".
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}
