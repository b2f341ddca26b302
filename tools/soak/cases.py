"""One case of a soak: a row is done to a job, what followed is compared, and the job goes on."""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from popdist_py.checkpoint import Checkpoints
from tools.soak.jobs import Job, MachineLoad, Place
from tools.soak.rows import NUMPY, PROGRAMS, Done, Row

# A launcher that has not ended after so long never will.
_NEVER_SECONDS = 120.0
# What a killed launcher leaves goes by itself; the time counts.
_LEFT_SECONDS = 20.0
_EXCERPT = 3000
_BLAMED = re.compile(r"poprun-py: instance (\d+) .*(?:failed first|hangs)")


@dataclass(frozen=True)
class Reference:
    """An unfaulted training: the digests it prints, and that of the checkpoint of every step."""

    digests: list[tuple[str, str]]
    states: dict[int, str] = field(default_factory=dict)


def digests(text: str) -> list[tuple[str, str]]:
    """Return the final digests that the instances have printed, each with its instance."""
    return sorted(re.findall(r"\[1,(\d+)\].*digest (\w{64})", text))


def reference(place: Place, program: str) -> Reference:
    """Train without any fault.

    Raises:
        RuntimeError: even that fails.
    """
    job = Job(place, (PROGRAMS[program],), "reference")
    job.start((), {"SOAK_KEEP": "1000"})
    code = job.wait(_NEVER_SECONDS)
    found = digests(job.text("out"))
    job.close()
    if code != 0 or len(found) != place.num_instances:
        raise RuntimeError(f"a training without faults ended with {code}: {job.text('err')}")
    saved = Checkpoints(job.checkpoints).newest_first()
    return Reference(found, {each.step: _sha(each.data) for each in saved})


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Case:
    """One case, from the start of its job to what is said of it.

    Args:
        row: what is done.
        place: where; it is the case's own until the case is over.
        dice: says the moment, and the instance.
        wanted: how an unfaulted training ends.
        load: of the machine, by which times are judged.
    """

    def __init__(
        self, row: Row, place: Place, dice: random.Random, wanted: Reference, load: MachineLoad
    ) -> None:
        self._row, self._place, self._dice = row, place, dice
        self._wanted, self._load = wanted, load
        self._wrong: list[str] = []
        self.record: dict[str, Any] = {"row": row.title}

    def run(self) -> dict[str, Any]:
        """Do it and return its record; ``wrong`` lists what was not as expected."""
        began = time.monotonic()
        job = Job(self._place, (PROGRAMS[self._row.program],), "run")
        try:
            self._do(job)
        except Exception:
            self._wrong.append(f"the soak itself: {traceback.format_exc(limit=-3)}")
        finally:
            job.close()
        if self._wrong:
            with contextlib.suppress(OSError):
                self.record["said"] = job.text("err")[-_EXCERPT:]
        self.record["wrong"] = self._wrong
        self.record["whole_seconds"] = round(time.monotonic() - began, 1)
        return self.record

    def _do(self, job: Job) -> None:
        row = self._row
        more = row.prepare(job, self._dice) if row.prepare is not None else {}
        job.start(row.options, {**row.env, **more}, row.before)
        done = row.act(job, self._dice)
        expected = row.expected_of(done)
        code = job.wait(_NEVER_SECONDS)
        self._await_nothing(code)
        seconds = time.monotonic() - done.at
        load = self._load.since(done.at)
        self.record |= {
            "phase": done.phase, "instance": done.instance, "missed": done.missed,
            "what": done.what, "code": code, "codes": expected.codes,
            "seconds": round(seconds, 2), "limit": expected.seconds, "load": round(load, 2),
        }  # fmt: skip
        if code is None:
            self._wrong.append("did not return")
        elif code not in expected.codes:
            self._wrong.append(f"exit code {code}")
        if seconds > load * expected.seconds:
            self._wrong.append(f"took {seconds:.1f} s")
        self._judge_cause(job, done, code)
        self._judge_processes()
        if row.mend is not None:
            row.mend(job)
        # What a killed launcher cannot remove, the next start of the same user does.
        swept = row.swept or (code is not None and code < 0)
        if not swept:
            self._judge_files()
        self._judge_training(job, code, goes_on=code != 0 or swept)
        if swept:
            self._judge_files()

    def _await_nothing(self, code: int | None) -> None:
        """Wait for what ends by itself: after a killed launcher, and on hosts that it cannot reach.

        Else nothing may be left when the launcher returns.
        """
        if code is None or (code >= 0 and self._place.num_instances == 2):
            return
        deadline, pause = time.monotonic() + _LEFT_SECONDS, 0.01
        while self._place.left() and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(0.2, 2 * pause)

    def _judge_cause(self, job: Job, done: Done, code: int | None) -> None:
        """Compare what the launcher says about the first cause."""
        expected, said = self._row.expected_of(done), job.text("err")
        if code == 0 and len(expected.codes) > 1:  # it was too late to harm
            self.record["cause"] = None
            return
        right = re.search(expected.says, said) is not None
        if not right:
            self._wrong.append(f"did not say {expected.says!r}")
        blamed = _BLAMED.search(said)
        if expected.names and blamed is not None and int(blamed[1]) != done.instance:
            self._wrong.append(f"blamed {blamed[1]}, not {done.instance}")
            right = False
        self.record["cause"] = right if expected.says or expected.names else None

    def _judge_processes(self) -> None:
        """Look for processes that nobody needs any more."""
        processes = self.record["left"] = [_command_line(pid) for pid in self._place.left()]
        if processes:
            self._wrong.append(f"{len(processes)} processes left: {'; '.join(processes)[:300]}")

    def _judge_files(self) -> None:
        """Look for files that nobody needs any more."""
        files = self._place.left_files()
        self.record["left"] += files
        if files:
            self._wrong.append(f"files left: {' '.join(files)[:300]}")

    def _judge_training(self, job: Job, code: int | None, goes_on: bool) -> None:
        """Compare checkpoints and the end of the training, now or after it has gone on."""
        self.record["resumed"] = None
        if not self._row.resumes:
            return
        folder = Checkpoints(self._place.inside(job.checkpoints))
        whole = {each.step: _sha(each.data) for each in folder.newest_first()}
        right = set(whole) == set(folder.steps())
        if self._row.program == NUMPY:  # torch writes the same state in other bytes
            right &= whole.items() <= self._wanted.states.items()
        newest = self.record["checkpoint"] = max(whole, default=0)
        right &= newest >= job.saved()
        if not right:
            found = f"checkpoints {folder.steps()}, whole and right {sorted(whole)}"
            self._wrong.append(f"{found}, saved {job.saved()}")
        last = job
        if goes_on:
            last = Job(self._place, (PROGRAMS[self._row.program],), "resumed")
            last.start((), {})
            code = last.wait(_NEVER_SECONDS)
            last.close()
        found = digests(last.text("out"))
        if code != 0 or found != self._wanted.digests:
            self._wrong.append(f"the resumed training ended with {code}, digests {found}")
            self.record["said_then"] = last.text("err")[-_EXCERPT:]
            right = False
        self.record["resumed"] = right


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    except OSError:
        return f"process {pid}, which ended then"
