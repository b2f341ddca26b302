"""What a row of the soak's table is: what is done to a job, and what has to follow."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools.soak.jobs import Job

NUMPY, POPTORCH = "numpy", "poptorch"
PROGRAMS = {
    NUMPY: Path(__file__).with_name("program.py"),
    POPTORCH: Path(__file__).with_name("model_program.py"),
}


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What has to follow a fault: one of ``codes`` within ``seconds``, and a report that says it.

    ``says`` is a pattern in the report. ``names``: an instance that it blames is the one drawn.
    """

    codes: tuple[int, ...]
    seconds: float
    names: bool = False
    says: str = ""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A fault that was done: when, in which phase, and to which instance.

    ``missed``: what it is done to was gone, and the job has to end well. ``at`` is what time is
    counted from.
    """

    at: float
    phase: str = ""
    instance: int | None = None
    missed: bool = False
    what: str = ""


Act = Callable[[Job, random.Random], Done]
Prepare = Callable[[Job, random.Random], Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of fault.

    ``by_phase`` are exceptions from ``expected``. ``weight`` is how often the row comes, beside
    others. ``prepare`` does something to the place before the job starts, and returns variables for
    it; ``mend`` undoes what was done, so that it can go on.
    """

    title: str
    act: Act
    expected: Expected
    by_phase: Mapping[str, Expected] = field(default_factory=dict)
    hosts: int = 1
    weight: int = 1
    program: str = NUMPY
    options: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    prepare: Prepare | None = None
    mend: Callable[[Job], None] | None = None
    needs: Callable[[], str] = lambda: ""  # says why the row cannot be done here
    resumes: bool = True
    swept: bool = False  # files stay until the next start of the same user

    def expected_of(self, done: Done) -> Expected:
        """Return what has to follow a fault as it was done."""
        if done.missed:
            return Expected(codes=(0,), seconds=max(30.0, self.expected.seconds))
        return self.by_phase.get(done.phase, self.expected)
