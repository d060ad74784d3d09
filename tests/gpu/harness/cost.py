"""Questions 3: what the gate costs, compared with the same container without it, in turn."""

import statistics
import time

from .place import GATE, NONE

ROUNDS = 5


def in_turn(run, name, words, figure, limit, rounds=ROUNDS):
    """A figure of each run with the gate and without, in turn; None where one failed."""
    gated, plain = [], []
    for count in range(rounds):
        for kind, figures in ((True, gated), (False, plain)):
            label = f"{name}-{'gated' if kind else 'plain'}-{count + 1}"
            answer = run.ask(label, words, limit, door=GATE if kind else NONE).answer()
            value = figure(answer) if answer and "failed" not in answer else None
            if value is None:
                return None
            figures.append(value)
    return gated, plain


def compared(gated, plain, unit):
    one, other = statistics.median(gated), statistics.median(plain)
    return (
        f"{one:.1f} {unit} behind the gate, {other:.1f} without ({100 * (one / other - 1):+.1f} %); "
        f"medians of {len(gated)}, from {min(gated):.1f} to {max(gated):.1f} and "
        f"{min(plain):.1f} to {max(plain):.1f}"
    )


def start_up(run):
    number, question = "3.1", "start-up of CUDA: cuInit and a context"
    words = [run.program("alloc"), "info"]
    figures = in_turn(run, "start-up", words, lambda a: a["init_ms"] + a["context_ms"], 40)
    if not figures:
        return run.table.answer(number, question, "to be learnt", "a run failed", False, run.evidence)
    run.table.reported(number, question, compared(*figures, "ms"), run.evidence)


def latency(run):
    number, question = "3.2", "one call that the monitor executes: how long, and how often so long"
    figures = {}
    for name, gated in (("behind the gate", True), ("without", False)):
        label, door = ("latency-gated", GATE) if gated else ("latency-plain", NONE)
        outcome = run.ask(label, [run.program("latency"), 20000], 40, door=door)
        answer = outcome.answer()
        if not answer or "p50_ns" not in answer:
            return run.table.answer(number, question, "to be learnt", outcome.why(), False, run.evidence)
        figures[name] = answer
    parts = []
    for name, answer in figures.items():
        at = {key: answer[f"{key}_ns"] / 1000 for key in ("p50", "p90", "p99", "max")}
        histogram = ", ".join(f"≤ {int(ns) / 1000:.3g} µs: {count}" for ns, count in answer["up_to_ns"].items())
        parts.append(
            f"{name}: median {at['p50']:.1f} µs, p90 {at['p90']:.1f}, p99 {at['p99']:.1f}, "
            f"longest {at['max']:.0f} ({histogram})"
        )
    run.table.reported(number, question, "; ".join(parts), run.evidence)


def kernels(run):
    number, question = "3.3", "throughput of a loop of kernels"
    if run.skips_kernels(number, question):
        return
    figures = in_turn(run, "kernels", [run.program("spin"), "--seconds", 3], lambda a: a.get("per_s"), 40, 3)
    expected = "within 1 % of what it is without the gate"
    if not figures:
        return run.table.answer(number, question, expected, "a run failed", False, run.evidence)
    ratio = statistics.median(figures[0]) / statistics.median(figures[1])
    run.table.answer(number, question, expected, compared(*figures, "kernels/s"), ratio > 0.99, run.evidence)


def calls_a_second(run, name, words):
    """Calls that the monitor had in the steady state of a program, a second."""
    running = run.start(name, words, run.quota_mib)
    # It says a line when it begins to compute.
    running.line(90)
    time.sleep(1)
    before, begun = run.place.status(), time.monotonic()
    time.sleep(4)
    after, ended = run.place.status(), time.monotonic()
    outcome = run.finish(running, 60)
    if not before or not after:
        return outcome, None
    sums = [sum(status["calls"].values()) for status in (before, after)]
    return outcome, (sums[1] - sums[0]) / (ended - begun)


def training(run):
    cases = [
        ("3.4", "start-up of PyTorch: import, context and first step"),
        ("3.5", "throughput of a training loop of PyTorch"),
        ("3.6", "calls trapped a second while PyTorch trains"),
    ]
    if run.torch:
        for number, question in cases:
            run.table.not_asked(number, question, run.torch)
        return
    words = ["python3", run.program("torch_train.py"), 4]
    expected = "within 1 % of what it is without the gate"
    both = in_turn(run, "train", words, lambda a: (a["start_s"], a["steps_per_s"]), 60, 3)
    if not both:
        for number, question in cases[:2]:
            run.table.answer(number, question, "to be learnt", "a run failed", False, run.evidence)
    else:
        starts = [[pair[0] for pair in side] for side in both]
        steps = [[pair[1] for pair in side] for side in both]
        run.table.reported(*cases[0], compared(*starts, "s"), run.evidence)
        ratio = statistics.median(steps[0]) / statistics.median(steps[1])
        run.table.answer(*cases[1], expected, compared(*steps, "steps/s"), ratio > 0.99, run.evidence)
    outcome, rate = calls_a_second(run, "train-calls", ["python3", run.program("torch_train.py"), 8])
    if rate is None:
        return run.table.answer(*cases[2], "few", outcome.why() + ", or the monitor didn't answer", False, run.evidence)
    run.table.reported(*cases[2], f"{rate:.1f}", run.evidence)


ALL = [start_up, latency, kernels, training]
