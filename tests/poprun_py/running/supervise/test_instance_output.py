"""The shown lines of the instances' output, and their order."""

from __future__ import annotations

import os
import pty
import termios
import time

import pytest
from support.launcher.jobs import a_job
from support.terminals import screen_of

from poprun_py.running.supervise.connection import Peer
from poprun_py.running.supervise.instance_output import InstanceOutput
from poprun_py.running.supervise.job_description import Watchers

TRACEBACK = b"Traceback (most recent call last):\n  File x\nValueError: rank %d\n"
WARNING = b"x.py:1: UserWarning: rank\n  f(x)\n"


@pytest.fixture
def start(tmp_path):
    """Start the output of a job of three instances; its stderr is a file."""
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:

        def make(count=3, **watchers):
            job = a_job(count=count, watchers=Watchers(**watchers))
            output = InstanceOutput(job, (out.fileno(), err.fileno()), print)
            peers = []
            for index in range(3):
                output.add(index)
                peers.append(Peer(index=index, connection=None, host="h", pid=1))
            return output, peers, (tmp_path / "err").read_text

        yield make


def test_all_instances_of_a_repeated_traceback_at_the_end_are_visible(start):
    output, peers, shown = start()
    for peer in (peers[1], peers[0]):
        output.feed_stderr(peer, TRACEBACK % peer.index)
    assert "rank 0" not in shown()
    for peer in peers:
        output.finish(peer.index)
    assert shown().splitlines()[-2:] == [
        "[1,1]<stderr>:ValueError: rank 1",
        "[1,0]<stderr>:the same traceback as instance 1",
    ]
    assert output.visible_instances == {0, 1}


def test_output_that_many_lines_follow_is_not_visible(start):
    output, peers, _ = start()
    output.feed_stderr(peers[0], b"a\n")
    output.feed_stderr(peers[1], b"b\n" * 8)
    assert output.visible_instances == {0, 1}
    output.feed_stderr(peers[1], b"b\n")
    assert output.visible_instances == {1}


def test_an_unfinished_line_after_a_held_traceback_is_shown_after_the_end_of_its_instance(start):
    output, peers, shown = start()
    output.feed_stderr(peers[0], TRACEBACK % 0)
    output.feed_stderr(peers[1], TRACEBACK % 1 + b"bye")
    output.finish(1)
    assert "bye" not in shown()
    deadline = output.next_deadline()
    output.on_time(deadline)
    assert shown().splitlines()[-2:] == [
        "[1,1]<stderr>:the same traceback as instance 0", "[1,1]<stderr>:bye",
    ]  # fmt: skip
    assert shown().endswith("\n")


def test_a_hidden_instance_is_neither_shown_nor_compared(start):
    output, peers, shown = start(only_output_from=frozenset({1}))
    for peer in peers:
        output.feed_stderr(peer, TRACEBACK % peer.index)
        output.finish(peer.index)
    assert shown() == "".join(
        f"[1,1]<stderr>:{line}\n" for line in (TRACEBACK % 1).decode().splitlines()
    )
    assert output.visible_instances == {1}


def test_plain_output_is_shown_at_once(start):
    output, peers, shown = start(output="plain")
    for peer in peers:
        output.feed_stderr(peer, TRACEBACK % 0)
        output.feed_stderr(peer, WARNING)
    assert shown() == (TRACEBACK % 0 + WARNING).decode() * 3


def test_a_repeated_warning_is_told_before_a_repeated_traceback(start):
    output, peers, shown = start()
    for peer in peers:
        output.feed_stderr(peer, WARNING)
        output.feed_stderr(peer, TRACEBACK % peer.index)
    for peer in peers:
        output.finish(peer.index)
    assert shown().splitlines()[5:] == [
        "[1,1-2]<stderr>:the same warning as instance 0 (UserWarning, x.py:1)",
        "[1,1-2]<stderr>:the same traceback as instance 0",
    ]


