"""A long training at its start and at its end: memory, descriptors, threads, log, step time.

python benchmarks/long_run.py [--seconds 3600] [--steps 200000] [--json]

Two instances train the small net of long_training.py until one of the limits is reached. "start" is
the second fifth of the run, in whose first one buffers grow to their size, and "end" the last fifth
without its last moment. Memory is a process's own (anonymous) and what it maps of shared memory.
A step's time is that of the fast tenth of each window of steps, beside that of hand-written steps
of the same net in the same window: what else the machine does slows both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from many import descendants
from show_rows import show_rows

PROGRAM = Path(__file__).with_name("long_training.py")
SHARED_MEMORY = Path("/dev/shm")
INSTANCES = 2
SAMPLES, MOST_PAUSE_SECONDS = 100, 10.0
LARGEST = {"descriptors": max, "threads": max}


@dataclass(frozen=True)
class Held:
    """What one process of the job holds at one time."""

    private_bytes: int
    shared_bytes: int
    descriptors: int
    threads: int


def held_by(pid: int) -> Held | None:
    """Look at a process; None if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    status = dict(line.split(":", 1) for line in lines)
    if "RssAnon" not in status:
        return None
    sizes = [int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")]
    return Held(*sizes, descriptors, int(status["Threads"]))


def role(pid: int) -> str:
    """Return what a process is in the job."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    if "poprun-py" in words[1]:
        return "launcher"
    if words[1] == str(PROGRAM):
        return "program"
    return "mpirun" if words[0].endswith("prterun") else "in front of the program"


def halves(values: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the values of the run's start and of its end."""
    count = max(1, len(values) // 5)
    return values[count : 2 * count], values[-count - 1 : -1]


def growth(name: str, samples: list[Held]) -> dict[str, Any]:
    """Return what a process held at the start and at the end."""
    row: dict[str, Any] = {"process": name}
    for key in asdict(samples[0]):
        middle = LARGEST.get(key, statistics.median)
        row[key] = [middle([getattr(held, key) for held in part]) for part in halves(samples)]
    return row


def step_times(windows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return an instance's microseconds of a step at the start and at the end."""
    times = {
        key: [statistics.median(window[key] for window in part) for part in halves(windows)]
        for key in ("fast_us", "plain_us")
    }
    ratios = [ours / plain for ours, plain in zip(times["fast_us"], times["plain_us"], strict=True)]
    return {"steps": windows[-1]["step"], **times, "end/start": ratios[1] / ratios[0]}


def unused_shared_memory() -> set[str]:
    """Return what is in shared memory and nobody maps or has open, as other jobs have theirs."""
    files = {str(path) for path in SHARED_MEMORY.iterdir()}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            lines = (process / "maps").read_text().splitlines()
            files -= {line[line.find("/") :] for line in lines}
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    files.discard(str(descriptor.readlink()))
    return files


def bytes_per_line(screen: bytes) -> float:
    """Return the screen's bytes for each line of the program, from its first line on."""
    lines = screen[screen.index(b'"step"') :].count(b'"step"')
    return (len(screen) - screen.index(b'"step"')) / lines


def train(folder: Path, seconds: float, steps: int) -> dict[str, Any]:
    """Run the training in ``folder`` and return the figures of its processes and instances."""
    launcher = Path(sys.executable).with_name("poprun-py")
    words = [launcher, "-n", str(INSTANCES), "--output-dir", "output"]
    samples: dict[int, list[Held]] = {}
    roles: dict[int, str] = {}
    pause = max(0.25, min(MOST_PAUSE_SECONDS, seconds / SAMPLES))
    before, began = unused_shared_memory(), time.monotonic()
    with (folder / "screen").open("wb") as screen:  # a full pipe would hold the job up
        job = subprocess.Popen(
            [*words, PROGRAM, str(seconds), str(steps)],
            **{"cwd": folder, "stdin": subprocess.DEVNULL, "stdout": screen, "stderr": screen},
        )
        while job.poll() is None:
            time.sleep(pause)
            if b'"step"' not in (folder / "screen").read_bytes():
                continue  # imports and compilation
            seen = {pid: held for pid in descendants(job.pid) if (held := held_by(pid))}
            with contextlib.suppress(OSError):  # one that has just ended
                roles.update({pid: role(pid) for pid in seen if pid not in roles})
            if sum(roles.get(pid) == "program" for pid in seen) < INSTANCES:
                continue  # the job ends: the launcher writes the page of its run
            for pid, held in seen.items():
                samples.setdefault(pid, []).append(held)
    took, text = time.monotonic() - began, (folder / "screen").read_bytes()
    if job.returncode:
        raise RuntimeError(text[-2000:].decode(errors="replace"))
    # Those that were there all the time.
    longest = max(map(len, samples.values()))
    lasting = {pid: seen for pid, seen in samples.items() if len(seen) >= 0.9 * longest}
    files = sorted((folder / "output" / "latest").glob("**/instance-*.stdout"))
    windows = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return {
        "seconds": took,
        "bytes_of_log_per_line": bytes_per_line(text),
        "left_in_shared_memory": sorted(unused_shared_memory() - before),
        "processes": [growth(roles[pid], seen) for pid, seen in lasting.items()],
        "instances": [step_times(each) for each in windows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = train(Path(folder), args.seconds, args.steps)
    if args.json:
        print(json.dumps(found, indent=1))
        return
    rows = [*found.pop("processes"), *found.pop("instances"), found]
    show_rows(rows, as_json=False)


if __name__ == "__main__":
    main()
