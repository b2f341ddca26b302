"""Where the files of a run lie, and which run a user means.

runs/
  latest -> RUN
  RUN/
    report.json                   the report of all attempts
    report.html                   the same as a page
    timeline.json.gz              --timeline
    attempt-1/
      plan.json                   what ran, as --from-plan reads it
      steps.jsonl                 a line for each training step of each instance
      looks.jsonl                 a line for each look at all instances
      instance-0.values.jsonl     what popdist_py.Metrics logged
      instance-0.device.json      memory and schedule by the model of the device
      instance-0.stdout, .stderr  what instances wrote

Nothing here reads what is in a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from poprun_py.errors import UsageError

_ATTEMPT: Final = re.compile(r"attempt-(\d+)")
DEFAULT_PARENT: Final = "runs"
# The link to the newest run, beside the folders of all runs.
LATEST: Final = "latest"


@dataclass(frozen=True, slots=True)
class AttemptFiles:
    """The files of one attempt at a job; not all need be there."""

    folder: Path
    number: int

    @property
    def plan(self) -> Path:
        """What ran."""
        return self.folder / "plan.json"

    @property
    def steps(self) -> Path:
        """The training steps."""
        return self.folder / "steps.jsonl"

    @property
    def looks(self) -> Path:
        """The looks at all instances."""
        return self.folder / "looks.jsonl"

    def values(self) -> list[Path]:
        """Return what ``popdist_py.Metrics`` logged, by instance."""
        return sorted(self.folder.glob("instance-*.values.jsonl"))

    def outputs(self) -> list[Path]:
        """Return what instances wrote, their standard output before their standard error."""
        found = (*self.folder.glob("instance-*.stdout"), *self.folder.glob("instance-*.stderr"))
        return [path for path in found if path.stat().st_size]

    def devices(self) -> list[Path]:
        """Return what the model of the device says, by instance."""
        return sorted(self.folder.glob("instance-*.device.json"))


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of one run."""

    folder: Path

    @property
    def report(self) -> Path:
        """The report of all attempts, for programs."""
        return self.folder / "report.json"

    @property
    def page(self) -> Path:
        """The same for people."""
        return self.folder / "report.html"

    @property
    def timeline(self) -> Path:
        """The trace of --timeline."""
        return self.folder / "timeline.json.gz"

    def attempts(self) -> list[AttemptFiles]:
        """Return the attempts, the first one first."""
        found = [
            AttemptFiles(path, int(match[1]))
            for path in self.folder.iterdir()
            if (match := _ATTEMPT.fullmatch(path.name))
        ]
        return sorted(found, key=lambda each: each.number)


def find_run(named: str, parent: str = DEFAULT_PARENT) -> RunFiles:
    """Return the run that a user names.

    Args:
        named: the folder of a run, or its name in ``parent``; ``latest`` is the newest one.
        parent: where runs are that are given by name.

    Raises:
        UsageError: there is none.
    """
    if not named:
        raise UsageError(f"a run without a name: expected a folder, or the name of one in {parent}")
    for folder in (Path(named), Path(parent, named)):
        if (folder / "report.json").is_file():
            return RunFiles(folder.resolve())
    if Path(named).is_dir():
        raise UsageError(f"{named}: no run: it has no report.json, as folders of --output-dir have")
    raise UsageError(
        f"{named}: there is no such run: expected the folder of a run, or the name of one in "
        f"{parent} (--output-dir)"
    )
