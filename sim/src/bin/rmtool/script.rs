//! `run`: a small script, one command a line, plays an application.
//!
//! Each command prints one line: what it was, and `ok` or why not. A line that can't be
//! read ends the script; a call that fails doesn't, but the program's exit code reports it.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, bail};
use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;
use cgpu_sim::size_bytes;
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};

use crate::rm::{Fail, Place, Rm, raw_ioctl};
use crate::uvm::{Managed, Uvm};
use crate::{alarm, threads};

/// How often a race is run that may be lost.
const MOST_RACES: u32 = 2000;

/// What a script has made.
#[derive(Debug)]
struct Actor<'a> {
    place: &'a Place,
    rm: Option<Rm>,
    uvm: Option<Uvm>,
    uuid: Option<[u8; 16]>,
    /// Another UVM file, and the GPU that it has.
    aside: (Option<Uvm>, Option<[u8; 16]>),
    memory: BTreeMap<String, (u32, u64)>,
    mapped: BTreeMap<String, (u64, u64)>,
    managed: Vec<Managed>,
    exported: Option<OwnedFd>,
    /// Whose messages have files.
    sockets: Vec<(UnixStream, UnixStream)>,
    children: Vec<Pid>,
    /// The number of a thread that ended.
    ended: Option<i32>,
    failed: bool,
}

/// Runs the lines; whether all calls succeeded.
pub(crate) fn run(place: &Place, lines: &[String]) -> anyhow::Result<bool> {
    let mut actor = Actor {
        place,
        rm: None,
        uvm: None,
        uuid: None,
        aside: (None, None),
        memory: BTreeMap::new(),
        mapped: BTreeMap::new(),
        managed: Vec::new(),
        exported: None,
        sockets: Vec::new(),
        children: Vec::new(),
        ended: None,
        failed: false,
    };
    actor.block(lines)?;
    actor.join()?;
    Ok(!actor.failed)
}

fn debug(what: impl std::fmt::Debug) -> String {
    format!("{what:?}")
}

/// Where the block that begins before `from` ends.
fn end_of_block(lines: &[String], from: usize) -> anyhow::Result<usize> {
    let mut depth = 1;
    for (at, line) in lines.iter().enumerate().skip(from) {
        match line.trim() {
            "}" => depth -= 1,
            line if line.ends_with('{') => depth += 1,
            _ => {}
        }
        if depth == 0 {
            return Ok(at);
        }
    }
    bail!("a block has no \"}}\"")
}

