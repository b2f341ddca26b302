"""The wrapper reads from the shared memory what the program has written."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.processes import wait_until
from support.repository import ROOT

from popdist_py import environment, heartbeat
from popdist_py.activities import ledger
from poprun_py.instance import control_protocol, progress_memory
from poprun_py.instance.program_environment import stacks_variables
from poprun_py.instance.progress_memory import ProgressMemory, unnamed_file
from poprun_py.instance.quick_imports import dumps

READY = "print('ready', flush=True)\n"


def test_both_sides_agree_on_the_words():
    for name in ("_SINCE", "_ACTIVITY", "_SAMPLES", "_TIMED_STEPS", "_STEPS", "_NANOSECONDS"):
        assert getattr(progress_memory, name) == getattr(ledger, name), name
    for name in ("_CALL", "_CALL_BEGAN"):
        assert getattr(progress_memory, name) == getattr(ledger, name), name
    assert (ledger.WAITING, ledger.SAVING) == (progress_memory._WAITING, progress_memory._SAVING)
    assert ledger._CALL_BEGAN < progress_memory._FAILED < ledger._ROWS
    assert ledger._NANOSECONDS + progress_memory._NUM_ACTIVITIES <= ledger._CALL
    assert ledger._CALL_BEGAN < ledger._ROWS
    for name in ("_ROWS", "_RING", "_ROW_WORDS", "_UNTIMED", "_UNKNOWN_BITS", "_FIRST_END",
                 "_LAST_END"):  # fmt: skip
        assert getattr(progress_memory, name) == getattr(ledger, name), name
    assert progress_memory._ALL_WORDS == ledger._NUM_WORDS
    assert heartbeat._NUM_WORDS <= ledger._BEGAN  # they follow the words of the heartbeat
    assert progress_memory._LEDGER_BEGAN == ledger._BEGAN
    assert len(ledger.NAMES) == progress_memory._NUM_ACTIVITIES


@pytest.mark.parametrize(
    ("code", "asked", "has_started"),
    [
        ("import mpi4py.MPI", "1", True),
        ("import mpi4py.MPI", "", False),
        ("import mpi4py; mpi4py.rc.initialize = False; import mpi4py.MPI", "1", False),
        (
            "import mpi4py; mpi4py.rc.initialize = False\n"
            "from mpi4py import MPI\nassert MPI.Init() == 'started'",
            "1",
            True,
        ),
        ("import os", "1", False),
    ],
)
def test_the_wrapper_reads_whether_the_program_has_started_mpi(
    program, tmp_path, code, asked, has_started
):
    package = tmp_path / "mpi4py"
    package.mkdir()
    package.joinpath("__init__.py").write_text("class rc:\n    initialize = True\n")
    package.joinpath("MPI.py").write_text(
        "from mpi4py import rc\nis_on = rc.initialize\n"
        "def Is_initialized(): return is_on\n"
        "def Init(): return 'started'\nInit_thread = Init\n"
    )
    memory = ProgressMemory()
    hook = ROOT / "popdist_py" / "start_hook"
    environ = {"PYTHONPATH": f"{hook}:{tmp_path}", "POPDIST_MEMORY_CHECKPOINTS": asked}
    program(f"{code}\n{READY}", **memory.variables(), **environ)
    assert memory.has_started_mpi() is has_started


def test_the_wrapper_reads_the_ledger_of_the_program(program):
    memory = ProgressMemory()
    assert memory.ledger() is None
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
    program(code, **memory.variables())
    asked = time.monotonic_ns()
    read = memory.ledger()
    assert json.loads(json.dumps(read)) == read
    assert (read["samples"], read["timed"], read["loss"]) == (8 * 301, 300, None)
    assert len(read["steps"]) == 255
    last = read["steps"][-10:]
    assert all(0 < own <= step for own, step in zip(read["own"], last, strict=True))
    assert ledger.NAMES[read["activity"]] == "saving"
    loading = ledger.NAMES.index("loading")
    assert read["until_first"][loading] == 0 < read["until_last"][loading]
    assert 0 < sum(read["until_first"]) < sum(read["until_last"]) < sum(read["nanoseconds"])
    assert sum(read["until_last"]) >= sum(read["steps"])
    # The current activity counts until now.
    assert sum(read["nanoseconds"]) == read["now"] - read["began"]
    assert asked <= read["now"] <= time.monotonic_ns()


def test_the_wrapper_reads_the_last_collective(program):
    memory = ProgressMemory()
    assert (memory.last_collective(), memory.counts_steps()) == ([0, 0, 0, 0.0], False)
    code = (
        "import time, popdist_py\nfrom popdist_py import activities, heartbeat\n"
        "popdist_py.init()\npopdist_py.barrier()\n"
        "with activities.doing(activities.REDUCING, 'reduce'):\n"
        "    print('ready', flush=True)\n    input()\n"
        "heartbeat.expect()\ntime.sleep(100)\n"
    )
    began = time.monotonic()
    running = program(code, **memory.variables())
    number, which, goes_on, seconds = memory.last_collective()
    assert (number, environment.COLLECTIVES[which], goes_on) == (2, "reduce", 1)
    assert 0 < seconds < time.monotonic() - began
    assert (memory.progress(), memory.counts_steps()) == ([0, 0, 0, 0], False)
    running.stdin.write("\n")
    running.stdin.flush()
    wait_until(memory.counts_steps)
    assert memory.last_collective()[:3] == [2, which, 0]


GOES_ON = """
import sys, threading, time
def rest(): sys.stdin.readline()
def pause(): time.sleep(100)
{}
print('ready', flush=True)
{}
"""


@pytest.mark.parametrize(
    ("before", "end", "is_reported"),
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
def test_an_exception_is_reported_if_threads_or_processes_go_on(program, before, end, is_reported):
    memory = ProgressMemory()
    stacks = stacks_variables(unnamed_file("stacks"), [sys.executable], os.environ)
    running = program(GOES_ON.format(before, end), **memory.variables(), **stacks)
    if is_reported:
        wait_until(lambda: memory.failed_process() == running.pid)
    else:
        # A daemon thread does not delay the end of the program.
        running.communicate("\n\n", 60)
        assert memory.failed_process() == 0


def test_a_ledger_adds_up_while_the_program_writes_it(program):
    memory = ProgressMemory()
    code = (
        "from popdist_py import activities\n" + READY + "while True:\n"
        "    with activities.doing(activities.LOADING): sum(range(500))\n"
    )
    program(code, **memory.variables())
    wait_until(lambda: memory.ledger() is not None)
    for _ in range(500):
        read = memory.ledger()
        assert sum(read["nanoseconds"]) == read["now"] - read["began"]


def counting(monkeypatch, memory):
    """Let this process count in the memory."""
    for name, value in memory.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ledger, "_words", None)
    monkeypatch.setattr(ledger, "_last_step", (0, 0, 0, 0))


@settings(max_examples=10)
@given(st.lists(st.integers(0, 2 * ledger._RING), min_size=1, max_size=4))
def test_each_step_is_returned_once_or_counted_as_lost(bursts):
    with pytest.MonkeyPatch.context() as patch:
        memory, made, told = ProgressMemory(), 0, 0
        counting(patch, memory)
        for burst in bursts:
            for number in range(made + 1, made + burst + 1):
                ledger.step_done(number, number / 2, number)
            made += burst
            steps = memory.steps(told)
            assert steps["made"] == made
            assert steps["lost"] == max(0, burst - (ledger._RING - 1))
            numbers = list(range(told + steps["lost"] + 1, made + 1))
            assert [(row[0], row[4], row[5]) for row in steps["rows"]] == [
                (number, number, number / 2) for number in numbers
            ]
            told = made
        ledger.step_done()
        assert memory.steps(told)["rows"][0][5] is None
        assert memory.ledger()["loss"] is None


def test_the_largest_report_fits_into_a_frame(monkeypatch):
    memory, longest = ProgressMemory(), (-(2**63), *[-(2**63)] * 4, -1.7976931348623157e308)
    counting(monkeypatch, memory)
    words = ledger._open()
    for row in range(ledger._RING):
        ledger._ROW.pack_into(words, 8 * (ledger._ROWS + row * ledger._ROW_WORDS), *longest)
    words[ledger._STEPS] = 10**18
    told = dumps({"steps": memory.steps(10**18 - ledger._RING), "ledger": memory.ledger()})
    assert 500_000 < len(told) < control_protocol.MAX_PAYLOAD / 1.5


def test_rows_are_complete_while_the_program_makes_more_steps(program):
    """The rows are in order, and the number of missing rows is returned."""
    memory, told, lost, rows = ProgressMemory(), 0, 0, 0
    code = (
        "from popdist_py import heartbeat\n" + READY + "number = 0\n"
        "while True:\n"
        "    number += 1\n"
        "    heartbeat.step(3 * number, number / 8)\n"
    )
    program(code, **memory.variables())
    for turn in range(15):
        ahead = told + (ledger._RING - 20 if turn % 5 else 2 * ledger._RING)
        wait_until(lambda ahead=ahead: memory._words[progress_memory._STEPS] >= ahead)
        steps = memory.steps(told)
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
