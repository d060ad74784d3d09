//! Asks the driver what a monitor builds on, by the calls that a monitor makes. One JSON object a question.

use std::ffi::CString;
use std::io::{Read as _, Write as _};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use cgpu_sim::abi::*;
use cgpu_sim::bytes::Fields;
use clap::Subcommand;
use nix::fcntl::{AtFlags, FcntlArg, FdFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, execveat, fork, pipe};
use serde_json::{Value, json};

use crate::rm::{Fail, Place, Rm, call, open};

/// What is asked.
#[derive(Debug, Subcommand)]
pub(crate) enum Question {
    /// Whether a client, its objects and its duplicates of another client's memory survive an execve of their owner.
    Execve,
    /// The second half of `execve`, by the program that was executed.
    #[command(hide = true)]
    Executed {
        /// What was handed over.
        handed: Vec<u32>,
    },
    /// What it costs to ask for a process's memory, by how many objects the process has.
    Figures {
        /// Numbers of objects, in ascending order.
        #[arg(default_values_t = [1, 1000, 10_000, 40_000])]
        counts: Vec<u32>,
    },
    /// In which process's figure memory shows that is exported from one duplicate of the monitor's.
    Pins,
}

const MIB: u64 = 1 << 20;
const BLOCK_BYTES: u64 = 64 * MIB;

/// Where handles begin that this process chooses for the other's client.
const THEIR_HANDLES: u32 = 0xa100_0000;

/// How often a call is timed; the median is reported.
const ROUNDS: usize = 51;

/// How long a figure may take to follow.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Longest that objects are made for `figures`.
const LONGEST: Duration = Duration::from_secs(40);

/// Clients that a process makes for `figures`, in addition to those with objects.
const CLIENTS: u32 = 500;

pub(crate) fn run(place: &Place, question: &Question) -> anyhow::Result<bool> {
    let answer = match question {
        Question::Execve => execve(place)?,
        Question::Executed { handed } => executed(place, handed)?,
        Question::Figures { counts } => figures(place, counts)?,
        Question::Pins => pins(place)?,
    };
    println!("{answer}");
    Ok(answer["failed"].is_null())
}

/// Another process with a client that has memory, which ends when this is dropped.
#[derive(Debug)]
struct Other {
    /// Its files: this process has them, too.
    rm: Rm,
    pid: Pid,
    memory: u32,
}

impl Other {
    /// Starts a process that takes `bytes` by files that both have.
    fn start(place: &Place, bytes: u64) -> anyhow::Result<Self> {
        let mut rm = Rm::open(place)?;
        let (answer, report) = pipe()?;
        std::io::stdout().flush()?;
        // SAFETY: this program has one thread here.
        match unsafe { fork() }? {
            ForkResult::Parent { child } => {
                drop(report);
                let mut reported = [0; 16];
                std::fs::File::from(answer)
                    .read_exact(&mut reported)
                    .context("the other failed")?;
                rm.client = reported.u32_at(0);
                rm.device = reported.u32_at(4);
                rm.subdevice = reported.u32_at(8);
                rm.skip_to(THEIR_HANDLES);
                Ok(Other { rm, pid: child, memory: reported.u32_at(12) })
            }
            ForkResult::Child => {
                let made = (|| {
                    rm.make_client()?;
                    rm.make_device(place.gpu)?;
                    rm.make_subdevice()?;
                    rm.alloc(bytes)
                })();
                if let Ok((memory, _)) = made {
                    let mut reported = [0; 16];
                    let handles = [rm.client, rm.device, rm.subdevice, memory];
                    reported
                        .chunks_exact_mut(4)
                        .zip(handles)
                        .for_each(|(at, it)| at.set_u32(0, it));
                    let _ = std::fs::File::from(report).write_all(&reported);
                    loop {
                        std::thread::park();
                    }
                }
                // SAFETY: ends this process at once.
                unsafe { libc::_exit(1) }
            }
        }
    }

    fn end(&self) -> anyhow::Result<()> {
        kill(self.pid, Signal::SIGKILL)?;
        waitpid(self.pid, None)?;
        Ok(())
    }
}

