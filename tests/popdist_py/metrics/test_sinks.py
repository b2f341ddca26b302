"""What the sinks leave on the disk, read back with the tools that people use."""

from __future__ import annotations

import csv
import errno
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.repository import ROOT

import popdist_py
from popdist_py.metrics.sink import AppendedFile


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def write(sink, *rows):
    for step, values in rows:
        sink.write(step, values)
    sink.close()


# --- CSV ------------------------------------------------------------------------------------------


def test_a_table_is_written(tmp_path):
    path = tmp_path / "made" / "metrics.csv"
    sink = popdist_py.CsvSink(path)
    assert not path.parent.exists()  # every instance makes a sink, one of them writes
    write(sink, (1, {"loss": 0.1, 'a, "b"': 1e-300}), (2, {"loss": math.nan}))
    assert path.read_text() == 'step,loss,"a, ""b"""\n1,0.1,1e-300\n2,nan,\n'
    table = np.genfromtxt(path, delimiter=",", skip_header=1)
    assert table[0].tolist() == [1, 0.1, 1e-300]


def test_a_name_that_comes_later_becomes_a_column(tmp_path):
    path = tmp_path / "metrics.csv"
    write(
        popdist_py.CsvSink(path),
        (1, {"loss": 1.0}), (2, {"validation": 2.0}), (3, {"loss": 3.0, "validation": 4.0}),
    )  # fmt: skip
    assert rows_of(path) == [
        ["step", "loss", "validation"], ["1", "1.0", ""], ["2", "", "2.0"], ["3", "3.0", "4.0"]
    ]  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]


def test_values_of_the_same_step_share_a_row(tmp_path):
    path = tmp_path / "metrics.csv"
    sink = popdist_py.CsvSink(path)
    train, validation = popdist_py.Metrics(sink), popdist_py.Metrics(sink)
    for step in (1, 2, 3):
        train.update(loss=step)
        train.log(step)
        if step > 1:
            validation.update(error=10**step)  # first a new column, then a longer row
            validation.log(step)
    assert path.read_text() == "step,loss,error\n1,1.0,\n2,2.0,100.0\n3,3.0,1000.0\n"


def test_a_resumed_run_goes_on_in_the_same_file(tmp_path, caplog):
    path = tmp_path / "metrics.csv"
    write(popdist_py.CsvSink(path), *((step, {"loss": step / 1}) for step in (10, 20, 30)))
    with path.open("a") as file:
        file.write("40,4")  # a writer that was killed in the middle of a row
    # The checkpoint was one of step 10.
    write(popdist_py.CsvSink(path), (20, {"lr": 0.5}), (30, {"loss": 9.0}))
    assert rows_of(path) == [
        ["step", "loss", "lr"], ["10", "10.0", ""], ["20", "", "0.5"], ["30", "9.0", ""]
    ]  # fmt: skip
    assert "2 rows of an earlier run are replaced, from step 20 on" in caplog.text


@pytest.mark.parametrize(
    "text", ["name,age\nAda,36\n", "step,loss\nmonday,1\n", "epoch,loss\n1,2\n", "\n\n", "a note"]
)
def test_a_file_of_something_else_is_left_alone(tmp_path, text):
    path = tmp_path / "people.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match="was not written by a metrics sink: give another path"):
        popdist_py.CsvSink(path).write(1, {"loss": 1.0})
    assert path.read_text() == text


@pytest.mark.parametrize("make", [popdist_py.CsvSink, popdist_py.JsonlSink])
def test_what_is_no_file_is_not_read(tmp_path, make):
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for a writer
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(ValueError, match="is not a regular file: give another path"):
            make(path).write(1, {"loss": 1.0})


def test_json_lines_have_a_step_each_also_in_a_resumed_run(tmp_path, caplog):
    path = tmp_path / "made" / "metrics.jsonl"
    sink = popdist_py.JsonlSink(path)
    assert not path.parent.exists()  # every instance makes a sink, one of them writes
    train, validation = popdist_py.Metrics(sink), popdist_py.Metrics(sink)
    for step in (1, 2, 3):
        train.update(loss=step)
        train.log(step)
    validation.update(error=math.inf)
    validation.log(3)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # a writer that was killed in the middle of a line
    write(popdist_py.JsonlSink(path), (2, {"loss": 0.5}))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
    ]
    assert "2 lines of an earlier run are replaced, from step 2 on" in caplog.text


