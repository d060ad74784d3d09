"""Questions 1: whether a quota holds by every path, and which sizes a program is shown."""

from .driver import MIB
from .place import CHARGING, NONE
from .record import EXPANDABLE

# CUDA_ERROR_OUT_OF_MEMORY, and CUDA_ERROR_UNKNOWN: what it says of a mapping that fails, whyever.
OUT_OF_MEMORY, UNKNOWN = 2, 999

# What is asked for beyond the quota where a quota doesn't hold: enough to see it.
BEYOND_MIB = 2048

# What one process gives to another: more than a context takes.
TENSOR_MIB = 1024

# What may be left of the quota when the smallest piece of a path was refused: pools and graphs take
# 32 MiB at once, and CUDA keeps a little for itself.
SLACK_BYTES = 96 * MIB

# A graph whose launch was refused keeps what it had got until then, which was less than it asked for:
# CUDA does so, and the driver counts it.
KEPT_BYTES = {"graph": 256 * MIB}

MANAGED = "managed-fill"

# How soon what was given back is free. The monitor believes that no process has an exported file open
# any more only after three checks, a second apart; it sees that managed memory is mapped no more
# when it checks.
BACK_MS = {"exported": 5000, MANAGED: 5000, "graph": float("inf")}
OTHERS_BACK_MS = 100

PATHS = [
    ("plain", "cuMemAlloc"),
    ("pitched", "cuMemAllocPitch"),
    ("vmm", "cuMemCreate (virtual memory management)"),
    ("mapped", "memory that a mapping alone keeps"),
    ("exported", "memory that an exported descriptor alone keeps"),
    ("async", "cuMemAllocAsync (pools)"),
    ("array", "cuArrayCreate"),
    ("graph", "a graph's memory node"),
]


def mib(count):
    return f"{count / MIB:.0f} MiB"


def shown(run):
    """The memory that a program is shown as the GPU's."""
    number, question = "1.1", "cuMemGetInfo and cuDeviceTotalMem show the quota"
    outcome = run.ask("info", [run.program("alloc"), "info"], 60)
    answer = outcome.answer("info")
    expected = f"{run.quota_mib} MiB in total"
    if not answer:
        run.table.answer(number, question, expected, outcome.why(), False, run.evidence)
        plain = run.ask("info-plain", [run.program("alloc"), "info"], 60, door=NONE)
        starts = "it starts" if plain.answer("info") else f"it doesn't either: {plain.why()}"
        run.broken = f"CUDA doesn't start behind the gate (1.1); without it {starts}"
        return None
    totals = {answer["total"], answer["device_total"]}
    run.table.answer(
        number,
        question,
        expected,
        f"cuMemGetInfo {mib(answer['total'])}, of which {mib(answer['free'])} free; "
        f"cuDeviceTotalMem {mib(answer['device_total'])}",
        totals == {run.quota_mib * MIB},
        run.evidence,
    )


def shown_by_smi(run):
    number, question = "1.2", "nvidia-smi shows the quota"
    if not run.driver.smi:
        return run.table.not_asked(number, question, "this driver has no nvidia-smi")
    words = ["nvidia-smi", "--query-gpu=memory.total,memory.used", "--format=csv,noheader,nounits"]
    outcome = run.ask("smi", words, 60)
    lines = [[cell.strip() for cell in line.split(",")] for line in outcome.stdout.splitlines()]
    seen = "; ".join(f"total {line[0]} MiB, used {line[-1]} MiB" for line in lines) or outcome.why()
    holds = outcome.status == 0 and len(lines) == 1 and lines[0][0] == str(run.quota_mib)
    run.table.answer(number, question, f"one GPU of {run.quota_mib} MiB", seen, holds, run.evidence)
    run.ask("smi-plain", ["nvidia-smi"], 60)


def paths(run):
    """Each path until it's refused, in a container of its own."""
    for place, (path, entry) in enumerate(PATHS):
        number, question = f"1.3.{place + 1}", f"until refused: {entry}"
        cap = run.quota_mib + BEYOND_MIB
        words = [run.program("alloc"), "--cap-mib", cap, path]
        outcome = run.ask(path, words, 40)
        evidence = run.evidence
        expected = "never more than the quota, all of it, refused as out of memory, and had again"
        wrong, seen = judged(run, path, outcome, run.quota_mib * MIB)
        if wrong and not run.arguments.leaking:
            # Whose fault it is shows where there is no gate.
            plain = run.ask(f"{path}-plain", words, 40, door=NONE)
            seen += f"; without the gate: {judged(run, path, plain, run.quota_mib * MIB)[1]}"
        run.table.answer(number, question, expected, "; ".join([*wrong, seen]), not wrong, evidence)