impl Actor<'_> {
    fn block(&mut self, lines: &[String]) -> anyhow::Result<()> {
        let mut at = 0;
        while let Some(line) = lines.get(at) {
            at += 1;
            let line = line.trim();
            let forks = match line.split_whitespace().collect::<Vec<_>>()[..] {
                ["fork", "{"] => Some(Vec::new()),
                ["fork-as-ended", "{"] => Some(self.ended.into_iter().collect()),
                // Its id in the container's pid namespace, and in the host's.
                ["fork-as", number, "{"] => Some(vec![number.parse()?; 2]),
                _ => None,
            };
            if let Some(ids) = forks {
                let end = end_of_block(lines, at)?;
                self.fork(&lines[at..end], &ids)?;
                at = end + 1;
            } else if !line.is_empty() && !line.starts_with('#') {
                self.line(line).with_context(|| format!("line {at}: {line}"))?;
            }
        }
        Ok(())
    }

    fn fork(&mut self, lines: &[String], ids: &[i32]) -> anyhow::Result<()> {
        std::io::stdout().flush()?;
        let forked = match ids {
            // SAFETY: this program has one thread here.
            [] => unsafe { fork() },
            ids => threads::fork_as(ids),
        };
        match forked? {
            ForkResult::Parent { child } => self.children.push(child),
            ForkResult::Child => {
                self.children.clear();
                self.failed = false;
                let done = self.block(lines).and_then(|()| self.join());
                if let Err(error) = &done {
                    eprintln!("rmtool: {error:#}");
                }
                std::io::stdout().flush()?;
                let code = i32::from(done.is_err() || self.failed);
                // SAFETY: ends this process at once; what the parent shares stays its own.
                unsafe { libc::_exit(code) }
            }
        }
        Ok(())
    }

    fn join(&mut self) -> anyhow::Result<()> {
        for child in std::mem::take(&mut self.children) {
            self.failed |= waitpid(child, None)? != WaitStatus::Exited(child, 0);
        }
        Ok(())
    }

    fn rm(&self) -> anyhow::Result<&Rm> {
        self.rm.as_ref().context("not open")
    }

    /// An object was made, and has that name from now on; or it wasn't.
    fn made(&mut self, what: &str, name: &str, done: Result<u32, Fail>) {
        if let Ok(object) = done {
            self.memory.insert(name.to_owned(), (object, 0));
        }
        self.say(&format!("{what} {name}"), done.map(|_| String::new()));
    }

    /// Prints what came of a command.
    fn say(&mut self, what: &str, done: Result<String, Fail>) {
        match done {
            Ok(more) if more.is_empty() => println!("{what} ok"),
            Ok(more) => println!("{what} ok {more}"),
            Err(fail) => {
                println!("{what} {fail}");
                self.failed = true;
            }
        }
        let _ = std::io::stdout().flush();
    }

    fn line(&mut self, line: &str) -> anyhow::Result<()> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let place = self.place;
        let nothing = |done: Result<(), Fail>| done.map(|()| String::new());
        match words[..] {
            ["open"] => {
                let rm = Rm::open(place);
                let done = rm.map(|rm| self.rm = Some(rm));
                self.say("open", nothing(done));
            }
            ["start"] => {
                let rm = Rm::start(place);
                let done = rm.map(|rm| self.rm = Some(rm));
                self.say("start", nothing(done));
            }
            ["client"] => {
                let rm = self.rm.as_mut().context("not open")?;
                let done = rm.make_client().map(|()| format!("handle={:#x}", rm.client));
                self.say("client", done);
            }
            ["device", instance] => {
                let instance = instance.parse()?;
                let done = self.rm.as_mut().context("not open")?.make_device(instance);
                self.say("device", nothing(done));
            }
            // What follows is below that GPU's device.
            ["gpu", number] => {
                let number = number.parse()?;
                let done = self.rm.as_mut().context("not open")?.move_to(place, number);
                self.say("gpu", nothing(done));
            }
            ["subdevice"] => {
                let done = self.rm.as_mut().context("not open")?.make_subdevice();
                self.say("subdevice", nothing(done));
            }
            [how @ ("alloc" | "heap" | "extended" | "system"), size, "as", name] => {
                let (rm, size) = (self.rm()?, size_bytes(size)?);
                let done = match how {
                    "alloc" => rm.alloc(size),
                    "heap" => rm.heap(size),
                    "extended" => rm.alloc_as(rm.ctl(), rm.handle(), NV_MEMORY_EXTENDED_USER, size),
                    _ => {
                        let mut params = rm.memory_params(size);
                        params.set_u32(24, 1 << NVOS32_ATTR_LOCATION_SHIFT);
                        let made = rm.alloc_object(
                            rm.ctl(),
                            rm.device,
                            rm.handle(),
                            NV01_MEMORY_SYSTEM,
                            &mut params,
                        );
                        made.map(|handle| (handle, size))
                    }
                };
                let done = done.map(|memory| {
                    self.memory.insert(name.to_owned(), memory);
                    format!("bytes={}", memory.1)
                });
                self.say(&format!("{how} {name}"), done);
            }
            // Asks so often for what isn't given.
            ["refused", count, size] => {
                let (rm, size) = (self.rm()?, size_bytes(size)?);
                let count: u32 = count.parse()?;
                let refused = (0..count).filter(|_| rm.alloc(size).is_err()).count();
                self.say("refused", Ok(format!("times={refused}")));
            }
            // A surface of semaphores in that memory, as Vulkan makes one.
            ["semaphores", memory] => {
                let memory_handle = self.objects(&[memory])?[0];
                let rm = self.rm()?;
                let mut params = [0; 16];
                params.set_u32(0, memory_handle);
                let class = NV_SEMAPHORE_SURFACE;
                let made = rm.alloc_object(rm.ctl(), rm.subdevice, rm.handle(), class, &mut params);
                self.say(&format!("semaphores {memory}"), nothing(made.map(drop)));
            }
            ["alloc-below-subdevice", size, "as", name] => {
                let (rm, size) = (self.rm()?, size_bytes(size)?);
                let (handle, mut params) = (rm.handle(), rm.memory_params(size));
                let class = NV01_MEMORY_LOCAL_USER;
                let made = rm.alloc_object(rm.ctl(), rm.subdevice, handle, class, &mut params);
                let done = made.map(|handle| {
                    self.memory.insert(name.to_owned(), (handle, size));
                    String::new()
                });
                self.say(&format!("alloc {name}"), done);
            }
            ["alloc27"] => {
                let done = self.rm()?.alloc27(NV01_MEMORY_LOCAL_USER, 0, 0, 0);
                self.say("alloc27", done.map(|limit| format!("total={}", limit.wrapping_add(1))));
            }
            ["alloc27", class] => {
                let class = u32::try_from(size_bytes(class)?)?;
                let done = self.rm()?.alloc27(class, 0, 0, 4095);
                self.say(&format!("alloc27 {class:#x}"), done.map(|_| String::new()));
            }
            ["dmabuf", name] => {
                let (handle, _) = *self.memory.get(name).context("no such memory")?;
                let done = self.rm()?.dmabuf(handle);
                self.say(&format!("dmabuf {name}"), nothing(done));
            }
            ["os-descriptor", size] => {
                let size = size_bytes(size)?;
                let rm = self.rm()?;
                let memory = vec![1_u8; usize::try_from(size)? + 4096];
                let address = memory.as_ptr().addr().next_multiple_of(4096) as u64;
                // Cached, not contiguous, not mapped: NVOS02_FLAGS_COHERENCY, _MAPPING.
                let flags = 1 << 4 | 1 << 12 | 1 << 30;
                let done = rm.alloc27(NV01_MEMORY_SYSTEM_OS_DESCRIPTOR, flags, address, size - 1);
                self.say("os-descriptor", done.map(|_| String::new()));
            }
            // The driver chooses the handle.
            ["alloc-any", size, "as", name] => {
                let (rm, size) = (self.rm()?, size_bytes(size)?);
                let done = rm.alloc_as(rm.ctl(), 0, NV01_MEMORY_LOCAL_USER, size);
                let done = done.map(|memory| {
                    self.memory.insert(name.to_owned(), memory);
                    format!("bytes={}", memory.1)
                });
                self.say(&format!("alloc-any {name}"), done);
            }
            // When, how often after that, and how long its handler takes.
            ["alarm", ms, every_ms, handler_ms] => {
                alarm::after(ms.parse()?, every_ms.parse()?, handler_ms.parse()?)?;
            }
            ["interrupt", ms] => alarm::interrupt(ms.parse()?)?,
            ["signals"] => {
                alarm::after(0, 0, 0)?;
                println!("signals={}", alarm::SIGNALS.load(Ordering::Relaxed));
            }
            // So many threads ask for memory at a barrier.
            ["at-once", threads, size] => {
                let (threads, size) = (threads.parse()?, size_bytes(size)?);
                let done = threads::at_once(self.rm()?, threads, size);
                let done = done.map(|(given, refused)| format!("given={given} refused={refused}"));
                self.say("at-once", done);
            }
            // A thread calls, and ends.
            ["end-a-thread"] => self.ended = Some(threads::ended(self.rm()?)),
            // A thread asks for memory and is interrupted when a file is there, which ends it.
            ["interrupt-a-thread", size, path] => {
                let (rm, size) = (self.rm()?, size_bytes(size)?);
                self.ended = Some(threads::interrupted(rm, rm.handle(), size, path)?);
            }
            ["free", name] => {
                let (handle, _) = self.memory.remove(name).context("no such memory")?;
                let rm = self.rm()?;
                let done = rm.free(rm.device, handle);
                self.say(&format!("free {name}"), nothing(done));
            }
            ["free-device"] => {
                let rm = self.rm()?;
                let done = rm.free(rm.client, rm.device);
                self.say("free-device", nothing(done));
            }
            ["free-client"] => {
                let rm = self.rm()?;
                let done = rm.free(0, rm.client);
                self.say("free-client", nothing(done));
            }
            // The file that calls are made by is pending in a socket that is never read, and no process has it.
            ["close-into-a-socket"] => {
                let rm = self.rm.take().context("not open")?;
                self.sockets.push(crate::passing::keep(rm.ctl())?);
            }
            ["close"] => {
                self.rm = None;
                self.say("close", Ok(String::new()));
            }
            ["close-uvm"] => {
                (self.uvm, self.uuid) = (None, None);
                self.say("close-uvm", Ok(String::new()));
            }
            // The file that was put aside, or none, becomes the one that calls are made by.
            ["swap-uvm"] => {
                std::mem::swap(&mut self.aside.0, &mut self.uvm);
                std::mem::swap(&mut self.aside.1, &mut self.uuid);
                self.say("swap-uvm", Ok(String::new()));
            }
            ["uvm-of-a-child"] | ["uvm-of-a-child", "without" | "executing" | "waiting"] => {
                let done = self.uvm_of_a_child(words.get(1).copied());
                self.say("uvm-of-a-child", nothing(done));
            }
            ["set-mm"] => {
                // PR_SET_MM_MAP_SIZE, which reports how long a struct is, and changes nothing.
                let mut size = 0_u32;
                // SAFETY: the kernel writes a u32.
                let rc = unsafe { libc::prctl(libc::PR_SET_MM, 15, &raw mut size, 0, 0) };
                let done = if rc == 0 { Ok(()) } else { Err(crate::rm::errno()) };
                self.say("set-mm", nothing(done));
            }
            ["personality", bits] => {
                let bits = u32::from_str_radix(bits.trim_start_matches("0x"), 16);
                // SAFETY: takes a number only.
                let rc = unsafe { libc::personality(bits.unwrap_or(u32::MAX).into()) };
                let done = if rc == -1 { Err(crate::rm::errno()) } else { Ok(()) };
                self.say("personality", nothing(done));
            }
            ["uvm-register-anew"] => {
                self.uuid = None;
                let done = self.uvm_registered();
                self.say("uvm-register-anew", nothing(done.map(drop)));
            }
            ["uvm-register"] => {
                let done = self.uvm_registered();
                self.say("uvm-register", nothing(done.map(drop)));
            }
            ["dup", source, "as", name] => {
                let (handle, bytes) = *self.memory.get(source).context("no such memory")?;
                let rm = self.rm()?;
                let done = rm.dup(rm.client, rm.device, rm.client, handle);
                let done = done.map(|copy| {
                    self.memory.insert(name.to_owned(), (copy, bytes));
                    String::new()
                });
                self.say(&format!("dup {name}"), done);
            }
            ["info"] => {
                let rm = self.rm()?;
                let indices =
                    [NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE, NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE];
                let text = |total: u64, free: u64| {
                    format!(
                        "total_mib={} free_mib={} used_mib={}",
                        total >> 20,
                        free >> 20,
                        (total - free) >> 20
                    )
                };
                let kib = |list: Vec<u32>| text(u64::from(list[0]) << 10, u64::from(list[1]) << 10);
                let (list, inline) =
                    (rm.fb_info(&indices).map(kib), rm.fb_info_v2(&indices).map(kib));
                let heap = rm.heap_info().map(|(total, free)| text(total, free));
                self.say("fb-info", list);
                self.say("fb-info-v2", inline);
                self.say("heap-info", heap);
            }
            ["controls"] => {
                let rm = self.rm()?;
                let said = [
                    ("version", rm.build_version().map(|texts| format!("{texts:?}"))),
                    ("classes", rm.classes().map(|classes| format!("{classes:x?}"))),
                    ("gr", rm.information(NV2080_CTRL_CMD_GR_GET_INFO, &[3, 4, 5]).map(debug)),
                    ("bus", rm.information(NV2080_CTRL_CMD_BUS_GET_INFO, &[7]).map(debug)),
                    ("uuid", rm.uuid().map(debug)),
                    ("firmware", rm.firmware(0xf0f0).map(debug)),
                    ("peers", rm.control(0, 0x503c_0104, &mut [0; 32]).map(debug)),
                ];
                said.into_iter().for_each(|(what, done)| self.say(what, done));
            }
            ["pids"] => {
                let done = self.rm()?.pids(NV20_SUBDEVICE_0).map(|pids| format!("pids={pids:?}"));
                self.say("pids", done);
            }
            ["pid-bytes", pid] => {
                let pid = if pid == "self" { std::process::id() } else { pid.parse()? };
                let done = self.rm()?.pid_bytes(pid);
                let text = |[private, owned, duped]: [u64; 3]| {
                    format!("private={private} owned={owned} duped={duped}")
                };
                self.say("pid-bytes", done.map(text));
            }
            ["channel"] | ["channel", "as", _] => {
                let rm = self.rm()?;
                let group = rm.alloc_object(
                    rm.ctl(),
                    rm.device,
                    rm.handle(),
                    KEPLER_CHANNEL_GROUP_A,
                    &mut [0; 20],
                );
                let channel = group.and_then(|group| {
                    rm.alloc_object(rm.ctl(), group, rm.handle(), AMPERE_CHANNEL_GPFIFO_A, &mut [])
                });
                let done = channel.and_then(|channel| {
                    rm.alloc_object(rm.ctl(), channel, rm.handle(), AMPERE_COMPUTE_A, &mut [])?;
                    Ok(channel)
                });
                let done = done.map(|channel| {
                    if let Some(name) = words.get(2) {
                        self.memory.insert((*name).to_owned(), (channel, 0));
                    }
                    String::new()
                });
                self.say("channel", done);
            }
            // As many as there may be, below the device; the last is known by that name.
            ["groups" | "channels", most, "as", name] => {
                let rm = self.rm()?;
                let (class, params) = match words[0] {
                    "groups" => (KEPLER_CHANNEL_GROUP_A, 20),
                    _ => (AMPERE_CHANNEL_GPFIFO_A, 0),
                };
                let mut last = None;
                let (mut made, mut done) = (0, Ok(()));
                while made < size_bytes(most)? && done.is_ok() {
                    let mut params = vec![0; params];
                    let (ctl, device) = (rm.ctl(), rm.device);
                    match rm.alloc_object(ctl, device, rm.handle(), class, &mut params) {
                        Ok(group) => (last, made) = (Some(group), made + 1),
                        Err(fail) => done = Err(fail),
                    }
                }
                if let Some(group) = last {
                    self.memory.insert((*name).to_owned(), (group, 0));
                }
                println!(
                    "groups made={made} {}",
                    done.err().map(|fail| fail.to_string()).unwrap_or_default()
                );
            }
            // With nothing in its parameters.
            ["control", name, command, bytes] => {
                let command = u32::try_from(size_bytes(command)?)?;
                let mut params = vec![0; usize::try_from(size_bytes(bytes)?)?];
                let object = self.objects(&[name])?[0];
                let done = self.rm()?.control(object, command, &mut params);
                self.say(&format!("control {command:#x}"), nothing(done));
            }
            // With these bytes, as hexadecimal digits.
            ["control", name, command, "with", digits] => {
                let command = u32::try_from(size_bytes(command)?)?;
                let mut params = bytes_of_digits(digits)?;
                let object = self.objects(&[name])?[0];
                let done = self.rm()?.control(object, command, &mut params);
                self.say(&format!("control {command:#x}"), nothing(done));
            }
            // How a group's kernels are preempted: 0 WFI, 1 CTA, 2 CILP.
            ["compute-mode", name, mode] => {
                let (group, mode) = (self.objects(&[name])?[0], u32::try_from(size_bytes(mode)?)?);
                let done = self.rm()?.set_compute_mode(group, mode);
                self.say("compute-mode", nothing(done));
            }
            // A group of an engine, with a channel that is scheduled.
            ["compute", engine, "as", name] => {
                let done = self.rm()?.compute(u32::try_from(size_bytes(engine)?)?);
                self.made("compute", name, done);
            }
            // The same, called another class in the call.
            ["compute", engine, "by", class, "as", name] => {
                let (engine, class) = (size_bytes(engine)?, size_bytes(class)?);
                let done = self.rm()?.compute_by(u32::try_from(class)?, u32::try_from(engine)?);
                self.made("compute", name, done);
            }
            // A channel of any client's, under any name.
            ["channel-named", client, device, handle] => {
                let [client, device, handle] =
                    [client, device, handle].map(|word| size_bytes(word).map(u32::try_from));
                let done = self.rm()?.channel_named(client??, device??, handle??);
                self.say("channel-named", done.map(|_| String::new()));
            }
            // A channel outside a group.
            ["channel", engine, "by", class, "as", name] => {
                let (engine, class) = (size_bytes(engine)?, size_bytes(class)?);
                let done = self.rm()?.channel_by(u32::try_from(class)?, u32::try_from(engine)?);
                self.made("channel", name, done);
            }
            // Work for a group: so many kernels, each of so many microseconds.
            ["kernels", name, count, "of", us] => {
                let group = self.objects(&[name])?[0];
                let (count, kernel_ns) = (size_bytes(count)?, size_bytes(us)? * 1000);
                let done = self.rm()?.ring(group, count, kernel_ns);
                self.say(&format!("kernels {name}"), nothing(done));
            }
            // Written from an offset on, and read, by a debugger's calls of so many bytes.
            ["debug", name, offset, bytes] => {
                let memory = self.objects(&[name])?[0];
                let (offset, bytes) = (size_bytes(offset)?, usize::try_from(size_bytes(bytes)?)?);
                let done = self.rm()?.debug(memory, offset, bytes);
                self.say(&format!("debug {name}"), done);
            }
            // A channel, whichever client's it is, switches its zcull buffer no more.
            ["bind-zcull", client, channel] => {
                let rm = self.rm()?;
                let client = match client {
                    "own" => rm.client,
                    client => u32::try_from(size_bytes(client)?)?,
                };
                let channel = match self.memory.get(channel) {
                    Some((channel, _)) => *channel,
                    None => u32::try_from(size_bytes(channel)?)?,
                };
                let mut params = [0; 24];
                params.set_u32(0, client);
                params.set_u32(4, channel);
                let command = NV2080_CTRL_CMD_GR_CTXSW_ZCULL_BIND;
                let done = rm.control(rm.subdevice, command, &mut params);
                self.say("bind-zcull", nothing(done));
            }
            // An event buffer that shows context switches, by either version of the control.
            ["watch-switches", version] => {
                let rm = self.rm()?;
                let mut params = [0; 72];
                params.set_u32(16, 32);
                params.set_u32(20, 1000);
                params.set_u32(52, rm.subdevice);
                let class = NV_EVENT_BUFFER;
                let made = rm.alloc_object(rm.ctl(), rm.client, rm.handle(), class, &mut params);
                let (command, bytes) = match version {
                    "1" => (NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID, 20),
                    _ => (NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID_V2, 24),
                };
                let done = made.and_then(|buffer| {
                    let mut params = vec![0; bytes];
                    params.set_u32(0, buffer);
                    rm.control(rm.subdevice, command, &mut params)
                });
                self.say("watch-switches", nothing(done));
            }
            // An allocation whose struct is longer than any that is known, of the driver and of a pipe.
            ["grown"] => {
                let (pipe, _other) = nix::unistd::pipe()?;
                let request = crate::rm::command(NV_ESC_RM_ALLOC, 56);
                let of = |file| raw_ioctl(file, request, &mut [0; 56]).err();
                println!("grown {:?} {:?}", of(self.rm()?.ctl()), of(pipe.as_raw_fd()));
            }
            ["grown", number, size] => {
                let number = u32::try_from(size_bytes(number)?)?;
                let mut bytes = vec![0; usize::try_from(size_bytes(size)?)?];
                let request = crate::rm::command(number, bytes.len());
                let refused = raw_ioctl(self.rm()?.ctl(), request, &mut bytes).err();
                println!("grown {number:#x} {size} {refused:?}");
            }
            // The first channel of a client, whichever process's it is.
            ["stop-channels", client] => {
                let client = match client {
                    "own" => self.rm()?.client,
                    client => u32::try_from(size_bytes(client)?)?,
                };
                let rm = self.rm()?;
                let mut params = vec![0; 536];
                params[0] = 1;
                params.set_u32(4, 1);
                params.set_u32(24, client);
                params.set_u32(280, 1);
                let command = NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS;
                let done = rm.control(rm.subdevice, command, &mut params);
                self.say("stop-channels", nothing(done));
            }
            ["uvm-init"] | ["uvm-init", _] => {
                let flags = words.get(1).map_or(Ok(0), |flags| size_bytes(flags))?;
                let abi = self.rm()?.abi;
                if self.uvm.is_none() {
                    self.uvm = Uvm::open(place, abi).ok();
                }
                let done = self
                    .uvm
                    .as_ref()
                    .map_or(Err(Fail::Errno(libc::ENOENT)), |uvm| uvm.initialize(flags));
                self.say("uvm-init", nothing(done));
            }
            // A file with HMM, against a monitor that prevents it; as often as it takes.
            ["uvm-init-racing"] => {
                let abi = self.rm()?.abi;
                let mut won = Ok(false);
                for _ in 0..MOST_RACES {
                    self.uvm = Uvm::open(place, abi).ok();
                    let uvm = self.uvm.as_ref().ok_or(Fail::Errno(libc::ENOENT));
                    won = uvm.and_then(Uvm::initialize_racing);
                    if won != Ok(false) {
                        break;
                    }
                }
                self.say("uvm-init-racing", won.map(|won| format!("won={won}")));
            }
            ["managed", size] | ["managed", size, "at", _] => {
                let size = usize::try_from(size_bytes(size)?)?;
                let uvm = self.uvm.as_ref().context("no uvm-init")?;
                let mapped = match words.get(3) {
                    Some(at) => {
                        let at = usize::try_from(size_bytes(at)?)?;
                        uvm.managed_at(std::ptr::without_provenance_mut(at), size, true)
                    }
                    None => uvm.managed(size, true),
                };
                let done = mapped.map(|managed| {
                    let bytes = managed.touch();
                    self.managed.push(managed);
                    format!("bytes={bytes}")
                });
                self.say("managed", done);
            }
            // By a thread that has ended since.
            ["thread-managed", size, "at", at] => {
                let (size, at) = (usize::try_from(size_bytes(size)?)?, size_bytes(at)?);
                let uvm = self.uvm.as_ref().context("no uvm-init")?;
                let at = std::ptr::without_provenance_mut::<libc::c_void>(usize::try_from(at)?);
                let address = at.addr();
                let mapped = std::thread::scope(|scope| {
                    let map = || {
                        let at = std::ptr::without_provenance_mut(address);
                        uvm.managed_at(at, size, true).map(|managed| managed.touch())
                    };
                    scope.spawn(map).join()
                });
                let mapped = mapped.map_err(|_| anyhow::anyhow!("the thread panicked"))?;
                self.say("managed", mapped.map(|bytes| format!("bytes={bytes}")));
            }
            ["unmap", at, size] => {
                let (at, size) =
                    (usize::try_from(size_bytes(at)?)?, usize::try_from(size_bytes(size)?)?);
                // SAFETY: what scripts map, nothing refers to.
                unsafe { libc::munmap(std::ptr::without_provenance_mut(at), size) };
            }
            // A file whose name is no text is mapped from now on.
            ["map-odd-name"] => {
                let file =
                    nix::sys::memfd::memfd_create(c"\xff", nix::sys::memfd::MFdFlags::empty())?;
                nix::unistd::ftruncate(&file, 4096)?;
                let (protection, flags) = (libc::PROT_READ, libc::MAP_SHARED);
                let at = std::ptr::null_mut();
                // SAFETY: a new mapping at an address of the kernel's choice.
                unsafe { libc::mmap(at, 4096, protection, flags, file.as_raw_fd(), 0) };
            }
            ["uvm-map", name] => {
                let (handle, bytes) = *self.memory.get(name).context("no such memory")?;
                let done = self.uvm_map(name, handle, bytes);
                self.say(&format!("uvm-map {name}"), nothing(done));
            }
            ["uvm-unmap", name] => {
                let (base, bytes) = self.mapped.remove(name).context("not mapped")?;
                let (uvm, uuid) = (
                    self.uvm.as_ref().context("no uvm-init")?,
                    self.uuid.context("not registered")?,
                );
                let done = uvm.unmap_external(uuid, base, bytes);
                self.say(&format!("uvm-unmap {name}"), nothing(done));
            }
            ["uvm-range", base, bytes] => {
                let (base, bytes) = (size_bytes(base)?, size_bytes(bytes)?);
                let uvm = self.uvm.as_ref().context("no uvm-init")?;
                let done = uvm.external_range(base, bytes);
                self.say("uvm-range", nothing(done));
            }
            // The first bytes of memory, or all of it, into a range that is there.
            ["uvm-map", name, "at", base] | ["uvm-map", name, "at", base, _] => {
                let (handle, bytes) = *self.memory.get(name).context("no such memory")?;
                let base = size_bytes(base)?;
                let bytes = words.get(4).map_or(Ok(bytes), |bytes| size_bytes(bytes))?;
                let done = self.uvm_registered().and_then(|uuid| match (&self.rm, &self.uvm) {
                    (Some(rm), Some(uvm)) => uvm.map_external(rm, uuid, base, bytes, handle),
                    _ => Err(Fail::Errno(libc::EBADF)),
                });
                self.say(&format!("uvm-map {name}"), nothing(done));
            }
            [how @ ("uvm-cut" | "uvm-free"), base, bytes] => {
                let (base, bytes) = (size_bytes(base)?, size_bytes(bytes)?);
                let uvm = self.uvm.as_ref().context("no uvm-init")?;
                let done = match how {
                    "uvm-free" => uvm.free_range(base, bytes),
                    _ => uvm.unmap_external(self.uuid.context("not registered")?, base, bytes),
                };
                self.say(how, nothing(done));
            }
            ["uvm-unregister", what] => {
                let uvm = self.uvm.as_ref().context("no uvm-init")?;
                let number = match what {
                    "gpu" => UVM_UNREGISTER_GPU,
                    _ => UVM_UNREGISTER_GPU_VASPACE,
                };
                let done = uvm.unregister(number, self.uuid.context("not registered")?);
                self.uuid = None;
                self.say("uvm-unregister", nothing(done));
            }
            ["export", name] => {
                let (handle, _) = *self.memory.get(name).context("no such memory")?;
                let done = crate::rm::open(&place.dev, "nvidiactl").and_then(|file| {
                    self.rm
                        .as_ref()
                        .ok_or(Fail::Errno(libc::EBADF))?
                        .export(handle, file.as_raw_fd())?;
                    self.exported = Some(file);
                    Ok(String::new())
                });
                self.say(&format!("export {name}"), done);
            }
            ["import", "as", name] => {
                let file = self.exported.as_ref().context("nothing is exported")?;
                let done = self.rm()?.import(file.as_raw_fd()).map(|handle| {
                    self.memory.insert(name.to_owned(), (handle, 0));
                    String::new()
                });
                self.say(&format!("import {name}"), done);
            }
            // Into PLACES of one file, from FIRST on; "-" is no object.
            ["export-list", places, first, ref names @ ..] => {
                let objects = self.objects(names)?;
                if self.exported.is_none() {
                    self.exported = crate::rm::open(&place.dev, "nvidiactl").ok();
                }
                let file = self.exported.as_ref().context("no file")?.as_raw_fd();
                let (places, first) = (places.parse()?, first.parse()?);
                let done = self.rm()?.export_list(file, places, first, &objects);
                self.say("export-list", nothing(done));
            }
            // From FIRST on, with handles of the driver's choice, or of the program's.
            [how @ ("import-list" | "import-list-chosen"), first, "as", ref names @ ..] => {
                let file = self.exported.as_ref().context("nothing is exported")?.as_raw_fd();
                let rm = self.rm()?;
                let handle = || if how == "import-list-chosen" { rm.handle() } else { 0 };
                let wanted: Vec<u32> = names.iter().map(|_| handle()).collect();
                let done = rm.import_list(file, first.parse()?, &wanted);
                let done = done.map(|made| {
                    for (name, (handle, _)) in
                        names.iter().zip(&made).filter(|(_, made)| made.1 != 0)
                    {
                        self.memory.insert((*name).to_owned(), (*handle, 0));
                    }
                    let kinds: Vec<u8> = made.iter().map(|(_, kind)| *kind).collect();
                    format!("kinds={kinds:?}")
                });
                self.say("import-list", done);
            }
            // With handles of things that are there already.
            ["import-list-over", first, ref names @ ..] => {
                let file = self.exported.as_ref().context("nothing is exported")?.as_raw_fd();
                let wanted = self.objects(names)?;
                let done = self.rm()?.import_list(file, first.parse()?, &wanted);
                let left = done.map(|made| {
                    let kinds: Vec<u8> = made.iter().map(|(_, kind)| *kind).collect();
                    let retained = made.iter().zip(&wanted).all(|((now, _), asked)| now == asked);
                    format!("kinds={kinds:?} kept={retained}")
                });
                self.say("import-list-over", left);
            }
            ["export-info"] => {
                let file = self.exported.as_ref().context("nothing is exported")?.as_raw_fd();
                let done = self.rm()?.export_info(file).map(|(places, metadata)| {
                    format!("places={places} metadata={}", String::from_utf8_lossy(&metadata))
                });
                self.say("export-info", done);
            }
            // The file to another process, over a socket.
            ["offer-export", path] => {
                let file = self.exported.as_ref().context("nothing is exported")?;
                crate::passing::offer(path, file)?;
                self.say("offer-export", Ok(String::new()));
            }
            ["fetch-export", path] => {
                self.exported = Some(crate::passing::fetch(path)?);
                self.say("fetch-export", Ok(String::new()));
            }
            ["close-export"] => {
                self.exported = None;
                self.say("close-export", Ok(String::new()));
            }
            ["object", class] => {
                let class = u32::try_from(size_bytes(class)?)?;
                let rm = self.rm()?;
                let done = rm.alloc_object(rm.ctl(), rm.device, rm.handle(), class, &mut [0; 512]);
                self.say(&format!("object {class:#x}"), done.map(|_| String::new()));
            }
            // The client of one open file, used through another.
            ["other-file", size] => {
                let size = size_bytes(size)?;
                let rm = self.rm()?;
                let done = crate::rm::open(&place.dev, "nvidiactl").and_then(|file| {
                    rm.alloc_as(file.as_raw_fd(), rm.handle(), NV01_MEMORY_LOCAL_USER, size)
                });
                self.say("other-file", done.map(|_| String::new()));
            }
            // A call with nothing in its struct.
            ["raw", number, size] => {
                let number = u32::try_from(size_bytes(number)?)?;
                let mut bytes = vec![0; usize::try_from(size_bytes(size)?)?];
                let command = crate::rm::command(number, bytes.len());
                let done = crate::rm::raw_ioctl(self.rm()?.ctl(), command, &mut bytes);
                self.say(&format!("raw {number:#x}"), nothing(done));
            }
            ["uvm-call", number] => {
                let number = u32::try_from(size_bytes(number)?)?;
                let uvm = Uvm::open(place, self.rm()?.abi);
                let done = uvm.and_then(|uvm| uvm.call(number, |_| {}));
                self.say(&format!("uvm-call {number}"), nothing(done));
            }
            ["repeats", number] => {
                crate::rm::REPEATS.store(number.parse()?, Ordering::Relaxed);
            }
            ["stale", number] => {
                crate::uvm::STALE.store(number.parse()?, Ordering::Relaxed);
            }
            ["uvm-pool", base, bytes] => {
                let (base, bytes) = (size_bytes(base)?, size_bytes(bytes)?);
                let done = self.uvm.as_ref().context("no uvm-init")?.pool(base, bytes);
                self.say("uvm-pool", nothing(done));
            }
            ["uvm-p2p-of-nothing", base, bytes] => {
                let (base, bytes) = (size_bytes(base)?, size_bytes(bytes)?);
                let done = self.uvm.as_ref().context("no uvm-init")?.p2p_of_nothing(base, bytes);
                self.say("uvm-p2p-of-nothing", nothing(done));
            }
            ["free-client-by-other"] => {
                let rm = self.rm()?;
                let done = crate::rm::open(&place.dev, "nvidiactl")
                    .and_then(|file| rm.free_client_by(file.as_raw_fd()));
                self.say("free-client-by-other", nothing(done));
            }
            // Each call's struct is the last one's, as it was answered.
            ["heaps", size] => {
                let (rm, size) = (self.rm()?, size_bytes(size)?);
                let done = rm.heaps(size).map(|list| format!("handles={list:x?}"));
                self.say("heaps", done);
            }
            ["taken", ready, go] => {
                let done = threads::taken(self.rm()?, ready, go);
                self.say("taken", nothing(done));
            }
            ["exchanged"] => {
                self.exported = crate::rm::open(&place.dev, "nvidiactl").ok();
                let file = self.exported.as_ref().context("no file")?.as_raw_fd();
                let done = threads::exchanged(self.rm.as_mut().context("not open")?, file);
                self.say("exchanged", nothing(done));
            }
            ["sleep", seconds] => std::thread::sleep(Duration::from_secs_f64(seconds.parse()?)),
            ["wait", path] => {
                while !Path::new(path).exists() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            ["touch", path] => std::fs::write(path, "")?,
            // A process that waits for our output isn't to wait for us.
            ["quiet"] => {
                let null = std::fs::File::open("/dev/null")?;
                for number in 0..3 {
                    // SAFETY: numbers alone; what these three are used for needs no file.
                    unsafe { libc::dup2(null.as_raw_fd(), number) };
                }
            }
            // Of its own: else the number of who began it is no other's while we live.
            ["session"] => drop(nix::unistd::setsid()?),
            // What was forked lives on.
            ["exit"] => std::process::exit(0),
            // A child has our memory, and we are gone.
            ["leave-memory", path] => match threads::leave_memory(path)? {},
            ["join"] => self.join()?,
            ["print", ..] => {
                println!("{}", words[1..].join(" "));
                std::io::stdout().flush()?;
            }
            _ => bail!("no such command"),
        }
        Ok(())
    }

    /// Handles of memory by name; "-" is none, and "device" and "subdevice" are these.
    fn objects(&self, names: &[&str]) -> anyhow::Result<Vec<u32>> {
        let handle = |name: &&str| match *name {
            "-" => Ok(0),
            "device" => Ok(self.rm()?.device),
            "subdevice" => Ok(self.rm()?.subdevice),
            name => Ok(self.memory.get(name).context("no such memory")?.0),
        };
        names.iter().map(handle).collect()
    }

    /// The GPU, registered with UVM.
    fn uvm_registered(&mut self) -> Result<[u8; 16], Fail> {
        let (Some(rm), Some(uvm)) = (&self.rm, &self.uvm) else {
            return Err(Fail::Errno(libc::EBADF));
        };
        let uuid = match self.uuid {
            Some(uuid) => uuid,
            None => uvm.register(rm)?,
        };
        self.uuid = Some(uuid);
        Ok(uuid)
    }

    /// A child that has our descriptors, and not our memory, makes a UVM file, with a GPU or
    /// `without`, and ends, or is `executing` something else for some seconds, or `waiting` as long.
    fn uvm_of_a_child(&mut self, how: Option<&str>) -> Result<(), Fail> {
        let rm = self.rm.as_ref().ok_or(Fail::Errno(libc::EBADF))?;
        let (hears, says) = nix::unistd::pipe().map_err(|errno| Fail::Errno(errno as i32))?;
        // SAFETY: without a stack and CLONE_VM it is a fork; this program has one thread here.
        let child = unsafe {
            libc::syscall(libc::SYS_clone, libc::CLONE_FILES | libc::SIGCHLD, 0, 0, 0, 0)
        };
        if child == 0 {
            // By a client of its own; what it opens stays open here.
            let made = Rm::start(self.place).and_then(|rm| {
                let uvm = Uvm::open(self.place, rm.abi)?;
                uvm.initialize(0)?;
                if how == Some("without") {
                    uvm.keep_memory()?;
                } else {
                    uvm.register(&rm)?;
                }
                std::mem::forget(rm);
                Ok(uvm)
            });
            if let Err(fail) = &made {
                eprintln!("rmtool: uvm-of-a-child: {fail}");
            }
            let number = made.as_ref().map_or(0, Uvm::fd);
            let _ = nix::unistd::write(&says, &[u8::try_from(number).unwrap_or(0)]);
            if how == Some("waiting") {
                std::thread::sleep(Duration::from_secs(3));
            }
            if how == Some("executing") {
                let _ = Command::new("/proc/self/exe").args(["run", "sleep 3"]).exec();
            }
            // SAFETY: ends this process at once, and closes nothing of ours.
            unsafe { libc::_exit(0) }
        }
        let child = i32::try_from(child).map_err(|_| Fail::Errno(libc::EAGAIN))?;
        self.children.push(Pid::from_raw(child));
        let mut number = [0];
        if !matches!(nix::unistd::read(&hears, &mut number), Ok(1)) || number == [0] {
            return Err(Fail::Errno(libc::ECHILD));
        }
        if !matches!(how, Some("executing" | "waiting")) {
            // It's over when it was waited for.
            self.children.pop();
            let _ = waitpid(Pid::from_raw(child), None);
        }
        self.uvm = Some(Uvm::of(self.place, number[0].into(), rm.abi));
        self.uuid = rm.uuid().ok();
        Ok(())
    }

    fn uvm_map(&mut self, name: &str, handle: u32, bytes: u64) -> Result<(), Fail> {
        let uuid = self.uvm_registered()?;
        let (Some(rm), Some(uvm)) = (&self.rm, &self.uvm) else {
            return Err(Fail::Errno(libc::EBADF));
        };
        // Any address will do: nothing is mapped there in this process.
        let base = 0x10_0000_0000 + (u64::from(handle & 0xffff) << 36);
        uvm.external_range(base, bytes)?;
        uvm.map_external(rm, uuid, base, bytes, handle)?;
        self.mapped.insert(name.to_owned(), (base, bytes));
        Ok(())
    }
}

/// The bytes that hexadecimal digits say, two each.
fn bytes_of_digits(digits: &str) -> anyhow::Result<Vec<u8>> {
    let pairs = digits.as_bytes().chunks(2);
    let byte = |pair: &[u8]| Ok(u8::from_str_radix(std::str::from_utf8(pair)?, 16)?);
    pairs.map(byte).collect()
}
