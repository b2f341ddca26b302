"""The part of docs/performance.md on collectives within a host, from benchmarks/allreduce.py.

How many rows reach a target is counted here. Nothing here measures or writes files.
"""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]

ALL_REDUCE = """
## All-reduce within a host

Microseconds to sum a float32 array over all instances (`benchmarks/allreduce.py`), with calls one
after the other on the same arrays. *window*: ours on an array that lives in memory shared by the
host's instances, as gradients do; *ours*: on any other array; *copy*: every instance copies its
array once, at the same time as the others.
"""
COLD = """
The same with cold caches: before each call every instance writes 64 MB of other memory, which takes
each its own time of some milliseconds. The time is that from the last instance's arrival until the
last one has its result.
"""
REWRITTEN = """
The same after the arrays were rewritten: each way has an array of its own, ours a torch tensor.
Before each call the instances meet, and each rewrites the arrays of all ways. The time is that from
the last instance's arrival until the last one has its result.
"""
HOT_HEAD = """
| instances | size | window | ours | MPI | gloo | copy | gloo / window | MPI / window | MPI / ours |
|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""
COLD_HEAD = """
| instances | size | window | ours | MPI | copy | MPI / window | MPI / ours |
|--:|--:|--:|--:|--:|--:|--:|--:|
"""
MOVES = """
## Other collectives within a host

Microseconds, likewise, for an array in a process's own memory; the size is that of all_gather's
result, and of what reduce_scatter is given. MPI, too, gathers and scatters into a new array.
*rewritten*: after all arrays were rewritten, as above.

| collective | instances | size | ours | MPI | MPI / ours | ours, cold | MPI, cold | MPI / ours \
| ours, rewritten | MPI, rewritten | MPI / ours |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""
TARGETS = """
## Targets of the collectives within a host

How many of the rows above reach each target, in all settings.

| target | all_reduce, window | all_reduce, ours | broadcast | all_gather | reduce_scatter |
|---|--:|--:|--:|--:|--:|
"""
LIMIT = """
Not every row can reach every target. An all-reduce has to read and write as much as one copy. In
{impossible} of the {number} rows of private arrays from 16 MB, half of MPI's time is less than the
copy measured beside it. all_gather and reduce_scatter, ours and MPI's, return new arrays: the
kernel clears their pages, which the copy beside them does not pay for.

Every call of ours begins with a meeting, in which calls that differ and instances that ended are
found. MPI has none: the root of a broadcast goes on before the others arrive, and with cold caches
those that arrived early have their data before the last one comes. With fewer cores than instances
a meeting lets every process run in turn; that is most of the time of small arrays. With a core for
each instance the time of small arrays is that of Python: from 3 to 10 microseconds a call, in which
MPI's C code takes 2 or 3. A tensor takes 2 microseconds more than an array, since NumPy has to be
shown its memory.
"""
PYTHON = """
The Python part of a call should take less than 8 microseconds. It is measured as the time of a hot
call that has nothing to move, one number for each of two instances, meetings included; *in slices*
is the way of large arrays, with three meetings:
{times}.
"""
_TEXTS = {"hot": ALL_REDUCE, "cold": COLD, "rewritten": REWRITTEN}
_FROM_TWICE, _FROM_COPY = 16_000_000, 64_000_000


def collectives_within_host(rows: list[Row]) -> list[str]:
    """Return the tables of what was measured within a host; none for what was not."""
    tables = [line for setting in _TEXTS for line in _all_reduce(rows, setting)]
    return [*tables, *_moves(rows), *_targets(rows), *_python_part(rows)]


