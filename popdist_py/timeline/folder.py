"""The folder in which the instances of one attempt at a job record: what its files are called.

    instance-3.0.spans              the program's spans; .1.spans and so on of what it starts
    instance-3.torch-4711-0.json    a trace of torch.profiler
    instance-3.ended                when the program ended, in nanoseconds of its host's clock
    instance-3.clock                how the host's clock is compared with that of the trace

Nothing here reads spans.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from popdist_py.timeline.clocks import LOCAL, ClockLine, ClockSample, clock_line

__all__ = [
    "SPANS_SUFFIX",
    "TORCH_SUFFIX",
    "clock_path",
    "end_path",
    "instance_prefix",
    "instances_in",
    "read_clock",
    "read_end",
    "save_clock",
]

SPANS_SUFFIX: Final = ".spans"
TORCH_SUFFIX: Final = ".json"
_PROGRAM_FILE: Final = re.compile(r"instance-(\d+)\..*")


def instance_prefix(folder: Path, instance: int) -> Path:
    """Return what the paths of an instance's files begin with."""
    return folder / f"instance-{instance}"


def instances_in(folder: Path) -> list[int]:
    """Return the instances that have files in a folder, in order."""
    matches = (_PROGRAM_FILE.fullmatch(path.name) for path in folder.glob("instance-*"))
    return sorted({int(match[1]) for match in matches if match})


def clock_path(prefix: Path) -> Path:
    """Return where the samples of an instance's clock are."""
    return prefix.with_name(f"{prefix.name}.clock")


def end_path(prefix: Path) -> Path:
    """Return where the launcher's wrapper notes when an instance's program has ended."""
    return prefix.with_name(f"{prefix.name}.ended")


def read_end(path: Path) -> int | None:
    """Return when a program ended, on its host's monotonic clock; None if nobody knows."""
    try:
        return int(path.read_bytes())
    except (OSError, ValueError):
        return None


def save_clock(path: Path, samples: Sequence[ClockSample]) -> None:
    """Write what is known of another host's clock.

    Raises:
        OSError: that is not possible.
    """
    path.write_text(json.dumps([[s.sent, s.answer, s.received] for s in samples]), "utf-8")


def read_clock(path: Path) -> ClockLine | None:
    """Return how an instance's clock becomes that of the trace.

    Returns:
        The trace's own where there is no file; None for a file that tells nothing.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
        return clock_line([ClockSample(*map(int, sample)) for sample in found])
    except FileNotFoundError:
        return LOCAL
    except (OSError, ValueError, TypeError, OverflowError, RecursionError):
        return None
