"""Where programs are asked: a container by a real runtime, or else a bare process, behind the gate.

A container's root is the host's own (so that python and PyTorch are there), by an overlay that takes
what is written; mounts of the host come along read-only. Its driver comes by `inject`, as any user's.
Beside the gate there is a second configuration, with backend `none`: the same container without it.
"""

import glob
import json
import os
import shutil
import socket
import subprocess

from .command import Running, run

# What a container's calls meet: the gate as it is set by default, one that charges managed memory, nothing, and
# the gate with GPUs that the driver's library lists.
GATE, CHARGING, NONE, TOOLS = "gate", "charging", "none", "tools"

# Where a container has the programs and may write.
SHARE = "/cgpu-gpu"

# What a container has of its own, and where mounts of the host come and go.
OWN = ("/proc", "/sys", "/dev", "/run", "/tmp", "/var")

# docker's, so without CAP_SYS_ADMIN.
CAPABILITIES = [
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FSETID", "CAP_FOWNER", "CAP_MKNOD", "CAP_NET_RAW", "CAP_SETGID",
    "CAP_SETUID", "CAP_SETFCAP", "CAP_SETPCAP", "CAP_NET_BIND_SERVICE", "CAP_SYS_CHROOT", "CAP_KILL",
    "CAP_AUDIT_WRITE",
]  # fmt: skip


# What a container asks for that is only to be seen to start, and how long that may take: the first
# looks for the driver's files.
PROBE_MIB, PROBE_S = 256, 60

HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

# Variables of the host that would ask for something.
ASKING = ("ALIYUN_COM_GPU_", "NVIDIA_", "CGPU_")


class NoWay(Exception):
    """The way that was demanded leads nowhere."""


