"""Questions 9: what the monitor's design builds on, asked of the driver by the calls that a monitor makes.

All but the last are asked on the host, without a container: `rmtool ask` says what it did, step by step.
"""

import glob
import json
import os
import signal

from .command import run as command

# Objects that a process has, and how many of them a simulated driver is asked to make.
OBJECTS, SIMULATED_OBJECTS = (1, 1000, 10000, 40000), (1, 100)

LIMIT_S = 90

# How much more the driver may show than before, when all has ended: page tables that it keeps.
KEPT_MIB = 16


def asked(run, name, *words):
    """The answer of `rmtool ask`; None if there is none, after the reason went into the table."""
    rmtool = os.path.join(run.programs, "rmtool")
    dev = os.path.join(run.driver.settings()["root"], "dev")
    done = command([rmtool, "--dev", dev, "ask", *words], run.limit(LIMIT_S))
    run.keep(name, done)
    return done, done.answer()


def steps(run, number, question, name):
    """A question of several steps, each of which has a right outcome."""
    done, answer = asked(run, name, name)
    if not answer:
        return run.table.answer(number, question, "each step", done.why(), False, run.evidence)
    wrong = answer["failed"]
    seen = f"not so: {wrong}" if wrong else f"all {len(answer['steps'])} steps"
    seen += "; " + "; ".join(f"{step['step']}: {json.dumps(step['seen'])}" for step in answer["steps"])
    run.table.answer(number, question, "each step", seen, not wrong, run.evidence)


def execve(run):
    steps(run, "9.1", "a client, its objects and its duplicates survive an execve of their owner", "execve")


def pins(run):
    steps(run, "9.3", "exports of one duplicate keep memory in the figure of the process that has the duplicate", "pins")


def figures(run):
    number, question = "9.2", "what it costs to ask for a process's memory (GET_PID_INFO), by its objects"
    counts = SIMULATED_OBJECTS if run.driver.simulated else OBJECTS
    done, answer = asked(run, "figures", "figures", *map(str, counts))
    if not answer or answer["failed"]:
        return run.table.answer(number, question, "to be learnt", done.why(), False, run.evidence)
    parts = [
        f"{row['objects']} objects: {row['asked_us']:.1f} µs, of another process {row['other_asked_us']:.1f}, "
        f"the GPU's free memory {row['free_us']:.1f}, an object made and freed {row['allocated_and_freed_us']:.1f}"
        for row in answer["rows"]
    ]
    beside = answer["with_clients"]
    parts.append(
        f"{beside['clients']} clients more: {beside['asked_us']:.1f} µs, of another process {beside['other_asked_us']:.1f}"
    )
    parts.append(f"the file of all these objects closed in {answer['closed_ms']:.0f} ms")
    parts += [answer["not_asked"]] if answer["not_asked"] else []
    run.table.reported(number, question, "; ".join(parts), run.evidence)


def monitors():
    """Process ids of the monitors on this host."""
    found = []
    for path in glob.glob("/proc/[0-9]*/comm"):
        try:
            with open(path, encoding="utf-8") as file:
                if file.read().startswith("cgpu-monitor"):
                    found.append(int(path.split("/")[2]))
        except OSError:
            pass  # it has ended
    return found


def unwatched(run):
    number, question = "9.4", "what PyTorch meets when the container's monitor is killed, and whether all is given back"
    if run.torch:
        return run.table.not_asked(number, question, run.torch)
    before = run.driver.used_mib()
    running = run.start("unwatched", ["python3", run.program("torch_unwatched.py")], run.quota_mib)
    if running.line(90).strip() != "begun":
        outcome = run.finish(running, 5)
        return run.table.answer(number, question, "to be learnt", outcome.why(), False, run.evidence)
    killed = monitors()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    outcome = run.finish(running, 60)
    answer = outcome.answer()
    after = run.driver.used_mib()
    seen = "; ".join(f"{key}: {text}" for key, text in answer.items()) if answer else outcome.why()
    seen = f"{len(killed)} processes killed; {seen}; the driver shows {after - before} MiB more than before"
    holds = bool(killed) and after - before <= KEPT_MIB
    run.table.answer(number, question, "all is given back when it has ended", seen, holds, run.evidence)


ALL = [execve, figures, pins, unwatched]
