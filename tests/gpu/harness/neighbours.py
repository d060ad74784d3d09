"""Questions 2: two containers on one GPU."""

import time

from .driver import MIB
from .memory import BEYOND_MIB, OUT_OF_MEMORY, mib


def unseen(run):
    """Each has its own quota while the other is full, and is shown nothing of the other."""
    number, question = "2.1", "two containers of different quotas at once"
    one, other = run.quota_mib, run.quota_mib // 2
    expected = f"{one} and {other} MiB shown and had, each as if alone"
    program = run.program("alloc")
    full = run.start("unseen-full", [program, "--cap-mib", one + BEYOND_MIB, "info", "hold"], one)
    lines = [full.line(60), full.line(60)]
    outcome = run.ask("unseen", [program, "--cap-mib", other + BEYOND_MIB, "info", "plain"], 60, other)
    smi = None
    if run.driver.smi:
        words = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
        smi = run.ask("unseen-smi", words, 60, other)
    first = run.finish(full, 20)
    shown, held = first.answer("info"), first.answer("hold")
    second, had = outcome.answer("info"), outcome.answer("plain")
    if not (shown and held and second and had):
        why = f"{first.why()} and {outcome.why()} ({len(''.join(lines))} characters)"
        return run.table.answer(number, question, expected, why, False, run.evidence)
    wrong = []
    for name, info, got, error, quota in (
        ("the first", shown, held["bytes"], held["error"], one),
        ("the second", second, had["bytes"], had["error"], other),
    ):
        if info["total"] != quota * MIB:
            wrong.append(f"{name} is shown {mib(info['total'])}")
        if got > quota * MIB:
            wrong.append(f"{name} has {mib(got - quota * MIB)} MORE THAN ITS QUOTA")
        if error != OUT_OF_MEMORY:
            wrong.append(f"{name} met error {error}")
    seen = f"{mib(held['bytes'])} of {mib(shown['total'])} and {mib(had['bytes'])} of {mib(second['total'])}"
    run.table.answer(number, question, expected, "; ".join([*wrong, seen]), not wrong, run.evidence)
    number, question = "2.2", "nvidia-smi in one container lists no process of the other"
    if smi is None:
        return run.table.not_asked(number, question, "this driver has no nvidia-smi")
    listed = [line for line in smi.stdout.splitlines() if line.strip()]
    holds = smi.status == 0 and not listed
    seen = "; ".join(listed) or (smi.why() if smi.status else "no process")
    run.table.answer(number, question, "none", seen, holds, run.evidence)


def rate(ticks, begin_ns, end_ns):
    """Kernels a second between two moments."""
    within = [tick for tick in ticks if begin_ns <= tick[0] <= end_ns]
    if len(within) < 5:
        return None
    (first, before), (last, after) = within[0], within[-1]
    return (after - before) * 1e9 / (last - first)


def undisturbed(run):
    """One computes; another beats against its quota for the middle third of that."""
    number, question = "2.3", "a container over its quota doesn't disturb another's throughput"
    if run.skips_kernels(number, question):
        return
    expected = "within 2 % of what it was before and after"
    seconds = 14
    worker = run.start("undisturbed", [run.program("spin"), "--seconds", seconds], run.quota_mib)
    time.sleep(4.5)
    words = [run.program("alloc"), "--cap-mib", run.quota_mib // 2 + BEYOND_MIB, "--seconds", 4, "churn"]
    other = run.ask("undisturbed-other", words, 40, run.quota_mib // 2)
    outcome = run.finish(worker, 40)
    answer, churn = outcome.answer(), other.answer("churn")
    if not answer or "ticks" not in answer or not churn:
        why = f"{outcome.why()} and {other.why()}"
        return run.table.answer(number, question, expected, why, False, run.evidence)
    ticks = answer["ticks"]
    # A context of the other is made before it's full: that takes the driver's locks, quota or not.
    during = rate(ticks, churn["filled_ns"], churn["ended_ns"])
    alone = [
        rate(ticks, 0, churn["filled_ns"] - 2_500_000_000),
        rate(ticks, churn["ended_ns"] + 500_000_000, 1 << 63),
    ]
    alone = [figure for figure in alone if figure]
    if not during or not alone:
        return run.table.answer(number, question, expected, "too few kernels to tell", False, run.evidence)
    usual = sum(alone) / len(alone)
    change = 100 * (during / usual - 1)
    seen = f"{usual:.1f} kernels/s alone, {during:.1f} while {churn['refused']} calls were refused: {change:+.1f} %"
    run.table.answer(number, question, expected, seen, change > -2 and churn["refused"] > 0, run.evidence)


ALL = [unseen, undisturbed]
