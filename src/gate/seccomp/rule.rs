//! One entry of `linux.seccomp.syscalls`: what it says of one system call, as runtimes read it, and entries that say
//! the same of other arguments.
//!
//! Reads and writes the JSON value; fields that it does not know stay.

use serde_json::{Map, Value, json};

use super::cube::{self, Cube};
use super::error::SectionError;
use super::region::{ARGUMENTS, Operator, Piece, Region, Test};

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    Allow,
    Log,
    Trace(u64),
    Errno(u64),
    Trap,
    KillThread,
    KillProcess,
    Notify,
}

/// `EPERM`: runtimes use it where an entry names no error.
const DEFAULT_ERRNO: u64 = 1;

impl Action {
    /// Reads the value of `action` (or of `defaultAction`) and the error that belongs to it. `field` names the former
    /// in messages.
    pub(super) fn read(
        name: &str,
        errno: Option<&Value>,
        field: impl FnOnce() -> String,
    ) -> Result<Self, SectionError> {
        let errno = errno.and_then(Value::as_u64).unwrap_or(DEFAULT_ERRNO);
        Ok(match name {
            "SCMP_ACT_ALLOW" => Self::Allow,
            "SCMP_ACT_LOG" => Self::Log,
            "SCMP_ACT_TRACE" => Self::Trace(errno),
            "SCMP_ACT_ERRNO" => Self::Errno(errno),
            "SCMP_ACT_TRAP" => Self::Trap,
            "SCMP_ACT_KILL" | "SCMP_ACT_KILL_THREAD" => Self::KillThread,
            "SCMP_ACT_KILL_PROCESS" => Self::KillProcess,
            "SCMP_ACT_NOTIFY" => Self::Notify,
            _ => {
                let expected = "an action like SCMP_ACT_ERRNO";
                return Err(SectionError::Misshapen { field: field(), expected });
            }
        })
    }

    /// Whether the call can take place. `TRACE` permits: the tracer may be a process of the container.
    pub(super) fn permits(self) -> bool {
        matches!(self, Self::Allow | Self::Log | Self::Trace(_))
    }
}

/// What an entry says of one system call.
#[derive(Debug)]
pub(super) struct Rule {
    /// The entry's place in `syscalls`.
    pub(super) place: usize,
    pub(super) action: Action,
    pub(super) region: Region,
    /// The entry has no condition: libseccomp then ignores every other rule of the call.
    pub(super) unconditional: bool,
    /// Where the request's upper half is garbage, the entry matches no call that `region`, which has only a lower
    /// half, does not match.
    pub(super) no_wider: bool,
    /// The entry and `region` match the same calls, with garbage in the upper half, too.
    pub(super) exact: bool,
    /// The entry compares upper halves of arguments only: in a 32-bit program, it compares nothing.
    pub(super) upper_only: bool,
}

/// The largest number of 32 bits: the kernel reads 32 bits of a request.
const NARROW: u64 = u32::MAX as u64;

/// One item of `args`.
struct Condition {
    argument: usize,
    test: Test,
}

/// `linux.seccomp.syscalls[PLACE]`, for messages.
pub(super) fn field(place: usize) -> String {
    format!("linux.seccomp.syscalls[{place}]")
}

/// Whether an entry names the system call `name`.
pub(super) fn has_name(entry: &Value, name: &str) -> bool {
    let names = entry.get("names").and_then(Value::as_array);
    names.into_iter().flatten().any(|found| found == name)
}

/// The action of an entry.
pub(super) fn action(entry: &Value, place: usize) -> Result<Action, SectionError> {
    let name = entry.get("action").and_then(Value::as_str).unwrap_or_default();
    Action::read(name, entry.get("errnoRet"), || format!("{}.action", field(place)))
}

impl Rule {
    /// Reads the entry at `place`. `request` is the argument that has a set of numbers.
    pub(super) fn read(
        entry: &Value,
        place: usize,
        request: Option<usize>,
    ) -> Result<Self, SectionError> {
        let conditions = match entry.get("args") {
            None | Some(Value::Null) => Vec::new(),
            Some(Value::Array(args)) => {
                args.iter().map(|arg| Condition::read(arg, place)).collect::<Result<_, _>>()?
            }
            Some(_) => return Err(misshapen_args(place)),
        };
        // Where an entry has several conditions on one argument, runtimes treat each of its conditions as a rule of
        // its own, whatever else the entry asks.
        let repeats = (0..ARGUMENTS)
            .any(|argument| conditions.iter().filter(|c| c.argument == argument).count() > 1);
        let alternatives: Vec<&[Condition]> =
            if repeats { conditions.chunks(1).collect() } else { vec![&conditions] };
        let on_request =
            || conditions.iter().filter(|condition| Some(condition.argument) == request);
        Ok(Self {
            place,
            action: action(entry, place)?,
            unconditional: alternatives.iter().any(|all| all.iter().all(Condition::asks_nothing)),
            upper_only: alternatives.iter().any(|all| {
                all.iter().all(Condition::asks_nothing_of_a_lower_half)
                    && !all.iter().all(Condition::asks_nothing)
            }),
            no_wider: on_request().all(Condition::is_no_wider_in_32_bits),
            exact: on_request().all(Condition::has_no_upper_half),
            region: alternatives
                .into_iter()
                .map(|all| piece(all, request))
                .filter(|piece| !piece.request.is_empty())
                .collect(),
        })
    }
}

