"""Questions 8: what cgpu's own tools say of this GPU and of a container on it, as an administrator asks them.

The other questions have a list of GPUs in a file. These ask the driver's library, by the configuration
that an installed cgpu has.
"""

import json
import os
import time

from .command import run as command
from .driver import MIB
from .place import TOOLS

QUOTA_MIB = 2048
HOLD_S, START_S = 12, 30

# Longest that one of our tools takes.
LIMIT_S = 20

# cgpu doctor: nothing worse than a note, and a warning.
NOTES, WARNINGS = 0, 3

# How often a poll is repeated whose answer isn't complete.
LOOKS, LOOK_PAUSE_S = 20, 0.2

# No field of a container: one without a quota has an exclusive GPU.
WHOLE = {"ALIYUN_COM_GPU_MEM_CONTAINER": None, "ALIYUN_COM_GPU_MEM_UNIT": None}


def ask(run, name, *words):
    """Runs one of our programs with the configuration of an installed cgpu, and keeps what it said."""
    argv = [os.path.join(run.programs, words[0]), "--config", run.place.doors[TOOLS], *words[1:]]
    done = command(argv, run.limit(LIMIT_S))
    run.keep(name, done)
    return done


def look(run, name, is_whole, *words):
    """Asks until the answer is complete: on a busy machine a monitor may not answer a poll in time."""
    for _ in range(LOOKS):
        done = ask(run, name, *words)
        if is_whole(done):
            break
        time.sleep(LOOK_PAUSE_S)
    return done


def parsed(done):
    """What it printed as JSON; None if it isn't JSON."""
    try:
        return json.loads(done.stdout)
    except ValueError:
        return None


def doctor(run):
    number, question = "8.1", "cgpu doctor looks at this host"
    done = ask(run, "tools-doctor", "cgpu", "doctor", "--format", "json")
    report = parsed(done) or {"findings": []}
    bad = [f"{f['severity']} {f['name']}: {f['what']}" for f in report["findings"] if f["severity"] in ("warning", "error")]
    seen = f"exit status {done.status}, {len(report['findings'])} findings; " + ("; ".join(bad)[:600] or "none is bad")
    run.table.answer(number, question, "no error", seen, done.status in (NOTES, WARNINGS), run.evidence)


def gpus(run):
    number, question = "8.2", "cgpu gpus lists what nvidia-smi lists"
    done = ask(run, "tools-gpus", "cgpu", "gpus", "--refresh", "--format", "json")
    keys = ("index", "uuid", "minor", "bus_id", "name", "memory_mib")
    listed = [{key: gpu.get(key) for key in keys} for gpu in parsed(done) or []]
    wanted = [{key: gpu[key] for key in keys} for gpu in run.driver.listed]
    seen = "the same" if listed == wanted else f"{listed} for {wanted}; {done.why() if done.status else ''}"
    run.table.answer(number, question, f"{len(wanted)} with the same figures", seen, listed == wanted, run.evidence)


def steers(run):
    """Before any container: the driver is asked whether it takes slices, by channel groups of our own."""
    number, question = "8.3", "cgpu set gpu 0 policy=2, before there is a container"
    done = ask(run, "tools-set", "cgpu", "set", "gpu", "0", "policy=2")
    seen = f"taken, after {done.seconds * 1000:.0f} ms" if done.status == 0 else done.why()
    run.table.answer(number, question, "taken", seen, done.status == 0, run.evidence)


def has_begun(running):
    """Whether a program that reports when it begins has begun."""
    return running.line(START_S).startswith("{")


def shown(run):
    """A container computes: what ps, cgpu-smi and the metrics tell of it."""
    # It is ended once all have looked, which takes long on a busy host.
    spin = [run.program("spin"), "--seconds", 20 * HOLD_S]
    running = run.place.start(spin, QUOTA_MIB, door=TOOLS)
    begun = has_begun(running)
    # The driver reports which processes ran in the last seconds.
    time.sleep(HOLD_S / 2)
    looks = {
        "8.4": (LISTED, ("tools-ps", "cgpu", "ps", "--format", "json")),
        "8.5": (PAGE, ("tools-smi", "cgpu-smi", "--format=json")),
        "8.6": (METRICS, ("tools-metrics", "cgpu-metrics", "--once")),
    }
    asked = {}
    for number, ((_, judge), (name, *words)) in looks.items():
        asked[number] = look(run, name, lambda done, judge=judge: not judge(run, done, running)[0], *words)
    ask(run, "tools-smi-page", "cgpu-smi", "--processes")
    ask(run, "tools-events", "cgpu", "events", running.name)
    run.place.end(running)
    outcome = run.place.finish(running, HOLD_S + START_S)
    run.keep("tools-spin", outcome)
    for number, ((question, judge), _) in looks.items():
        done = asked[number]
        wrong, seen = (["the container does not compute"], outcome.why()) if not begun else judge(run, done, running)
        run.table.answer(number, question, "as it is", "; ".join([*wrong, seen]), not wrong, run.evidence)


