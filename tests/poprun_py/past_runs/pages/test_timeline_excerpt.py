"""Excerpts of traces, complete and damaged."""

from __future__ import annotations

import gzip
import json

import pytest
from support.damage import damaged

from poprun_py.past_runs.pages.timeline_excerpt import Excerpt, TraceSpan, read_excerpt


def named(kind: str, process: int, thread: int, **about) -> dict:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": about}


def span(name: str, process: int, thread: int, ts: float, dur: float) -> dict:
    return {
        "ph": "X",
        "name": name,
        "cat": "c",
        "pid": process,
        "tid": thread,
        "ts": ts,
        "dur": dur,
    }


def write(path, events) -> None:
    """Write a trace with one event in each line, like popdist_py.timeline.merging."""
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    text = '{"displayTimeUnit":"ms","traceEvents":[\n' + lines + "\n]}\n"
    path.write_bytes(gzip.compress(text.encode()))


def trace(num_steps: int = 9) -> list[dict]:
    """Return the events of two instances with steps of 1 ms, which overlap with reductions."""
    events = []
    for process in (1, 2):
        events += [named("process_name", process, 0, name=f"instance {process - 1}")]
        for step in range(num_steps):
            events += [
                span("step", process, 10 * process, step * 1000.0, 1000.0),
                span("update", process, 10 * process, step * 1000.0 + 500, 250.0),
                span("reduce", process, 10 * process + 1, step * 1000.0 + 900, 200.0),
            ]
        events += [
            named("thread_name", process, 10 * process, name="device"),
            named("thread_sort_index", process, 10 * process, sort_index=2),
            named("thread_name", process, 10 * process + 1, name="collectives"),
            named("thread_sort_index", process, 10 * process + 1, sort_index=1),
        ]
    return events


def test_consecutive_spans_are_not_nested(tmp_path):
    # 0.1 + 0.2 > 0.3
    events = [span("step", 1, 1, 0.0, 10.0), span("update", 1, 2, 0.1, 0.2),
              span("stage 0", 1, 2, 0.3, 5.0)]  # fmt: skip
    write(tmp_path / "t.gz", events)
    excerpt = read_excerpt(tmp_path / "t.gz")
    assert [each.depth for each in excerpt.spans] == [0, 0, 0]


def test_steps_are_taken_from_the_middle(tmp_path):
    write(tmp_path / "t.gz", trace())
    excerpt = read_excerpt(tmp_path / "t.gz")
    assert excerpt is not None
    assert (excerpt.at, excerpt.seconds, excerpt.num_steps) == (0.003, 0.003, 3)
    rows = list(dict.fromkeys(each.row for each in excerpt.spans))
    assert rows == ["instance 0: collectives", "instance 0: device",
                    "instance 1: collectives", "instance 1: device"]  # fmt: skip
    device = [each for each in excerpt.spans if each.row == "instance 1: device"]
    assert [(each.name, each.depth) for each in device] == [("step", 0), ("update", 1)] * 3
    assert [each.begin for each in device] == pytest.approx(
        [0, 0.0005, 0.001, 0.0015, 0.002, 0.0025]
    )


def test_spans_are_clipped_to_the_excerpt(tmp_path):
    write(tmp_path / "t.gz", trace())
    excerpt = read_excerpt(tmp_path / "t.gz")
    assert excerpt is not None
    first, *_, last = (each for each in excerpt.spans if each.row == "instance 0: collectives")
    assert (first.begin, first.seconds) == (0, pytest.approx(0.0001))
    assert last.begin + last.seconds == pytest.approx(excerpt.seconds)


def test_a_trace_with_one_step(tmp_path):
    write(tmp_path / "t.gz", [named("process_name", 1, 0, name="instance 0"),
                              span("step", 1, 7, 2e6, 5e5)])  # fmt: skip
    only = TraceSpan("instance 0: 7", "step", 0.0, 0.5, 0)
    assert read_excerpt(tmp_path / "t.gz") == Excerpt(2.0, 0.5, 1, (only,))


def test_the_number_of_spans_is_limited(tmp_path):
    events = [span("step", 1, 7, 1000.0 * i, 1000.0) for i in range(3)]
    events += [span("cell", 1, 7, i * 0.5, 0.25) for i in range(6000)]
    write(tmp_path / "t.gz", events)
    excerpt = read_excerpt(tmp_path / "t.gz")
    assert excerpt is not None
    assert (excerpt.num_steps, len(excerpt.spans)) == (1, 1500)


def test_only_the_first_part_of_a_large_trace_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("poprun_py.past_runs.pages.timeline_excerpt._MOST_BYTES", 3000)
    write(tmp_path / "t.gz", trace(1000))
    excerpt = read_excerpt(tmp_path / "t.gz")
    assert excerpt is not None
    assert excerpt.at < 0.01


# Without a fixed mtime, the data and so the names of the tests would differ between workers.
@pytest.mark.parametrize("data", [
    b"", b"no gzip", gzip.compress(b"not json\n", mtime=0), gzip.compress(b"{}" * 50, mtime=0)[:20],
    gzip.compress(b'{"ph":"X","name":"step","pid":1}\n', mtime=0),
    gzip.compress(b'{"ph":"X","name":"step","pid":1,"ts":"a","dur":{}}\n', mtime=0),
    gzip.compress(b'{"ph":"X","name":"step","pid":1,"ts":1,"dur":\n', mtime=0),
])  # fmt: skip
def test_files_that_are_not_a_trace_give_none(tmp_path, data):
    (tmp_path / "t.gz").write_bytes(data)
    assert read_excerpt(tmp_path / "t.gz") is None
    assert read_excerpt(tmp_path / "missing.gz") is None


def test_a_damaged_trace_gives_none_or_the_same_excerpt(tmp_path):
    path = tmp_path / "t.gz"
    write(path, trace(3))
    whole, before = read_excerpt(path), path.read_bytes()
    for how, data in damaged(before):
        path.write_bytes(data)
        # Some bytes of the header, such as the time, do not matter, and another trace may follow.
        assert read_excerpt(path) in (None, whole) or how.endswith("follows"), how


@pytest.mark.parametrize("line", [
    '{"ph":"X","name":"step","pid":1,"tid":1,"ts":' + "9" * 400 + ',"dur":1}',
    '{"ph":"X","name":"step","pid":1,"tid":1,"ts":0,"dur":' + "[" * 50_000 + "}",
    '{"ph":"X","name":"step","pid":1,"tid":1,"ts":1e999,"dur":1}',
    '{"ph":"X","name":"step","pid":[],"tid":{},"ts":1,"dur":1}',
])  # fmt: skip
def test_an_impossible_event_gives_none(tmp_path, line):
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(f"[\n{line},\n{line}\n]".encode()))
    read_excerpt(path)