class Place:
    """Makes containers; `way` says how."""

    def __init__(self, work, programs, driver, policy):
        self.work = work
        self.programs = programs
        self.driver = driver
        self.policy = policy
        self.share = os.path.join(work, "share")
        self.tried = []
        self.count = 0
        self.inject = "off"
        self.unfinished = []
        # What is at the door of a container: a configuration of each.
        self.doors = {}
        self.rootfs = None
        self.runtime = None
        self.way = None
        os.makedirs(self.share, exist_ok=True)

    def prepare(self, way=None, leaking=False):
        """Finds out by which way it goes; `close` is to be called however that ends."""
        for name in [way] if way else ["runc", "crun", "bare"]:
            if not self._has(name):
                continue
            # The driver's files as users get them; else a container that has the host's.
            for inject in dict.fromkeys([self.driver.settings()["inject"] if self.rootfs else "off", "off"]):
                self.inject = inject
                # A gate that isn't there shows whether the table would tell.
                gate = "none" if leaking else "gate"
                self.doors = {
                    GATE: self._configure("gate", gate),
                    CHARGING: self._configure("charging", gate, managed="charge"),
                    NONE: self._configure("plain", "none"),
                    TOOLS: self._configure("tools", gate, asks_driver=not self.driver.simulated),
                }
                outcome = self.run(["true"], PROBE_MIB, PROBE_S)
                if outcome.status == 0:
                    return
                self.tried.append(f"{name} with inject = {inject}: {outcome.why()}")
        raise NoWay("; ".join(self.tried))

    def _has(self, name):
        """Whether that runtime can make any container at all."""
        if name == "bare":
            self.rootfs = None
            self.runtime = os.path.join(HERE, "bare-runtime")
            self.way = "a bare process behind the same filter, no container"
            return True
        beside = os.path.join(self.programs, name)
        found = beside if os.access(beside, os.X_OK) else shutil.which(name, path=_path())
        if not found:
            self.tried.append(f"{name}: not installed")
            return False
        if not self.rootfs and not self._make_rootfs():
            return False
        self.runtime = found
        outcome = self._try()
        if outcome.status:
            self.tried.append(f"{name}: {outcome.why()}")
            return False
        version = run([found, "--version"], 5).stdout.splitlines()
        self.way = f"a container by {version[0] if version else name}"
        return True

    def _try(self):
        self.count += 1
        name = f"{os.path.basename(self.work)}-{self.count}"
        bundle = self._bundle(name, ["true"], [f"PATH={_path()}"])
        return run([self.runtime, "--root", os.path.join(self.work, "try"), "run", "--bundle", bundle, name], 20)

    def _make_rootfs(self):
        base = os.path.join(self.work, "root")
        os.makedirs(base, exist_ok=True)
        if not self._mount("-t", "tmpfs", "tmpfs", base):
            return False
        upper, spare, merged = (os.path.join(base, name) for name in ("upper", "work", "merged"))
        for directory in (upper, spare, merged):
            os.mkdir(directory)
        if not self._mount("-t", "overlay", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={spare}", merged):
            return False
        self.rootfs = merged
        return True

    def _mount(self, *words):
        outcome = run(["mount", *words], 10)
        if outcome.status:
            self.tried.append(f"mount {words[1]}: {outcome.why()}")
            return False
        return True

    def _configure(self, name, backend, managed="refuse", asks_driver=False):
        state = os.path.join(self.work, name)
        settings = self.driver.settings()
        listed = os.path.join(self.work, "inventory.json")
        with open(listed, "w", encoding="utf-8") as file:
            json.dump(self.driver.listed, file)
        source = 'source = "auto"' if asks_driver else f'source = "file"\npath = "{listed}"'
        path = os.path.join(self.work, f"{name}.toml")
        with open(path, "w", encoding="utf-8") as file:
            file.write(
                f'state_dir = "{state}"\nlog = "{self.work}/{name}.log"\n'
                f'[runtime]\ncandidates = ["{self.runtime}"]\n'
                f"[inventory]\n{source}\n"
                f'[isolation]\nbackend = "{backend}"\nmanaged_memory = "{managed}"\n'
                f'[compute]\npolicy = {self.policy}\nidle = "yield"\n'
                f'[driver]\nroot = "{settings["root"]}"\nproc_root = "{settings["proc_root"]}"\n'
                f'inject = "{self.inject}"\n'
            )
        return path

    def mounts(self):
        """What of the host's mounts a container has, in addition to its own."""
        own = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
             "options": ["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "nodev", "mode=1777"]},
            {"destination": "/sys", "type": "none", "source": "/sys", "options": ["rbind", "ro"]},
            {"destination": "/run", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
        ]  # fmt: skip
        for point in () if self.driver.simulated else mount_points():
            inside = any(point == top or point.startswith(top + "/") for top in (*OWN, self.work))
            # Files are what somebody mounted into a container that we are in ourselves: the driver's
            # among them, which come by `inject` where that can bring them.
            if point == "/" or inside or not (os.path.isdir(point) or self.inject == "off"):
                continue
            own.append({"destination": point, "type": "none", "source": point, "options": ["bind", "ro"]})
        own.append({"destination": SHARE, "type": "none", "source": self.share, "options": ["bind", "rw"]})
        return own

    def _bundle(self, name, argv, env):
        directory = os.path.join(self.work, "bundles", name)
        os.makedirs(directory)
        config = {
            "ociVersion": "1.0.2",
            "process": {
                "terminal": False,
                "user": {"uid": 0, "gid": 0},
                "args": argv,
                "env": env,
                "cwd": SHARE if self.rootfs else self.share,
                "capabilities": {kind: CAPABILITIES for kind in ("bounding", "effective", "permitted")},
                "noNewPrivileges": True,
            },
            "root": {"path": self.rootfs or "/", "readonly": False},
            "mounts": self.mounts() if self.rootfs else [],
            "linux": {
                "resources": {"devices": [{"allow": False, "access": "rwm"}]},
                # Without mounts of its own a bare process is no runtime's to the monitor. cgpu refuses a quota in
                # the host's pids; a bare process has them all the same, and what runs here attacks no monitor's pid.
                "namespaces": [{"type": kind} for kind in (("pid", "ipc", "uts", "mount") if self.rootfs else ("pid",))],
            },
        }
        with open(os.path.join(directory, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        return directory

    def program(self, name):
        """Where a container has a program of ours."""
        return os.path.join(SHARE if self.rootfs else self.share, name)

    def standin_env(self, inside=False):
        """Variables by which a program finds the stand-in for libcuda, and that the simulated driver."""
        place, dev = (SHARE, "/dev") if inside else (self.share, os.path.join(self.driver.settings()["root"], "dev"))
        return {"LD_LIBRARY_PATH": os.path.join(place, "standin"), "STANDIN_DEV": dev, "ALLOC_PATIENCE_S": "25"}

    def start(self, argv, mib, door=GATE, more=None):
        """Starts a container with so many MiB of the first GPU, and more variables, or without those that are None."""
        self.count += 1
        # Runtimes name cgroups by ids, which other runs' containers must not share.
        name = f"{os.path.basename(self.work)}-{self.count}"
        variables = {key: text for key, text in os.environ.items() if not key.startswith(ASKING)}
        variables["PYTHONDONTWRITEBYTECODE"] = "1"
        variables["ALIYUN_COM_GPU_MEM_CONTAINER"] = str(mib)
        variables["ALIYUN_COM_GPU_MEM_UNIT"] = "MiB"
        variables["NVIDIA_VISIBLE_DEVICES"] = "0"
        for key, text in (more or {}).items():
            if text is None:
                variables.pop(key, None)
            else:
                variables[key] = text
        if self.driver.simulated:
            variables.update(self.standin_env(inside=self.rootfs is not None))
        env = [f"{key}={text}" for key, text in variables.items()]
        bundle = self._bundle(name, [str(word) for word in argv], env)
        runtime = os.path.join(self.programs, "cgpu-runtime")
        config = self.doors[door]
        root = os.path.join(self.work, "runtime")
        words = [runtime, "--cgpu-config", config, "--root", root, "run", "--bundle", bundle, name]
        running = Running(words, preexec=None if self.rootfs else _no_new_privileges)
        running.name, running.container_root = name, root
        self.unfinished.append(running)
        return running

    def run(self, argv, mib, limit, door=GATE):
        """Runs a program in a container to its end."""
        return self.finish(self.start(argv, mib, door), limit)

    def end(self, running):
        """Ends a container that `finish` waits for."""
        self._delete(running)

    def finish(self, running, limit):
        outcome = running.finish(limit)
        self.unfinished.remove(running)
        if outcome.timed_out:
            self._delete(running)
        return outcome

    def _delete(self, running):
        """The runtime was killed, which doesn't end its container."""
        if self.rootfs:
            run([self.runtime, "--root", running.container_root, "delete", "--force", running.name], 10)

    def status(self):
        """What the only monitor that runs says of itself; None where there is none."""
        for path in glob.glob(os.path.join(self.work, "gate/gate/*/control")):
            try:
                with socket.socket(socket.AF_UNIX) as stream:
                    stream.settimeout(2)
                    stream.connect(path)
                    stream.sendall(b'"status"\n')
                    return json.loads(stream.makefile().readline())["status"]
            except (OSError, ValueError, KeyError):
                continue
        return None

    def close(self):
        """Leaves nothing running, nothing mounted, and no file; never removes what lies behind a mount."""
        for running in self.unfinished:
            running.kill()
            self._delete(running)
        for point in reversed(self._mounted()):
            subprocess.run(["umount", "-l", point], check=False, stderr=subprocess.DEVNULL)
        if not self._mounted():
            shutil.rmtree(self.work, ignore_errors=True)

    def _mounted(self):
        return [point for point in mount_points() if point.startswith(self.work + "/")]


def mount_points():
    """Where something is mounted, what lies above first."""
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        return sorted({line.split(" ")[4].encode().decode("unicode_escape") for line in file})


def _path():
    return os.environ.get("PATH", "") + ":/usr/sbin:/usr/bin:/sbin:/usr/local/bin"


def _no_new_privileges():
    """Without it a process that lacks CAP_SYS_ADMIN can't put on a filter (prctl(2))."""
    import ctypes

    PR_SET_NO_NEW_PRIVS = 38
    ctypes.CDLL(None).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