def judged(run, figures):
    """What is wrong with the figures of the only container on the only GPU it has, and these in words."""
    quota, used = figures["quota"], figures["used"]
    wrong = [] if quota == QUOTA_MIB * MIB else ["the quota is another"]
    # A context is in the container's figure: some 520 MiB.
    wrong += [] if used and 0 < used <= quota else ["not what is in use"]
    share, held = figures.get("share"), figures.get("held")
    if not run.driver.simulated:
        # The samples reach back 14 s, and it has computed for six.
        wrong += [] if held and 0.3 < held <= 1 else ["not the time that it had"]
    return wrong, f"{(used or 0) // MIB} of {quota // MIB} MiB in use, share {share}, held {held}"


def listed(run, done, running):
    rows = [row for row in (parsed(done) or []) if row["id"] == running.name]
    if len(rows) != 1:
        return ["it isn't listed once"], done.why()
    row, gpu = rows[0], rows[0]["gpus"][0]
    figures = {"quota": gpu["memory_limit_bytes"], "used": gpu["memory_used_bytes"]}
    figures |= {"share": gpu["compute_share"], "held": gpu["compute_held"]}
    wrong, seen = judged(run, figures)
    return wrong + ([] if row["state"] == "active" else ["it isn't active"]), seen


def page(run, done, running):
    shown_page = parsed(done) or {"gpus": [], "containers": []}
    rows = [row for row in shown_page["containers"] if row["id"] == running.name]
    if len(rows) != 1 or not shown_page["gpus"]:
        return ["it isn't listed once"], done.why()
    share, gpu = rows[0]["shares"][0], shown_page["gpus"][0]
    figures = {"quota": share["memory_limit_bytes"], "used": share["memory_used_bytes"]}
    figures |= {"share": share["compute_share"], "held": share["compute_held"]}
    wrong, seen = judged(run, figures)
    if not run.driver.simulated:
        of_gpu = {key: gpu[key] for key in ("utilization_percent", "temperature_celsius", "power_watts")}
        wrong += [f"no {key} of the GPU" for key, value in of_gpu.items() if value is None]
        seen += f"; the GPU: {of_gpu}; its utilisation: {share['utilization_percent']} %"
        wrong += [f"a gap: {gap}" for gap in shown_page["gaps"]]
    return wrong, seen


def metrics(run, done, running):
    # Labels are dcgm-exporter's and the short id.
    found, short = {}, f'container_id="{running.name[:12]}"'
    for line in done.stdout.splitlines():
        name, _, value = line.rpartition(" ")
        if short in name or name.startswith("cgpu_gpu_"):
            found[name.split("{")[0]] = value
    wanted = ["cgpu_container_memory_quota_bytes", "cgpu_container_memory_used_bytes", "cgpu_container_enforced"]
    if not run.driver.simulated:
        wanted += ["cgpu_gpu_utilization_ratio", "cgpu_gpu_temperature_celsius", "cgpu_gpu_power_watts"]
    wrong = [f"no {name}" for name in wanted if name not in found]
    if wrong:
        return wrong, done.why()
    figures = {"quota": int(float(found[wanted[0]])), "used": int(float(found[wanted[1]]))}
    for name in ("share", "held"):
        text = found.get(f"cgpu_container_compute_{name}_ratio")
        figures[name] = float(text) if text else None
    wrong, seen = judged(run, figures)
    return wrong + ([] if float(found[wanted[2]]) == 1 else ["not enforced"]), seen


LISTED = ("cgpu ps of a container that computes", listed)
PAGE = ("cgpu-smi of it", page)
METRICS = ("the metrics of it", metrics)


