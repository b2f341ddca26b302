"""The phases of one instance: launch, imports, and the time before, in and after its steps.

The activity "other" of the whole program does not tell where the program spent this time. In the
phase before the first step, "other" is preparation, such as reading a data set. Within the steps,
"other" is the program's own code. A step without a known begin, such as the first one, counts as a
part of the phase before the steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

# The activities of a program, in the order of popdist_py/activities/ledger.py. The activity
# "other" is the program's own code.
ACTIVITIES: Final = (
    "other", "compiling", "computing", "loading", "transferring",
    "reducing", "waiting", "updating", "saving", "validating",
)  # fmt: skip

# The parts of a restart in their order, as in report.json, with their names for users.
RESTART_PARTS: Final = {
    "ending": "ending",
    "pause": "pause",
    "starting": "start",
    "imports": "Python and imports",
    "compiling": "compiling",
    "state": "loading the state",
    "first_step": "preparation and first step",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """The seconds that an instance spent in each phase until now.

    Attributes:
        launch: From the start of the job to the start of the program: mpirun and the wrappers.
        imports: From the start of the program until the program began to count its time, usually
            by its call of ``init()``; None if the program has not counted yet.
        has_joined: Whether the program has called ``init()``. Without the call, ``imports`` also
            contains other preparation.
        program: From the start of the program until now.
        before_steps: The time of each activity from the begin of counting to the end of the first
            step. Keys are the names in ``ACTIVITIES``; activities without time are left out.
        in_steps: The time of each activity from the end of the first step to that of the last step.
        after_steps: The time of each activity since the end of the last step.
    """

    launch: float = 0.0
    imports: float | None = None
    has_joined: bool = True
    program: float = 0.0
    before_steps: Mapping[str, float]
    in_steps: Mapping[str, float]
    after_steps: Mapping[str, float]

    @classmethod
    def of(cls, message: Mapping[str, Any], launch: float) -> Phases:
        """Return the phases of an instance from a message of its wrapper.

        Args:
            message: The message of the wrapper, with the ``ledger`` of the program.
            launch: The seconds from the start of the job to the start of the program.
        """
        ledger, started = message.get("ledger"), message["started"]
        if ledger is None:
            program = (message["now"] - started) / 1e9
            empty: dict[str, float] = {}
            return cls(
                launch=launch, program=program, before_steps=empty, in_steps=empty, after_steps={}
            )
        whole = ledger["nanoseconds"]
        first = ledger.get("until_first") or whole
        last = ledger.get("until_last") or whole
        return cls(
            launch=launch,
            imports=max(0, ledger["began"] - started) / 1e9,
            has_joined=ledger.get("joined", True),
            program=(ledger["now"] - started) / 1e9,
            before_steps=_between([0] * len(ACTIVITIES), first),
            in_steps=_between(first, last),
            after_steps=_between(last, whole),
        )

    @property
    def has_steps(self) -> bool:
        """Whether the program has made a training step whose duration is known."""
        return bool(self.in_steps)

    def to_json(self) -> dict[str, Any]:
        """Return the phases as JSON values."""
        return {
            "launch": round(self.launch, 3),
            "imports": None if self.imports is None else round(self.imports, 3),
            "has_joined": self.has_joined,
            "program": round(self.program, 3),
            "before_steps": _rounded(self.before_steps),
            "in_steps": _rounded(self.in_steps),
            "after_steps": _rounded(self.after_steps),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Phases:
        """Create phases from JSON values that ``to_json`` returned."""
        imports = data["imports"]
        return cls(
            launch=float(data["launch"]),
            imports=None if imports is None else float(imports),
            has_joined=data["has_joined"] is True,
            program=float(data["program"]),
            before_steps=_seconds(data["before_steps"]),
            in_steps=_seconds(data["in_steps"]),
            after_steps=_seconds(data["after_steps"]),
        )


def _between(before: Sequence[int], after: Sequence[int]) -> dict[str, float]:
    spent = zip(ACTIVITIES, before, after, strict=True)
    return {name: (b - a) / 1e9 for name, a, b in spent if b > a}


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    rounded = {name: round(each, 3) for name, each in seconds.items()}
    return {name: each for name, each in rounded.items() if each}


def _seconds(data: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(data[name]) for name in ACTIVITIES if name in data}
