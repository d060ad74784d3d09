//! What an image demands of its host: the `NVIDIA_REQUIRE_*` variables.
//!
//! Owns their language, as libnvidia-container reads it (`src/cli/dsl.c`): spaces part
//! alternatives, commas what must hold together, and each condition compares `cuda`,
//! `driver`, `arch` (compute capability) or `brand` with a value; all variables must
//! hold. Must not know where the facts come from, nor what a refusal does. Pure.
//!
//! A condition on a fact that isn't known here passes: what loads no library of NVIDIA's
//! knows neither `arch` nor `brand`, and must not refuse for that. Its term's other
//! conditions still count. A condition that can't be read, or names an unknown
//! property, fails its term, so it refuses only if no alternative holds: whatever starts
//! under NVIDIA's runtime starts here. The values are the image author's: reading one is
//! linear in its length, which is bounded, and errors quote a bounded part.

use std::collections::BTreeMap;
use std::fmt;

use thiserror::Error;

use cgpu_core::request::Quoted;

/// What all variables with demands begin with.
const PREFIX: &str = "NVIDIA_REQUIRE_";

/// The same of another language, which Jetson images speak to NVIDIA's own toolkit.
const JETPACK: &str = "NVIDIA_REQUIRE_JETPACK";

/// The variable that most images have, and whose absence makes [`LEGACY`] count.
const CUDA: &str = "NVIDIA_REQUIRE_CUDA";

/// All that images of old say.
const LEGACY: &str = "CUDA_VERSION";

/// Goes without the check.
const DISABLE: &str = "NVIDIA_DISABLE_REQUIRE";

/// What Go's `strconv.ParseBool` takes for true, as NVIDIA's toolkit reads [`DISABLE`] by it.
const TRUE: &[&str] = &["1", "t", "T", "TRUE", "true", "True"];

/// The longest value that is read; those of NVIDIA's images have some 2,000 bytes.
const VALUE_BYTES_MAX: usize = 32 << 10;

/// CUDA that a branch of the driver brings, by the branch's first number.
///
/// NVIDIA's CUDA release notes, "CUDA Toolkit and Corresponding Driver Versions"; from 470 on
/// also as each branch's `nvidia-smi` says it.
const BRINGS: &[(u16, Version)] = &[
    (346, Version::new(7, 0)),
    (352, Version::new(7, 5)),
    (367, Version::new(8, 0)),
    (384, Version::new(9, 0)),
    (390, Version::new(9, 1)),
    (396, Version::new(9, 2)),
    (410, Version::new(10, 0)),
    (418, Version::new(10, 1)),
    (440, Version::new(10, 2)),
    (450, Version::new(11, 0)),
    (455, Version::new(11, 1)),
    (460, Version::new(11, 2)),
    (465, Version::new(11, 3)),
    (470, Version::new(11, 4)),
    (495, Version::new(11, 5)),
    (510, Version::new(11, 6)),
    (515, Version::new(11, 7)),
    (520, Version::new(11, 8)),
    (525, Version::new(12, 0)),
    (530, Version::new(12, 1)),
    (535, Version::new(12, 2)),
    (545, Version::new(12, 3)),
    (550, Version::new(12, 4)),
    (555, Version::new(12, 5)),
    (560, Version::new(12, 6)),
    (565, Version::new(12, 7)),
    (570, Version::new(12, 8)),
    (575, Version::new(12, 9)),
    (580, Version::new(13, 0)),
    (590, Version::new(13, 1)),
    (595, Version::new(13, 2)),
    (610, Version::new(13, 3)),
    (615, Version::new(13, 4)),
];

/// A version of up to four numbers; those that aren't said are zeros, so 12.4 is 12.4.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version([u32; 4]);

/// What is known of a host, and of one of its GPUs; what isn't is `None`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The newest CUDA that the driver runs.
    pub cuda: Option<Version>,
    pub driver: Option<nvrm::Version>,
    /// The GPU's compute capability.
    pub arch: Option<Version>,
    /// The GPU's brand as NVML calls it, as `Tesla`; case doesn't matter.
    pub brand: Option<String>,
}