def rested(run):
    """A program computes no more, and keeps its context: how much it is reported to have had, as time goes by."""
    number, question = "8.9", "cgpu ps of a container that rests after it has computed"
    words = f"{run.program('spin')} --seconds 4 >&2; exec {run.program('spin')} --seconds 26 --batch 1 --rest-us 3000000"
    running = run.place.start(["sh", "-c", words], QUOTA_MIB, door=TOOLS)
    begun, begin, shares = has_begun(running), time.monotonic(), []

    def held(done):
        rows = [row for row in parsed(done) or [] if row["id"] == running.name]
        return rows[0]["gpus"][0]["compute_held"] if rows else None

    for after in (1, 8, 20):
        time.sleep(max(0.0, begin + after - time.monotonic()))
        words = ("cgpu", "ps", "--format", "json")
        shares.append(held(look(run, f"tools-rested-{after}", lambda done: held(done) is not None, *words)))
    outcome = run.place.finish(running, START_S)
    run.keep("tools-rested", outcome)
    holds = begun and None not in shares and shares[-1] < 0.05
    seen = f"held after 1, 8 and 20 s: {shares}" if begun else outcome.why()
    run.table.answer(number, question, "less than 0.05 after 20 s", seen, holds, run.evidence)


def whole(run):
    """A container without a quota has all of the GPU."""
    number, question = "8.7", "a container without a quota has the whole GPU"
    if run.driver.simulated:
        return run.table.not_asked(number, question, "a simulated driver has no files")
    query = "nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits"
    words = ["sh", "-c", f"{query} && exec {run.program('spin')} --seconds 1"]
    running = run.place.start(words, QUOTA_MIB, door=TOOLS, more=WHOLE)
    outcome = run.place.finish(running, run.limit(START_S))
    run.keep("tools-whole", outcome)
    total = outcome.stdout.strip().splitlines()[:1]
    computed = any("ticks" in answer for answer in outcome.answers())
    seen = f"{(total or ['nothing'])[0]} MiB shown, and it {'computes' if computed else 'does NOT compute'}"
    holds = total == [str(run.driver.total_mib)] and computed
    seen = seen if holds else f"{seen}; {outcome.why()}"
    run.table.answer(number, question, f"{run.driver.total_mib} MiB, and kernels run", seen, holds, run.evidence)


def container_files(below):
    """Quota in bytes and memory in words, in the directory of the only container of a GPU's; None and nothing where none is listed."""
    for name in os.listdir(below):
        if os.path.isdir(os.path.join(below, name)):
            with open(os.path.join(below, name, "memsize"), encoding="utf-8") as file:
                quota = int(file.read())
            with open(os.path.join(below, name, "meminfo"), encoding="utf-8") as file:
                return quota, " ".join(file.read().split())
    return None, ""


def tree(run):
    """The tree of files, as Alibaba's scripts read it."""
    number, question = "8.8", "cgpu mount shows the container's quota and memory as files"
    place = os.path.join(run.place.work, "tree")
    os.makedirs(place, exist_ok=True)
    running = run.place.start([run.program("spin"), "--seconds", 20 * HOLD_S], QUOTA_MIB, door=TOOLS)
    begun = has_begun(running)
    mounted = ask(run, "tools-mount", "cgpu-tree", "--detach", place)
    below = os.path.join(place, str(run.driver.listed[0]["minor"]))
    quota, text = None, ""
    for _ in range(LOOKS):
        try:
            quota, text = container_files(below)
        except (OSError, ValueError) as error:
            text = f"{error}; {mounted.why()}"
        # What is read may be older than the program's first memory.
        if "PID:" in text:
            break
        time.sleep(LOOK_PAUSE_S)
    ask(run, "tools-unmount", "cgpu-tree", "--unmount", place)
    run.place.end(running)
    outcome = run.place.finish(running, HOLD_S + START_S)
    run.keep("tools-tree", outcome)
    holds = begun and quota == QUOTA_MIB * MIB and "Free:" in text and "PID:" in text
    seen = f"memsize {quota}; meminfo {text}" if begun else outcome.why()
    run.table.answer(number, question, f"memsize {QUOTA_MIB * MIB}, and a process in meminfo", seen, holds, run.evidence)


def tools(run):
    """What an installed cgpu says, one question after the other."""
    missing = [name for name in ("cgpu", "cgpu-smi", "cgpu-metrics", "cgpu-tree")
               if not os.access(os.path.join(run.programs, name), os.X_OK)]  # fmt: skip
    if missing:
        return run.table.not_asked("8", "cgpu's own tools", f"{', '.join(missing)} missing: make gpu-programs")
    if run.driver.simulated:
        for number, question in (("8.1", "cgpu doctor looks at this host"), ("8.2", "cgpu gpus lists what nvidia-smi lists")):
            run.table.not_asked(number, question, "a simulated driver has no management library")
    else:
        doctor(run)
        gpus(run)
    steers(run)
    shown(run)
    whole(run)
    tree(run)
    rested(run)


ALL = [tools]
