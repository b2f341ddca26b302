"""A reader of traces, as strict as Perfetto's: the events of a trace as tables for SQL.

The tables and columns are those of Perfetto's trace processor that the tests ask for: ``process``,
``thread``, ``thread_track``, ``slice``, ``flow``, ``counter``. The rules are those of its importer
of JSON: spans of a row have to nest, or they are dropped; an arrow needs an open span at both ends.
With ``TRACE_PROCESSOR`` naming the program ``trace_processor_shell``, it is asked instead.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sqlite3
import subprocess
from collections import defaultdict
from pathlib import Path

_SCHEMA = """
CREATE TABLE process (upid INTEGER PRIMARY KEY, pid INTEGER, name TEXT);
CREATE TABLE thread (utid INTEGER PRIMARY KEY, tid INTEGER, name TEXT, upid INTEGER);
CREATE TABLE thread_track (id INTEGER PRIMARY KEY, utid INTEGER);
CREATE TABLE slice (id INTEGER PRIMARY KEY, ts INTEGER, dur INTEGER, track_id INTEGER,
                    name TEXT, category TEXT, depth INTEGER, parent_id INTEGER);
CREATE TABLE flow (id INTEGER PRIMARY KEY, slice_out INTEGER, slice_in INTEGER);
CREATE TABLE counter (ts INTEGER, value REAL);
"""


def query(path: Path, sql: str) -> list[tuple[str, ...]]:
    """Return the rows that a query of a trace gives, each value as text."""
    shell = os.environ.get("TRACE_PROCESSOR")
    if shell:
        # From its standard input.
        done = subprocess.run(
            [shell, "-q", "/dev/stdin", path], input=sql, capture_output=True, text=True, check=True
        )
        return [tuple(row) for row in csv.reader(io.StringIO(done.stdout))][1:]
    rows = tables(events(path)).execute(sql).fetchall()
    return [tuple("" if value is None else str(value) for value in row) for row in rows]


def events(path: Path) -> list[dict]:
    """Return the events of a trace; every one has what its kind needs."""
    data = path.read_bytes()
    text = gzip.decompress(data) if path.suffix == ".gz" else data
    document = json.loads(text, parse_constant=_refuse)
    assert document["displayTimeUnit"] in ("ms", "ns")
    found = document["traceEvents"]
    needed = {
        "X": {"name", "pid", "tid", "ts", "dur"},
        "M": {"name", "pid", "args"},
        "C": {"name", "pid", "ts", "args"},
        **{kind: {"name", "cat", "id", "pid", "tid", "ts"} for kind in "stf"},
    }
    for event in found:
        assert needed[event["ph"]] <= set(event), event
        assert event.get("ts", 0) >= 0, event
        assert event.get("dur", 0) >= 0, event
    return found


def tables(found: list[dict]) -> sqlite3.Connection:
    """Return a database of the events.

    Raises:
        AssertionError: Perfetto would drop something of them.
    """
    db = sqlite3.connect(":memory:")
    db.executescript(_SCHEMA)
    names = {
        (e["name"], e["pid"], e.get("tid")): e["args"].get("name") for e in found if e["ph"] == "M"
    }
    for _, pid in sorted({(0, e["pid"]) for e in found}):
        name = names.get(("process_name", pid, 0))
        assert name, f"process {pid} has no name"
        db.execute("INSERT INTO process VALUES (?, ?, ?)", (pid, pid, name))
    rows = sorted({(e["tid"], e["pid"]) for e in found if e["ph"] in "Xstf"})
    assert len({tid for tid, _ in rows}) == len(rows), "two processes share a thread id"
    for tid, pid in rows:
        name = names.get(("thread_name", pid, tid))
        assert name, f"row {tid} has no name"
        db.execute("INSERT INTO thread VALUES (?, ?, ?, ?)", (tid, tid, name, pid))
        db.execute("INSERT INTO thread_track VALUES (?, ?)", (tid, tid))
    _add_slices(db, found)
    for event in found:
        if event["ph"] == "C":
            for value in event["args"].values():
                db.execute("INSERT INTO counter VALUES (?, ?)", (_ns(event["ts"]), value))
    return db


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _ns(microseconds: float) -> int:
    return int(microseconds * 1000)  # the importer does not round


def _add_slices(db: sqlite3.Connection, found: list[dict]) -> None:
    """Go through spans and arrows by time, as the importer does: the order of equals stays."""
    open_slices: dict[int, list[tuple[int, int]]] = defaultdict(list)  # (end, id) by row
    arrows: dict[int, int] = {}
    timed = sorted((e for e in found if e["ph"] in "Xstf"), key=lambda e: _ns(e["ts"]))
    for number, event in enumerate(timed):
        ts, stack = _ns(event["ts"]), open_slices[event["tid"]]
        if event["ph"] == "X":
            end = ts + _ns(event["dur"])
            while stack and stack[-1][0] <= ts:
                stack.pop()
            assert not stack or end <= stack[-1][0], f"{event} overlaps a span of its row by half"
            parent = stack[-1][1] if stack else None
            db.execute(
                "INSERT INTO slice VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(number, ts, end - ts, event["tid"], event["name"], event.get("cat")),
                    *(len(stack), parent),
                ),
            )
            stack.append((end, number))
            continue
        is_open = [one for one in stack if one[0] >= ts]
        assert is_open, f"{event} is in no span"
        inside = is_open[-1][1]
        if event["ph"] != "s":
            assert event["id"] in arrows, f"{event} ends an arrow that has not begun"
            assert event["ph"] == "t" or event.get("bp") == "e", "it would bind to the next span"
            db.execute(
                "INSERT INTO flow (slice_out, slice_in) VALUES (?, ?)",
                (arrows[event["id"]], inside),
            )
        arrows[event["id"]] = inside
