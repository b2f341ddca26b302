"""What one look at an instance tells, and two looks: phase, speed, shares of its time, its use.

Pure: messages of wrappers in, values out. Nothing here compares instances: stragglers.py does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

# As popdist_py/activities/ledger.py numbers them; "other" is the program's own code.
ACTIVITIES: Final = (
    "other", "compiling", "computing", "loading", "transferring",
    "reducing", "waiting", "updating", "saving", "validating",
)  # fmt: skip
_POSITIONS: Final = {name: position for position, name in enumerate(ACTIVITIES)}
# What lasts longer than this is no part of a quick step: it is shown as the phase.
_LONG_SECONDS = 1.0
_P95 = 0.95
# In place of the ledger of a program that has none.
_NOTHING_COUNTED: Final[Mapping[str, Any]] = {
    "began": None, "activity": 0, "nanoseconds": [0] * len(ACTIVITIES),
    "samples": 0, "timed": 0, "steps": [], "own": [],
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What the wrapper of one instance said at one time; times are in seconds.

    ``at`` and ``started`` (of the program) are on the clock of the instance's host. Its steps and
    activities are known if it ``counts``. ``spent`` is the time of each activity until ``at``.
    ``activity`` goes on for ``lasting``. ``steps`` are how long the last steps took, ``own`` how
    long the last ten without waiting for others, the oldest first; ``timed`` counts all such
    steps. ``calls`` were made since the last step, which had this ``loss``; None where nobody
    knows.
    """

    at: float = 0.0
    started: float = 0.0
    counts: bool = True
    spent: tuple[float, ...] = (0.0,) * len(ACTIVITIES)
    activity: int = 0
    lasting: float = 0.0
    samples: int = 0
    timed: int = 0
    steps: tuple[float, ...] = field(default=(), repr=False)
    own: tuple[float, ...] = field(default=(), repr=False)
    step: int | None = None
    calls: int = 0
    loss: float | None = None
    cpu_seconds: float = 0.0
    memory_bytes: int = 0
    swap_bytes: int = 0
    num_cpus: int = 0
    queued_seconds: float = 0.0
    throttled_seconds: float = 0.0

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Look | None:
        """Return what a wrapper's message says; None for one that was lost with its wrapper."""
        now = message.get("now")
        if now is None:
            return None
        ledger = message.get("ledger") or {**_NOTHING_COUNTED, "now": now, "since": now}
        progress = message.get("progress") or [None, 0]
        return cls(
            at=ledger["now"] / 1e9,
            started=message["started"] / 1e9,
            counts=ledger["began"] is not None,
            spent=tuple(each / 1e9 for each in ledger["nanoseconds"]),
            activity=ledger["activity"],
            lasting=(ledger["now"] - ledger["since"]) / 1e9,
            samples=ledger["samples"],
            timed=ledger["timed"],
            steps=tuple(each / 1e9 for each in ledger["steps"]),
            own=tuple(each / 1e9 for each in ledger["own"]),
            step=progress[0],
            calls=progress[1],
            loss=ledger.get("loss"),
            cpu_seconds=message.get("cpu_seconds", 0.0),
            memory_bytes=message.get("memory_bytes", 0),
            swap_bytes=message.get("swap_bytes", 0),
            num_cpus=len(message.get("cpus", ())),
            queued_seconds=message.get("queued_seconds", 0.0),
            throttled_seconds=message.get("throttled_seconds", 0.0),
        )

    @property
    def phase(self) -> str:
        """What the instance does, in the words of the views."""
        if not self.counts:
            return "running"
        name = ACTIVITIES[self.activity]
        if name in ("compiling", "saving", "validating"):
            return name
        if name in ("waiting", "loading") and self.lasting > _LONG_SECONDS:
            return name
        if self.calls:
            return "validating"
        return "training" if self.timed else "starting"


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceState:
    """How an instance is doing between two looks; times are in seconds, shares of all time.

    ``step_seconds`` and ``p95_seconds`` are the median and the 95th percentile of its last steps,
    ``own_seconds`` the median of the last ten without waiting for others; 0 before there are any.
    ``shares`` are those of the activities, in their order. ``cpu`` is the number of CPUs that it
    used on average. ``queued`` and ``throttled`` are the shares of time in which it had no CPU
    although it was ready to run, and in which its control group was not allowed to run. Since
    counting began, ``num_samples`` were trained on, and ``seconds`` are those of the activities.
    ``loss`` is that of the last step; None where nobody knows.
    """

    index: int
    host: str = ""
    pid: int = 0
    phase: str = "starting"
    step: int | None = None
    num_steps: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    p95_seconds: float = 0.0
    own_seconds: float = 0.0
    shares: tuple[float, ...] = (0.0,) * len(ACTIVITIES)
    cpu: float = 0.0
    num_cpus: int = 0
    memory_bytes: int = 0
    swap_bytes: int = 0
    queued: float = 0.0
    throttled: float = 0.0
    num_samples: int = 0
    seconds: tuple[float, ...] = (0.0,) * len(ACTIVITIES)
    loss: float | None = None
    _json_text: str = field(default="", init=False, repr=False, compare=False)

    @classmethod
    def between(
        cls, before: Look | None, now: Look, *, index: int, host: str = "", pid: int = 0
    ) -> InstanceState:
        """Return the state from two looks; from one, that since the program began."""
        # The control group is older than the program: what it was throttled before is not known.
        before = before or Look(at=now.started, throttled_seconds=now.throttled_seconds)
        seconds = max(now.at - before.at, 1e-9)
        spent = [max(0.0, b - a) for a, b in zip(before.spent, now.spent, strict=True)]
        mean = sum(now.steps) / len(now.steps) if now.steps else 0.0
        return cls(
            index=index,
            host=host,
            pid=pid,
            phase=now.phase,
            step=now.step,
            num_steps=now.timed,
            # The first step was counted, but has no time.
            samples_per_second=now.samples / (now.timed + 1) / mean if mean else 0.0,
            step_seconds=median(now.steps),
            p95_seconds=percentile(now.steps, _P95),
            own_seconds=median(now.own),
            shares=tuple(each / (sum(spent) or 1.0) for each in spent),
            cpu=max(0.0, now.cpu_seconds - before.cpu_seconds) / seconds,
            num_cpus=now.num_cpus,
            memory_bytes=now.memory_bytes,
            swap_bytes=now.swap_bytes,
            queued=min(1.0, max(0.0, now.queued_seconds - before.queued_seconds) / seconds),
            throttled=min(
                1.0, max(0.0, now.throttled_seconds - before.throttled_seconds) / seconds
            ),
            num_samples=now.samples,
            seconds=now.spent,
            loss=now.loss,
        )

    def share(self, *names: str) -> float:
        """Return the share of time of these activities together."""
        shares = self.shares
        return sum([shares[_POSITIONS[name]] for name in names])

    def to_json(self) -> dict[str, Any]:
        """Return the state for programs."""
        return {
            "index": self.index,
            "host": self.host,
            "pid": self.pid,
            "phase": self.phase,
            "step": self.step,
            "num_timed_steps": self.num_steps,
            "samples_per_second": round(self.samples_per_second, 3),
            "step_seconds": {
                "median": round(self.step_seconds, 9),
                "p95": round(self.p95_seconds, 9),
                "median_without_waiting": round(self.own_seconds, 9),
            },
            "shares": {
                name: round(share, 4) for name, share in zip(ACTIVITIES, self.shares, strict=True)
            },
            "cpus_used": round(self.cpu, 3),
            "num_cpus": self.num_cpus,
            "memory_bytes": self.memory_bytes,
            "swap_bytes": self.swap_bytes,
            "queued_share": round(self.queued, 4),
            "throttled_share": round(self.throttled, 4),
            "num_samples": self.num_samples,
            "seconds": {
                name: round(each, 3) for name, each in zip(ACTIVITIES, self.seconds, strict=True)
            },
            "loss": loss_to_json(self.loss),
        }

    def json_text(self) -> str:
        """Return ``to_json`` as text, which is kept: several callers need the text of a state."""
        if not self._json_text:
            object.__setattr__(self, "_json_text", json.dumps(self.to_json()))
        return self._json_text

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> InstanceState:
        """Read what ``to_json`` wrote."""
        steps = data["step_seconds"]
        return cls(
            index=data["index"],
            host=data["host"],
            pid=data["pid"],
            phase=data["phase"],
            step=data["step"],
            num_steps=data["num_timed_steps"],
            samples_per_second=data["samples_per_second"],
            step_seconds=steps["median"],
            p95_seconds=steps["p95"],
            own_seconds=steps["median_without_waiting"],
            shares=tuple(data["shares"][name] for name in ACTIVITIES),
            cpu=data["cpus_used"],
            num_cpus=data["num_cpus"],
            memory_bytes=data["memory_bytes"],
            swap_bytes=data["swap_bytes"],
            queued=data["queued_share"],
            throttled=data["throttled_share"],
            num_samples=data["num_samples"],
            seconds=tuple(data["seconds"][name] for name in ACTIVITIES),
            loss=loss_from_json(data["loss"]),
        )


def loss_to_json(loss: float | None) -> float | str | None:
    """Return a loss for a file: one that is no JSON number is "nan", "inf" or "-inf"."""
    return loss if loss is None or math.isfinite(loss) else str(loss)


def loss_from_json(loss: float | str | None) -> float | None:
    """Read what ``loss_to_json`` wrote.

    Raises:
        TypeError, ValueError: it is something else.
    """
    return None if loss is None else float(loss)


def median(values: Sequence[float]) -> float:
    """Return the lower median; 0 of nothing."""
    return percentile(values, 0.5)


def percentile(values: Sequence[float], part: float) -> float:
    """Return the least value that ``part`` of all do not exceed (nearest rank); 0 of nothing."""
    ordered = sorted(values)
    rank = -int(-part * len(ordered) // 1)  # rounded up
    return ordered[max(rank, 1) - 1] if ordered else 0.0
