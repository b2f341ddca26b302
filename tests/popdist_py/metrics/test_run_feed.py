"""The process that writes a run's numbers: whatever a sink does, the others get theirs."""

from __future__ import annotations

import json
from typing import ClassVar

import pytest

from popdist_py.metrics import run_feed


class FakeSink:
    made: ClassVar[list[FakeSink]] = []

    def __init__(self, folder=None, **arguments):
        self.folder, self.arguments = folder, arguments
        self.steps, self.is_closed = [], False
        FakeSink.made.append(self)

    def write(self, step, values):
        if self.folder == "full" or "project" in self.arguments:
            raise OSError("no space\nleft")
        self.steps.append((step, values))

    def close(self):
        self.is_closed = True


@pytest.fixture(autouse=True)
def fake_sinks(monkeypatch):
    FakeSink.made = []
    monkeypatch.setattr(run_feed, "TensorBoardSink", FakeSink)
    monkeypatch.setattr(run_feed, "WandbSink", FakeSink)


def lines(*documents):
    return [json.dumps(document).encode() + b"\n" for document in documents]


def sinks(*places):
    return {"sinks": [{"name": f"sink {number}", **each} for number, each in enumerate(places)]}


ONE, TWO = ({"step": step, "values": {"loss": step / 2}} for step in (1, 2))
BEGINS = {"begins": True}


def test_all_sinks_get_all_numbers_and_are_closed():
    first = sinks({"tensorboard": "folder"}, {"wandb": {"group": "run"}})
    assert run_feed.feed(lines(first, ONE, TWO)) == []
    assert [sink.steps for sink in FakeSink.made] == [[(1, {"loss": 0.5}), (2, {"loss": 1.0})]] * 2
    assert all(sink.is_closed for sink in FakeSink.made)


def test_an_attempt_begins_a_file_and_goes_on_with_a_run():
    first = sinks({"tensorboard": "folder"}, {"wandb": {"group": "run"}})
    assert run_feed.feed(lines(first, BEGINS, TWO, BEGINS, ONE)) == []
    written = {sink.folder: [] for sink in FakeSink.made}
    for sink in FakeSink.made:
        written[sink.folder].append([step for step, _ in sink.steps])
    assert written == {"folder": [[], [2], [1]], None: [[2, 1]]}


def test_a_sink_that_fails_is_said_once_and_keeps_nothing_from_others():
    first = sinks({"tensorboard": "full"}, {"wandb": {"project": "x"}}, {"tensorboard": "folder"})
    assert run_feed.feed(lines(first, ONE, TWO)) == [
        "metrics for sink 0 are incomplete: OSError: no space left",
        "metrics for sink 1 are incomplete: OSError: no space left",
    ]
    assert len(FakeSink.made[2].steps) == 2


def test_half_a_line_of_a_killed_launcher_is_left_out():
    assert run_feed.feed([*lines(sinks({"tensorboard": "folder"}), ONE), b'{"step": 2, "val']) == []
    assert [step for step, _ in FakeSink.made[0].steps] == [1]
    assert run_feed.feed([]) == []


def test_files_get_a_row_or_a_line_for_each_step_and_attempts_replace_steps(tmp_path):
    table, text = tmp_path / "metrics.csv", tmp_path / "metrics.jsonl"
    first = sinks({"csv": str(table)}, {"jsonl": str(text)})
    again = {"step": 2, "values": {"loss": float("nan"), "lr": 0.5}}
    assert run_feed.feed(lines(first, BEGINS, ONE, TWO, BEGINS, again)) == []
    assert table.read_text() == "step,loss,lr\n1,0.5,\n2,nan,0.5\n"
    assert text.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": NaN, "lr": 0.5}\n'


@pytest.mark.parametrize("found", ["a note\n", "[1]\n", '{"loss": 2}\n'])
def test_a_file_of_something_else_is_left_alone(tmp_path, found):
    text = tmp_path / "metrics.jsonl"
    text.write_text(found)
    (trouble,) = run_feed.feed(lines(sinks({"jsonl": str(text)}), ONE))
    assert "was not written by a metrics sink: give another path" in trouble
    assert text.read_text() == found
