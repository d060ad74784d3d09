"""Questions 4: driver calls of real programs, recorded to be replayed by `make test`."""

import os
import socket

from .command import run

# What a file of the corpus may have at most.
MOST_BYTES = 2 << 20

# PyTorch's segments that grow: address space is reserved once, and memory is mapped into it piece by piece.
EXPANDABLE = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}

PATHS = ["info", "plain", "pitched", "vmm", "mapped", "exported", "async", "array", "graph", "managed"]


def programs(run_):
    """What is recorded: number, name, words, and why it can't be."""
    share = run_.place.share
    no_smi = None if run_.driver.smi else "this driver has no nvidia-smi"
    train = ["python3", os.path.join(share, "torch_train.py"), "1"]
    return [
        ("4.1", "nvidia-smi", ["nvidia-smi"], no_smi),
        ("4.2", "cuda", [os.path.join(share, "alloc"), "--cap-mib", "512", *PATHS], None),
        ("4.3", "torch-training", train, run_.torch),
        ("4.4", "jax-training", ["python3", os.path.join(share, "jax_train.py"), "1"], run_.jax),
        ("4.7", "torch-expandable", train, run_.torch),
        ("4.5", "torch-ipc", ["python3", os.path.join(share, "torch_ipc.py"), "64"], run_.torch),
    ]


def record(run_):
    """Each program once, on the host without the gate, under the recorder."""
    recorder = os.path.join(run_.programs, "cgpu-record")
    chosen = run_.arguments.recordings
    for number, name, words, missing in programs(run_):
        if chosen and name not in chosen.split(","):
            continue
        question = f"driver calls of {name} are recorded"
        if not os.access(recorder, os.X_OK):
            missing = missing or f"{recorder} is missing: make gpu-programs"
        if missing:
            run_.table.not_asked(number, question, missing)
            continue
        directory = os.path.join(run_.out, "corpus")
        os.makedirs(directory, exist_ok=True)
        kind = "simulated" if run_.driver.simulated else run_.driver.name.replace(" ", "-")
        file = f"{kind}-{run_.driver.version}-{name}.jsonl.gz"
        path = os.path.join(directory, file)
        # It takes three quarters of the GPU otherwise, whatever it needs.
        env = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false")
        if name == "torch-expandable":
            env.update(EXPANDABLE)
        if run_.driver.simulated:
            env.update(run_.place.standin_env())
        dev = os.path.join(run_.driver.settings()["root"], "dev")
        argv = [recorder, "--driver", run_.driver.version, "--dev", dev, "--output", path]
        for text in [socket.gethostname(), *run_.driver.names()]:
            argv.append(f"--hide={text}")
        outcome = run([*argv, "--", *words], run_.limit(60), env=env)
        run_.keep(f"record-{name}", outcome)
        said = next((answer for answer in outcome.answers() if "recorded" in answer), None)
        expected = f"all calls, in {MOST_BYTES >> 20} MiB at most"
        if not said:
            run_.table.answer(number, question, expected, outcome.why(), False, run_.evidence)
            continue
        seen = f"{said['recorded']} calls, {said['cut_off']} of them cut off, in {said['bytes']} bytes: corpus/{file}"
        holds = said["recorded"] > 0 and said["exit"] == 0 and said["bytes"] <= MOST_BYTES
        run_.table.answer(number, question, expected, seen, holds and not said["cut_off"], run_.evidence)


ALL = [record]
