"""Reports that ``--json`` has written to a file, and the figures of a report in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

__all__ = ["SavedIpu", "SavedReports", "read_saved_reports", "saved_reports"]

_MOST_BYTES: Final = 64 << 20
_PART_BYTES: Final = 1 << 20
# A number above this limit is not a model's figure, and quotients of such numbers might be
# infinite.
_MOST: Final = 1e18
_NOT_A_REPORT: Final = "the file is not a report that python -m popdist_py.ipu --json has written"


@dataclass(frozen=True, slots=True)
class SavedIpu:
    """The memory and the work of one IPU in a saved report.

    Attributes:
        ipu: The number of the IPU.
        needed: The bytes that the program needs on all tiles.
        capacity: The bytes of the memory of all tiles.
        fullest_tile: The bytes that the program needs on the fullest tile.
        by_category: The bytes of each category of memory.
        busy: The share of a call in which the IPU computes, from 0 to 1.
        cycles: The clock cycles of a call by kind of activity; empty in older reports.
    """

    ipu: int
    needed: int
    capacity: int
    fullest_tile: int
    by_category: Mapping[str, int]
    busy: float
    cycles: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SavedReports:
    """The figures about memory and time that a comparison shows of a saved report.

    Attributes:
        name: The name of the model or of the file.
        device: The name of the type of IPU, such as "mk2".
        tile_bytes: The memory of one tile in bytes.
        verdict: Whether the model fits, in the words of the report.
        ipus: The figures of each IPU.
        throughput: The samples per second of all replicas.
        cycles: The clock cycles of one call.
        seconds: The duration of one call.
        samples: The samples of one call of all replicas.
        options: The options that the user gave, with their values.
    """

    name: str
    device: str
    tile_bytes: int
    verdict: str
    ipus: tuple[SavedIpu, ...]
    throughput: float
    cycles: int
    seconds: float
    samples: int
    options: Mapping[str, str]

    @property
    def share(self) -> float:
        """The used share of the fullest tile of all IPUs."""
        return max(own.fullest_tile for own in self.ipus) / self.tile_bytes


def read_saved_reports(path: Path) -> SavedReports:
    """Return the reports of a file that ``python -m popdist_py.ipu --json`` has written.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file contains something else. The message is one short line.
    """
    text = bytearray()
    with path.open("rb") as file:
        # A pipe may be endless, so the file is read in parts.
        while part := file.read(_PART_BYTES):
            text += part
            if len(text) > _MOST_BYTES:
                raise ValueError(_NOT_A_REPORT)
    try:
        document = json.loads(text.decode())
    except (ValueError, RecursionError):
        raise ValueError(f"{_NOT_A_REPORT}: the text of the file is not JSON") from None
    return saved_reports(document, path.name)


def _count(value: Any) -> int:
    """Return a JSON value as an integer from 0 on that charts can draw; else raise ValueError."""
    return int(_amount(value))


def _amount(value: Any) -> float:
    """Return a JSON value as a number from 0 on that charts can draw; else raise ValueError."""
    number = float(value)
    if not 0 <= number <= _MOST:
        raise ValueError
    return number


def saved_reports(document: Any, name: str) -> SavedReports:
    """Return the figures of a parsed report; ``name`` is used if the report has no model name.

    Raises:
        ValueError: The document is not a report. The message is one short line.
    """
    try:
        memory, execution = document["memory"], document["execution"]
        busy = {_count(own["ipu"]): _amount(own["busy"]) for own in execution["ipus"]}
        cycles = {
            _count(own["ipu"]): {str(k): _amount(v) for k, v in own["cycles"].items()}
            for own in document.get("cycles_by_kind", [])
        }
        verdict = document.get("verdict")
        if verdict is None:
            verdict = "fits" if memory["fits"] else "does not fit"
        options = document.get("options", {})
        found = SavedReports(
            name=str(document.get("model", name)),
            device=str(memory["device"]),
            tile_bytes=_count(memory["tile_bytes"]),
            verdict=str(verdict),
            ipus=tuple(
                SavedIpu(
                    ipu=_count(own["ipu"]),
                    needed=_count(own["needed"]),
                    capacity=_count(own["capacity"]),
                    fullest_tile=max(_count(own["fullest_tile"]), _count(own["fullest_io_tile"])),
                    by_category={str(k): _count(v) for k, v in own["by_category"].items()},
                    busy=busy[_count(own["ipu"])],
                    cycles=cycles.get(_count(own["ipu"]), {}),
                )
                for own in memory["ipus"]
            ),
            throughput=_amount(execution["samples_per_second"]),
            cycles=_count(execution["cycles"]),
            seconds=_amount(execution["seconds"]),
            samples=_count(execution["samples"]),
            options={str(key): str(value) for key, value in options.items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise ValueError(_NOT_A_REPORT) from None
    if not found.ipus or found.tile_bytes < 1 or any(own.capacity < 1 for own in found.ipus):
        raise ValueError(_NOT_A_REPORT)
    return found
