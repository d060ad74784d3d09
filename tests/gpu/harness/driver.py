"""The driver that is asked, and what it says itself: NVIDIA's, or a simulated one."""

import csv
import glob
import json
import os
import re
import shutil

from .command import run

MIB = 1 << 20


class Driver:
    """NVIDIA's driver on this host."""

    simulated = False

    def __init__(self):
        self.smi = shutil.which("nvidia-smi", path=os.environ.get("PATH", "") + ":/usr/local/nvidia/bin")
        text = _read("/proc/driver/nvidia/version")
        found = re.search(r"Kernel Module(?: for \S+)?\s+(\d[\d.]+)", text)
        self.version = found.group(1) if found else ""
        self.name, self.total_mib, self.listed = "", 0, []
        for line in self._query("index,uuid,pci.bus_id,name,memory.total"):
            index, uuid, bus, name, total = line
            if not total.isdigit():
                continue
            domain, rest = bus.lower().split(":", 1)
            self.listed.append(
                {
                    "index": int(index),
                    "uuid": uuid,
                    "minor": _minor(f"{domain[-4:]}:{rest}", int(index)),
                    "bus_id": f"{domain[-4:]}:{rest}",
                    "name": name,
                    "memory_mib": int(total),
                }
            )
        if self.listed:
            self.name, self.total_mib = self.listed[0]["name"], self.listed[0]["memory_mib"]

    def missing(self):
        """Why nothing can be asked; None where all is there."""
        if not os.path.exists("/dev/nvidiactl"):
            return "there is no /dev/nvidiactl"
        if not self.version:
            return "/proc/driver/nvidia/version names no driver"
        if not self.listed:
            return "nvidia-smi lists no GPU" if self.smi else "there is no nvidia-smi"
        return None

    def used_mib(self):
        """What of the first GPU is in use by all, by the driver."""
        lines = self._query("memory.used")
        return int(lines[0][0]) if lines and lines[0][0].isdigit() else None

    def hold(self):
        """Keeps the driver awake between questions, or each would begin by waking it."""
        node = f"/dev/nvidia{self.listed[0]['minor']}"
        return open(node, "r+b", buffering=0)

    def names(self):
        """What a recording must not tell: which GPU of all there are this is."""
        cells = [cell for line in self._query("uuid,serial,pci.bus_id") for cell in line]
        return [cell for cell in cells if len(cell) > 6 and not cell.startswith("[")]

    def facts(self):
        """What the table's reader may want to know of the machine."""
        parts = [_read("/proc/driver/nvidia/version"), _read("/proc/driver/nvidia/params")]
        if self.smi:
            parts.append(run([self.smi], 40).stdout)
        return "\n".join(parts)

    def settings(self):
        return {"root": "/", "proc_root": "/proc", "inject": "native"}

    def _query(self, what):
        if not self.smi:
            return []
        outcome = run([self.smi, f"--query-gpu={what}", "--format=csv,noheader,nounits"], 40)
        return [[cell.strip() for cell in line] for line in csv.reader(outcome.stdout.splitlines())]


class Simulated:
    """A simulated driver that somebody serves at `directory` (sim)."""

    simulated = True
    smi = None

    def __init__(self, directory):
        self.directory = directory
        with open(os.path.join(directory, "inventory.json"), encoding="utf-8") as file:
            self.listed = json.load(file)
        found = re.search(r"Kernel Module\s+(\S+)", _read(os.path.join(directory, "proc/driver/nvidia/version")))
        self.version = found.group(1) if found else ""
        self.name, self.total_mib = "simulated", self.listed[0]["memory_mib"]

    def missing(self):
        return None

    def used_mib(self):
        for _ in range(100):
            try:
                with open(os.path.join(self.directory, "sim/state"), encoding="utf-8") as file:
                    return json.load(file)["gpus"][0]["used_bytes"] // MIB
            except ValueError:
                pass  # it changed while it was read
        return None

    def hold(self):
        return None

    def names(self):
        return [gpu["uuid"] for gpu in self.listed]

    def facts(self):
        return _read(os.path.join(self.directory, "proc/driver/nvidia/version"))

    def settings(self):
        return {"root": self.directory, "proc_root": os.path.join(self.directory, "proc"), "inject": "off"}


def _read(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _minor(bus, index):
    """The number of a GPU's node: not its index, where nodes were made in another order."""
    for path in glob.glob("/proc/driver/nvidia/gpus/*/information"):
        if os.path.basename(os.path.dirname(path)).lower() == bus:
            found = re.search(r"Device Minor:\s*(\d+)", _read(path))
            if found:
                return int(found.group(1))
    return index