def judged(run, path, outcome, quota):
    """What is wrong with what a path said, and what it said."""
    answer = outcome.answer(path)
    if not answer:
        return ["no answer"], outcome.why()
    got, wrong = answer["bytes"], []
    slack = max(SLACK_BYTES, KEPT_BYTES.get(path, 0))
    refusals = {OUT_OF_MEMORY, UNKNOWN} if path == MANAGED else {OUT_OF_MEMORY}
    if got > quota:
        wrong.append(f"{mib(got - quota)} MORE THAN THE QUOTA")
    if answer["error"] not in refusals:
        wrong.append("not refused" if not answer["error"] else f"refused with {answer['error']}")
    if answer["free_before"] - got > slack:
        wrong.append(f"{mib(answer['free_before'] - got)} of what was free not given")
    if answer["free_before"] - answer["free_after"] > slack:
        wrong.append(f"{mib(answer['free_before'] - answer['free_after'])} not given back")
    # How soon it is given back on a simulated driver, the machine's other work decides.
    if not run.driver.simulated and answer["back_ms"] > BACK_MS.get(path, OTHERS_BACK_MS):
        wrong.append("only slowly")
    if answer["again_error"]:
        wrong.append(f"afterwards refused with {answer['again_error']}")
    refused = f"then {answer['where']} failed with {answer['error']}" if answer["error"] else "no refusal"
    return wrong, (
        f"{mib(got)} in {answer['pieces']} pieces of {mib(answer['free_before'])} free, {refused}; "
        f"{mib(answer['free_after'])} free {answer['back_ms']:.0f} ms after it was given back"
    )


def processes(run):
    """Several processes of one container share its quota."""
    cases = [
        ("1.4", "second", "a second process gets what the first left", "all together have the quota, no more"),
        ("1.5", "four", "four processes at once", "all together have the quota, no more"),
    ]
    for number, path, question, expected in cases:
        cap = run.quota_mib + BEYOND_MIB
        outcome = run.ask(path, [run.program("alloc"), "--cap-mib", cap, path], 60)
        answer = outcome.answer(path)
        if not answer:
            run.table.answer(number, question, expected, outcome.why(), False, run.evidence)
            continue
        got, quota = answer["bytes"], run.quota_mib * MIB
        each = ", ".join(mib(part) for part in answer["each"])
        wrong = [f"{mib(got - quota)} MORE THAN THE QUOTA"] if got > quota else []
        if answer["timed_out"]:
            wrong.append("a process didn't answer")
        # The first of two stops by itself.
        errors = set(answer["errors"][1:] if path == "second" else answer["errors"])
        if errors != {OUT_OF_MEMORY}:
            wrong.append(f"errors {answer['errors']}")
        seen = f"{mib(got)} together ({each})"
        run.table.answer(number, question, expected, "; ".join([*wrong, seen]), not wrong, run.evidence)


def managed(run):
    number, question = "1.6", "managed memory (cuMemAllocManaged)"
    expected = "refused, with an error that programs can handle, and all else goes on"
    outcome = run.ask("managed", [run.program("alloc"), "managed"], 40)
    answer = outcome.answer("managed")
    if not answer:
        return run.table.answer(number, question, expected, outcome.why(), False, run.evidence)
    seen = f"error {answer['error']}" if answer["error"] else "given"
    seen += f"; a plain allocation afterwards: error {answer['plain_error']}"
    holds = answer["error"] != 0 and answer["plain_error"] == 0
    run.table.answer(number, question, expected, seen, holds, run.evidence)


def charged(run):
    """Managed memory where the administrator has it charged."""
    number, question = "1.12", 'managed memory, with managed_memory = "charge"'
    expected = "never more than the quota, all of it, refused as out of memory, and had again"
    words = [run.program("alloc"), "--cap-mib", run.quota_mib + BEYOND_MIB, MANAGED]
    outcome = run.ask("managed-charged", words, 40, door=CHARGING)
    wrong, seen = judged(run, MANAGED, outcome, run.quota_mib * MIB)
    run.table.answer(number, question, expected, "; ".join([*wrong, seen]), not wrong, run.evidence)


def host(run):
    number, question = "1.7", "pinned memory of the host (cuMemHostAlloc)"
    expected = "given, and nothing of the quota is used"
    outcome = run.ask("host", [run.program("alloc"), "host"], 40)
    answer = outcome.answer("host")
    if not answer:
        return run.table.answer(number, question, expected, outcome.why(), False, run.evidence)
    used = answer["free_before"] - answer["free_after"]
    seen = f"error {answer['error']}, {mib(used)} of the quota used"
    run.table.answer(number, question, expected, seen, answer["error"] == 0 and used <= 2 * MIB, run.evidence)


