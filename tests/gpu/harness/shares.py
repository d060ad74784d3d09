"""Questions 7: what two containers have of a GPU's computing time, by policy, weight and priority.

Real containers behind the gate, whose programs keep the GPU busy. Settings of GPU and containers are
changed with `cgpu set` while they compute.
"""

import contextlib
import os
import re
import time

from .command import Outcome
from .command import run as command
from .neighbours import rate

# How long each setting is measured, and how much of its beginning isn't counted.
PHASE_S, SETTLE_S = 3.0, 0.5

# A process with a context takes some 520.
QUOTA_MIB = 1024
AHEAD = 16
START_S = 30

# A ResNet50 in half precision, with batches as in the documents' table, and how long each setting is measured.
TRAINING_MIB, BATCHES, TRAINING_S = 16384, (16, 32, 64, 128), 6.0

# Parts of a GPU under policy 3, and which of them two containers have.
PARTS, FIXED = 20, (5, 10)

TOO_FEW = "too few kernels to tell"


def cgpu(run, *words):
    """Runs the command of that name on the gate's registry; why it failed, or None."""
    argv = [os.path.join(run.programs, "cgpu"), "--config", run.place.doors["gate"], *words]
    done = command(argv, 20)
    with open(os.path.join(run.out, "shares-commands.txt"), "a", encoding="utf-8") as file:
        file.write(done.text() + "\n")
    return None if done.status == 0 else done.why()


def start(run, name, seconds, weight=None, processes=1, resting=0):
    """Starts a container that computes with so many processes, next to so many that are idle."""
    spin = f"{run.program('spin')} --seconds {seconds} --tick-ms 5"
    each = [f"{spin} --ahead {AHEAD}"] * processes + [f"{spin} --batch 1 --rest-us 3000000"] * resting
    # What a program says is longer than a pipe takes at once.
    each = [f"{words} > {run.program(f'{name}-{number}')}" for number, words in enumerate(each)]
    words = ["sh", "-c", f"{' & '.join(each)} & wait"]
    extra = {"ALIYUN_COM_GPU_SCHD_WEIGHT": str(weight)} if weight else {}
    return run.start(name, words, QUOTA_MIB * (processes + resting), extra)


def said(run, name, number):
    """What a process of a container said so far."""
    try:
        with open(os.path.join(run.place.share, f"{name}-{number}"), encoding="utf-8") as file:
            return Outcome([], 0, file.read(), "", 0.0, False).answers()
    except OSError:
        return []


