"""Reports that ``--json`` has written to a file, and the section that compares two reports."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from popdist_py.html_pages.charts import Bars, Mark, bars
from popdist_py.html_pages.page import Cell, Part, Section, Sentence, Table
from popdist_py.ipu.page.charted_values import category_style, percent

__all__ = ["SavedIpu", "SavedReports", "comparison_section", "read_saved_reports", "saved_reports"]

_MOST_BYTES: Final = 64 << 20
_PART_BYTES: Final = 1 << 20
# Larger numbers are not figures of a model, and their quotients might not be finite.
_MOST: Final = 1e18
_MOST_IPUS: Final = 64
_NOT_A_REPORT: Final = "it is not a report that --json has written"
# A row of the comparison: a quantity, its value in both reports, and the difference.
_Row: TypeAlias = tuple[str, str | Cell, str | Cell, str]


@dataclass(frozen=True, slots=True)
class SavedIpu:
    """The memory and the work of one IPU in a saved report; bytes, and shares between 0 and 1."""

    ipu: int
    needed: int
    capacity: int
    fullest_tile: int
    by_category: Mapping[str, int]
    busy: float


@dataclass(frozen=True, slots=True)
class SavedReports:
    """The figures of a saved report about memory and time that a comparison shows.

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
        raise ValueError(f"{_NOT_A_REPORT}: its text is not JSON") from None
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


# --- comparison ---------------------------------------------------------------------------------


def comparison_section(this: SavedReports, other: SavedReports) -> Section:
    """Return the section that shows two reports side by side, with their differences."""
    rows = [
        (
            "verdict",
            this.verdict,
            other.verdict,
            "" if this.verdict == other.verdict else "differs",
        ),
        ("device", this.device, other.device, "" if this.device == other.device else "differs"),
        _share_row("fullest tile", this.share, other.share),
        _row("IPUs of a replica", len(this.ipus), len(other.ipus), "{:,.0f}"),
        _row("fullest IPU, MB", _most(this), _most(other), "{:,.1f}"),
        *_category_rows(this, other),
        _row("samples/s", this.throughput, other.throughput, "{:,.1f}"),
        _row("samples of a call", this.samples, other.samples, "{:,.0f}"),
        _row("milliseconds of a call", this.seconds * 1e3, other.seconds * 1e3, "{:,.1f}"),
        _row("cycles of a call", this.cycles, other.cycles, "{:,.0f}"),
        _share_row("busy, mean of the IPUs", _busy(this), _busy(other)),
    ]
    parts: list[Part] = [
        Sentence(f"This report is {this.name}. The other report is {other.name}."),
        Table("Comparison", ("quantity", "this report", "other report", "difference"), rows),
        _chart(this, other),
    ]
    changed = _changed_options(this, other)
    if changed:
        columns = ("option that differs", "this report", "other report")
        parts.append(Table("Different options", columns, changed))
    return Section("Comparison", tuple(parts))


def _row(name: str, this: float, other: float, form: str) -> _Row:
    if this == other:
        difference = ""
    elif other:
        difference = f"{(this - other) / other:+.1%}"
    else:
        difference = "only in this report"
    return name, form.format(this), form.format(other), difference


def _share_row(name: str, this: float, other: float) -> _Row:
    points = (this - other) * 100
    difference = f"{points:+.1f} points" if abs(points) >= 0.05 else ""
    first, second = (Cell(percent(one), share=min(1.0, max(0.0, one))) for one in (this, other))
    return name, first, second, difference


def _category_rows(this: SavedReports, other: SavedReports) -> Iterator[_Row]:
    sums = [_by_category(one) for one in (this, other)]
    for name in dict.fromkeys([*sums[0], *sums[1]]):
        first, second = (one.get(name, 0) for one in sums)
        if first or second:
            yield _row(f"{name} on all IPUs, MB", first / 1e6, second / 1e6, "{:,.1f}")


def _by_category(reports: SavedReports) -> dict[str, int]:
    sums: dict[str, int] = {}
    for own in reports.ipus:
        for name, size in own.by_category.items():
            sums[name] = sums.get(name, 0) + size
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _most(reports: SavedReports) -> float:
    return max(own.needed for own in reports.ipus) / 1e6


def _busy(reports: SavedReports) -> float:
    return sum(own.busy for own in reports.ipus) / len(reports.ipus)


def _chart(this: SavedReports, other: SavedReports) -> Part:
    ipus = [("this", own) for own in this.ipus[:_MOST_IPUS]]
    ipus += [("other", own) for own in other.ipus[:_MOST_IPUS]]
    names = list(dict.fromkeys([*_by_category(this), *_by_category(other)]))
    summary = (
        f"The fullest IPU needs {_most(this):,.1f} MB in this report and {_most(other):,.1f} MB in "
        "the other one."
    )
    capacity = min(own.capacity for _, own in ipus) / 1e6
    return bars(
        "Memory of both reports by category",
        summary,
        [f"{which}: IPU {own.ipu}" for which, own in ipus],
        [
            Bars(name, [own.by_category.get(name, 0) / 1e6 for _, own in ipus],
                 *category_style(name))
            for name in names
        ],
        unit="MB",
        marks=[Mark(capacity, "available", is_left=True)],
    )  # fmt: skip


def _changed_options(this: SavedReports, other: SavedReports) -> Sequence[tuple[str, str, str]]:
    names = dict.fromkeys([*this.options, *other.options])
    rows = ((name, this.options.get(name, "-"), other.options.get(name, "-")) for name in names)
    return [row for row in rows if row[1] != row[2]]
