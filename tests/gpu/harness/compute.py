"""Questions 5: can a GPU's time be divided from the monitor's side, by the driver's own controls.

`cgpu-steer` runs two programs that keep the GPU busy, on the host without the gate, and asks the driver
for one thing after the other. It says when it asked what, and the programs say when their kernels ended:
throughput is the judge, since a control that answers that all is well may have done nothing.
"""

import os
import statistics

from .command import Outcome, run
from .neighbours import rate

# What a phase takes, and how much of its beginning isn't counted.
PHASE_MS, SIMULATED_PHASE_MS, SETTLE_NS = 2000, 1000, 300_000_000

# cgpu-steer ends by itself before it's ended.
STEER_S, LIMIT_S = 50, 58

# How soon a program has to be off the GPU, or on it.
SOON_NS = 500_000_000

# Kernels that each has in its queue: more than run in the longest slice.
AHEAD = 16

RATIO_PERCENT, AGAIN_PERCENT = 10, 5

SLICES = "time slices of {} for two programs that keep the GPU busy, {}"
CASES = [
    ("5.1", SLICES.format("2:1", "without a restart of the runlist")),
    ("5.2", SLICES.format("2:1", "and a restart of the runlist")),
    ("5.3", SLICES.format("3:1, then 1:3", "and a restart of the runlist")),
    ("5.4", "channels are disabled and enabled, with a restart of the runlist"),
    ("5.5", "channels are disabled and enabled, without a restart"),
    ("5.6", "controls that schedule: statuses by who asks, and time"),
]


class Seen:
    """What was asked when, and what both programs did."""

    def __init__(self, said, ticks, failures):
        self.phases = {phase["name"]: phase for phase in said["phases"]}
        self.controls = said["controls"]
        self.said = said
        self.ticks = ticks
        self.failures = failures

    def rates(self, name):
        """Kernels a second of both in a phase, once it has settled."""
        phase = self.phases.get(name)
        if not phase:
            return None
        found = [rate(ticks, phase["begin_ns"] + SETTLE_NS, phase["end_ns"]) for ticks in self.ticks]
        return found if all(found) else None

    def divided(self, name):
        """How the GPU was divided in a phase, or None, and that in words."""
        found, usual = self.rates(name), self.rates("base")
        if not found or not usual:
            return None, f"too few kernels to tell in '{name}', or before"
        one, other = found
        together = 100 * sum(found) / sum(usual)
        text = f"{one / other:.2f}:1 ({one:.0f} and {other:.0f} kernels/s, together {together:.1f} % of what it was)"
        return one / other, text + self.refusals(name)

    def refusals(self, name):
        """What of a phase the driver didn't do, by its own word."""
        wrong = {f"{c['name']} {outcome(c)}" for c in self.controls if c["phase"] == name and outcome(c) != "0x0"}
        return f"; {', '.join(sorted(wrong))}" if wrong else ""

    def off(self, name):
        """How long the second took to stop, or None, and that in words."""
        phase = self.phases.get(name)
        if not phase:
            return None, f"'{name}' didn't come"
        asked = phase["asked_ns"]
        ended = [tick[0] for tick in self.ticks[1] if tick[0] <= phase["end_ns"]]
        if not any(asked - SOON_NS < moment <= asked for moment in ended):
            return None, "it computed nothing before that could stop"
        took, calls = max(0, ended[-1] - asked) / 1e6, (phase["begin_ns"] - asked) / 1e6
        if took * 1e6 > SOON_NS:
            return None, f"it does NOT stop (its last kernel ended after {took:.0f} ms)" + self.refusals(name)
        return took, f"its last kernel ended {took:.1f} ms after it was disabled (the calls took {calls:.1f} ms)"

    def on(self, name):
        """The same of its coming back."""
        phase = self.phases.get(name)
        if not phase:
            return None, f"'{name}' didn't come"
        ended = [tick[0] for tick in self.ticks[1] if phase["asked_ns"] < tick[0] <= phase["end_ns"]]
        if not ended or ended[0] - phase["asked_ns"] > SOON_NS:
            return None, "it does NOT come back" + self.refusals(name)
        took = (ended[0] - phase["asked_ns"]) / 1e6
        return took, f"its first kernel ended {took:.1f} ms after it was enabled"

    def gain(self, name):
        """What the first has of a GPU that the second is off, in words."""
        phase, usual = self.phases.get(name), self.rates("as found")
        alone = phase and rate(self.ticks[0], phase["begin_ns"] + SETTLE_NS, phase["end_ns"])
        if not alone or not usual:
            return "too few kernels of the other's to tell"
        return f"the other has {alone / usual[0]:.2f} times what it had"


def outcome(control):
    """The status that the driver answered, or why there is none."""
    if "status" in control:
        return control["status"]
    return control.get("errno") or control.get("not_tried") or "did not come back"


