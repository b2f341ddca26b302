"""One training on four hosts that loses something every few seconds, and what each loss costs.

python -m tools.soak.repeated_losses [--minutes 20] [--every 10] [--seed 1] [--per-host 1]
       [--losses N] [--program poptorch|ddp] [--kinds PATTERN] [--json RECORD]

The training runs until it has done the steps that an undisturbed training does in 80 % of the
minutes. Between two losses lie 50 to 150 % of ``--every`` seconds, and at least one finished step.
At the end, the digests of the weights are compared with those of an undisturbed training. The
record has one line for each loss. A run that was cut off goes on with its record and with the
checkpoints on the disk, which lie beside the record.

The code is 1 if the weights differ or if the training does not end.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The hosts of the lab are those of the tests.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from lab.lab import Lab, missing

from tools.processes import surrounding_variables
from tools.soak.losses import LOSSES, Loss, draw, programs
from tools.soak.record import Record
from tools.soak.step_notes import (
    Cost,
    Run,
    cost,
    digests,
    median_step,
    read_notes,
    steps_and_seconds,
)

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = {
    "poptorch": ROOT / "tools" / "soak" / "losses_program.py",
    "ddp": ROOT / "tools" / "soak" / "losses_ddp_program.py",
}
NUM_HOSTS, NUM_REPLICAS = 4, 8
PAUSE_SECONDS = 0.05
MEASURED_STEPS = 150
WANTED_SHARE = 0.8
OPTIONS = ("--memory-checkpoints", "--max-restarts", "10000", "--allow-fewer-hosts",
           "--wait-for-hosts")  # fmt: skip
_POLL_SECONDS = 0.1
# A training that has not gone on after this time never will.
_NEVER_SECONDS = 180.0


class Training:
    """A launch of the training on the hosts of a lab.

    Args:
        lab: The hosts.
        program: The program file.
        folder: The folder of the notes, checkpoints and output.
        name: The name of the launch's files.
        steps: The number of steps to do.
        pause: The time in seconds that each step sleeps.
        per_host: The number of instances per host.
        options: More options of the launcher.
    """

    def __init__(
        self,
        lab: Lab,
        program: Path,
        folder: Path,
        name: str,
        steps: int,
        pause: float,
        per_host: int,
        options: tuple[str, ...] = (),
    ) -> None:
        self.notes = folder / f"notes-{name}"
        self.notes.mkdir(parents=True, exist_ok=True)
        self._out = folder / name
        host = lab[0]
        # The processes of a DDP program are its replicas. After each start, DDP changes the order
        # of the gradients in its buckets. The sums of gloo depend on this order, by rounding. The
        # number of threads must not depend on the number of instances of a host.
        is_ddp = program == PROGRAMS["ddp"]
        replicas = per_host * NUM_HOSTS if is_ddp else NUM_REPLICAS
        for_ddp = (
            *("--torch-backend", "popdist"),
            *("--env", "POPDIST_DETERMINISTIC=1", "--env", "OMP_NUM_THREADS=1"),
        )
        words = [
            *("--host", lab.names(), "--num-instances", per_host * NUM_HOSTS),
            *("--num-replicas", replicas, "--oversubscribe", "--env", "SOAK_NOTES"),
            *("--executable-cache-path", folder / "cache", *(for_ddp if is_ddp else ()), *options),
            *(program, steps, pause, folder / f"checkpoints-{name}"),
        ]
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "XDG_CACHE_HOME": str(host.folder / "cache"),
            "POPRUN_LEASES": "",
            "TMPDIR": "/tmp",
            "SOAK_NOTES": str(self.notes),
        }
        with Path(f"{self._out}.out").open("ab") as out, Path(f"{self._out}.err").open("ab") as err:
            self.process = subprocess.Popen(
                host.enter(sys.executable, "-m", "poprun_py", *words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
            )

    def runs(self, offset: int = 0) -> list[Run]:
        """Return what the first instance has noted, from a byte of its file on."""
        return read_notes(self._text(offset))

    def size(self) -> int:
        """Return the number of bytes that the first instance has noted."""
        return len(self._text(0))

    def newest_start(self, offset: int = 0) -> int:
        """Return the byte of the notes at which the newest process starts; ``offset`` is before."""
        text = self._text(offset)
        return offset + max(0, text.rfind("\nstart ") + 1)

    def _text(self, offset: int) -> str:
        with contextlib.suppress(FileNotFoundError), (self.notes / "instance-0").open() as file:
            file.seek(offset)
            return file.read()
        return ""

    def wait(self, limit: float) -> int | None:
        """Return the exit code of the launcher; None if it still runs after ``limit`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit)
        return None

    def said(self) -> str:
        """Return the end of the launcher's stderr."""
        return Path(f"{self._out}.err").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the launcher, if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def undisturbed(lab: Lab, args: argparse.Namespace, folder: Path, steps: int | None) -> Training:
    """Do an undisturbed training; without ``steps``, do a few to measure the median step.

    Raises:
        RuntimeError: The training fails.
    """
    name, pause = ("measured", PAUSE_SECONDS) if steps is None else ("undisturbed", 0.0)
    training = Training(
        lab,
        PROGRAMS[args.program],
        folder,
        name,
        steps or min(MEASURED_STEPS, args.steps or MEASURED_STEPS),
        pause,
        args.per_host,
    )
    try:
        code = training.wait(60 + 60 * args.minutes)
    finally:
        training.close()
    if code != 0:
        raise RuntimeError(f"an undisturbed training ended with {code}: {training.said()}")
    return training


class Losses:
    """The losses of one training while it runs, one after another.

    Args:
        lab: The hosts.
        training: The training.
        kinds: The kinds of loss to draw from.
        every: The mean time between two losses, in seconds.
        most: The largest number of losses.
        dice: The random generator for kinds, programs and times.
        note: Receives the record of each loss.
    """

    def __init__(
        self,
        lab: Lab,
        training: Training,
        kinds: tuple[Loss, ...],
        every: float,
        most: float,
        dice: random.Random,
        note: Callable[[dict[str, Any]], None],
    ) -> None:
        self._lab, self._training, self._kinds = lab, training, kinds
        self._every, self._left = every, most
        self._dice, self._note = dice, note
        # The notes before this byte belong to processes that ended before the present loss.
        self._offset = 0
        # When and how the present loss ends.
        self._end: tuple[float, Callable[[], None]] | None = None
        # The present loss, until its cost is known.
        self._open: dict[str, Any] | None = None

    def cause_all(self) -> None:
        """Cause losses until the training ends.

        Raises:
            RuntimeError: The training does not go on after a loss.
        """
        due = time.monotonic() + self._pause()
        while self._training.wait(_POLL_SECONDS) is None:
            now = time.monotonic()
            self._end_loss(now)
            if now < due:
                continue
            loss = self._open
            went_on = self._cost() if loss else any(run.steps for run in self._runs())
            if went_on and self._end is None and self._left > 0:
                self._cause()
                due = time.monotonic() + self._pause()
            elif not went_on and loss is not None and now - loss["at"] > _NEVER_SECONDS:
                raise RuntimeError(
                    f"no step within {_NEVER_SECONDS:.0f} s after the loss of {loss['kind']}"
                )
        self._end_loss(float("inf"))
        self._close_loss(time.monotonic())

    def _pause(self) -> float:
        return self._every * self._dice.uniform(0.5, 1.5)

    def _runs(self) -> list[Run]:
        return self._training.runs(self._offset)

    def _cause(self) -> None:
        """Close the present loss and cause the next one."""
        kind = draw(self._kinds, self._dice)
        running = programs(self._lab, self._training.notes)
        candidates = [
            each for each in running if each.host is not self._lab[0] or not kind.spares_first_host
        ]
        if not candidates:  # only the first host is left at present
            return
        target = self._dice.choice(candidates)
        now = time.monotonic()
        self._left -= 1
        self._close_loss(now)
        self._offset = self._training.newest_start(self._offset)
        self._open = {"kind": kind.title, "host": target.host.name, "at": now}
        undone = kind.act(self._lab, running, target)
        if undone is not None:
            self._end = (now + undone.after, undone.act)

    def _end_loss(self, now: float) -> None:
        if self._end is not None and now >= self._end[0]:
            self._end[1]()
            self._end = None

    def _cost(self, next_loss: float = float("inf")) -> Cost | None:
        assert self._open is not None
        return cost(self._runs(), self._open["at"], next_loss)

    def _close_loss(self, now: float) -> None:
        """Record the present loss, whose cost is known now."""
        if self._open is None:
            return
        found = self._cost(now)
        if found is not None:  # a loss at the very end may have cost nothing
            self._note({**self._open, **vars(found)})
        self._open = None


def train_with_losses(lab: Lab, args: argparse.Namespace, folder: Path, record: Record) -> int:
    """Do the training with losses and its undisturbed twin; returns the code to end with."""
    if not any(line["line"] == "median" for line in record.lines):
        median = median_step(undisturbed(lab, args, folder, None).runs())
        steps = args.steps or round(60 * args.minutes * WANTED_SHARE / median)
        record.add({"line": "median", "seconds": round(median, 5), "steps": steps})
    measured = next(line for line in record.lines if line["line"] == "median")
    parts = sum(line["line"] == "part" for line in record.lines)
    if not any(line.get("ended") for line in record.lines):
        kinds = tuple(kind for kind in LOSSES if re.search(args.kinds, kind.title))
        dice = random.Random(f"{args.seed}:{parts}")
        training = Training(
            lab, PROGRAMS[args.program], folder, "losses", measured["steps"], PAUSE_SECONDS,
            args.per_host, tuple(args.options.split() if args.options is not None else OPTIONS),
        )  # fmt: skip
        begun = training.size()
        losses = Losses(
            lab, training, kinds, args.every, args.losses or math.inf, dice,
            lambda line: record.add({"line": "loss", "part": parts, **line}),
        )  # fmt: skip
        try:
            losses.cause_all()
        finally:
            training.close()
            time.sleep(2)  # processes on other hosts notice the end of the launcher
            done, seconds = steps_and_seconds(training.runs(begun))
            code = training.process.returncode
            record.add({
                "line": "part", "steps": done, "seconds": round(seconds, 2), "code": code,
                "ended": code == 0, "left": files_left(lab),
                "load": round(os.getloadavg()[1], 1), "cores": os.cpu_count(),
            })  # fmt: skip
        if code != 0:
            raise RuntimeError(f"the training ended with {code}: {training.said()}")
    if not any(line["line"] == "digests" for line in record.lines):
        right = digests(undisturbed(lab, args, folder, measured["steps"]).runs())
        seen = digests(read_notes((folder / "notes-losses" / "instance-0").read_text()))
        wrong = sorted(step for step in seen if seen[step] != right.get(step))
        last = max(seen)
        record.add({
            "line": "digests", "steps": len(seen), "wrong": wrong, "last": last,
            "equal": not wrong and last == measured["steps"],
        })  # fmt: skip
    return 0


def files_left(lab: Lab) -> list[str]:
    """Return the files of jobs in the shared memory of all hosts."""
    return sorted(
        f"{host.name}:{path.name}"
        for host in lab.hosts
        for path in Path(f"/proc/{host.init_pid}/root/dev/shm").glob("popr*")
        if "leases" not in path.name
    )


def shares(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the share of the time that was training, and the share of undisturbed steps.

    The time from each loss to the next finished step is no training. The second share is the number
    of steps, each counted once, times the median step of a training without losses and without
    states in memory. It is smaller, because steps take longer with states in memory, and with fewer
    hosts. Both are shares of the time from the first finished step to the last one.
    """
    median = next(line["seconds"] for line in lines if line["line"] == "median")
    parts = [line for line in lines if line["line"] == "part"]
    lost = sum(line["seconds"] for line in lines if line["line"] == "loss")
    seconds = sum(part["seconds"] for part in parts)
    return 1 - lost / seconds, median * sum(part["steps"] for part in parts) / seconds


def report(record: Record) -> int:
    """Print a summary of the record; returns the code to end with."""
    found = [line for line in record.lines if line["line"] == "loss"]
    for kind in dict.fromkeys(line["kind"] for line in found):
        of_kind = [line for line in found if line["kind"] == kind]
        seconds = sorted(line["seconds"] for line in of_kind)
        again = max(line["again"] for line in of_kind)
        print(
            f"{kind}: {len(of_kind)}, next step after {seconds[len(seconds) // 2]:.1f} s, worst "
            f"{seconds[-1]:.1f} s, at most {again} steps again"
        )
    compared = next(line for line in record.lines if line["line"] == "digests")
    training, undisturbed_steps = (f"{100 * each:.0f} %" for each in shares(record.lines))
    print(f"{len(found)} losses, {training} of the time is training")
    print(f"undisturbed steps without states in memory would have taken {undisturbed_steps} of it")
    print(f"weights equal: {compared['equal']}")
    return int(not compared["equal"])


def parsed(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.soak.repeated_losses", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--steps", type=int, help="steps, in place of those of the minutes")
    parser.add_argument("--every", type=float, default=10, help="seconds between two losses")
    parser.add_argument("--losses", type=int, help="the largest number of losses")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-host", type=int, default=1, help="instances on each host")
    parser.add_argument("--program", choices=sorted(PROGRAMS), default="poptorch")
    parser.add_argument("--kinds", default="", metavar="PATTERN", help="only losses that match")
    parser.add_argument("--options", help=f"the launcher's options, not {' '.join(OPTIONS)}")
    parser.add_argument("--json", type=Path, metavar="RECORD", help="a line for every loss")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parsed(argv)
    if reason := missing():
        sys.exit(f"repeated_losses: {reason}")
    for name in surrounding_variables():
        del os.environ[name]
    # Sockets have short names, so all of it lies below /tmp.
    scratch = Path(tempfile.mkdtemp(prefix="losses-", dir="/tmp"))
    path = (args.json or scratch / "record.jsonl").resolve()
    draw_line = {name: value for name, value in vars(args).items() if name != "json"}
    record = Record(path, draw_line)
    folder = path.with_suffix(".d")
    folder.mkdir(exist_ok=True)
    try:
        with Lab(scratch / "lab", NUM_HOSTS, visible=(folder,)) as lab:
            train_with_losses(lab, args, folder, record)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return report(record)


if __name__ == "__main__":
    sys.exit(main())
