"""The files of a run in ``--output-dir``, and the lookup of a run by name or folder.

runs/
  latest -> RUN                   the newest run
  RUN/
    report.json                   the report of all attempts, for programs
    report.html                   the report as a page, for people
    timeline.json.gz              the trace of --timeline
    attempt-1/
      plan.json                   the plan of the attempt, which --from-plan reads
      steps.jsonl                 a line for each training step of each instance
      looks.jsonl                 a line for each periodic observation of all instances
      instance-0.values.jsonl     values that the program logged with popdist_py.Metrics
      instance-0.device.json      memory and schedule in the model of the device
      instance-0.stdout, .stderr  output of the instance, or the newest part of long output
      instance-0.stdout.1, .5     the first part and later parts of long output (--log-limit)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from popdist_py.errors import counted
from poprun_py.errors import UsageError, nearest

_ATTEMPT: Final = re.compile(r"attempt-(\d+)")
DEFAULT_PARENT: Final = "runs"
# An error lists at most this many runs.
_MOST_NAMES: Final = 5


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The paths of the files of one run."""

    folder: Path

    @property
    def report(self) -> Path:
        """The path of the report of all attempts as JSON."""
        return self.folder / "report.json"

    @property
    def page(self) -> Path:
        """The path of the report as an HTML page."""
        return self.folder / "report.html"

    @property
    def timeline(self) -> Path:
        """The path of the trace that --timeline recorded."""
        return self.folder / "timeline.json.gz"

    def attempts(self) -> dict[int, Path]:
        """Return the folders of the run's attempts, keyed by the numbers of the attempts."""
        found = ((path, _ATTEMPT.fullmatch(path.name)) for path in self.folder.iterdir())
        return dict(sorted((int(match[1]), path) for path, match in found if match))


def run_in(folder: Path) -> RunFiles | None:
    """Return the files of the run whose folder is ``folder``; None if it is not a run's folder."""
    files = RunFiles(folder)
    return RunFiles(folder.resolve()) if files.report.is_file() else None


def find_run(
    named: str, parent: str = DEFAULT_PARENT, parent_source: str = "--output-dir"
) -> RunFiles:
    """Return the files of a run that is given by its name or folder.

    Args:
        named: The path of the run's folder, or the name of a folder in ``parent``.
        parent: The folder that contains the folders of all runs.
        parent_source: The name by which the user set or can set ``parent``, for errors.

    Raises:
        UsageError: The run does not exist.
    """
    if not named:
        raise UsageError(
            "the name of the run is empty: expected the folder of a run, or the name of a run "
            f"in {parent}"
        )
    for folder in (Path(named), Path(parent, named)):
        if (run := run_in(folder)) is not None:
            return run
    if Path(named).is_dir():
        raise UsageError(f"{named} is not the folder of a run: it contains no report.json")
    names = _names_in(Path(parent))
    raise UsageError(
        f"{named}: there is no such run{nearest(named, names)}: expected the folder of a run, or "
        f"the name of a run in {parent} ({parent_source}), which has {_names_text(names)}"
    )


def _names_in(parent: Path) -> list[str]:
    """Return the names of the runs in a folder, the newest first."""
    try:
        times = {
            each.name: RunFiles(each).report.stat().st_mtime_ns
            for each in parent.iterdir()
            if not each.is_symlink() and RunFiles(each).report.is_file()
        }
    except OSError:
        return []
    return sorted(times, key=lambda name: (-times[name], name))


def _names_text(names: list[str]) -> str:
    if not names:
        return "no runs"
    if len(names) > _MOST_NAMES:
        return (
            f"{', '.join(names[:_MOST_NAMES])} and {counted(len(names) - _MOST_NAMES, 'older run')}"
        )
    return ", ".join(names)
