"""The state of one instance, such as its speed, computed from two messages of its wrapper."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from poprun_py.display.formatting import loss_from_json, loss_to_json
from poprun_py.running.watch.phases import ACTIVITIES, Phases

_POSITIONS: Final = {name: position for position, name in enumerate(ACTIVITIES)}
# If an instance has been waiting or loading data for longer than this, its phase is shown as
# waiting or loading. Shorter times of waiting or loading are a part of every training step.
_LONG_NANOSECONDS = 10**9
_P95 = 0.95
# The fields of an instance state whose JSON keys are equal to their names.
_SAME_IN_JSON: Final = (
    "index", "host", "pid", "phase", "step", "samples_per_second",
    "num_cpus", "memory_bytes", "swap_bytes", "num_samples",
)  # fmt: skip
# The ledger (record of steps and activities) that is assumed for a program that does not keep one.
_EMPTY_LEDGER: Final[Mapping[str, Any]] = {
    "began": None, "activity": 0, "since": 0, "nanoseconds": [0] * len(ACTIVITIES),
    "samples": 0, "timed": 0, "steps": [], "own": [],
}  # fmt: skip


def read_at(message: Mapping[str, Any]) -> float:
    """Return the time when a wrapper read its counters, in seconds on the clock of the host."""
    return float((message.get("ledger") or message)["now"]) / 1e9


def num_timed_steps(message: Mapping[str, Any] | None) -> int:
    """Return the number of timed training steps that a message counts; 0 without a message."""
    return int(((message or {}).get("ledger") or _EMPTY_LEDGER)["timed"])


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceState:
    """Speed and resource use of an instance between two wrapper messages; times in seconds.

    Attributes:
        step: The number of the last completed training step; None if unknown.
        num_steps: The number of training steps whose duration was measured.
        step_seconds: The median duration of the last training steps; 0 if no step was timed yet.
        own_seconds: The median duration of the last ten training steps, less the time of waiting
            for other instances.
        shares: The fractions of the time that the instance spent on each of ``ACTIVITIES``.
        queued: The fraction of the time that the program was ready to run, but waited for a CPU.
        throttled: The fraction of the time that the program's control group had used up its CPU
            quota and was not allowed to run.
        num_samples: The number of samples that the program has trained on since it began to count.
        seconds: The time that the program has spent on each of ``ACTIVITIES`` since it began to
            count.
        busy: The mean number of the instance's CPUs that any process of the machine used; 0 if
            unknown. The instance itself used ``cpu`` of them.
        launch: The seconds from the start of the job to the start of the program.
        phases: The time of the launch, and before, in and after the steps; None if unknown.
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
    busy: float = 0.0
    launch: float = 0.0
    phases: Phases | None = None
    _json_text: str = field(default="", init=False, repr=False, compare=False)

    def after(self, before: Mapping[str, Any] | None, now: Mapping[str, Any]) -> InstanceState:
        """Return the instance's state over the time between two messages of its wrapper.

        If ``before`` is None, the state covers the time from the program's start.
        """
        # A control group may be older than the program, so its counter of throttled time may
        # include earlier times. A state that begins with the program therefore shows no throttling.
        throttled = now.get("throttled_seconds", 0.0)
        before = before or {"now": now["started"], "throttled_seconds": throttled}
        ledger = now.get("ledger") or _EMPTY_LEDGER
        spent_before = (before.get("ledger") or _EMPTY_LEDGER)["nanoseconds"]
        spent = [max(0, b - a) for a, b in zip(spent_before, ledger["nanoseconds"], strict=True)]
        all_spent = sum(spent) or 1
        seconds = max(read_at(now) - read_at(before), 1e-9)

        def mean_of(counter: str) -> float:
            used: float = now.get(counter, 0.0) - before.get(counter, 0.0)
            return max(0.0, used) / seconds

        steps = [each / 1e9 for each in ledger["steps"]]
        mean = sum(steps) / len(steps) if steps else 0.0
        step, num_calls = (now.get("progress") or (None, 0))[:2]
        return replace(
            self,
            phase=_phase(ledger, num_calls),
            step=step,
            num_steps=ledger["timed"],
            # One is added to the number of timed steps, because the samples include the first step,
            # which is not timed.
            samples_per_second=ledger["samples"] / (ledger["timed"] + 1) / mean if mean else 0.0,
            step_seconds=median(steps),
            p95_seconds=percentile(steps, _P95),
            own_seconds=median(ledger["own"]) / 1e9,
            shares=tuple(each / all_spent for each in spent),
            cpu=mean_of("cpu_seconds"),
            num_cpus=len(now.get("cpus", ())),
            memory_bytes=now.get("memory_bytes", 0),
            swap_bytes=now.get("swap_bytes", 0),
            queued=min(1.0, mean_of("queued_seconds")),
            throttled=min(1.0, mean_of("throttled_seconds")),
            num_samples=ledger["samples"],
            seconds=tuple(each / 1e9 for each in ledger["nanoseconds"]),
            loss=ledger.get("loss"),
            busy=mean_of("busy_seconds"),
            phases=Phases.of(now, self.launch),
        )

    def share(self, *names: str) -> float:
        """Return the fraction of the time that the instance spent on the named activities."""
        shares = self.shares
        return sum([shares[_POSITIONS[name]] for name in names])

    def to_json(self) -> dict[str, Any]:
        """Return the instance's state as JSON values."""
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
            **({"cpus_busy": round(self.busy, 3)} if self.busy else {}),
            **({} if self.phases is None else {"phases": self.phases.to_json()}),
        }

    def json_text(self) -> str:
        """Return the instance's state as JSON text, which is cached for later calls."""
        if not self._json_text:
            object.__setattr__(self, "_json_text", json.dumps(self.to_json()))
        return self._json_text

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> InstanceState:
        """Create an instance state from JSON values that ``to_json`` returned."""
        steps = data["step_seconds"]
        return cls(
            **{name: data[name] for name in _SAME_IN_JSON},
            num_steps=data["num_timed_steps"],
            step_seconds=steps["median"],
            p95_seconds=steps["p95"],
            own_seconds=steps["median_without_waiting"],
            shares=tuple(data["shares"][name] for name in ACTIVITIES),
            cpu=data["cpus_used"],
            queued=data["queued_share"],
            throttled=data["throttled_share"],
            seconds=tuple(data["seconds"][name] for name in ACTIVITIES),
            loss=loss_from_json(data["loss"]),
            busy=data.get("cpus_busy", 0.0),
            phases=Phases.from_json(data["phases"]) if "phases" in data else None,
        )


def _phase(ledger: Mapping[str, Any], num_calls: int) -> str:
    if ledger["began"] is None:
        return "running"
    name = ACTIVITIES[ledger["activity"]]
    if name in ("compiling", "saving", "validating"):
        return name
    if name in ("waiting", "loading") and ledger["now"] - ledger["since"] > _LONG_NANOSECONDS:
        return name
    if num_calls:
        return "validating"
    return "training" if ledger["timed"] else "starting"


def median(values: Sequence[float]) -> float:
    """Return the lower median of ``values``; 0 for an empty sequence."""
    return percentile(values, 0.5)


def percentile(values: Sequence[float], part: float) -> float:
    """Return a percentile of ``values`` by the nearest-rank method; 0 for an empty sequence.

    ``part`` is between 0 and 1, such as 0.95 for the 95th percentile.
    """
    ordered = sorted(values)
    rank = math.ceil(part * len(ordered))
    return ordered[max(rank, 1) - 1] if ordered else 0.0