def test_values_of_the_same_step_share_a_json_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(popdist_py.JsonlSink(path), (1, {"loss": 1.0}), (2, {"loss": 2.0}), (2, {"error": 3.0}))
    assert path.read_text() == '{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 2.0, "error": 3.0}\n'


@pytest.mark.parametrize("text", ['{"epoch": 1}\n', "[1]\n", "step,loss\n1,2\n", "\n", "a note"])
def test_json_lines_of_something_else_are_left_alone(tmp_path, text):
    path = tmp_path / "people.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="was not written by a metrics sink: give another path"):
        popdist_py.JsonlSink(path).write(1, {"loss": 1.0})
    assert path.read_text() == text


def test_a_relative_path_is_meant_where_the_sink_was_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sink = popdist_py.CsvSink("metrics.csv")
    monkeypatch.chdir("/")
    write(sink, (1, {"loss": 1.0}))
    assert (tmp_path / "metrics.csv").exists()


def test_a_piece_that_failed_half_way_is_overwritten(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.touch()
    file = AppendedFile(path, 0)
    file.append(b"one\n")
    real_open = Path.open

    def short_of_space(self, mode):
        opened = real_open(self, mode)
        opened.truncate = lambda: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full"))
        return opened

    monkeypatch.setattr(Path, "open", short_of_space)
    with pytest.raises(OSError, match="disk full"):
        file.append(b"a long piece\n")
    monkeypatch.undo()
    file.append(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
    file.append(b"three\n", instead_of_last=True)
    file.append(b"3\n", instead_of_last=True)
    assert path.read_bytes() == b"one\n3\n"


def test_a_full_disk_is_a_warning(tmp_path, caplog):
    sink = popdist_py.CsvSink(tmp_path / "metrics.csv")
    sink.write(1, {"loss": 1.0})
    sink._file._path = Path("/dev/full")
    metrics = popdist_py.Metrics(sink)
    metrics.update(loss=2.0)
    assert metrics.log(2) == {"loss": 2.0}
    assert "CsvSink(" in caplog.text
    assert "failed to write step 2: OSError" in caplog.text


# --- TensorBoard ----------------------------------------------------------------------------------

READ_EVENTS = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator(sys.argv[1])
events.Reload()
tags = events.Tags()["scalars"]
print(json.dumps({tag: [(e.step, repr(e.value)) for e in events.Scalars(tag)] for tag in tags}))
"""


def events_of(folder):
    """What TensorBoard itself reads, in a process of its own: it changes warnings and logging."""
    done = subprocess.run(
        [sys.executable, "-c", READ_EVENTS, folder], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = __import__("json").loads(done.stdout)
    return {tag: [(step, float(value)) for step, value in points] for tag, points in found.items()}


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    sink = popdist_py.TensorBoardSink(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    write(
        sink,
        (1, {"train/loss": 0.5, "größe": 1e300}), (300, {"train/loss": -math.inf}),
        (2**40, {"train/loss": math.nan}),
    )  # fmt: skip
    found = events_of(tmp_path / "runs")
    steps, values = zip(*found["train/loss"], strict=True)
    assert steps == (1, 300, 2**40)
    assert values[:2] == (0.5, -math.inf)
    assert math.isnan(values[2])
    assert found["größe"] == [(1, math.inf)]


def test_tensorboard_sees_each_step_of_a_resumed_run_once(tmp_path):
    pytest.importorskip("tensorboard")
    for steps, value in (((10, 20, 30), 1.0), ((20, 30, 40), 2.0)):
        write(popdist_py.TensorBoardSink(tmp_path), *((step, {"loss": value}) for step in steps))
    assert len(list(tmp_path.iterdir())) == 2
    assert events_of(tmp_path) == {"loss": [(10, 1.0), (20, 2.0), (30, 2.0), (40, 2.0)]}


def test_the_checksum_is_crc32c():
    from popdist_py.metrics.tensorboard_sink import _checksum

    # RFC 3720, B.4: CRC-32C of 32 bytes of zeros, here masked as event files want it.
    crc = 0x8A9136AA
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
    assert _checksum(bytes(32)) == masked.to_bytes(4, "little")


# --- Weights & Biases -----------------------------------------------------------------------------


class FakeWandb:
    """Counts its runs; each keeps what was logged."""

    def __init__(self, error=None):
        self.error, self.began, self.logged, self.finished = error, [], [], 0

    def init(self, **arguments):
        self.began.append(arguments)
        if self.error:
            raise self.error
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished += 1


@pytest.fixture
def fake_wandb(monkeypatch):
    from popdist_py.metrics import wandb_sink

    fake = FakeWandb()
    monkeypatch.setattr(wandb_sink, "import_module", lambda _: fake)
    monkeypatch.setattr(wandb_sink, "find_spec", lambda _: __import__("pytest").__spec__)
    return fake


def test_a_run_begins_with_the_first_write(fake_wandb):
    sink = popdist_py.WandbSink(project="digits", mode="offline")
    assert fake_wandb.began == []
    write(sink, (1, {"loss": 1.0}), (2, {"loss": 2.0}))
    sink.close()
    assert fake_wandb.began == [{"project": "digits", "mode": "offline"}]
    assert fake_wandb.logged == [(1, {"loss": 1.0}), (2, {"loss": 2.0})]
    assert fake_wandb.finished == 1


def test_a_run_that_cannot_begin_is_not_tried_at_every_step(fake_wandb, caplog):
    fake_wandb.error = RuntimeError("no account")
    metrics = popdist_py.Metrics(popdist_py.WandbSink(project="digits"))
    for step in range(3):
        metrics.update(loss=1)
        metrics.log(step)
    assert len(fake_wandb.began) == 1
    assert (
        caplog.text.count("WandbSink(project='digits') failed to write step 0: RuntimeError") == 1
    )


@pytest.mark.parametrize("spec", [None, "namespace"])
def test_a_missing_package_is_named_when_the_sink_is_made(monkeypatch, tmp_path, spec):
    from importlib.machinery import ModuleSpec

    from popdist_py.metrics import wandb_sink

    # A folder ``wandb`` of earlier runs looks like a package without an origin.
    found = ModuleSpec("wandb", None) if spec else None
    monkeypatch.setattr(wandb_sink, "find_spec", lambda _: found)
    with pytest.raises(ModuleNotFoundError, match="not installed: pip install wandb"):
        popdist_py.WandbSink(project="digits")


OFFLINE = """
import popdist_py
popdist_py.init()
metrics = popdist_py.Metrics(popdist_py.WandbSink(project="digits", mode="offline"))
for step in range(3):
    metrics.update(loss=step + popdist_py.getInstanceIndex())
    print(metrics.log(step))
metrics.close()
"""
# The file is a log of LevelDB behind seven bytes: checksum, length and type, then a message.
READ_RUN = """
import struct, sys
from pathlib import Path
from wandb.proto import wandb_internal_pb2
data = Path(sys.argv[1]).read_bytes()
at = 7
while at < len(data):
    _, length, kind = struct.unpack_from("<IHB", data, at)
    assert kind == 1, "a message in several pieces: more than this test writes"
    record = wandb_internal_pb2.Record.FromString(data[at + 7 : at + 7 + length])
    at += 7 + length
    items = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
    if items:
        print(items["_step"], items["loss"])
"""


# wandb takes 62 MB and starts a server of its own.
@pytest.mark.sweep
@pytest.mark.mpi
def test_an_offline_run_holds_the_means(poprun, script, tmp_path):
    pytest.importorskip("wandb")
    done = poprun("--num-instances", 2, "--num-replicas", 2, script(OFFLINE))
    assert done.returncode == 0, done.stderr[-3000:]
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")  # one instance writes
    done = subprocess.run(
        [sys.executable, "-c", READ_RUN, run], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["0 0.5", "1 1.5", "2 2.5"], done.stderr[-2000:]


def test_importing_the_sinks_imports_nothing_heavy():
    code = (
        "import sys, popdist_py as p; p.Metrics(p.CsvSink('x')), p.TensorBoardSink('y')\n"
        "print(sorted({'torch', 'numpy', 'mpi4py', 'wandb', 'tensorboard'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "[]\n"