impl Condition {
    fn read(arg: &Value, place: usize) -> Result<Self, SectionError> {
        let number = |name: &str| arg.get(name).map_or(Some(0), Value::as_u64);
        let argument = number("index").and_then(|index| usize::try_from(index).ok());
        let (Some(argument @ 0..ARGUMENTS), Some(value), Some(second)) =
            (argument, number("value"), number("valueTwo"))
        else {
            return Err(misshapen_args(place));
        };
        let test = match arg.get("op").and_then(Value::as_str).unwrap_or_default() {
            "SCMP_CMP_EQ" => Test::Bits(Cube::exactly(value)),
            "SCMP_CMP_MASKED_EQ" => Test::Bits(Cube::new(value, second)),
            "SCMP_CMP_NE" => Test::Compare(Operator::NotEqual, value),
            "SCMP_CMP_LT" => Test::Compare(Operator::Less, value),
            "SCMP_CMP_LE" => Test::Compare(Operator::LessOrEqual, value),
            "SCMP_CMP_GE" => Test::Compare(Operator::GreaterOrEqual, value),
            "SCMP_CMP_GT" => Test::Compare(Operator::Greater, value),
            _ => return Err(misshapen_args(place)),
        };
        Ok(Self { argument, test })
    }

    fn asks_nothing(&self) -> bool {
        matches!(self.test, Test::Bits(cube) if cube.mask == 0)
    }

    fn asks_nothing_of_a_lower_half(&self) -> bool {
        matches!(self.test, Test::Bits(cube) if cube.mask & NARROW == 0)
    }

    fn is_no_wider_in_32_bits(&self) -> bool {
        match self.test {
            Test::Bits(Cube { value, .. })
            | Test::Compare(Operator::Less | Operator::LessOrEqual, value) => value <= NARROW,
            Test::Compare(..) => false,
        }
    }

    fn has_no_upper_half(&self) -> bool {
        matches!(self.test, Test::Bits(cube) if cube.mask <= NARROW)
    }

    /// The numbers of 32 bits that pass the condition.
    fn numbers(&self) -> Vec<Cube> {
        match self.test {
            Test::Bits(cube) if cube.value > NARROW => Vec::new(),
            Test::Bits(cube) => vec![Cube::new(cube.mask & NARROW, cube.value)],
            Test::Compare(Operator::NotEqual, value) if value > NARROW => vec![Cube::ALL],
            Test::Compare(Operator::NotEqual, value) => cube::outside(&[Cube::new(NARROW, value)]),
            Test::Compare(Operator::Less, value) => below(value),
            Test::Compare(Operator::LessOrEqual, value) => below(value.saturating_add(1)),
            Test::Compare(Operator::GreaterOrEqual, value) => cube::outside(&below(value)),
            Test::Compare(Operator::Greater, value) => {
                cube::outside(&below(value.saturating_add(1)))
            }
        }
    }
}

/// The numbers of 32 bits below `limit`: for each bit of `limit`, the numbers that first differ from `limit` there.
fn below(limit: u64) -> Vec<Cube> {
    if limit > NARROW {
        return vec![Cube::ALL];
    }
    let from = |bit: u64| NARROW & !(bit - 1);
    Cube::new(limit, limit).bits().map(|bit| Cube::new(from(bit), limit ^ bit)).collect()
}

fn misshapen_args(place: usize) -> SectionError {
    SectionError::Misshapen {
        field: format!("{}.args", field(place)),
        expected: "a list of {index, value, valueTwo, op}",
    }
}

fn piece(conditions: &[Condition], request: Option<usize>) -> Piece {
    let mut piece = Piece::all();
    for condition in conditions {
        if Some(condition.argument) == request {
            piece.request = condition.numbers();
        } else if !condition.asks_nothing() {
            piece.tests[condition.argument] = Some(condition.test);
        }
    }
    piece
}

/// Removes `name` from an entry. Returns `true` where the entry still names another system call.
pub(super) fn remove_name(entry: &mut Value, name: &str) -> bool {
    let names = entry.get_mut("names").and_then(Value::as_array_mut);
    names.is_none_or(|names| {
        names.retain(|found| found != name);
        !names.is_empty()
    })
}

/// Entries like `pattern` that say of the system call `name` what `region` contains.
pub(super) fn entries(
    pattern: &Map<String, Value>,
    name: &str,
    region: &[Piece],
    request: Option<usize>,
) -> Vec<Value> {
    let mut entries = Vec::new();
    for piece in region {
        for &numbers in &piece.request {
            let mut tests = piece.tests;
            if let Some(request) = request
                && numbers != Cube::ALL
            {
                tests[request] = Some(Test::Bits(numbers));
            }
            let args: Vec<Value> = tests
                .iter()
                .enumerate()
                .filter_map(|(argument, test)| test.map(|test| condition(argument, test)))
                .collect();
            let mut entry = pattern.clone();
            entry.insert("names".into(), json!([name]));
            if args.is_empty() {
                entry.shift_remove("args");
            } else {
                entry.insert("args".into(), args.into());
            }
            let entry = Value::Object(entry);
            if !entries.contains(&entry) {
                entries.push(entry);
            }
        }
    }
    entries
}

fn condition(argument: usize, test: Test) -> Value {
    let (operator, value, second) = match test {
        Test::Bits(cube) if cube.mask == u64::MAX => ("EQ", cube.value, None),
        Test::Bits(cube) => ("MASKED_EQ", cube.mask, Some(cube.value)),
        Test::Compare(Operator::NotEqual, value) => ("NE", value, None),
        Test::Compare(Operator::Less, value) => ("LT", value, None),
        Test::Compare(Operator::LessOrEqual, value) => ("LE", value, None),
        Test::Compare(Operator::GreaterOrEqual, value) => ("GE", value, None),
        Test::Compare(Operator::Greater, value) => ("GT", value, None),
    };
    let mut condition = json!({"index": argument, "value": value});
    if let Some(second) = second {
        condition["valueTwo"] = second.into();
    }
    condition["op"] = format!("SCMP_CMP_{operator}").into();
    condition
}