/// Why an image should not be started here.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum RequireError {
    /// It demands what the host hasn't.
    #[error(
        "{variable} asks for {condition}{}, and this host has {has}; {remedy}, or set \
         {DISABLE}=1 in the container",
        alternatives(*others)
    )]
    Unmet {
        variable: String,
        /// The first condition of it that doesn't hold.
        condition: String,
        /// How many other terms there are; none of them holds either.
        others: usize,
        /// What the host has in its place.
        has: String,
        remedy: String,
    },
    /// It demands something of a property that there isn't.
    #[error(
        "{variable}: {condition} names no property of a host; known are cuda, driver, arch and \
         brand; correct it, or set {DISABLE}=1 in the container"
    )]
    UnknownProperty { variable: String, condition: String },
    /// A condition that can't be read.
    #[error(
        "{variable}: {condition} is no condition; it should be as cuda>=12.4 or brand=tesla, \
         with one of = != < <= > >= (brand: = !=); correct it, or set {DISABLE}=1 in the container"
    )]
    Malformed { variable: String, condition: String },
    /// A value longer than any that is meant.
    #[error(
        "{variable} has {bytes} bytes, and at most {VALUE_BYTES_MAX} are read; correct it, or set \
         {DISABLE}=1 in the container"
    )]
    TooLong {
        variable: String,
        /// Its value's length in bytes.
        bytes: usize,
    },
}

/// ` or one of 3 alternatives`, where there are any.
fn alternatives(others: usize) -> String {
    match others {
        0 => String::new(),
        1 => " or its alternative".to_owned(),
        _ => format!(" or one of {others} alternatives"),
    }
}

/// Sees whether a host with `facts` has what the variables `env` demand, of which the last
/// counts where one is there twice. For several GPUs it is called for each.
///
/// # Errors
///
/// If it hasn't, or that can't be determined because a demand can't be read.
pub fn check<'a>(
    env: impl Iterator<Item = (&'a str, &'a str)>,
    facts: &Facts,
) -> Result<(), RequireError> {
    let counts = |name: &str| name.starts_with(PREFIX) && !name.starts_with(JETPACK);
    let mut demands = BTreeMap::new();
    let mut legacy = "";
    let mut disabled = false;
    for (name, value) in env {
        match name {
            DISABLE => disabled = TRUE.contains(&value),
            LEGACY => legacy = value,
            _ if counts(name) => {
                demands.insert(name, value);
            }
            _ => {}
        }
    }
    if disabled {
        return Ok(());
    }
    for (variable, value) in &demands {
        check_value(variable, value, facts)?;
    }
    // An image can call anything CUDA_VERSION: what is no version demands nothing.
    match (demands.get(CUDA).is_none_or(|value| value.is_empty()), release(legacy)) {
        (true, Some(version)) => check_value(LEGACY, &format!("cuda>={version}"), facts),
        _ => Ok(()),
    }
}

/// The first two numbers of a `CUDA_VERSION`: what it needs; the third is the toolkit's own.
fn release(legacy: &str) -> Option<Version> {
    let Version([major, minor, ..]) = Version::parse(legacy)?;
    Some(Version::new(major, minor))
}

/// The CUDA that a driver brings; `None` for branches before the table's first and after its
/// last, of which it can't be determined.
#[must_use]
pub fn cuda_of(driver: nvrm::Version) -> Option<Version> {
    let (newest, _) = BRINGS.last()?;
    if driver.branch > *newest {
        return None;
    }
    let found = BRINGS.iter().rfind(|(branch, _)| *branch <= driver.branch)?;
    Some(found.1)
}

impl Facts {
    /// What is known of a host by its driver alone.
    #[must_use]
    pub fn of_driver(driver: nvrm::Version) -> Self {
        Facts { cuda: cuda_of(driver), driver: Some(driver), ..Facts::default() }
    }
}