def test_a_warning_is_told_when_its_time_has_come(start):
    output, peers, shown = start()
    for peer in peers:
        output.feed_stderr(peer, WARNING)
    output.on_time(output.next_deadline())
    assert "[1,1-2]<stderr>:the same warning as instance 0" in shown()
    assert output.next_deadline() == float("inf")


def test_a_progress_bar_is_shown_when_it_stands_still(start):
    output, peers, shown = start()
    assert output.next_deadline() == float("inf")
    output.feed_stderr(peers[0], b"\r 5%")
    assert shown() == ""
    output.on_time(output.next_deadline() + 0.01)
    assert shown() == "[1,0]<stderr>: 5%\n"
    assert output.next_deadline() == float("inf")


@pytest.mark.parametrize(("num_instances", "is_split"), [(3, True), (64, False)])
def test_many_instances_have_longer_to_end_a_line(start, num_instances, is_split):
    output, peers, shown = start(num_instances)
    output.feed_stderr(peers[0], b"words")
    fed = time.monotonic()
    output.on_time(fed + 0.3)
    assert (shown() != "") is is_split
    output.on_time(fed + 3.0)
    assert shown() == "[1,0]<stderr>:words"


def test_a_path_that_is_not_utf_8_is_shown(start):
    output, _, shown = start()
    output.say("the folder b\udcff is gone")
    assert shown() == "poprun-py: the folder b\\udcff is gone\n"


def test_the_panel_is_written_at_once_and_removed_at_the_end(monkeypatch):
    ours, theirs = pty.openpty()
    writes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda to, data: writes.append(data) or write(to, data))
    try:
        job = a_job(environ={"TERM": "xterm"}, watchers=Watchers(live=True))
        output = InstanceOutput(job, (theirs, theirs), print)
        termios.tcsetwinsize(theirs, (30, 100))
        output.add(0)
        peer = Peer(index=0, connection=None, host="h", pid=1)
        lines = [f"row {number} {'x' * 80}" for number in range(10)]
        output.show_panel(lines)
        assert len(writes) == 1
        output.feed_stdout(peer, b"line\n")
        output.close()
        seen = os.read(ours, 1 << 16)
        while lines[-1].encode() not in seen or b"line" not in seen:
            seen += os.read(ours, 1 << 16)
    finally:
        os.close(ours)
        os.close(theirs)
    assert screen_of(seen.decode(), columns=100, rows=30) == ["[1,0]<stdout>:line"]


def test_a_message_during_the_job_is_wrapped_on_a_terminal_only(start):
    sentence = "instance 1 has made no step for ten seconds, and instance 0 waits for it"
    output, _, shown = start()
    output.say(sentence)
    assert shown() == f"poprun-py: {sentence}\n"
    ours, theirs = pty.openpty()
    try:
        termios.tcsetwinsize(theirs, (30, 50))
        output = InstanceOutput(a_job(environ={"TERM": "xterm"}), (theirs, theirs), print)
        output.say(sentence)
        rows = os.read(ours, 1 << 16).decode().splitlines()
        output.close()
    finally:
        os.close(ours)
        os.close(theirs)
    assert rows == [
        "poprun-py: instance 1 has made no step for ten",
        "  seconds, and instance 0 waits for it",
    ]


@pytest.mark.parametrize("form", ["tag", "plain"])
def test_after_ctrl_c_tracebacks_of_interrupts_are_short_except_as_plain_bytes(start, form):
    output, peers, shown = start(output=form)
    interrupt = TRACEBACK.replace(b"ValueError: rank %d", b"KeyboardInterrupt")
    output.feed_stderr(peers[0], interrupt)
    output.shorten_interrupts()
    output.feed_stderr(peers[1], interrupt)
    for peer in peers:
        output.finish(peer.index)
    assert shown().count("Traceback (most recent call last)") == (2 if form == "plain" else 1)
    assert shown().count("KeyboardInterrupt") == 2
