"""State, parents, children and commands of processes that the tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import psutil
from support.processes import wait_until

from poprun_py import process_info

CHILDREN_OF_A_THREAD = """
import subprocess, threading, time
start = lambda: subprocess.Popen(["sh", "-c", "sleep 100 & sleep 100"])
thread = threading.Thread(target=start)
thread.start()
thread.join()
start()
time.sleep(100)
"""


def test_both_ways_to_find_descendants_agree():
    with subprocess.Popen([sys.executable, "-c", CHILDREN_OF_A_THREAD]) as process:
        pid = process.pid
        wait_until(lambda: len(process_info.descendants(pid)) >= 4)
        wait_until(
            lambda: (
                sorted(process_info.process_tree(pid)[1:]) == sorted(process_info.descendants(pid))
            )
        )
        assert process_info.has_children(pid)
        for each in [*process_info.descendants(pid), pid]:
            os.kill(each, signal.SIGKILL)


def test_facts_agree_with_those_of_psutil():
    with subprocess.Popen(["sleep", "100"]) as process:
        pid, other = process.pid, psutil.Process(process.pid)
        wait_until(lambda: process_info.command_line(pid) == "sleep 100")
        stat = process_info.read_stat(pid)
        boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        started = boot + stat.start_ticks / os.sysconf("SC_CLK_TCK")
        assert abs(started - other.create_time()) < 2
        assert (stat.parent, stat.group) == (os.getpid(), os.getpgrp())
        assert process_info.owner(pid) == other.uids().real
        assert int(process_info.read_fields(pid, "status")["Threads"]) == other.num_threads() == 1
        assert process_info.ancestors(pid) == [each.pid for each in other.parents()]
        assert process_info.variable(pid, "PATH") == other.environ()["PATH"]
        assert process_info.variable(pid, "NO_SUCH_VARIABLE") == ""
        assert not process_info.has_children(pid)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: process_info.state_letter(pid) == "T")
        process.kill()


def test_an_ended_process_has_no_facts():
    with subprocess.Popen(["true"]) as process:
        pass
    pid = process.pid
    assert process_info.read_stat(pid) is None
    assert process_info.read_fields(pid, "status") == {}
    assert process_info.start_ticks(pid) is None
    assert process_info.owner(pid) is None
    assert process_info.state_and_handler(pid, 1) == ("Z", False)
    assert process_info.command_line(pid) == "?"
    assert (process_info.process_tree(pid), process_info.threads(pid)) == ([pid], [])


def test_a_command_line_is_short_and_printable():
    code = "import time; time.sleep(100)" + " " * 100
    with subprocess.Popen([sys.executable, "-c", code, "\x1b[31m"]) as process:
        wait_until(lambda: "-c" in process_info.command_line(process.pid))
        text = process_info.command_line(process.pid)
        process.kill()
    assert len(text) == 80
    assert text.isprintable()


STAT = """cpu  500 10 90 4000 300 20 30 50 5 0
cpu0 400 0 50 1000 100 20 30 0 0 0
cpu12 100 10 40 3000 200 0 0 50 5 0
intr 12 0
"""


def test_time_in_use_of_each_cpu(tmp_path):
    """The time of guests is a part of the user time, and waiting for a disk is not use."""
    path = tmp_path / "stat"
    path.write_text(STAT)
    ticks = os.sysconf("SC_CLK_TCK")
    assert process_info.busy_seconds(str(path)) == {0: 500 / ticks, 12: 200 / ticks}
    path.write_text("cpu0 not numbers\n")
    assert process_info.busy_seconds(str(path)) == {}
    assert process_info.busy_seconds(str(tmp_path / "none")) == {}
    assert set(process_info.busy_seconds()) >= os.sched_getaffinity(0)
