"""Merging of files into one trace: its rows, clocks, arrows and unreadable files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.damage import damaged
from support.trace_tables import events, query

from popdist_py.timeline.__main__ import main
from popdist_py.timeline.clocks import ClockSample
from popdist_py.timeline.folder import clock_path, instance_prefix, instances_in, save_clock
from popdist_py.timeline.merging import merge_files, recorded_instances
from popdist_py.timeline.span_file import SpanWriter
from popdist_py.timeline.torch_traces import MAX_TORCH_BYTES

# When the hosts' clocks start, in nanoseconds.
START = 1_000_000_000
BAD_TIME = '{"traceEvents": [{"ph": "X", "cat": "op", "name": "a", "ts": 1e999, "dur": 1}]}'


def write(folder, instance, spans, *, number=0, label="", start=START):
    """Write the spans (name, track, begin, end, number of the call) of one process."""
    path = instance_prefix(folder, instance)
    path = path.with_name(f"{path.name}.{number}.spans")
    writer = SpanWriter(path, 1 << 16, label, (10 * START, start))
    for name, track, begin, end, call in spans:
        writer.write(
            *(writer.intern(name), writer.intern(track), start + begin, start + end), number=call
        )


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "spans"
    folder.mkdir()
    return folder


def test_instances_workers_and_calls(folder, tmp_path):
    for instance in range(3):
        reduce = ("reduce gradients", "collectives", 10 + instance, 20, 7)
        write(folder, instance, [("step", "device", 0, 30, -1), reduce])
    write(folder, 1, [("samples", "data loader", 5, 6, -1)], number=1, label="worker 0")
    path = tmp_path / "timeline.json.gz"
    merged = merge_files(recorded_instances([folder]), path)
    assert (merged.num_spans, merged.num_dropped, merged.spans_hosts) == (7, 0, False)
    assert merged.troubles == ()
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [folder, path] or len(list(tmp_path.iterdir())) == 2
    rows = query(
        path,
        "SELECT process.name, thread.name, slice.name, ts FROM slice"
        " JOIN thread_track ON track_id = thread_track.id JOIN thread USING (utid)"
        " JOIN process USING (upid) WHERE process.name = 'instance 1' ORDER BY ts",
    )
    assert rows == [
        ("instance 1", "device", "step", "0"),
        ("instance 1", "data loader of worker 0", "samples", "5"),
        ("instance 1", "collectives", "reduce gradients", "11"),
    ]
    arrows = query(
        path,
        "SELECT a.ts, b.ts, a.name = b.name FROM flow JOIN slice a ON slice_out = a.id"
        " JOIN slice b ON slice_in = b.id ORDER BY a.ts",
    )
    assert arrows == [("10", "11", "1"), ("11", "12", "1")]


def test_the_instance_that_the_others_waited_for_is_told(folder, tmp_path):
    for instance in range(3):
        calls = [("reduce", "collectives", 100 * n + instance, 100 * n + 9, n) for n in range(4)]
        write(folder, instance, calls)
    merged = merge_files(recorded_instances([folder]), tmp_path / "timeline.json.gz")
    assert (merged.waited_for, merged.waited) == ("instance 2", 6)


def test_two_processes_of_one_name_have_rows_of_their_own(folder, tmp_path):
    """Else their spans would overlap in one row, and readers would drop some."""
    for number, begin in ((1, 0), (2, 5)):
        write(folder, 0, [("a", "program", begin, begin + 9, -1)], number=number, label="worker")
    path = tmp_path / "timeline.json"
    merge_files(recorded_instances([folder]), path)
    rows = query(path, "SELECT name FROM thread ORDER BY tid")
    assert rows == [
        ("program of worker",),
        (f"program of worker (process {os.getpid()})",),
    ]


def test_arguments_that_are_no_numbers_of_json_are_shown_as_text(folder, tmp_path):
    """NaN in one span would keep readers from the whole trace."""
    writer = SpanWriter(folder / "instance-0.0.spans", 1 << 16, "", (START, START))
    name = writer.intern("a")
    for begin, text in enumerate(['{"loss": NaN, "norm": Infinity}', "[" * 1500, "1"]):
        writer.write(name, name, START + begin, START + begin, arguments=text)
    path = tmp_path / "timeline.json"
    merge_files(recorded_instances([folder]), path)
    found = [event.get("args") for event in events(path) if event["ph"] == "X"]
    assert found == [{"loss": "NaN", "norm": "Infinity"}, None, None]


def test_what_never_ended_goes_on_until_its_program_ended(folder, tmp_path):
    for instance in range(2):
        writer = SpanWriter(folder / f"instance-{instance}.0.spans", 1 << 16, "", (0, START))
        row = writer.intern("collectives")
        for name, begin in (("reduce gradients", 10 + instance), ("wait for instances", 20)):
            number = 3 if begin < 20 else -1
            writer.open(writer.intern(name), row, START + begin, number)
    (folder / "instance-1.ended").write_text(str(START + 5_000))
    path = tmp_path / "timeline.json"
    assert merge_files(recorded_instances([folder]), path).num_spans == 4
    rows = query(path, "SELECT name, ts, dur, depth FROM slice ORDER BY track_id, ts")
    assert rows == [
        ("reduce gradients", "10", "10", "0"),  # nobody knows until when
        ("wait for instances", "20", "0", "0"),
        ("reduce gradients", "11", "4989", "0"),
        ("wait for instances", "20", "4980", "1"),
    ]
    assert query(path, "SELECT COUNT(*) FROM flow") == [("1",)]
    found = [event["args"] for event in events(path) if event["ph"] == "X"]
    assert all(arguments["unfinished"] is True for arguments in found)


def test_another_host_is_put_on_the_clock_of_the_first(folder, tmp_path):
    ahead = 5_000_000
    write(folder, 0, [("reduce all", "collectives", 100, 200, 0)])
    write(folder, 1, [("reduce all", "collectives", 150, 200, 0)], start=START + ahead)
    asked = [ClockSample(START, START + ahead + 20, START + 40)]
    save_clock(clock_path(instance_prefix(folder, 1)), asked)
    path = tmp_path / "timeline.json"
    merged = merge_files(recorded_instances([folder]), path)
    assert (merged.clock_error, merged.spans_hosts, merged.troubles) == (20, True, ())
    assert query(path, "SELECT ts, dur FROM slice ORDER BY ts") == [("100", "100"), ("150", "50")]


def test_what_cannot_be_read_is_said_and_the_rest_is_merged(folder, tmp_path):
    write(folder, 0, [("a", "program", 0, 1, -1)])
    (folder / "instance-0.1.spans").write_bytes(b"nothing")
    (folder / "instance-1.0.spans").write_bytes(b"")
    (folder / "instance-1.clock").write_text("[]")
    (folder / "instance-0.torch-1-0.json").write_text("{}")
    path = tmp_path / "timeline.json.gz"
    merged = merge_files(recorded_instances([folder]), path)
    assert merged.num_spans == 1
    assert [trouble.replace(f"{folder}/", "") for trouble in merged.troubles] == [
        "instance-0.1.spans is not a file with spans of a timeline",
        "instance-0.torch-1-0.json: the file is not a trace of torch.profiler: "
        "KeyError('traceEvents')",
        "instance-1.0.spans is not a file with spans of a timeline",
        "the clock of instance 1 is not known",
    ]
    assert len([e for e in events(path) if e["ph"] == "X"]) == 1


def test_calls_of_two_attempts_are_not_the_same(tmp_path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for start, folder in enumerate(folders):
        folder.mkdir()
        write(folder, 0, [("reduce x", "collectives", start * 100, start * 100 + 9, 0)])
    path = tmp_path / "timeline.json"
    merge_files(recorded_instances(folders), path)
    assert query(path, "SELECT COUNT(*) FROM flow") == [("0",)]
    assert query(path, "SELECT name FROM process ORDER BY pid") == [
        ("instance 0 (attempt 1)",),
        ("instance 0 (attempt 2)",),
    ]


@pytest.mark.parametrize("base", [10 * START, 0])
def test_a_trace_of_torch_comes_onto_our_clock(folder, tmp_path, base):
    """Its times are of the day, with and without a base."""
    write(folder, 0, [("step", "device", 0, 10_000, -1)])
    begin = (10 * START + 2_000 - base) / 1000
    trace = {
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 9, "tid": 9, "args": {"name": "python"}},
            {
                **{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 9, "tid": 9},
                **{"ts": begin, "dur": 3.0},
            },
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "S", "tid": 0},
        ],
        **({"baseTimeNanoseconds": base} if base else {}),
    }
    (folder / "instance-0.torch-9-0.json").write_text(json.dumps(trace))
    path = tmp_path / "timeline.json"
    merge_files(recorded_instances([folder]), path)
    rows = query(
        path,
        "SELECT thread.name, ts, dur FROM slice JOIN thread_track ON track_id = thread_track.id"
        " JOIN thread USING (utid) WHERE slice.name = 'aten::mm'",
    )
    assert rows == [("torch python", "2000", "3000")]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"traceEvents": 1}', BAD_TIME])
def test_a_file_that_is_no_trace_of_torch_is_said(folder, tmp_path, text):
    (folder / "instance-0.torch-9-0.json").write_text(text)
    merged = merge_files(recorded_instances([folder]), tmp_path / "timeline.json")
    assert [
        ": the file is not a trace of torch.profiler: " in trouble for trouble in merged.troubles
    ] == [True]


def test_a_trace_of_torch_that_would_fill_the_memory_is_left_out(folder, tmp_path):
    with (folder / "instance-0.torch-9-0.json").open("wb") as file:
        file.truncate(MAX_TORCH_BYTES + 1)
    merged = merge_files(recorded_instances([folder]), tmp_path / "timeline.json")
    assert merged.troubles[0].endswith("because it has more than 256 MiB")


def test_a_trace_that_is_interrupted_leaves_no_part_of_it(folder, tmp_path, monkeypatch):
    write(folder, 0, [("a", "program", 0, 1, -1)])

    def interrupted(data):
        raise KeyboardInterrupt

    monkeypatch.setattr("popdist_py.timeline.merging.read_spans", interrupted)
    with pytest.raises(KeyboardInterrupt):
        merge_files(recorded_instances([folder]), tmp_path / "timeline.json")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_trace_that_cannot_be_written_leaves_the_old_one(folder, tmp_path):
    write(folder, 0, [("a", "program", 0, 1, -1)])
    path = tmp_path / "there" / "timeline.json"
    with pytest.raises(FileNotFoundError):
        merge_files(recorded_instances([folder]), path)


def test_the_command_replaces_a_trace_and_no_other_file(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(folder, 0, [("a", "program", 0, 1, -1)])
    words = [str(folder), "-o", "trace.json"]
    assert CliRunner().invoke(main, words).output == "trace.json: 1 span\n"
    assert CliRunner().invoke(main, words).output == "trace.json (replaced): 1 span\n"
    Path("trace.json").write_text("my notes\n")
    refused = CliRunner().invoke(main, words)
    assert refused.exit_code == 2
    assert "--output trace.json: this existing file is not a timeline: give" in refused.output
    assert Path("trace.json").read_text() == "my notes\n"


def test_other_files_of_the_folder_are_no_instances(folder):
    (folder / "instance-x.0.spans").touch()
    (folder / "instance-12.0.spans").touch()
    (folder / "instance-2.lock").touch()
    assert instances_in(folder) == [2, 12]


def test_files_of_an_instance_that_are_damaged_anywhere_leave_the_others(folder, tmp_path):
    for instance in range(2):
        write(folder, instance, [("step", "device", 0, 30, -1)])
    save_clock(clock_path(instance_prefix(folder, 1)), [ClockSample(1, 2, 3)])
    torch = instance_prefix(folder, 1).with_name("instance-1.torch-4711-0.json")
    torch.write_text('{"traceEvents": [{"ph": "X", "cat": "op", "name": "a", "ts": 1, "dur": 1}]}')
    spans = instance_prefix(folder, 1).with_name("instance-1.0.spans")
    path = tmp_path / "timeline.json.gz"
    for file, every in ((spans, 4001), (torch, 3), (clock_path(instance_prefix(folder, 1)), 1)):
        before = file.read_bytes()
        for how, data in damaged(before, every=every):
            file.write_bytes(data)
            merged = merge_files(recorded_instances([folder]), path)
            assert merged.num_spans >= 1, (file.name, how)
        file.write_bytes(before)


@pytest.mark.parametrize("text", ["[" * 100_000, "[[1e999, 1, 1]]", "[[NaN, 1, 1]]", '{"a": 1}'])
def test_a_clock_that_tells_nonsense_is_not_known(folder, tmp_path, text):
    write(folder, 0, [("step", "device", 0, 30, -1)])
    clock_path(instance_prefix(folder, 0)).write_text(text)
    merge_files(recorded_instances([folder]), tmp_path / "timeline.json.gz")