/// Duplicates another's object, which its own file lets `rm`'s client do, as a monitor does it.
fn duplicate(rm: &Rm, of: &Rm, object: u32) -> Result<u32, Fail> {
    let mut bytes = [0; 24];
    bytes.set_u32(0, of.client);
    bytes.set_u32(4, object);
    // The right to duplicate, for that client; added to what there is.
    bytes.set_u32(8, rm.client);
    bytes.set_u32(12, 1);
    bytes.set_u32(16, 3 | 4 << 16);
    call(of.ctl(), NV_ESC_RM_SHARE, &mut bytes, 20)?;
    rm.dup(rm.client, rm.device, of.client, object)
}

/// MiB of a process, private, shared and owned, shared and duplicated; the sum of the first two is what it has.
fn figure(rm: &Rm, pid: u32) -> Result<[u64; 3], Fail> {
    Ok(rm.pid_bytes(pid)?.map(|bytes| bytes / MIB))
}

fn has(figure: [u64; 3]) -> u64 {
    figure[0] + figure[1]
}

/// What each step came to, and which were not as they should be.
#[derive(Debug, Default)]
struct Steps {
    seen: Vec<Value>,
    failed: Vec<String>,
}

impl Steps {
    /// A step that is right where `is_right` says so.
    fn reported(&mut self, step: &str, seen: Value, is_right: bool) {
        if !is_right {
            self.failed.push(step.to_owned());
        }
        self.seen.push(json!({ "step": step, "seen": seen }));
    }

    /// A call that is to succeed; what it gave.
    fn call<T>(&mut self, step: &str, done: Result<T, Fail>) -> Option<T> {
        let seen = done.as_ref().err().map_or_else(|| json!("ok"), |fail| json!(fail.to_string()));
        self.reported(step, seen, done.is_ok());
        done.ok()
    }

    fn answer(self, question: &str) -> Value {
        let failed = (!self.failed.is_empty()).then(|| self.failed.join("; "));
        json!({ "question": question, "steps": self.seen, "failed": failed })
    }
}

/// Has a process with a client execute another program, by a descriptor and from a thread that isn't its first.
fn execve(place: &Place) -> anyhow::Result<Value> {
    let other = Other::start(place, BLOCK_BYTES)?;
    let rm = Rm::start(place)?;
    let (memory, _) = rm.alloc(BLOCK_BYTES)?;
    let pin = duplicate(&rm, &other.rm, other.memory)?;
    let number = |fd: RawFd| u32::try_from(fd).unwrap_or(u32::MAX);
    for fd in [&rm.ctl, &rm.gpu, &other.rm.ctl, &other.rm.gpu] {
        fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
    }
    let handed = [
        std::process::id(),
        number(rm.ctl()),
        number(rm.gpu.as_raw_fd()),
        rm.client,
        rm.device,
        rm.subdevice,
        memory,
        pin,
        number(other.rm.ctl()),
        number(other.rm.gpu.as_raw_fd()),
        other.rm.client,
        other.memory,
        u32::try_from(other.pid.as_raw())?,
        // The numbers of handles that are free.
        rm.handle(),
    ];
    let program = memfd_create(c"rmtool", MFdFlags::MFD_CLOEXEC)?;
    let mut file = std::fs::File::from(program.try_clone()?);
    file.write_all(&std::fs::read("/proc/self/exe")?)?;
    drop(file);
    let mut words = vec!["rmtool".to_owned(), "--dev".to_owned()];
    words.push(place.dev.to_str().context("the path of the nodes is no text")?.to_owned());
    words.extend([
        "--gpu".to_owned(),
        place.gpu.to_string(),
        "ask".to_owned(),
        "executed".to_owned(),
    ]);
    words.extend(handed.map(|number| number.to_string()));
    let words = words.into_iter().map(CString::new).collect::<Result<Vec<_>, _>>()?;
    // The thread's number changes, the process's doesn't.
    let executed = std::thread::spawn(move || {
        execveat(&program, c"", &words, &[c"PATH=/bin"], AtFlags::AT_EMPTY_PATH)
    });
    match executed.join() {
        Ok(Err(errno)) => bail!("execveat: {errno}"),
        _ => bail!("the thread ended, and nothing was executed"),
    }
}

