"""A process that is fed: it may be slow, gone or deaf, and never holds up who feeds it."""

from __future__ import annotations

import os
import signal

import pytest
from support.processes import wait_until

from poprun_py.running.metrics import metrics_process
from poprun_py.running.metrics.metrics_process import MetricsProcess

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
# It reads nothing before the end.
DEAF = """
import select, sys, time
def main():
    while not select.select([sys.stdin], [], [], 0)[0]:
        pass
    time.sleep(1000)
"""


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Start a process whose program is given; afterwards it is not left."""
    feeds = []

    def start(text):
        (tmp_path / "fed_program.py").write_text(text)
        environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
        feeds.append(MetricsProcess("fed_program", "the test", {"first": 0}, environ=environ))
        return feeds[-1]

    yield start
    for each in feeds:
        each.close()
        each.close()
        assert each._process.returncode is not None


def test_what_is_sent_arrives_and_what_is_said_comes_back(started):
    fed = started(COUNTS)
    assert all(fed.send({"n": n}) for n in range(3))
    assert fed.finish(pytest.fail) == ["4 lines, 36 bytes"]


def test_a_last_document_larger_than_the_pipe_arrives(started):
    fed = started(COUNTS)
    assert fed.send({"long": "x" * (3 << 20)})
    (said,) = fed.finish(pytest.fail)
    assert said.startswith("2 lines, 3145")


def test_between_two_documents_the_rest_of_a_long_one_goes_on(started):
    """That of thousands of instances is longer than the pipe."""
    fed = started(COUNTS)
    for _ in range(2):
        assert fed.send('"' + "x" * (3 << 20) + '"')
        wait_until(lambda: fed.go_on() or not fed._rest)
    assert fed.finish(pytest.fail)[0].startswith("3 lines, 6291")


def test_a_process_that_does_not_read_is_never_waited_for(started, monkeypatch):
    monkeypatch.setattr(metrics_process, "_END_SECONDS", 0.3)
    monkeypatch.setattr(metrics_process, "_SAID_SECONDS", 0.1)
    fed, told = started(DEAF), []
    sent = [fed.send({"long": "x" * (1 << 19)}) for _ in range(10)]
    assert sent[0]
    assert not sent[-1]
    assert fed.finish(told.append) == [
        "the test did not end in time: the last numbers may be missing"
    ]
    assert fed._process.poll() is not None
    assert told == ["waiting for the test, 0 s at most"]


def test_ctrl_c_ends_the_wait(started):
    fed = started(DEAF)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        troubles = fed.finish(lambda _: None)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert troubles == ["the test did not end in time: the last numbers may be missing"]


def test_a_process_that_was_too_slow_once_is_said_to_lack_numbers(started, tmp_path):
    fed = started(
        "import sys, time\nfrom pathlib import Path\ndef main():\n"
        f"    while not Path({str(tmp_path / 'go')!r}).exists(): time.sleep(0.01)\n"
        "    list(sys.stdin.buffer)\n"
    )
    num_sent = 2  # with the first, and the one that is left out
    while fed.send({"long": "x" * (1 << 19)}):
        num_sent += 1
    (tmp_path / "go").touch()
    missing = f"1 of {num_sent} documents were left out"
    assert fed.finish(pytest.fail) == [f"the test took too long: {missing}"]


def test_a_process_that_has_ended_is_said_once(started):
    fed = started(GONE)
    wait_until(lambda: fed._process.poll() is not None)
    assert not all(fed.send({"n": n}) for n in range(5))
    assert fed.finish(pytest.fail) == ["the test ended early, with exit code 3"]


def test_neither_the_working_folder_nor_ours_hide_the_standard_library(
    started, tmp_path, monkeypatch
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path / "elsewhere")
    fed = started("import json\ndef main(): print(json.__name__)")
    assert fed.finish(pytest.fail) == ["json"]
