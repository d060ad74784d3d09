"""Questions 6: hostile programs. Asked by name alone, on a machine that may be lost.

Each of `rmtool attack` is played in a container of its own, and meanwhile the driver is asked what it
has given. Which there are, and what is promised of each, the quota's tests know
(`tests/quota/table.rs`). Before one begins its name is on the disk, so that it's known if the machine
doesn't come back; one that takes the host's memory is ended.
"""

import os
import re
import shutil
import threading
import time

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

QUOTA_MIB = 500

# Clients and page tables that no allocation asked for.
SLACK_MIB = 16

# What the driver may show over a quota, and for how long, by promise.
LONGEST_S = {"Never": 0.0, "Briefly": 1.0, "Killed": 1.0}

LIMIT_S = 30

# Of the host's memory is left at least so much, or nothing is begun, and what runs is ended.
LEAST_KIB = 8 << 20


def attacks():
    """Words and promise of each."""
    with open(os.path.join(HERE, "../quota/table.rs"), encoding="utf-8") as file:
        found = re.findall(r"\(&\[(.*?)\], Promise::(\w+), ", file.read())
    return [(re.findall(r'"(.*?)"', words), promise) for words, promise in found]


def available_kib():
    with open("/proc/meminfo", encoding="utf-8") as file:
        return int(re.search(r"MemAvailable:\s+(\d+)", file.read()).group(1))


class Watch:
    """What the driver has given while a program runs, in MiB, and for how long too much."""

    def __init__(self, run, running):
        self.driver = run.driver
        self.place = run.place
        self.running = running
        self.before = self.driver.used_mib() or 0
        self.most = 0
        self.longest_s = 0.0
        self.starved = False
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def _watch(self):
        since = None
        while not self.over.wait(0.01):
            used = (self.driver.used_mib() or 0) - self.before
            self.most = max(self.most, used)
            now = time.monotonic()
            since = None if used <= QUOTA_MIB + SLACK_MIB else since or now
            if since:
                self.longest_s = max(self.longest_s, now - since)
            if available_kib() < LEAST_KIB and not self.starved:
                self.starved = True
                self.place.end(self.running)

    def end(self):
        self.over.set()
        self.thread.join()


def begin(run, name):
    """What is to be known of the last that was begun."""
    path = os.path.join(run.out, "hostile-last.txt")
    with open(path, "w", encoding="utf-8") as file:
        file.write(name + "\n")
        file.flush()
        os.fsync(file.fileno())
    print(f"      begun     {name}", flush=True)


def hostile(run):
    rmtool = os.path.join(run.programs, "rmtool")
    if not os.access(rmtool, os.X_OK):
        return run.table.not_asked("6", "hostile programs", f"{rmtool} is missing: make gpu-programs")
    shutil.copy2(rmtool, run.place.share)
    chosen = run.arguments.attacks
    for number, (words, promise) in enumerate(attacks(), start=1):
        name = " ".join(words)
        if chosen and name not in chosen.split(","):
            continue
        if run.budget.left() < LIMIT_S or available_kib() < 2 * LEAST_KIB:
            run.table.not_asked(f"6.{number}", name, "the time, or the host's memory, was over")
            continue
        begin(run, name)
        command = [run.program("rmtool"), "--quota", f"{QUOTA_MIB}MiB", "attack", *words]
        running = run.start(f"hostile-{number}", command, QUOTA_MIB)
        watch = Watch(run, running)
        try:
            outcome = run.finish(running, LIMIT_S)
        finally:
            watch.end()
        judge(run, f"6.{number}", name, promise, outcome, watch)


def judge(run, number, name, promise, outcome, watch):
    longest_s = LONGEST_S[promise]
    expected = f"{QUOTA_MIB} MiB at most" + (f", or more for {longest_s:.0f} s" if longest_s else "")
    seen = f"{watch.most} MiB at most, more than the quota for {watch.longest_s:.1f} s"
    wrong = []
    if watch.most > QUOTA_MIB + SLACK_MIB and watch.longest_s >= longest_s:
        wrong.append("MORE THAN THE QUOTA")
    if watch.starved:
        wrong.append("it took the host's memory, and was ended")
    # Killed by the monitor is what some are to be.
    if outcome.timed_out:
        wrong.append(f"it was killed after {outcome.seconds:.0f} s")
    said = outcome.stdout.strip().splitlines()
    seen += f"; it says {said[-1][:80]}" if said else f"; {outcome.why()[:120]}"
    run.table.answer(number, name, expected, "; ".join([*wrong, seen]), not wrong, run.evidence)


# Not among those that are asked of themselves.
BY_NAME = [hostile]