def size_of(count: int) -> str:
    """Return a size as people write it."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.0f} {unit}"
    return f"{count} B"


def table_line(cells: list[Any]) -> str:
    """Return one line of a table."""
    return "| " + " | ".join(map(str, cells)) + " |\n"


def _all_reduce(rows: list[Row], setting: str) -> list[str]:
    chosen = [row for row in rows if (row["collective"], row["setting"]) == ("all_reduce", setting)]
    if not chosen:
        return []
    with_gloo = setting != "cold"
    parts = [_TEXTS[setting], HOT_HEAD if with_gloo else COLD_HEAD]
    gloo, against_gloo = (["gloo"], ["window/gloo"]) if with_gloo else ([], [])
    for row in chosen:
        cells = [row["instances"], size_of(row["bytes"])]
        cells += [f"{row[f'{way}_us']:,.0f}" for way in ("window", "ours", "mpi", *gloo, "copy")]
        cells += [f"{row[pair]:.1f}" for pair in (*against_gloo, "window/mpi", "ours/mpi")]
        parts.append(table_line(cells))
    return parts


def _moves(rows: list[Row]) -> list[str]:
    settings: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["collective"] != "all_reduce" and row["setting"] in _TEXTS:
            case = (row["collective"], row["instances"], size_of(row["bytes"]))
            settings.setdefault(case, {})[row["setting"]] = row
    parts = [MOVES] if settings else []
    for case, of_setting in settings.items():
        cells = list(case)
        for setting in _TEXTS:
            if setting not in of_setting:
                cells += [""] * 3
                continue
            row = of_setting[setting]
            times = [f"{row[f'{way}_us']:,.0f}" for way in ("ours", "mpi")]
            cells += [*times, f"{row['ours/mpi']:.1f}"]
        parts.append(table_line(cells))
    return parts


def _not_slower_than_mpi(row: Row, way: str) -> bool:
    return bool(row[f"{way}_us"] <= max(row["mpi_us"] + 5, row["mpi_us"] * 1.05))


def _twice_as_fast_as_mpi(row: Row, way: str) -> bool:
    return bool(2 * row[f"{way}_us"] <= row["mpi_us"])


def _nearly_as_fast_as_a_copy(row: Row, way: str) -> bool:
    return bool(0.9 * row[f"{way}_us"] <= row["copy_us"])


def _targets(rows: list[Row]) -> list[str]:
    """Return the table of how many rows reach their targets, and what stands in the way."""
    timed = [row for row in rows if row["setting"] in _TEXTS]
    if not any(row["setting"] == "cold" for row in timed):
        return []
    targets = (
        ("no slower than MPI by more than 5 us or 5 %", 0, _not_slower_than_mpi),
        ("from 16 MB twice as fast as MPI", _FROM_TWICE, _twice_as_fast_as_mpi),
        ("from 64 MB at least 0.9 of a copy's speed", _FROM_COPY, _nearly_as_fast_as_a_copy),
    )
    columns = [("all_reduce", "window"), ("all_reduce", "ours")]
    columns += [(name, "ours") for name in ("broadcast", "all_gather", "reduce_scatter")]
    parts = [TARGETS]
    for text, from_bytes, reached in targets:
        cells = [text]
        for collective, way in columns:
            asked = [
                row
                for row in timed
                if row["collective"] == collective and row["bytes"] >= from_bytes
            ]
            count = sum(reached(row, way) for row in asked)
            cells.append(f"{count} of {len(asked)}")
        parts.append(table_line(cells))
    large = [
        row for row in timed if row["collective"] == "all_reduce" and row["bytes"] >= _FROM_TWICE
    ]
    impossible = sum(row["mpi_us"] / 2 < row["copy_us"] for row in large)
    return [*parts, LIMIT.format(impossible=impossible, number=len(large))]


def _python_part(rows: list[Row]) -> list[str]:
    """Return the sentence on the Python part of calls."""
    times = []
    for row in rows:
        if (row["setting"], row["instances"]) == ("python", 2):
            times.append(f"{row['collective']} {row['ours_us']:.1f}")
            if "slices_us" in row:
                times.append(f"all_reduce in slices {row['slices_us']:.1f}")
    return [PYTHON.format(times=", ".join(times))] if times else []