impl Version {
    /// A version of two numbers.
    #[must_use]
    pub const fn new(major: u32, minor: u32) -> Self {
        Version([major, minor, 0, 0])
    }

    /// One to four numbers with dots between them.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut version = Version([0; 4]);
        let mut places = version.0.iter_mut();
        for part in text.split('.') {
            // A plus sign would parse, too.
            if !part.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            *places.next()? = part.parse().ok()?;
        }
        Some(version)
    }
}

impl From<nvrm::Version> for Version {
    fn from(driver: nvrm::Version) -> Self {
        let patch = driver.patch.unwrap_or(0);
        Version([driver.branch.into(), driver.minor.into(), patch.into(), 0])
    }
}

/// At least two numbers, without the zeros that follow.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [major, minor, rest @ ..] = self.0;
        write!(f, "{major}.{minor}")?;
        let said = rest.iter().rposition(|number| *number != 0).map_or(0, |last| last + 1);
        rest.iter().take(said).try_for_each(|number| write!(f, ".{number}"))
    }
}

/// What a condition is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Property {
    Cuda,
    Driver,
    Arch,
    Brand,
}

/// How it compares: what the host has stands on the left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operator {
    Equal,
    NotEqual,
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

/// A condition that can be read.
#[derive(Debug, Clone, Copy)]
enum Condition<'a> {
    Number(Property, Operator, Version),
    Brand { same: bool, brand: &'a str },
}

/// Why a condition doesn't hold.
enum Fault {
    Unmet { has: String, remedy: String },
    UnknownProperty,
    Malformed,
}

/// Sees whether one of a value's alternatives holds; the error is the first one's.
fn check_value(variable: &str, value: &str, facts: &Facts) -> Result<(), RequireError> {
    if value.len() > VALUE_BYTES_MAX {
        return Err(RequireError::TooLong { variable: quoted(variable), bytes: value.len() });
    }
    let terms = value.split_ascii_whitespace().filter(|term| conditions(term).next().is_some());
    let mut first = None;
    let mut others = 0;
    for term in terms {
        let Some((condition, fault)) = fault_of(term, facts) else { return Ok(()) };
        match first {
            None => first = Some((condition, fault)),
            Some(_) => others += 1,
        }
    }
    let Some((condition, fault)) = first else { return Ok(()) };
    let (variable, condition) = (quoted(variable), quoted(condition));
    Err(match fault {
        Fault::Unmet { has, remedy } => {
            RequireError::Unmet { variable, condition, others, has, remedy }
        }
        Fault::UnknownProperty => RequireError::UnknownProperty { variable, condition },
        Fault::Malformed => RequireError::Malformed { variable, condition },
    })
}

/// An image's words as an error may have them.
fn quoted(text: &str) -> String {
    Quoted(text).to_string()
}

fn conditions(term: &str) -> impl Iterator<Item = &str> {
    term.split(',').filter(|condition| !condition.is_empty())
}

/// The condition for which a term doesn't hold. One that can't be read is it only where all
/// others hold: a term with a false condition is false whatever the rest means.
fn fault_of<'a>(term: &'a str, facts: &Facts) -> Option<(&'a str, Fault)> {
    let mut unread = None;
    for condition in conditions(term) {
        match read(condition).map(|read| read.fault(facts)) {
            Ok(None) => {}
            Ok(Some(fault)) => return Some((condition, fault)),
            Err(fault) => unread = unread.or(Some((condition, fault))),
        }
    }
    unread
}

