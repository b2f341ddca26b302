"""CPU time, memory, disk, connections and waiting of programs, as the kernel reports them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import wait_until

from poprun_py import process_info
from poprun_py.instance import program_activity
from poprun_py.instance.program_activity import ActivitySampler, resource_usage
from poprun_py.instance.program_environment import stacks_variables
from poprun_py.instance.progress_memory import ProgressMemory, unnamed_file
from poprun_py.instance.python_stacks import PythonStacks
from poprun_py.instance.quick_imports import dumps
from poprun_py.running.supervise.activity_monitor import ActivitySample

READY = "print('ready', flush=True)\n"


def sampler_of(memory, program):
    return ActivitySampler(memory, PythonStacks(unnamed_file("stacks")), program)


def test_cpu_time_and_memory_include_child_processes(program):
    child = "data = bytearray(b'x') * (64 << 20)\nprint('ready', flush=True)\nwhile True: pass"
    code = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    tree = program(code + "time.sleep(100)")
    before = resource_usage(tree.pid)
    assert 64 << 20 < before["memory_bytes"] < 200 << 20
    assert before["cpus"] == sorted(os.sched_getaffinity(0))
    wait_until(lambda: resource_usage(tree.pid)["cpu_seconds"] > before["cpu_seconds"] + 0.1)
    assert resource_usage(tree.pid)["swap_bytes"] >= 0


def test_waiting_for_a_shared_cpu_is_measured(program):
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, [{cpu}])\n" + READY + "while True: pass"
    shares, _ = program(code), program(code)
    before = resource_usage(shares.pid)
    assert before["cpus"] == [cpu]
    wait_until(
        lambda: resource_usage(shares.pid)["queued_seconds"] > before["queued_seconds"] + 0.1
    )


def test_an_ended_program_uses_nothing():
    process = subprocess.Popen(["true"])
    process.wait()
    seen = resource_usage(process.pid)
    assert (seen["cpu_seconds"], seen["memory_bytes"], seen["cpus"]) == (0.0, 0, [])


def test_a_busy_program_without_other_activity_is_asked_whether_it_runs_python(program):
    memory, stacks = ProgressMemory(), PythonStacks(unnamed_file("stacks"))
    code = READY + "while True: pass"
    running = program(code, **stacks_variables(stacks._file, [sys.executable], os.environ))
    sampler = ActivitySampler(memory, stacks, running.pid)
    first = sampler.sample(5)
    assert (first["written"], first["call"][:3], first["waits"], first["joined"]) == (
        *(5, [0, 0, 0], False, False),
    )
    assert stacks._asked == 0
    wait_until(lambda: sampler.sample(5)["awake_seconds"] > first["awake_seconds"] + 0.1)
    assert stacks._asked == running.pid
    assert json.loads(dumps(first)) == first
    assert ActivitySample.of(first).moved_bytes > 0


def test_bytes_of_tcp_connections_are_counted(program):
    """/proc/PID/io does not count recv()."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = (
            "import socket, time\n"
            f"s = socket.create_connection(('127.0.0.1', {server.getsockname()[1]}))\n"
            + READY
            + "view = bytearray(1 << 16)\nwhile s.recv_into(view): pass\n"
            "s.close()\ntime.sleep(100)\n"
        )
        running = program(code)
        given, _ = server.accept()
        with given:
            sampler = sampler_of(ProgressMemory(), running.pid)
            first = sampler.sample(0)["received_bytes"]
            assert sampler.sample(0)["received_bytes"] == first
            given.sendall(bytes(300_000))
            wait_until(lambda: sampler.sample(0)["received_bytes"] >= first + 300_000)
            given.sendall(bytes(1000))
            wait_until(lambda: sampler.sample(0)["received_bytes"] >= first + 301_000)
    # The sum does not shrink when a connection is closed.
    wait_until(lambda: not program_activity._socket_inodes(running.pid))
    assert sampler.sample(0)["received_bytes"] == first + 301_000


def test_a_kernel_that_refuses_the_request_is_tolerated(monkeypatch):
    monkeypatch.setattr(program_activity, "_BY_FAMILY", 255)
    assert program_activity.TcpTraffic().num_bytes([os.getpid()]) == 0


@pytest.mark.parametrize(
    ("state", "call", "saves"),
    [
        ("D", "1 0x3", True),
        ("S", "74 0x3 0x0", True),
        ("S", "1 0x3", False),
        ("R", "running", False),
    ],
)
def test_a_thread_that_waits_for_a_disk_counts_as_saving(monkeypatch, state, call, saves):
    files = {"stat": f"1 (a) b) {state} {'1 ' * 50}".encode(), "syscall": call.encode()}
    monkeypatch.setattr(process_info, "read_file", lambda _, name, **__: files[Path(name).name])
    assert program_activity._threads_at_disk(os.getpid()) >= ({os.getpid()} if saves else set())
    assert bool(program_activity._threads_at_disk(os.getpid())) is saves


def test_a_short_wait_for_a_disk_in_another_thread_does_not_count_as_saving(monkeypatch):
    sampler = sampler_of(ProgressMemory(), os.getpid())
    seen = [{os.getpid()}, set(), {5}, {6}, {6}]
    monkeypatch.setattr(process_info, "process_tree", lambda _: [os.getpid()])
    monkeypatch.setattr(program_activity, "_threads_at_disk", lambda _: seen.pop(0))
    assert [sampler.sample(0)["saves"] for _ in range(5)] == [True, False, False, False, True]


def test_saving_stopping_and_ending_are_recognised(program):
    memory, stacks = ProgressMemory(), PythonStacks(unnamed_file("stacks"))
    code = (
        "import ctypes, os, sys\nfrom popdist_py import activities\n"
        "with activities.doing(activities.SAVING):\n"
        "    print('ready', flush=True)\n"
        "    input()\n"
        "class Last:\n"
        "    def __del__(self, write=os.write, read=os.read):\n"
        "        write(1, b'deleted\\n')\n"
        "        read(0, 1)\n"
        "sys.last = Last()\n"
    )
    variables = {
        **memory.variables(),
        **stacks_variables(stacks._file, [sys.executable], os.environ),
    }
    running = program(code, **variables)
    sampler = ActivitySampler(memory, stacks, running.pid)
    sample = sampler.sample(0)
    assert (sample["saves"], sample["ending"], sample["stopped"]) == (True, False, False)
    os.kill(running.pid, signal.SIGSTOP)
    wait_until(lambda: sampler.sample(0)["stopped"])
    os.kill(running.pid, signal.SIGCONT)
    running.stdin.write("\n")
    running.stdin.flush()
    assert running.stdout.readline() == "deleted\n"
    sample = sampler.sample(0)
    assert (sample["saves"], sample["ending"], sample["stopped"]) == (False, True, False)