def steer(run_, binary):
    """Runs the programs; what was seen, or why nothing was."""
    outputs = {name: os.path.join(run_.out, f"compute-{name}.txt") for name in "ab"}
    env = dict(os.environ)
    if run_.driver.simulated:
        env.update(run_.place.standin_env())
    dev = os.path.join(run_.driver.settings()["root"], "dev")
    phase_ms = SIMULATED_PHASE_MS if run_.driver.simulated else PHASE_MS
    argv = [binary, "--driver", run_.driver.version, "--dev", dev, "--a", outputs["a"], "--b", outputs["b"]]
    argv += ["--phase-ms", phase_ms, "--limit-s", STEER_S, "--", os.path.join(run_.place.share, "spin")]
    argv += ["--seconds", STEER_S, "--tick-ms", 5, "--ahead", AHEAD]
    done = run(argv, run_.limit(LIMIT_S), env=env)
    run_.keep("compute", done)
    said = done.answer()
    ticks, failures = [], []
    for name, path in outputs.items():
        answers = answers_in(path)
        failures += [f"{name} failed: {a['failed']}, error {a.get('error')}" for a in answers if "failed" in a]
        ticks += [a["ticks"] for a in answers if "ticks" in a]
    if not said or "failed" in said or len(ticks) < len(outputs):
        why = done.why() if not said or "failed" in said else "a program didn't say when its kernels ended"
        return None, "; ".join([why, *failures])
    return Seen(said, ticks, failures), None


def answers_in(path):
    """What a program said, as far as it came."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return Outcome([], 0, file.read(), "", 0.0, False).answers()
    except OSError:
        return []


def near(value, wanted):
    return value is not None and abs(value / wanted - 1) <= RATIO_PERCENT / 100


def slices(run_, seen):
    evidence = run_.evidence
    alone, preempted = seen.divided("2:1 not committed")[1], seen.divided("3:1 preempted")[1]
    text = f"{alone}; 3:1 after 2:1, with a PREEMPT of the groups in the restart's place: {preempted}"
    run_.table.reported(*CASES[0], text, evidence)
    ratio, text = seen.divided("2:1")
    run_.table.answer(*CASES[1], f"2:1, within {RATIO_PERCENT} %", text, near(ratio, 2), evidence)
    (first, one), (second, other) = seen.divided("3:1"), seen.divided("1:3")
    holds = near(first, 3) and near(second, 1 / 3)
    expected = f"3:1 and 0.33:1, within {RATIO_PERCENT} %"
    run_.table.answer(*CASES[2], expected, f"{one}; then {other}", holds, evidence)


def channels(run_, seen):
    (stopped, one), (back, other) = seen.off("off"), seen.on("on")
    before, after = seen.rates("as found"), seen.rates("on")
    change = 100 * (after[1] / before[1] - 1) if before and after else None
    again = f"{change:+.1f} % kernels/s" if change is not None else "too few kernels to tell"
    holds = stopped is not None and back is not None and change is not None and abs(change) <= AGAIN_PERCENT
    soon = f"{SOON_NS // 1_000_000} ms"
    expected = f"off within {soon}, on again within {soon}, then as fast as before within {AGAIN_PERCENT} %"
    run_.table.answer(*CASES[3], expected, f"{one}; {seen.gain('off')}; {other}: {again}", holds, run_.evidence)
    one, other = seen.off("off without restart")[1], seen.on("on without restart")[1]
    run_.table.reported(*CASES[4], f"{one}; {seen.gain('off without restart')}; {other}", run_.evidence)


def privileges(run_, seen):
    by_control = {}
    for control in seen.controls:
        by_who = by_control.setdefault(f"{control['name']} {control['number']}", {})
        by_who.setdefault(control["who"], []).append(control)
    parts = list(seen.failures)
    for name, by_who in by_control.items():
        answers = {who: "/".join(sorted({outcome(c) for c in asked})) for who, asked in by_who.items()}
        took = statistics.median(c["us"] for asked in by_who.values() for c in asked)
        parts.append(f"{name}: {', '.join(f'{who} {answer}' for who, answer in answers.items())} ({took:.0f} µs)")
    said = seen.said
    parts += [f"{tenant['name']} has {len(tenant['groups'])} channel groups" for tenant in said["tenants"]]
    parts.append(f"root has {' and '.join(said['root_has']) or 'neither capability'}")
    if not said["put_back"]:
        parts.append("NOT all was put back")
    if said["ended_early"]:
        parts.append("the time was over before all was asked")
    run_.table.reported(*CASES[5], "; ".join(parts), run_.evidence)


def compute(run_):
    # A list: each has its row.
    if any([run_.skips_kernels(*case) for case in CASES]):
        return
    binary = os.path.join(run_.programs, "cgpu-steer")
    if not os.access(binary, os.X_OK):
        for case in CASES:
            run_.table.not_asked(*case, f"{binary} is missing: make gpu-programs")
        return
    seen, why = steer(run_, binary)
    if not seen:
        for case in CASES:
            run_.table.answer(*case, "an answer", why, False, run_.evidence)
        return
    slices(run_, seen)
    channels(run_, seen)
    privileges(run_, seen)


ALL = [compute]