/// A property's name, an operator and a value, with nothing between them.
fn read(condition: &str) -> Result<Condition<'_>, Fault> {
    let is_operator = |c| matches!(c, '<' | '>' | '=' | '!');
    let at = condition.find(is_operator).ok_or(Fault::Malformed)?;
    let (name, rest) = condition.split_at(at);
    let end = rest.find(|c| !is_operator(c)).ok_or(Fault::Malformed)?;
    let (operator, value) = rest.split_at(end);
    let operator = match operator {
        "=" => Operator::Equal,
        "!=" => Operator::NotEqual,
        "<" => Operator::Less,
        "<=" => Operator::LessEqual,
        ">" => Operator::Greater,
        ">=" => Operator::GreaterEqual,
        _ => return Err(Fault::Malformed),
    };
    let property = match name.to_ascii_lowercase().as_str() {
        "cuda" => Property::Cuda,
        "driver" => Property::Driver,
        "arch" => Property::Arch,
        "brand" => Property::Brand,
        "" => return Err(Fault::Malformed),
        _ => return Err(Fault::UnknownProperty),
    };
    match (property, operator) {
        (Property::Brand, Operator::Equal) => Ok(Condition::Brand { same: true, brand: value }),
        (Property::Brand, Operator::NotEqual) => Ok(Condition::Brand { same: false, brand: value }),
        (Property::Brand, _) => Err(Fault::Malformed),
        _ => {
            let version = Version::parse(value).ok_or(Fault::Malformed)?;
            Ok(Condition::Number(property, operator, version))
        }
    }
}

impl Operator {
    fn holds(self, has: Version, wanted: Version) -> bool {
        match self {
            Operator::Equal => has == wanted,
            Operator::NotEqual => has != wanted,
            Operator::Less => has < wanted,
            Operator::LessEqual => has <= wanted,
            Operator::Greater => has > wanted,
            Operator::GreaterEqual => has >= wanted,
        }
    }
}

impl Condition<'_> {
    /// Why it doesn't hold on a host with `facts`; `None` if it does, or that can't be determined.
    fn fault(&self, facts: &Facts) -> Option<Fault> {
        match *self {
            Condition::Brand { same, brand } => {
                let has = facts.brand.as_deref()?;
                let holds = has.eq_ignore_ascii_case(brand) == same;
                (!holds).then(|| Fault::Unmet {
                    has: format!("a GPU of brand {has}"),
                    remedy: "use another GPU or an image for this one".to_owned(),
                })
            }
            Condition::Number(property, operator, wanted) => {
                let has = facts.number(property)?;
                (!operator.holds(has, wanted)).then(|| Fault::Unmet {
                    has: facts.described(property, has),
                    remedy: remedy(property, has, wanted),
                })
            }
        }
    }
}

impl Facts {
    fn number(&self, property: Property) -> Option<Version> {
        match property {
            Property::Cuda => self.cuda,
            Property::Driver => self.driver.map(Version::from),
            Property::Arch => self.arch,
            Property::Brand => None,
        }
    }

    /// What it has of `property`, as a sentence has it.
    fn described(&self, property: Property, has: Version) -> String {
        match (property, self.driver) {
            (Property::Cuda, Some(driver)) => format!("CUDA {has} (driver {driver})"),
            (Property::Cuda, None) => format!("CUDA {has}"),
            (Property::Driver, Some(driver)) => format!("driver {driver}"),
            (Property::Driver, None) => format!("driver {has}"),
            _ => format!("a GPU of compute capability {has}"),
        }
    }
}

