"""Commands that end: each has a limit, and all together have one.

A command is a session of its own and is killed with all that it started. One that can't even be
killed (a driver may hold it) is left behind after a moment, so that nothing waits for ever.
"""

import json
import os
import shlex
import signal
import subprocess
import time

# Longest that is waited for a command that was killed.
GRACE_S = 3.0


class Budget:
    """The time that is left of the whole run."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def left(self):
        return self.end - time.monotonic()


class Outcome:
    def __init__(self, argv, status, stdout, stderr, seconds, timed_out):
        self.argv = argv
        self.status = status
        self.stdout = stdout
        self.stderr = stderr
        self.seconds = seconds
        self.timed_out = timed_out

    def answers(self):
        """The JSON objects among the lines of its output."""
        found = []
        for line in self.stdout.splitlines():
            if line.startswith("{"):
                try:
                    found.append(json.loads(line))
                except ValueError:
                    pass  # cut off in the middle
        return found

    def answer(self, path=None):
        """The one about `path`, or the last of all; None where it didn't come so far."""
        for answer in reversed(self.answers()):
            if path is None or answer.get("path") == path:
                return answer
        return None

    def why(self):
        """Why there is no answer, in a few words."""
        if self.timed_out:
            return f"it was killed after {self.seconds:.0f} s"
        failed = next((a for a in self.answers() if "failed" in a), None)
        if failed:
            return " ".join(f"{key} {value}" for key, value in failed.items())
        lines = [line.strip() for line in (self.stderr.strip() or self.stdout.strip()).splitlines()]
        said = lines if len(lines) < 3 else [lines[0], "…", lines[-1]]
        return f"exit status {self.status}: {' '.join(said)[:400] or 'nothing said'}"

    def text(self):
        return (
            f"$ {shlex.join(self.argv)}\n# exit status {self.status}, {self.seconds:.2f} s"
            f"{', killed' if self.timed_out else ''}\n{self.stdout}\n--- stderr\n{self.stderr}\n"
        )


class Running:
    """A command that runs while others do."""

    def __init__(self, argv, env=None, cwd=None, preexec=None):
        self.argv = [str(word) for word in argv]
        self.begun = time.monotonic()
        self.child = subprocess.Popen(
            self.argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            cwd=cwd,
            preexec_fn=preexec,
            start_new_session=True,
        )
        self.early = b""

    def line(self, limit):
        """The next line of its output, within so many seconds; empty where none comes."""
        import selectors

        end = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(self.child.stdout, selectors.EVENT_READ)
            text = b""
            while not text.endswith(b"\n") and time.monotonic() < end:
                if selector.select(max(0.0, end - time.monotonic())):
                    byte = os.read(self.child.stdout.fileno(), 1)
                    if not byte:
                        break
                    text += byte
        self.early += text
        return text.decode(errors="replace")

    def finish(self, limit):
        """Ends its input and waits for it."""
        timed_out = False
        try:
            stdout, stderr = self.child.communicate(timeout=max(0.1, limit))
        except subprocess.TimeoutExpired:
            timed_out = True
            self.kill()
            try:
                stdout, stderr = self.child.communicate(timeout=GRACE_S)
            except subprocess.TimeoutExpired as late:
                stdout, stderr = late.output or b"", (late.stderr or b"") + b"it could not be killed"
        seconds = time.monotonic() - self.begun
        output = (self.early + stdout).decode(errors="replace")
        return Outcome(self.argv, self.child.returncode, output, stderr.decode(errors="replace"), seconds, timed_out)

    def kill(self):
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def run(argv, limit, **how):
    """Runs a command to its end or for so many seconds."""
    try:
        return Running(argv, **how).finish(limit)
    except OSError as error:
        return Outcome([str(word) for word in argv], 127, "", str(error), 0.0, False)
