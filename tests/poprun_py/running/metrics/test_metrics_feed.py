"""A metrics process that is slow, has ended or does not read, and never delays the launcher."""

from __future__ import annotations

import os
import signal

import pytest
from support.processes import wait_until

from poprun_py.running.metrics import metrics_feed
from poprun_py.running.metrics.metrics_feed import MetricsProcess

COUNTS = """
import sys
def main():
    lines = list(sys.stdin.buffer)
    print(len(lines), "lines,", sum(map(len, lines)), "bytes")
"""
GONE = """
def main():
    raise SystemExit(3)
"""
READS_NOTHING = """
import select, sys, time
def main():
    while not select.select([sys.stdin], [], [], 0)[0]:
        pass
    time.sleep(1000)
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return a function that starts a process with the given program."""
    processes = []

    def start(text):
        (tmp_path / "test_program.py").write_text(text)
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        processes.append(MetricsProcess("test_program", "the test", {"first": 0}, environ=environ))
        return processes[-1]

    yield start
    for each in processes:
        each.close()
        each.close()
        assert each._process.returncode is not None


def test_documents_arrive_and_the_output_comes_back(started):
    process = started(COUNTS)
    assert all(process.send({"n": n}) for n in range(3))
    assert process.finish(pytest.fail) == ["4 lines, 36 bytes"]


def test_a_last_document_larger_than_the_pipe_arrives(started):
    process = started(COUNTS)
    assert process.send({"long": "x" * (3 << 20)})
    (said,) = process.finish(pytest.fail)
    assert said.startswith("2 lines, 3145")


def test_the_rest_of_a_long_document_is_sent_before_the_next_one(started):
    """A document about thousands of instances is longer than the pipe."""
    process = started(COUNTS)
    for _ in range(2):
        assert process.send('"' + "x" * (3 << 20) + '"')
        wait_until(lambda: process.continue_sending() or not process._rest)
    assert process.finish(pytest.fail)[0].startswith("3 lines, 6291")


def test_a_process_that_does_not_read_is_never_waited_for(started, monkeypatch):
    monkeypatch.setattr(metrics_feed, "_END_SECONDS", 0.3)
    monkeypatch.setattr(metrics_feed, "_SAID_SECONDS", 0.1)
    process, told = started(READS_NOTHING), []
    sent = [process.send({"long": "x" * (1 << 19)}) for _ in range(10)]
    assert sent[0]
    assert not sent[-1]
    assert process.finish(told.append) == [
        "the test did not end in time: the last metrics may be missing"
    ]
    assert process._process.poll() is not None
    assert told == ["waiting for the test, 0 s at most"]


def test_ctrl_c_ends_the_wait(started):
    process = started(READS_NOTHING)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        troubles = process.finish(lambda _: None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert troubles == ["the test did not end in time: the last metrics may be missing"]


def test_dropped_documents_of_a_slow_process_are_reported(started, tmp_path):
    process = started(
        "import sys, time\nfrom pathlib import Path\ndef main():\n"
        f"    while not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
        "    list(sys.stdin.buffer)\n"
    )
    num_sent = 2  # includes the first document and the dropped one
    while process.send({"long": "x" * (1 << 19)}):
        num_sent += 1
    (tmp_path / "go").touch()
    missing = f"1 of {num_sent} updates of the metrics were dropped"
    assert process.finish(pytest.fail) == [f"the test took too long: {missing}"]


def test_a_process_that_ended_early_is_reported_once(started):
    process = started(GONE)
    wait_until(lambda: process._process.poll() is not None)
    assert not all(process.send({"n": n}) for n in range(5))
    assert process.finish(pytest.fail) == ["the test ended early, with exit code 3"]


def test_modules_in_the_working_folder_do_not_hide_the_standard_library(
    started, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path / "elsewhere")
    process = started("import json\ndef main(): print(json.__name__)")
    assert process.finish(pytest.fail) == ["json"]
