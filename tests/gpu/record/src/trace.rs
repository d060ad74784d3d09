//! A program that is followed: every ioctl and mmap of the driver's files, before and after.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::Command as Program;

use anyhow::Context;
use cgpu_record::corpus::{self, Bytes, Copies, Line, Map, Writer};
use cgpu_record::follow::{self, Task, Then, Watch, read};
use cgpu_record::scrub::Scrubber;
use nix::unistd::Pid;
use nvrm::control::{ControlKind, Pieces, known};
use nvrm::{Call, Command, Key, Release, uvm};

/// Most bytes of what a call points at.
const MAX_PARAMS_BYTES: usize = 128 << 10;

/// A call that was written so often is known; its like is only counted.
const MOST_ALIKE: u32 = 3;

/// What to do.
pub(crate) struct Order {
    pub(crate) release: Release,
    pub(crate) dev: PathBuf,
    pub(crate) output: PathBuf,
    pub(crate) hide: Vec<String>,
    pub(crate) driver: String,
    pub(crate) program: Vec<String>,
}

/// What was done.
pub(crate) struct Recorded {
    pub(crate) seen: u64,
    pub(crate) repeated: u64,
    pub(crate) cut_off: u64,
    pub(crate) bytes: u64,
    pub(crate) exit: i32,
}

/// A place in the program's memory, and what was there.
struct Place {
    address: u64,
    before: Vec<u8>,
}

/// A call that has begun.
enum Begun {
    Ioctl {
        node: String,
        request: u32,
        bytes: Place,
        wrapped: Option<Place>,
        params: Option<Place>,
        pieces: Vec<Place>,
    },
    Map {
        node: String,
        length: u64,
        protection: u64,
        flags: u64,
        offset: u64,
    },
}

struct Recorder<'a> {
    order: &'a Order,
    writer: Writer,
    scrubber: Scrubber,
    /// Processes in the order in which they were seen.
    processes: BTreeMap<i32, u32>,
    alike: HashMap<Vec<u8>, u32>,
    seen: u64,
    repeated: u64,
    cut_off: u64,
}

/// Runs the program to its end.
pub(crate) fn record(order: &Order) -> anyhow::Result<Recorded> {
    let (name, arguments) = order.program.split_first().context("no program")?;
    let mut program = Program::new(name);
    program.args(arguments);
    let main = follow::start(program)?;
    let head = Line::Head { driver: order.driver.clone(), program: names(&order.program) };
    let mut recorder = Recorder {
        order,
        writer: Writer::create(&order.output, &head)?,
        scrubber: Scrubber::hiding(&order.hide),
        processes: BTreeMap::new(),
        alike: HashMap::new(),
        seen: 0,
        repeated: 0,
        cut_off: 0,
    };
    let ended = follow::follow(&[main], &mut recorder)?;
    let Recorder { writer, seen, repeated, cut_off, .. } = recorder;
    let bytes = writer.finish(&Line::Tail { seen, repeated, cut_off })?;
    let exit = ended.get(&main).copied().unwrap_or(1);
    Ok(Recorded { seen, repeated, cut_off, bytes, exit })
}

/// A program's words without the directories that they lie in.
fn names(words: &[String]) -> Vec<String> {
    let name =
        |word: &String| Path::new(word).file_name().map(|name| name.to_string_lossy().into_owned());
    words.iter().map(|word| name(word).unwrap_or_else(|| word.clone())).collect()
}

impl Watch for Recorder<'_> {
    type Begun = Begun;

    fn begins(&mut self, task: Task, number: i64, arguments: &[u64; 6]) -> Option<Begun> {
        match number {
            libc::SYS_ioctl => self.ioctl(task.id, arguments),
            libc::SYS_mmap => self.map(task.id, arguments),
            _ => None,
        }
    }

    fn ended(&mut self, task: Task, begun: Begun, result: i64) -> anyhow::Result<Then> {
        self.write_down(task, begun, result)?;
        Ok(Then::Follow)
    }
}

