"""What a wrapper sees of its program's use of the host, and of its ledger in shared memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import wait_until

from popdist_py.activities import ledger
from poprun_py.instance import observation, processes, vitals
from poprun_py.instance.observation import observe
from poprun_py.instance.vitals import Vitals


@pytest.fixture
def program():
    """Start a Python program, which ends with the test."""
    started = []

    def start(code, **environ):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE, text=True, env={**os.environ, **environ},
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


READY = "print('ready', flush=True)\n"


def test_cpu_and_memory_are_those_of_the_whole_tree(program):
    child = "data = bytearray(b'x') * (64 << 20)\nprint('ready', flush=True)\nwhile True: pass"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    tree = program(code + "time.sleep(100)")
    before = observe(tree.pid)
    assert 64 << 20 < before["memory_bytes"] < 200 << 20
    assert before["cpus"] == sorted(os.sched_getaffinity(0))
    wait_until(lambda: observe(tree.pid)["cpu_seconds"] > before["cpu_seconds"] + 0.1)
    assert observe(tree.pid)["swap_bytes"] >= 0


def test_the_tree_is_that_of_a_pass_over_all_processes(program):
    code = (
        "import subprocess, threading, time\n"
        "start = lambda: subprocess.Popen(['sh', '-c', 'sleep 100 & sleep 100'])\n"
        "thread = threading.Thread(target=start)\nthread.start()\nthread.join()\nstart()\n"
    )
    pid = program(code + READY + "time.sleep(100)").pid
    wait_until(lambda: len(processes.descendants(pid)) >= 4)
    wait_until(lambda: sorted(observation._tree(pid)[1:]) == sorted(processes.descendants(pid)))


def test_a_program_that_shares_its_cpu_is_seen_to_wait_for_it(program):
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{cpu}])\n" + READY + "while True: pass"
    shares, _ = program(code), program(code)
    before = observe(shares.pid)
    assert before["cpus"] == [cpu]
    wait_until(lambda: observe(shares.pid)["queued_seconds"] > before["queued_seconds"] + 0.1)


def test_a_program_that_is_gone_uses_nothing():
    process = subprocess.Popen(["true"])
    process.wait()
    seen = observe(process.pid)
    assert (seen["cpu_seconds"], seen["memory_bytes"], seen["cpus"]) == (0.0, 0, [])


@pytest.mark.parametrize(
    ("entry", "folder", "text", "seconds"),
    [
        ("0::/job", "job", "nr_throttled 3\nthrottled_usec 2500000\n", 2.5),
        ("0::/job", "", "nr_throttled 3\nthrottled_usec 2500000\n", 2.5),  # of a group above
        ("4:cpu,cpuacct:/job", "cpu/job", "nr_throttled 3\nthrottled_time 1500000000\n", 1.5),
        ("4:memory:/job", "cpu/job", "throttled_time 1500000000\n", 0.0),
        ("0::/job", "job", "", 0.0),
    ],
)
def test_throttling_is_read_from_the_control_group(tmp_path, entry, folder, text, seconds):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(entry + "\n")
    group = tmp_path / "sys/fs/cgroup" / folder
    group.mkdir(parents=True)
    (group / "cpu.stat").write_text(text)
    assert observation._throttled_seconds(str(tmp_path)) == seconds


def test_both_sides_name_the_same_words():
    for name in ("_SINCE", "_ACTIVITY", "_SAMPLES", "_TIMED_STEPS", "_NANOSECONDS", "_RING"):
        assert getattr(vitals, name) == getattr(ledger, name), name
    for name in ("_STEP_NANOSECONDS", "_OWN_NANOSECONDS"):
        assert getattr(vitals, name) == getattr(ledger, name), name
    assert vitals._ALL_WORDS == ledger._NUM_WORDS
    assert vitals._NUM_WORDS <= ledger._BEGAN  # after those of the heartbeat
    assert vitals._LEDGER_BEGAN == ledger._BEGAN
    assert len(ledger.NAMES) == vitals._NUM_ACTIVITIES


def test_the_wrapper_reads_what_the_program_counts(program):
    seen = Vitals()
    assert seen.ledger() is None
    code = (
        "import time\nfrom popdist_py import activities, heartbeat\n"
        "heartbeat.step(8)\n"
        "for _ in range(300):\n"
        "    with activities.doing(activities.LOADING): pass\n"
        "    heartbeat.step(8)\n"
        "with activities.doing(activities.SAVING):\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(100)\n"
    )
    program(code, **seen.variables([sys.executable], os.environ))
    read = seen.ledger()
    assert json.loads(json.dumps(read)) == read
    assert (read["samples"], read["timed"]) == (8 * 301, 300)
    # The place that is written next is left out.
    assert len(read["steps"]) == 255
    last = read["steps"][-10:]
    assert all(0 < own <= step for own, step in zip(read["own"], last, strict=True))
    assert ledger.NAMES[read["activity"]] == "saving"
    # What goes on counts until now.
    assert sum(read["nanoseconds"]) == read["now"] - read["began"]
    assert abs(time.monotonic_ns() - read["now"]) < 10**9


def test_a_program_that_writes_all_the_time_is_read_whole(program):
    seen = Vitals()
    code = (
        "from popdist_py import activities\n" + READY + "while True:\n"
        "    with activities.doing(activities.LOADING): sum(range(500))\n"
    )
    program(code, **seen.variables([sys.executable], os.environ))
    wait_until(lambda: seen.ledger() is not None)
    first = seen.ledger()["began"]
    while time.monotonic_ns() < first + 500_000_000:
        read = seen.ledger()
        assert sum(read["nanoseconds"]) == read["now"] - read["began"]