/// The same process as another program.
fn executed(place: &Place, handed: &[u32]) -> anyhow::Result<Value> {
    let &[
        pid,
        ctl,
        gpu,
        client,
        device,
        subdevice,
        memory,
        pin,
        ctl2,
        gpu2,
        client2,
        memory2,
        pid2,
        next,
    ] = handed
    else {
        bail!("fourteen numbers are handed over");
    };
    let file = |number: u32| -> anyhow::Result<OwnedFd> {
        // SAFETY: each is an open descriptor that the program before left to this one, without another owner.
        Ok(unsafe { OwnedFd::from_raw_fd(RawFd::try_from(number)?) })
    };
    let asked = Rm::open(place)?;
    let mut rm = Rm::through(asked.abi, file(ctl)?, file(gpu)?);
    (rm.client, rm.device, rm.subdevice) = (client, device, subdevice);
    rm.skip_to(next);
    let mut theirs = Rm::through(asked.abi, file(ctl2)?, file(gpu2)?);
    theirs.client = client2;
    let mut steps = Steps::default();
    steps.reported("the process has its number", json!(pid), pid == std::process::id());
    steps.call("a control of a subdevice", rm.uuid());
    let before = figure(&rm, pid);
    let before = steps.call("the driver is asked for this process's memory", before);
    let before = before.unwrap_or_default();
    steps.reported("its own block shows", json!(before), has(before) >= BLOCK_BYTES / MIB);
    let another = steps.call("another block", rm.alloc(BLOCK_BYTES));
    let after = figure(&rm, pid).unwrap_or_default();
    let more = has(after) - has(before).min(has(after));
    steps.reported("which shows as well", json!(after), more == BLOCK_BYTES / MIB);
    let fresh =
        steps.call("another process's block is duplicated", duplicate(&rm, &theirs, memory2));
    if let Some(fresh) = fresh {
        steps.call("that duplicate is freed", rm.free(rm.device, fresh));
    }
    kill(Pid::from_raw(i32::try_from(pid2)?), Signal::SIGKILL)?;
    waitpid(Pid::from_raw(i32::try_from(pid2)?), None)?;
    drop(theirs);
    let retained = figure(&rm, pid).unwrap_or_default();
    let more = has(retained) - has(after).min(has(retained));
    steps.reported(
        "the other is gone, and its block is this process's by the duplicate from before",
        json!(retained),
        more == BLOCK_BYTES / MIB,
    );
    steps.call("the duplicate from before is freed", rm.free(rm.device, pin));
    steps.call("the block from before is freed", rm.free(rm.device, memory));
    if let Some((another, _)) = another {
        steps.call("the new block is freed", rm.free(rm.device, another));
    }
    let last = figure(&rm, pid).unwrap_or_default();
    let less = has(before) - has(last).min(has(before));
    steps.reported("nothing of them is left", json!(last), less >= BLOCK_BYTES / MIB);
    steps.call("the client from before is freed", rm.free(rm.client, rm.client));
    Ok(steps.answer("execve"))
}

/// The median of some calls' times, in microseconds.
fn median_us<T>(mut work: impl FnMut() -> Result<T, Fail>) -> Result<f64, Fail> {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let began = Instant::now();
        work()?;
        times.push(began.elapsed().as_nanos());
    }
    times.sort_unstable();
    Ok(times[ROUNDS / 2] as f64 / 1000.0)
}