impl Recorder<'_> {
    /// Which of the driver's files a descriptor is.
    fn node(&self, pid: Pid, descriptor: u64) -> Option<String> {
        follow::node(&self.order.dev, pid, descriptor)
    }

    fn ioctl(&self, pid: Pid, arguments: &[u64; 6]) -> Option<Begun> {
        let node = self.node(pid, arguments[0])?;
        let request = u32::try_from(arguments[1] & 0xffff_ffff).ok()?;
        let address = arguments[2];
        let release = &self.order.release;
        let place = |address, size| Some(Place { address, before: read(pid, address, size)? });
        let nothing = || Place { address, before: Vec::new() };
        if node.starts_with("nvidia-uvm") {
            let size = uvm::params_size(release, request).unwrap_or(0);
            let bytes = place(address, size).unwrap_or_else(nothing);
            return Some(Begun::Ioctl {
                node,
                request,
                bytes,
                wrapped: None,
                params: None,
                pieces: vec![],
            });
        }
        let command = Command::of_ioctl(request);
        let bytes = place(address, command.size()).unwrap_or_else(nothing);
        let mut decoded = nvrm::decode(release, command, &bytes.before).ok();
        let mut wrapped = None;
        if let Some(Call::Wrapped { command, address }) = decoded.map(|decoded| decoded.call) {
            wrapped = place(address, command.size());
            decoded = wrapped
                .as_ref()
                .and_then(|place| nvrm::decode(release, command, &place.before).ok());
        }
        let params = decoded.and_then(|decoded| {
            let (address, size) = pointed_at(release, &decoded.call)?;
            place(address, size)
        });
        let mut pieces = Vec::new();
        if let (Some(Call::Control { command, .. }), Some(params)) =
            (decoded.map(|decoded| decoded.call), &params)
        {
            if known(command) == Some(ControlKind::Nested) {
                let found = Pieces::of(command, &params.before).unwrap_or_default();
                pieces.extend(found.iter().filter_map(|piece| place(piece.address, piece.bytes)));
            } else if known(command) == Some(ControlKind::Memory)
                && let Ok(list) = nvrm::fbinfo::list(release, command, &params.before)
                && let nvrm::fbinfo::List::Elsewhere { address, entries } = list
            {
                pieces.extend(place(address, 8 * entries));
            }
        }
        Some(Begun::Ioctl { node, request, bytes, wrapped, params, pieces })
    }

    fn map(&self, pid: Pid, arguments: &[u64; 6]) -> Option<Begun> {
        let [_, length, protection, flags, descriptor, offset] = *arguments;
        let anonymous = u64::from(libc::MAP_ANONYMOUS.cast_unsigned());
        if flags & anonymous != 0 {
            return None;
        }
        let node = self.node(pid, descriptor)?;
        Some(Begun::Map { node, length, protection, flags, offset })
    }

    fn write_down(&mut self, task: Task, begun: Begun, result: i64) -> anyhow::Result<()> {
        let pid = task.id;
        let maps = mappings(pid);
        let is_address = |value: u64| {
            let at = maps.partition_point(|(_, end)| *end <= value);
            maps.get(at).is_some_and(|(begin, _)| *begin <= value)
        };
        let process = self.process(task.process);
        let line = match begun {
            Begun::Ioctl { node, request, bytes, wrapped, params, pieces } => {
                let mut copies = |place: Place| {
                    let after = read(pid, place.address, place.before.len());
                    let mut before = place.before;
                    let mut after = after.filter(|after| *after != before);
                    self.scrubber.bytes(&mut before, is_address);
                    if let Some(after) = &mut after {
                        self.scrubber.bytes(after, is_address);
                    }
                    Copies { before: Bytes(before), after: after.map(Bytes) }
                };
                Line::Call(Box::new(corpus::Call {
                    node,
                    process,
                    request,
                    result,
                    bytes: copies(bytes),
                    wrapped: wrapped.map(&mut copies),
                    params: params.map(&mut copies),
                    pieces: pieces.into_iter().map(copies).collect(),
                }))
            }
            Begun::Map { node, length, protection, flags, offset } => {
                let mut rename = |value| self.scrubber.address(value, is_address);
                let address = u64::try_from(result).map(&mut rename).unwrap_or(0);
                let result = if result < 0 { result } else { i64::try_from(address)? };
                Line::Map(Map {
                    node,
                    process,
                    length,
                    protection,
                    flags,
                    offset: rename(offset),
                    result,
                })
            }
        };
        self.write(&line)
    }

    fn process(&mut self, process: Pid) -> u32 {
        let next = u32::try_from(self.processes.len()).unwrap_or(u32::MAX);
        *self.processes.entry(process.as_raw()).or_insert(next)
    }

    fn write(&mut self, line: &Line) -> anyhow::Result<()> {
        self.seen += 1;
        // Calls that make, free and duplicate are needed in full for accounting; a call that asks the
        // same again isn't.
        if let Line::Call(call) = line
            && Command::of_ioctl(call.request).number() == nvrm::number::NV_ESC_RM_CONTROL
        {
            let before =
                call.params.as_ref().map(|params| params.before.0.clone()).unwrap_or_default();
            let key = [call.bytes.before.0.clone(), before].concat();
            let times = self.alike.entry(key).or_insert(0);
            *times += 1;
            if *times > MOST_ALIKE {
                self.repeated += 1;
                return Ok(());
            }
        }
        if !self.writer.add(line)? {
            self.cut_off += 1;
        }
        Ok(())
    }
}

/// Parameters that a call points at, and their size.
fn pointed_at(release: &Release, call: &Call) -> Option<(u64, usize)> {
    let (address, size) = match *call {
        Call::Control { params, params_size, .. } => (params, usize::try_from(params_size).ok()?),
        Call::Alloc(alloc) => {
            let known = release.layouts(Key::Class(alloc.class)).first().map(nvrm::Layout::size);
            let stated = alloc.params_size.and_then(|size| usize::try_from(size).ok());
            (alloc.params, known.or(stated)?)
        }
        _ => return None,
    };
    (address != 0 && size != 0 && size <= MAX_PARAMS_BYTES).then_some((address, size))
}

/// Where the process has something, in order.
fn mappings(pid: Pid) -> Vec<(u64, u64)> {
    let mut text = String::new();
    let file = fs::File::open(format!("/proc/{pid}/maps"));
    if file.and_then(|mut file| file.read_to_string(&mut text)).is_err() {
        return Vec::new();
    }
    let range = |line: &str| {
        let (begin, end) = line.split_once(' ')?.0.split_once('-')?;
        Some((u64::from_str_radix(begin, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
    };
    text.lines().filter_map(range).collect()
}
