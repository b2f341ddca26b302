"""What a wrapper sees of its program's use of the host, and of its ledger in shared memory."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import wait_until

from popdist_py import environment
from popdist_py.activities import ledger
from poprun_py import process_info
from poprun_py.instance import control_protocol, program_activity, progress_memory, sockets
from poprun_py.instance.program_activity import SignsOfLife, observe
from poprun_py.instance.progress_memory import ProgressMemory
from poprun_py.instance.quick_imports import dumps
from poprun_py.running.supervise.hang_detection import Look


@pytest.fixture
def program():
    """Start a Python program, which ends with the test."""
    started = []

    def start(code, **environ):
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environ},
            start_new_session=True,
        )  # fmt: skip
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        if process.returncode is None:
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
    assert program_activity._throttled_seconds(str(tmp_path)) == seconds


def test_both_sides_name_the_same_words():
    for name in ("_SINCE", "_ACTIVITY", "_SAMPLES", "_TIMED_STEPS", "_STEPS", "_NANOSECONDS"):
        assert getattr(progress_memory, name) == getattr(ledger, name), name
    for name in ("_CALL", "_CALL_BEGAN"):
        assert getattr(progress_memory, name) == getattr(ledger, name), name
    assert (ledger.WAITING, ledger.SAVING) == (progress_memory._WAITING, progress_memory._SAVING)
    assert ledger._CALL_BEGAN < progress_memory._FAILED < ledger._ROWS
    assert ledger._NANOSECONDS + progress_memory._NUM_ACTIVITIES <= ledger._CALL
    assert ledger._CALL_BEGAN < ledger._ROWS
    for name in ("_ROWS", "_RING", "_ROW_WORDS", "_UNTIMED", "_UNKNOWN_BITS"):
        assert getattr(progress_memory, name) == getattr(ledger, name), name
    assert progress_memory._ALL_WORDS == ledger._NUM_WORDS
    assert progress_memory._NUM_WORDS <= ledger._BEGAN  # after those of the heartbeat
    assert progress_memory._LEDGER_BEGAN == ledger._BEGAN
    assert len(ledger.NAMES) == progress_memory._NUM_ACTIVITIES


def test_the_wrapper_reads_what_the_program_counts(program):
    seen = ProgressMemory()
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
    asked = time.monotonic_ns()
    read = seen.ledger()
    assert json.loads(json.dumps(read)) == read
    assert (read["samples"], read["timed"], read["loss"]) == (8 * 301, 300, None)
    assert len(read["steps"]) == 255
    last = read["steps"][-10:]
    assert all(0 < own <= step for own, step in zip(read["own"], last, strict=True))
    assert ledger.NAMES[read["activity"]] == "saving"
    # What goes on counts until now.
    assert sum(read["nanoseconds"]) == read["now"] - read["began"]
    assert asked <= read["now"] <= time.monotonic_ns()


def test_the_wrapper_reads_the_last_collective(program):
    seen = ProgressMemory()
    assert (seen.call(), seen.counts_steps()) == ([0, 0, 0, 0.0], False)
    code = (
        "import time, popdist_py\nfrom popdist_py import activities, heartbeat\n"
        "popdist_py.init()\npopdist_py.barrier()\n"
        "with activities.doing(activities.REDUCING, 'reduce'):\n"
        "    print('ready', flush=True)\n    input()\n"
        "heartbeat.expect()\ntime.sleep(100)\n"
    )
    began = time.monotonic()
    running = program(code, **seen.variables([sys.executable], os.environ))
    number, which, goes_on, seconds = seen.call()
    assert (number, environment.COLLECTIVES[which], goes_on) == (2, "reduce", 1)
    assert 0 < seconds < time.monotonic() - began
    assert (seen.progress(), seen.counts_steps()) == ([0, 0, 0, 0], False)
    running.stdin.write("\n")
    running.stdin.flush()
    wait_until(seen.counts_steps)
    assert seen.call()[:3] == [2, which, 0]


IN_C = """
import ctypes, sys, threading
c, lock = ctypes.CDLL(None), ctypes.create_string_buffer(8)
def let_go():
    sys.stdin.readline()
    c.pthread_spin_unlock(lock)
