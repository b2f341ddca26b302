"""Names of the timeline's files, which instances write during one attempt at a job.

The program of instance 3 writes its spans to ``instance-3.0.spans``. Its child processes write
their spans to ``instance-3.1.spans`` and so on. The file ``instance-3.torch-4711-0.json`` is a
trace of torch.profiler. The file ``instance-3.ended`` contains the time when the program ended, in
nanoseconds of its host's clock. The file ``instance-3.clock`` contains samples that compare the
clock of the instance's host with the trace's clock.

The module ``span_file`` reads and writes files of spans.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from popdist_py.timeline.clocks import LOCAL, ClockLine, ClockSample, clock_line

SPANS_SUFFIX: Final = ".spans"
TORCH_SUFFIX: Final = ".json"
# The first bytes of a trace, compressed or not, which may be replaced by another trace.
TRACE_BEGINNINGS: Final = (b"\x1f\x8b", b"{")
_PROGRAM_FILE: Final = re.compile(r"instance-(\d+)\..*")


def instance_prefix(folder: Path, instance: int) -> Path:
    """Return the common beginning of the paths of an instance's files."""
    return folder / f"instance-{instance}"


def instances_in(folder: Path) -> list[int]:
    """Return the sorted indices of the instances that have files in a folder."""
    matches = (_PROGRAM_FILE.fullmatch(path.name) for path in folder.glob("instance-*"))
    return sorted({int(match[1]) for match in matches if match})


def clock_path(prefix: Path) -> Path:
    """Return the path of the file with the clock samples of an instance's host."""
    return prefix.with_name(f"{prefix.name}.clock")


def end_path(prefix: Path) -> Path:
    """Return the path of the file with the time of the program's end, which the wrapper writes."""
    return prefix.with_name(f"{prefix.name}.ended")


def read_end(path: Path) -> int | None:
    """Return the time when a program ended, on its host's monotonic clock, or None if unknown."""
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None


def save_clock(path: Path, samples: Sequence[ClockSample]) -> None:
    """Write clock samples of another host to a file.

    Raises:
        OSError: The file cannot be written.
    """
    path.write_text(json.dumps([[s.sent, s.answer, s.received] for s in samples]), "utf-8")


def read_clock(path: Path) -> ClockLine | None:
    """Read a file of clock samples, and return the conversion to the trace's clock.

    Returns:
        ``LOCAL`` if the file does not exist, and None if the file does not contain valid samples.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
        return clock_line([ClockSample(*map(int, sample)) for sample in found])
    except FileNotFoundError:
        return LOCAL
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
