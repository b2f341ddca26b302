"""Notes of a training program for the run with repeated losses: its start, phases and steps.

Each instance appends lines of ``KIND STEP SECONDS TEXT`` to ``SOAK_NOTES``/instance-N. SECONDS is
the monotonic clock, which all hosts of the lab share. The kind ``step`` marks a finished step.
"""

import hashlib
import os
import time
from pathlib import Path

DIGEST_EVERY = 50


class Notes:
    """The file to which one instance appends what it has done."""

    def __init__(self):
        path = Path(os.environ["SOAK_NOTES"], f"instance-{os.environ['RANK']}")
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add_start(self):
        """Note when and where the process has started."""
        self.add("start", seconds=_process_began(), text=f"{os.uname().nodename} {os.getpid()}")

    def add(self, kind, step=0, seconds=None, text=""):
        """Append one line with a single write, so that a killed process leaves no half line."""
        seconds = time.monotonic() if seconds is None else seconds
        line = f"{kind} {step} {seconds:.6f} {text}\n"
        os.write(self._descriptor, line.encode())


def digest_of(training):
    """Return a digest of the weights and buffers."""
    digest = hashlib.sha256()
    for value in training.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()


def _process_began():
    """Return the time when this process started, on the clock of time.monotonic()."""
    # A program that measures the time before its imports would have to start without a spare.
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return since_boot - time.clock_gettime(time.CLOCK_BOOTTIME) + time.monotonic()