def computing(run, name, processes=1):
    """Waits until all its processes compute."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if all(said(run, name, number) for number in range(processes)):
            return True
        time.sleep(0.02)
    return False


def ticks_of(run, name, processes=1):
    """When kernels of each process ended, of those that reported it."""
    answers = [answer for number in range(processes) for answer in said(run, name, number)]
    return [answer["ticks"] for answer in answers if "ticks" in answer]


def measured(run, number, question, wanted, tolerance, seen, expected=None, of="kernels/s"):
    """A row: two parts of the GPU, and whether their ratio is as wanted, so many per cent more or less."""
    one, other = seen
    text = f"{one:.0f} and {other:.0f} {of}"
    ratio = other / one if one else 0.0
    holds = wanted is None or abs(ratio / wanted - 1) * 100 <= tolerance
    text = f"{ratio:.2f} ({text})"
    if wanted is None:
        return run.table.reported(number, question, text, run.evidence)
    run.table.answer(number, question, expected or f"{wanted}, within {tolerance} %", text, holds, run.evidence)


def two(run):
    """One container of weight 1, one of weight 2: settings are changed while both compute."""
    phases = [
        ("7.9.1", "weights 1 and 2, nothing set of the GPU", [], 2.0, 3),
        ("7.9.2", "policy 1: alike", [("gpu", "0", "policy=1")], 1.0, 3),
        ("7.9.3", "policy 2, the second's weight 6", [("gpu", "0", "policy=2"), ("b", "weight=6")], 6.0, 3),
        ("7.9.4", "policy 1, the second has high priority of 80 %",
         [("gpu", "0", "policy=1"), ("gpu", "0", "prio_ratio=80"), ("b", "high-priority=1")], 4.0, 3),
        ("7.9.5", "policy 5: the driver's own", [("b", "high-priority=0"), ("gpu", "0", "policy=5")], None, 0),
        ("7.9.6", "policy 2 again, weights 1 and 2", [("b", "weight=2"), ("gpu", "0", "policy=2")], 2.0, 3),
        ("7.9.7", "policy 3, weights 1 and 2 of 3: in turns",
         [("gpu", "0", "max_inst=3"), ("gpu", "0", "policy=3")], 2.0, 5),
        ("7.9.8", "policy 0, two of 2: in turns", [("gpu", "0", "policy=0"), ("gpu", "0", "max_inst=2")], 1.0, 5),
    ]  # fmt: skip
    seconds = 12 + len(phases) * (PHASE_S + SETTLE_S + 1)
    one = start(run, "shares-one", seconds)
    other = start(run, "shares-other", seconds, weight=2)
    ready = computing(run, "shares-one") and computing(run, "shares-other")
    failed = [] if ready else ["a container doesn't compute"]
    windows = []
    for _, _, changes, _, _ in phases:
        for change in changes if not failed else []:
            words = ("gpu", *change[1:]) if change[0] == "gpu" else ("container", other.name, *change[1:])
            why = cgpu(run, "set", *words)
            failed += [f"cgpu set {' '.join(words)}: {why}"] if why else []
        time.sleep(SETTLE_S)
        begin = time.monotonic_ns()
        time.sleep(PHASE_S if not failed else 0)
        windows.append((begin, time.monotonic_ns()))
    one, other = run.finish(one, START_S), run.finish(other, START_S)
    ticks = ticks_of(run, "shares-one") + ticks_of(run, "shares-other")
    if len(ticks) < 2:
        failed.append(f"{one.why()} and {other.why()}")
    for (number, question, _, wanted, tolerance), window in zip(phases, windows):
        rates = [rate(t, *window) for t in ticks] if not failed else [None]
        if not all(rates):
            why = "; ".join(failed) or TOO_FEW
            run.table.answer(number, question, "a ratio", why, False, run.evidence)
            continue
        measured(run, number, question, wanted, tolerance, rates)


def beside(run, label, seconds, processes=1, resting=0):
    """Under policy 1: a container of one busy process next to one of several, and of some that are idle.

    When all computed, and when kernels of each ended, the one's first; or None, and why.
    """
    why = cgpu(run, "set", "gpu", "0", "policy=1")
    one, other = f"{label}-one", f"{label}-other"
    running = [start(run, one, seconds), start(run, other, seconds, processes=processes, resting=resting)]
    ready = computing(run, one) and computing(run, other, processes + resting)
    begin = time.monotonic_ns()
    outcomes = [run.finish(container, seconds + START_S) for container in running]
    ticks = ticks_of(run, one) + ticks_of(run, other, processes)
    if why or not ready or len(ticks) != 1 + processes or not all(ticks):
        reported = f"{len(ticks)} of {1 + processes} reported"
        return None, None, why or "; ".join([*(outcome.why() for outcome in outcomes), reported])
    return begin, ticks, None


def rates_of(ticks, begin, end):
    """Kernels a second of each; None where one ended too few."""
    found = [rate(pairs, begin, end) for pairs in ticks]
    return found if all(found) else None


def forks(run):
    """One container computes with one process, the other with four: under policy 1 both have as much."""
    number, question = "7.10", "policy 1: one process in a container, four in another"
    begin, ticks, why = beside(run, "forks", 8, processes=4)
    end = min(pairs[-1][0] for pairs in ticks) if ticks else 0
    rates = rates_of(ticks, begin + int(SETTLE_S * 1e9), end) if ticks else None
    if not rates:
        return run.table.answer(number, question, "a ratio", why or TOO_FEW, False, run.evidence)
    ratio = rates[0] / sum(rates[1:])
    seen = f"{rates[0]:.0f} kernels/s to {sum(rates[1:]):.0f} of the four: {ratio:.2f}"
    run.table.answer(number, question, "the one has 0.95 of the other's at least", seen, ratio >= 0.95, run.evidence)


def resting(run):
    """Of four processes in a container one computes: it has as much as the only one of another."""
    number, question = "7.10.2", "policy 1: one busy process in a container, one and three that rest in another"
    _, ticks, why = beside(run, "resting", 28, resting=3)
    end = min(pairs[-1][0] for pairs in ticks) if ticks else 0
    early = rates_of(ticks, end - 24_000_000_000, end - 18_000_000_000) if ticks else None
    late = rates_of(ticks, end - 6_000_000_000, end) if ticks else None
    if not early or not late:
        return run.table.answer(number, question, "a ratio", why or TOO_FEW, False, run.evidence)
    seen = f"{late[1] / late[0]:.2f} at last, {early[1] / early[0]:.2f} in the first seconds"
    run.table.answer(number, question, "1.0, within 5 %", seen, abs(late[1] / late[0] - 1) <= 0.05, run.evidence)


def fixed(run):
    """Policy 3 before anybody starts: programs begin while their container is off the GPU, and have their part of it."""
    question = "policy 3, 20 parts of the GPU: {} container has {} of them, from its start on"
    rows = [("7.12.1", question.format("one", FIXED[0]), FIXED[0]), ("7.12.2", question.format("another", FIXED[1]), FIXED[1])]
    failed = cgpu(run, "set", "gpu", "0", "policy=3", f"max_inst={PARTS}")
    seconds = 14
    # The first goes on alone, under a policy that gives it all.
    names = ("fixed-one", "fixed-other")
    running = [start(run, name, seconds + 6 * (name == names[0]), weight=part) for name, part in zip(names, FIXED)]
    ready = computing(run, names[0]) and computing(run, names[1])
    begin = time.monotonic_ns() + int(SETTLE_S * 1e9)
    time.sleep(SETTLE_S + 2 * PHASE_S)
    end = time.monotonic_ns()
    other = run.finish(running[1], seconds + START_S)
    failed = failed or cgpu(run, "set", "gpu", "0", "policy=1")
    time.sleep(SETTLE_S)
    alone = time.monotonic_ns()
    one = run.finish(running[0], START_S)
    ticks = [ticks_of(run, name) for name in names]
    rates = [rate(pairs[0], begin, end) if pairs else None for pairs in ticks]
    usual = rate(ticks[0][0], alone, 1 << 63) if ticks[0] else None
    for (number, text, part), had in zip(rows, rates):
        expected = f"{part / PARTS:.2f} of what one has alone, within 0.03"
        if failed or not ready or not had or not usual:
            why = failed or f"{TOO_FEW}: {one.why()} and {other.why()}"
            run.table.answer(number, text, expected, why, False, run.evidence)
            continue
        holds = abs(had / usual - part / PARTS) <= 0.03
        seen = f"{had / usual:.3f} ({had:.0f} of {usual:.0f} kernels/s)"
        run.table.answer(number, text, expected, seen, holds, run.evidence)


def idle(run, how):
    """What becomes of the time of who rests: as the configuration has it from the next change on."""
    path = run.place.doors["gate"]
    with open(path, encoding="utf-8") as file:
        text = file.read()
    with open(path, "w", encoding="utf-8") as file:
        file.write(re.sub(r'(?m)^idle = ".*"$', f'idle = "{how}"', text))


def trains(run, batch, seconds):
    """Two containers that train a ResNet50 with so large batches, weights 1 and 2."""
    running = []
    for name, weight in (("one", 1), ("other", 2)):
        words = f"python3 {run.program('torch_resnet.py')} {seconds} {batch} > {run.program(f'resnet-{name}-0')}"
        extra = {"ALIYUN_COM_GPU_SCHD_WEIGHT": str(weight)}
        running.append(run.start(f"resnet-{name}", ["sh", "-c", words], TRAINING_MIB, extra))
    return running


def resnet(run):
    """The table of Alibaba's documents: ResNet50 at 1:2, for each batch, and for each use of who rests."""
    for row, batch in enumerate(BATCHES, 1):
        numbers = [(f"7.11.{row}.{way}", how) for way, how in enumerate(("yield", "keep"), 1)]
        question = f"ResNet50 in batches of {batch}, weights 1 and 2, idle = "
        if run.torch:
            for number, how in numbers:
                run.table.not_asked(number, question + how, run.torch)
            continue
        for name in ("one", "other"):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(run.place.share, f"resnet-{name}-0"))
        failed, windows = None, []
        running = trains(run, batch, START_S + 2 * (TRAINING_S + SETTLE_S + 1))
        ready = computing(run, "resnet-one") and computing(run, "resnet-other")
        for _, how in numbers if ready else []:
            idle(run, how)
            # A change has all shares set again.
            failed = failed or cgpu(run, "set", "gpu", "0", "policy=1") or cgpu(run, "set", "gpu", "0", "policy=2")
            time.sleep(SETTLE_S)
            begin = time.monotonic_ns()
            time.sleep(TRAINING_S)
            windows.append((begin, time.monotonic_ns()))
        idle(run, "yield")
        outcomes = [run.finish(container, 3 * START_S) for container in running]
        ticks = ticks_of(run, "resnet-one") + ticks_of(run, "resnet-other")
        if not failed and (not ready or len(ticks) < 2):
            failed = "; ".join(outcome.why() for outcome in outcomes)
        for (number, how), window in zip(numbers, windows or [(0, 0)] * len(numbers)):
            rates = [rate(pairs, *window) for pairs in ticks] if not failed else [None]
            if not all(rates):
                run.table.answer(number, question + how, "a ratio", failed or TOO_FEW, False, run.evidence)
                continue
            # Work that leaves the GPU idle between kernels gives time away where others may have it.
            wanted = 2.0 if how == "keep" else None
            measured(run, number, question + how, wanted, 5, rates, of="images/s")


def can_ask(run, number, question):
    """Whether there is a GPU that computes, and the command that sets how it is shared; the row says so if not."""
    if not os.access(os.path.join(run.programs, "cgpu"), os.X_OK):
        run.table.not_asked(number, question, "cgpu is missing: make gpu-programs")
        return False
    return not run.skips_kernels(number, question)


def shares(run):
    if not can_ask(run, "7", "shares of computing time"):
        return
    two(run)
    forks(run)
    resting(run)


def fixed_parts(run):
    if can_ask(run, "7.12", "fixed parts of the GPU from the start on"):
        fixed(run)


def resnets(run):
    if can_ask(run, "7.11", "shares of computing time while both train"):
        resnet(run)


ALL = [shares, fixed_parts, resnets]