c.pthread_spin_init(lock, 0)
c.pthread_spin_lock(lock)
print('ready', flush=True)
sys.stdin.readline()
threading.Thread(target=let_go, daemon=True).start()
c.pthread_spin_lock(lock)
print('python', flush=True)
while True: pass
"""


def test_only_python_answers_who_asks_whether_it_runs(program):
    """One call of C lasts until this has been seen; before and after it Python runs."""
    seen = ProgressMemory()
    running = program(IN_C, **seen.variables([sys.executable], os.environ))

    def away(ask=True):
        return seen.away_seconds([running.pid], ask=ask)

    assert away(ask=False) == away() == 0.0  # which is the first question
    running.stdin.write("\n")
    running.stdin.flush()
    wait_until(lambda: away() > 0.1)
    running.stdin.write("\n")
    running.stdin.flush()
    assert running.stdout.readline() == "python\n"
    wait_until(lambda: away(ask=False) == 0.0)
    assert "\0" not in seen.stacks(running.pid)[0]["text"]
    assert seen.stacks(running.pid)[0]["text"]
    away()
    assert seen.away_seconds([], ask=True) == 0.0  # it has ended, with the question


def test_who_does_not_catch_the_question_is_not_asked():
    seen = ProgressMemory()
    with subprocess.Popen(["sleep", "100"]) as process:
        assert seen.away_seconds([process.pid], ask=True) == 0.0
        alive = process.poll() is None
        process.kill()
    assert alive


def test_a_program_that_ends_is_not_ended_by_the_question():
    """The interpreter gives up its handlers long before its process is gone."""
    seen = ProgressMemory()
    environ = {**os.environ, **seen.variables([sys.executable], os.environ)}
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", "import json"], env=environ) as running:
            while running.poll() is None:
                seen.away_seconds([running.pid], ask=True)
                seen._asked = 0
        assert running.returncode == 0


def test_signs_of_life_are_asked_of_one_that_is_only_busy(program):
    seen = ProgressMemory()
    code = READY + "while True: pass"
    running = program(code, **seen.variables([sys.executable], os.environ))
    signs = SignsOfLife(seen, running.pid)
    first = signs.look(5)
    assert (first["written"], first["call"][:3], first["waits"], first["joined"]) == (
        *(5, [0, 0, 0], False, False),
    )
    assert seen._asked == 0
    wait_until(lambda: signs.look(5)["awake_seconds"] > first["awake_seconds"] + 0.1)
    assert seen._asked == running.pid
    assert json.loads(dumps(first)) == first
    assert Look.of(first).moved_bytes > 0


def test_what_a_connection_brings_is_counted(program):
    """Not by /proc/PID/io, which counts no recv()."""
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
            signs = SignsOfLife(ProgressMemory(), running.pid)
            first = signs.look(0)["received_bytes"]
            assert signs.look(0)["received_bytes"] == first
            given.sendall(bytes(300_000))
            wait_until(lambda: signs.look(0)["received_bytes"] >= first + 300_000)
            given.sendall(bytes(1000))
            wait_until(lambda: signs.look(0)["received_bytes"] >= first + 301_000)
    # A connection that is gone takes nothing away.
    wait_until(lambda: not sockets._socket_inodes(running.pid))
    assert signs.look(0)["received_bytes"] == first + 301_000


def test_a_kernel_that_does_not_tell_of_connections_is_no_failure(monkeypatch):
    monkeypatch.setattr(sockets, "_BY_FAMILY", 255)
    assert sockets.SocketBytes().num_bytes([os.getpid()]) == 0


@pytest.mark.parametrize(
    ("state", "call", "saves"),
    [
        ("D", "1 0x3", True),
        ("S", "74 0x3 0x0", True),
        ("S", "1 0x3", False),
        ("R", "running", False),
    ],
)
def test_a_thread_that_waits_for_a_disk_saves(monkeypatch, state, call, saves):
    files = {"stat": f"1 (a) b) {state} {'1 ' * 50}".encode(), "syscall": call.encode()}
    monkeypatch.setattr(process_info, "read_file", lambda _, name: files[Path(name).name])
    assert program_activity._threads_at_disk(os.getpid()) >= ({os.getpid()} if saves else set())
    assert bool(program_activity._threads_at_disk(os.getpid())) is saves


def test_a_short_wait_for_a_disk_beside_the_main_thread_is_no_saving(monkeypatch):
    signs = SignsOfLife(ProgressMemory(), os.getpid())
    seen = [{os.getpid()}, set(), {5}, {6}, {6}]
    monkeypatch.setattr(process_info, "process_tree", lambda _: [os.getpid()])
    monkeypatch.setattr(program_activity, "_threads_at_disk", lambda _: seen.pop(0))
    assert [signs.look(0)["saves"] for _ in range(5)] == [True, False, False, False, True]


def test_saving_and_the_last_of_an_end_are_seen(program):
    seen = ProgressMemory()
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
    running = program(code, **seen.variables([sys.executable], os.environ))
    signs = SignsOfLife(seen, running.pid)
    look = signs.look(0)
    assert (look["saves"], look["ending"], look["stopped"]) == (True, False, False)
    os.kill(running.pid, signal.SIGSTOP)
    wait_until(lambda: signs.look(0)["stopped"])
    os.kill(running.pid, signal.SIGCONT)
    running.stdin.write("\n")
    running.stdin.flush()
    assert running.stdout.readline() == "deleted\n"
    look = signs.look(0)
    assert (look["saves"], look["ending"], look["stopped"]) == (False, True, False)


KEPT = """
import sys, threading, time
def rest(): sys.stdin.readline()
def pause(): time.sleep(100)
{}
print('ready', flush=True)
{}
"""


@pytest.mark.parametrize(
    ("before", "end", "is_told"),
    [
        ("threading.Thread(target=rest).start()", "1 / 0", True),
        ("threading.Thread(target=rest).start()", "try: 1 / 0\nexcept ZeroDivisionError: "
         "sys.excepthook(*sys.exc_info())", False),
        ("import concurrent.futures as c; c.ThreadPoolExecutor(1).submit(rest)", "1 / 0", True),
        ("import multiprocessing as m; m.get_context('fork').Process(target=pause).start()",
         "1 / 0", True),
        ("hook = sys.excepthook; sys.excepthook = lambda *e: hook(*e); "
         "threading.Thread(target=rest).start()", "1 / 0", True),
        ("threading.Thread(target=rest).start()", "sys.exit(3)", False),
        ("threading.Thread(target=rest, daemon=True).start()", "1 / 0", False),
    ],
)  # fmt: skip
def test_an_exception_that_threads_or_processes_outlive_is_told(program, before, end, is_told):
    seen = ProgressMemory()
    running = program(KEPT.format(before, end), **seen.variables([sys.executable], os.environ))
    if is_told:
        wait_until(lambda: seen.failed_process() == running.pid)
    else:
        # communicate() allows for the end of the program: a daemon thread does not delay it.
        running.communicate("\n\n", 60)
        assert seen.failed_process() == 0


def test_a_program_that_writes_all_the_time_is_read_whole(program):
    seen = ProgressMemory()
    code = (
        "from popdist_py import activities\n" + READY + "while True:\n"
        "    with activities.doing(activities.LOADING): sum(range(500))\n"
    )
    program(code, **seen.variables([sys.executable], os.environ))
    wait_until(lambda: seen.ledger() is not None)
    for _ in range(500):
        read = seen.ledger()
        assert sum(read["nanoseconds"]) == read["now"] - read["began"]


def counting(monkeypatch, seen):
    """Count in the memory that is seen, in this process."""
    for name, value in seen.variables(["program"], {}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ledger, "_words", None)
    monkeypatch.setattr(ledger, "_last_step", (0, 0, 0, 0))


@settings(max_examples=10)
@given(st.lists(st.integers(0, 2 * ledger._RING), min_size=1, max_size=4))
def test_each_step_is_told_once_or_counted_as_lost(bursts):
    with pytest.MonkeyPatch.context() as patch:
        seen, made, told = ProgressMemory(), 0, 0
        counting(patch, seen)
        for burst in bursts:
            for number in range(made + 1, made + burst + 1):
                ledger.step_done(number, number / 2, number)
            made += burst
            steps = seen.steps(told)
            assert steps["made"] == made
            assert steps["lost"] == max(0, burst - (ledger._RING - 1))
            numbers = list(range(told + steps["lost"] + 1, made + 1))
            assert [(row[0], row[4], row[5]) for row in steps["rows"]] == [
                (number, number, number / 2) for number in numbers
            ]
            told = made
        ledger.step_done()
        assert seen.steps(told)["rows"][0][5] is None
        assert seen.ledger()["loss"] is None


def test_the_largest_answer_fits_into_a_frame(monkeypatch):
    seen, longest = ProgressMemory(), (-(2**63), *[-(2**63)] * 4, -1.7976931348623157e308)
    counting(monkeypatch, seen)
    words = ledger._open()
    for row in range(ledger._RING):
        ledger._ROW.pack_into(words, 8 * (ledger._ROWS + row * ledger._ROW_WORDS), *longest)
    words[ledger._STEPS] = 10**18
    told = dumps({"steps": seen.steps(10**18 - ledger._RING), "ledger": seen.ledger()})
    assert 500_000 < len(told) < control_protocol.MAX_PAYLOAD / 1.5


def test_steps_are_read_whole_while_the_program_makes_more(program):
    """Every row tells of one step, in order, and what is missing is counted."""
    seen, told, lost, rows = ProgressMemory(), 0, 0, 0
    code = (
        "from popdist_py import heartbeat\n" + READY + "number = 0\n"
        "while True:\n"
        "    number += 1\n"
        "    heartbeat.step(3 * number, number / 8)\n"
    )
    program(code, **seen.variables([sys.executable], os.environ))
    for turn in range(15):
        ahead = told + (ledger._RING - 20 if turn % 5 else 2 * ledger._RING)
        wait_until(lambda ahead=ahead: seen._words[progress_memory._STEPS] >= ahead)
        steps = seen.steps(told)
        lost += steps["lost"]
        before = told + steps["lost"]
        for place, (number, ended, taken, own, samples, loss) in enumerate(steps["rows"], 1):
            assert (number, samples, loss) == (before + place, 3 * number, number / 8)
            assert number == 1 or 0 < own <= taken < ended
        rows += len(steps["rows"])
        told = steps["made"]
        assert told == lost + rows
    assert lost >= 3 * ledger._RING
    assert rows > 1000