/// Times by the number of objects that a process has. Asked by another file of the same process, whose client has
/// no memory, and about a process with one object, too.
fn figures(place: &Place, counts: &[u32]) -> anyhow::Result<Value> {
    let other = Other::start(place, 4096)?;
    let asking = Rm::start(place)?;
    let rm = Rm::start(place)?;
    let pid = std::process::id();
    let pid2 = u32::try_from(other.pid.as_raw())?;
    let began = Instant::now();
    let (mut made, mut rows, mut why) = (0, Vec::new(), None);
    'counts: for count in counts {
        while made < *count {
            let done = rm.alloc(4096);
            if began.elapsed() > LONGEST {
                why = Some(format!("{made} objects took {} s", LONGEST.as_secs()));
            } else if let Err(fail) = done {
                why = Some(format!("object {}: {fail}", made + 1));
            }
            if why.is_some() {
                break 'counts;
            }
            made += 1;
        }
        let pair = || {
            let (handle, _) = rm.alloc(4096)?;
            rm.free(rm.device, handle)
        };
        rows.push(json!({
            "objects": made,
            "asked_us": median_us(|| asking.pid_bytes(pid))?,
            "other_asked_us": median_us(|| asking.pid_bytes(pid2))?,
            "free_us": median_us(|| asking.fb_info_v2(&[FB_HEAP_FREE]))?,
            "allocated_and_freed_us": median_us(pair)?,
        }));
    }
    let clients: Vec<Result<u32, Fail>> = (0..CLIENTS).map(|_| asking.new_client()).collect();
    let beside = json!({
        "clients": clients.iter().filter(|made| made.is_ok()).count(),
        "asked_us": median_us(|| asking.pid_bytes(pid))?,
        "other_asked_us": median_us(|| asking.pid_bytes(pid2))?,
    });
    let freed = Instant::now();
    drop(rm);
    let ended_ms = freed.elapsed().as_secs_f64() * 1000.0;
    other.end()?;
    let answer = json!({
        "question": "figures", "rows": rows, "with_clients": beside, "closed_ms": ended_ms, "not_asked": why,
        "failed": rows.is_empty().then_some("no objects could be made"),
    });
    Ok(answer)
}

/// `NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE`.
const FB_HEAP_FREE: u32 = 0x14;

/// Exports and imports around one duplicate of the monitor's: which process has the memory at each step.
fn pins(place: &Place) -> anyhow::Result<Value> {
    let other = Other::start(place, BLOCK_BYTES)?;
    let rm = Rm::start(place)?;
    let (pid, pid2) = (std::process::id(), u32::try_from(other.pid.as_raw())?);
    let at_first = [figure(&rm, pid2)?, figure(&rm, pid)?].map(has);
    let mut steps = Steps::default();
    let check = |steps: &mut Steps, step: &str, theirs: u64, ours: u64| {
        let began = Instant::now();
        // Files are closed a little later where the kernel has put that off.
        let (both, is_right) = loop {
            let both = [pid2, pid].map(|pid| figure(&rm, pid).unwrap_or_default());
            // The other's block shows at first.
            let seen = [has(both[0]) + BLOCK_BYTES / MIB, has(both[1])];
            let is_right = seen == [theirs + at_first[0], ours + at_first[1]];
            if is_right || began.elapsed() > TIMEOUT {
                break (both, is_right);
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        steps.reported(
            step,
            json!({ "theirs": both[0], "ours": both[1], "expected": [theirs, ours] }),
            is_right,
        );
    };
    check(&mut steps, "they have a block", 64, 0);
    let Some(pin) = steps.call("we duplicate it", duplicate(&rm, &other.rm, other.memory)) else {
        return Ok(steps.answer("pins"));
    };
    check(&mut steps, "duplicated", 64, 0);
    let (first, second) = (open(&place.dev, "nvidiactl")?, open(&place.dev, "nvidiactl")?);
    steps.call("our duplicate is exported", rm.export(pin, first.as_raw_fd()));
    steps.call("and once more, to another file", rm.export(pin, second.as_raw_fd()));
    check(&mut steps, "exported", 64, 0);
    let theirs = &other.rm;
    let copy = steps.call(
        "they duplicate their block",
        theirs.dup(theirs.client, theirs.device, theirs.client, other.memory),
    );
    steps.call("they free their block", theirs.free(theirs.device, other.memory));
    check(&mut steps, "their duplicate has it", 64, 0);
    let early = steps.call("they import it", theirs.import(first.as_raw_fd()));
    if let Some(copy) = copy {
        steps.call("they free their duplicate", theirs.free(theirs.device, copy));
    }
    check(&mut steps, "ours has it, though they have an import", 0, 64);
    let late = steps.call("they import it from the other file", theirs.import(second.as_raw_fd()));
    check(&mut steps, "ours has it still", 0, 64);
    steps.call("we free our duplicate", rm.free(rm.device, pin));
    check(&mut steps, "no process's figure has it, or an import does", 0, 0);
    drop((first, second));
    check(&mut steps, "the files are closed: an import has it", 64, 0);
    for object in [early, late].into_iter().flatten() {
        steps.call("they free an import", theirs.free(theirs.device, object));
    }
    check(&mut steps, "it is gone", 0, 0);
    other.end()?;
    Ok(steps.answer("pins"))
}