def killed(run):
    number, question = "1.8", "kill -9 of a process that holds its quota gives it back"
    expected = "another has as much within 5 s"
    outcome = run.ask("killed", [run.program("alloc"), "--cap-mib", run.quota_mib - 256, "killed"], 60)
    answer = outcome.answer("killed")
    if not answer:
        return run.table.answer(number, question, expected, outcome.why(), False, run.evidence)
    seen = f"{mib(answer['held'])} held; {mib(answer['again'])} had again"
    if answer["back_ms"] >= 0:
        seen += f" after {answer['back_ms']:.0f} ms, a context of {answer.get('context_ms', 0):.0f} ms included"
    holds = answer["held"] > 0 and 0 <= answer["back_ms"] <= 5000
    run.table.answer(number, question, expected, seen, holds, run.evidence)


def outside(run):
    """The quota by the driver's own figure, from the host, while a container holds all it could get."""
    number, question = "1.9", "what the driver counts from outside while a container holds its quota"
    expected = "the quota at most, beside what the driver takes for a context"

    def used_while(name, cap):
        before = run.driver.used_mib()
        running = run.start(f"outside-{name}", [run.program("alloc"), "--cap-mib", cap, "hold"], run.quota_mib)
        line = running.line(60)
        during = run.driver.used_mib()
        run.finish(running, 20)
        if '"hold"' not in line or before is None or during is None:
            return None
        return during - before

    context, full = used_while("context", 0), used_while("full", run.quota_mib + BEYOND_MIB)
    if context is None or full is None:
        why = "there was no answer, or no figure of the driver's"
        return run.table.answer(number, question, expected, why, False, run.evidence)
    seen = f"{full - context} MiB of a quota of {run.quota_mib} MiB, and {context} MiB for a process with a context"
    run.table.answer(number, question, expected, seen, full - context <= run.quota_mib, run.evidence)


def torch(run):
    torch_alloc(run, "1.10", "PyTorch gets OutOfMemoryError at the quota", "torch", None)


def torch_expandable(run):
    torch_alloc(run, "1.15", "the same, with PyTorch's expandable segments", "torch-expandable", EXPANDABLE)


def torch_alloc(run, number, question, name, more):
    if run.torch:
        return run.table.not_asked(number, question, run.torch)
    expected = "OutOfMemoryError within 1 GiB of the quota (context and cuBLAS), and it goes on"
    script = run.program("torch_alloc.py")
    running = run.start(name, ["python3", script, run.quota_mib + BEYOND_MIB], run.quota_mib, more)
    outcome = run.finish(running, 90)
    answer = outcome.answer()
    if not answer or "got_mib" not in answer:
        return run.table.answer(number, question, expected, outcome.why(), False, run.evidence)
    seen = (
        f"{answer['got_mib']} MiB of {answer['total_mib']} MiB, then {answer['refusal']}; "
        f"goes on: {answer['goes_on']}"
    )
    holds = (
        run.quota_mib - 1024 <= answer["got_mib"] <= run.quota_mib
        and answer["refusal"] == "OutOfMemoryError"
        and answer["goes_on"]
        and answer["total_mib"] == run.quota_mib
    )
    run.table.answer(number, question, expected, seen, holds, run.evidence)


def torch_ipc(run):
    number, question = "1.13", "PyTorch gives a tensor to another process (CUDA IPC)"
    if run.torch:
        return run.table.not_asked(number, question, run.torch)
    outcome = run.ask("torch-ipc", ["python3", run.program("torch_ipc.py"), TENSOR_MIB], 90)
    answer = outcome.answer()
    expected = "all of it, and it's counted once"
    if not answer or "same" not in answer:
        return run.table.answer(number, question, expected, outcome.why(), False, run.evidence)
    more = answer["free_before"] - answer["free_at_other"]
    whole = "the same" if answer["same"] else "NOT THE SAME"
    seen = f"the other reads {whole}, with {mib(more)} more in use meanwhile"
    # A context and what PyTorch takes at once, but not the tensor again.
    holds = answer["on_gpu"] and answer["same"] and more < TENSOR_MIB * MIB
    run.table.answer(number, question, expected, seen, holds, run.evidence)


def jax(run):
    number, question = "1.14", "JAX trains"
    if run.jax:
        return run.table.not_asked(number, question, run.jax)
    outcome = run.ask("jax", ["python3", run.program("jax_train.py"), "1"], 90)
    answer = outcome.answer()
    expected = "it does, with three quarters of the quota taken when it starts"
    if not answer or "steps" not in answer:
        return run.table.answer(number, question, expected, outcome.why(), False, run.evidence)
    seen = f"{answer['steps_per_s']:.0f} steps a second, with {mib(answer['limit'])}"
    quota = run.quota_mib * MIB
    holds = answer["steps"] > 0 and quota // 2 < answer["limit"] <= quota
    run.table.answer(number, question, expected, seen, holds, run.evidence)


ALL = [shown, shown_by_smi, paths, processes, managed, charged, host, killed, outside, torch, torch_expandable, torch_ipc, jax]