/// What brings the host and the image together.
fn remedy(property: Property, has: Version, wanted: Version) -> String {
    match property {
        Property::Cuda if has < wanted => {
            format!("update the driver, use an image for CUDA {has} or older")
        }
        Property::Driver if has < wanted => {
            "update the driver, use an image for an older CUDA".to_owned()
        }
        Property::Cuda => format!("use an image for CUDA {has}"),
        Property::Driver => "use an image for this driver".to_owned(),
        _ => "use another GPU or an image for this one".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As NVIDIA's image for CUDA 12.4 has it, but for some brands.
    const IMAGE: &str = "cuda>=12.4 brand=tesla,driver>=470,driver<471 \
                         brand=unknown,driver>=470,driver<471 brand=geforce,driver>=470,driver<471 \
                         brand=tesla,driver>=535,driver<536 brand=unknown,driver>=535,driver<536";

    fn driver(text: &str) -> nvrm::Version {
        text.parse().unwrap()
    }

    fn on(driver_version: &str, value: &str) -> Result<(), RequireError> {
        check([(CUDA, value)].into_iter(), &Facts::of_driver(driver(driver_version)))
    }

    /// An image of NVIDIA's is accepted on the drivers that its NVIDIA_REQUIRE_CUDA names, and on
    /// no others below its CUDA.
    #[test]
    fn nvidia_image_passes_on_its_named_drivers() {
        for (version, taken) in [
            ("550.54.14", true),
            ("580.65.06", true),
            ("625.10", true), // what it brings is unknown
            ("535.161.08", true),
            ("470.256.02", true),
            ("525.147.05", false),
            ("545.29.06", false),
            ("465.31", false),
        ] {
            assert_eq!(on(version, IMAGE).is_ok(), taken, "{version}");
        }
    }

    /// A refusal says which variable asks for what, what the host has, and what to do.
    #[test]
    fn refusal_names_variable_requirement_host_and_remedy() {
        let refused = |version, value| on(version, value).unwrap_err().to_string();
        assert_eq!(
            refused("465.31", IMAGE),
            "NVIDIA_REQUIRE_CUDA asks for cuda>=12.4 or one of 5 alternatives, and this host has \
             CUDA 11.3 (driver 465.31); update the driver, use an image for CUDA 11.3 or older, \
             or set NVIDIA_DISABLE_REQUIRE=1 in the container"
        );
        assert_eq!(
            refused("535.161.08", "brand=tesla,driver>=550 driver<500"),
            "NVIDIA_REQUIRE_CUDA asks for driver>=550 or its alternative, and this host has \
             driver 535.161.08; update the driver, use an image for an older CUDA, or set \
             NVIDIA_DISABLE_REQUIRE=1 in the container"
        );
        let too_new = refused("535.161.08", "driver<470");
        assert!(too_new.contains("driver<470, and this host has driver 535.161.08; use an image"));
        let too_new = refused("580.65.06", "cuda<12");
        assert!(too_new.contains("has CUDA 13.0 (driver 580.65.06); use an image for CUDA 13.0,"));
        let facts = Facts { arch: Some(Version::new(7, 0)), ..Facts::default() };
        let arch = check([("NVIDIA_REQUIRE_ARCH", "arch>=8.0")].into_iter(), &facts).unwrap_err();
        assert!(arch.to_string().starts_with(
            "NVIDIA_REQUIRE_ARCH asks for arch>=8.0, and this host has a GPU of compute \
             capability 7.0; use another GPU"
        ));
    }

    #[test]
    fn each_operator_compares_number_by_number() {
        let facts = Facts::of_driver(driver("535.161.08"));
        for (condition, holds) in [
            ("cuda=12.2", true),
            ("cuda=12.2.0", true),
            ("cuda=12", false),
            ("cuda!=12.2", false),
            ("cuda!=12.1", true),
            ("cuda<12.10", true), // not as decimals
            ("cuda<=12.2", true),
            ("cuda>12.2", false),
            ("cuda>=12.2", true),
            ("CUDA>=12", true),
            ("driver>=535", true),
            ("driver<536", true),
            ("driver>535.161.8", false),
            ("driver=535.161.08", true),
            ("driver>=535.161.08.1", false),
            ("driver<4294967295", true),
        ] {
            let checked = check([(CUDA, condition)].into_iter(), &facts);
            assert_eq!(checked.is_ok(), holds, "{condition}: {checked:?}");
        }
    }

    /// A condition on a fact that is not known of the host passes, and conditions on known facts
    /// still count.
    #[test]
    fn unknown_host_facts_pass_and_known_ones_count() {
        let facts = Facts::of_driver(driver("525.60.13"));
        for (value, passes) in [
            ("arch>=9.0", true),
            ("brand=tesla", true),
            ("brand!=geforce", true),
            ("brand=tesla,driver>=535", false),
            ("arch>=9.0,cuda>=12.0", true),
        ] {
            let checked = check([(CUDA, value)].into_iter(), &facts);
            assert_eq!(checked.is_ok(), passes, "{value}: {checked:?}");
            assert!(check([(CUDA, value)].into_iter(), &Facts::default()).is_ok());
        }
        let brand = |value| {
            let facts = Facts { brand: Some("GeForce".to_owned()), ..facts.clone() };
            check([(CUDA, value)].into_iter(), &facts)
        };
        assert!(brand("brand=geforce").is_ok() && brand("brand!=tesla").is_ok());
        let error = brand("brand=tesla").unwrap_err().to_string();
        assert!(error.contains("asks for brand=tesla, and this host has a GPU of brand GeForce;"));
    }

    /// A condition that cannot be read refuses the container only if no other alternative holds.
    #[test]
    fn malformed_condition_refuses_unless_an_alternative_holds() {
        let unread = |value| on("535.161.08", value).unwrap_err().to_string();
        for malformed in
            ["cuda", "cuda>=", ">=12.4", "cuda==12.2", "cuda!12", "cuda=>12", "cuda>=12.x"]
        {
            let says = format!("NVIDIA_REQUIRE_CUDA: {malformed} is no condition; it should be");
            assert!(unread(malformed).starts_with(&says), "{}", unread(malformed));
        }
        for malformed in
            ["cuda>=+12", "cuda>=1.2.3.4.5", "cuda>=12.", "cuda>=4294967296", "brand<tesla"]
        {
            assert!(unread(malformed).contains("is no condition"), "{malformed}");
        }
        assert!(unread("vram>=24").starts_with(
            "NVIDIA_REQUIRE_CUDA: vram>=24 names no property of a host; known are cuda, driver,"
        ));
        // Unknown and false together are false, and an alternative that holds is enough.
        assert!(unread("vram>=24,cuda>=13").contains("asks for cuda>=13, and"));
        assert!(unread("cuda>=13 vram>=24").contains("asks for cuda>=13 or its alternative"));
        for enough in ["vram>=24 cuda>=12", "cuda>=12 vram>=24", "nonsense driver>=470"] {
            assert_eq!(on("535.161.08", enough), Ok(()), "{enough}");
        }
    }

    #[test]
    fn nothing_asked_is_nothing_demanded() {
        for nothing in ["", "  ", ",", " , ,, "] {
            assert_eq!(on("465.31", nothing), Ok(()), "{nothing:?}");
        }
        assert!(on("465.31", "cuda>=12 ,").is_err());
    }

    #[test]
    fn variables_count_as_under_nvidias_toolkit() {
        let old = Facts::of_driver(driver("470.256.02"));
        let asks = |env: &[(&str, &str)]| check(env.iter().copied(), &old);
        let cuda = (CUDA, "cuda>=12.4");
        for (env, passes) in [
            (vec![cuda], false),
            (vec![cuda, (CUDA, "cuda>=11")], true), // the last one wins
            (vec![(CUDA, "cuda>=11"), cuda], false),
            (vec![(CUDA, "cuda>=11"), ("NVIDIA_REQUIRE_DRIVER", "driver>=535")], false),
            (vec![("NVIDIA_REQUIRE_JETPACK", "csv-mounts=all")], true),
            (vec![("NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS", "base-only")], true),
            (vec![("REQUIRE_CUDA", "cuda>=12.4")], true),
            (vec![(LEGACY, "12.4.1")], false),
            (vec![(LEGACY, "11.4.3")], true), // its third number is the toolkit's
            (vec![(LEGACY, "12.4.1"), (CUDA, "cuda>=11")], true),
            (vec![(LEGACY, "12.4.1"), (CUDA, "")], false),
            (vec![(LEGACY, "latest")], true),
            (vec![cuda, (LEGACY, "12.4.1"), (DISABLE, "1")], true),
            (vec![(DISABLE, "1"), cuda, (DISABLE, "0")], false),
        ] {
            assert_eq!(asks(&env).is_ok(), passes, "{env:?}");
        }
        let legacy = asks(&[(LEGACY, "12.4.1")]).unwrap_err().to_string();
        assert!(legacy.starts_with("CUDA_VERSION asks for cuda>=12.4, and this host has CUDA"));
    }

    #[test]
    fn the_switch_is_what_go_takes_for_true() {
        for (value, off) in [
            ("1", true),
            ("t", true),
            ("T", true),
            ("TRUE", true),
            ("true", true),
            ("True", true),
            ("", false),
            ("0", false),
            ("yes", false),
            ("tRUE", false),
            (" 1", false),
        ] {
            let env = [(CUDA, "cuda>=99"), (DISABLE, value)];
            assert_eq!(check(env.into_iter(), &Facts::of_driver(driver("535.54.03"))).is_ok(), off);
        }
    }

    #[test]
    fn cuda_is_what_the_drivers_branch_brings() {
        let brings = |version| cuda_of(driver(version)).map(|cuda| cuda.to_string());
        for (version, cuda) in [
            ("345.20", None),
            ("346.46", Some("7.0")),
            ("430.50", Some("10.1")),
            ("470.256.02", Some("11.4")),
            ("535.161.08", Some("12.2")),
            ("565.77", Some("12.7")),
            ("580.65.06", Some("13.0")),
            ("600.01", Some("13.2")),
            ("615.71.09", Some("13.4")),
            ("616.01", None),
        ] {
            assert_eq!(brings(version).as_deref(), cuda, "{version}");
        }
        assert!(BRINGS.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1));
    }

    /// A value that is too long is refused, and a long word is cut in the refusal.
    #[test]
    fn long_values_are_refused_and_long_words_cut() {
        let long = "cuda>=1 ".repeat(5000);
        assert_eq!(
            on("535.54.03", &long).unwrap_err().to_string(),
            "NVIDIA_REQUIRE_CUDA has 40000 bytes, and at most 32768 are read; correct it, or set \
             NVIDIA_DISABLE_REQUIRE=1 in the container"
        );
        let name = format!("{PREFIX}{}", "X\u{1b}[2J".repeat(100));
        let value = "ü".repeat(1000);
        let error = check([(&*name, &*value)].into_iter(), &Facts::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.len() < 1200 && !text.contains(char::is_control), "{text}");
    }

    proptest! {
        #[test]
        fn any_value_is_decided(value in ".{0,200}", known in any::<bool>()) {
            let facts = if known { Facts::of_driver(driver("535.161.08")) } else { Facts::default() };
            let _ = check([(CUDA, &*value), (LEGACY, &*value), (DISABLE, &*value)].into_iter(), &facts);
        }

        /// Any value that looks like conditions is decided, and a refusal of it has a bounded
        /// length.
        #[test]
        fn condition_like_values_get_bounded_refusals(
            value in "((cuda|driver|arch|brand|x)?[<>=!]{0,3}[0-9.a]{0,12}[, \t]{0,2}){0,40}",
        ) {
            if let Err(error) = on("535.161.08", &value) {
                prop_assert!(error.to_string().len() < 400, "{error}");
            }
        }

        #[test]
        fn an_alternative_that_holds_is_always_enough(value in "[a-z<>=!0-9., ]{0,60}") {
            prop_assert_eq!(on("535.161.08", &format!("{value} driver>=470")), Ok(()));
            prop_assert_eq!(on("535.161.08", &format!("driver>=470 {value}")), Ok(()));
        }

        #[test]
        fn versions_compare_as_their_numbers(a in any::<[u32; 4]>(), b in any::<[u32; 4]>()) {
            let text = |v: [u32; 4]| v.map(|number| number.to_string()).join(".");
            let parsed = |v| Version::parse(&text(v)).unwrap();
            prop_assert_eq!(parsed(a).cmp(&parsed(b)), a.cmp(&b));
            prop_assert_eq!(Version::parse(&parsed(a).to_string()), Some(parsed(a)));
        }
    }
}
