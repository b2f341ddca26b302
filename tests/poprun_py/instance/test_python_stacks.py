"""Signals that ask a program whether its main thread runs Python."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import wait_until

from poprun_py.instance import python_stacks
from poprun_py.instance.program_environment import STACKS_SIGNAL, stacks_variables
from poprun_py.instance.progress_memory import unnamed_file
from poprun_py.instance.python_stacks import PythonStacks

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

BUSY = """
import os, signal, sys
print('ready', flush=True)
sys.stdin.readline()
%s
print('busy', flush=True)
while True: pass
"""
CLOSED = "os.closerange(3, 64)"
REUSED = "os.closerange(3, 64); own = [os.memfd_create(str(each)) for each in range(8)]"


@pytest.fixture
def busy(program):
    """Start a program that runs a statement, and then runs Python code for ever."""

    def start(statement="pass"):
        stacks = PythonStacks(unnamed_file("stacks"))
        variables = stacks_variables(stacks._file, [sys.executable], os.environ)
        running = program(BUSY % statement, **variables)
        running.stdin.write("\n")
        running.stdin.flush()
        assert running.stdout.readline() == "busy\n"
        return stacks, running

    return start


def wait_until_asked(stacks, running):
    def is_asked():
        stacks.seconds_outside_python([running.pid], ask=True)
        return stacks._asked == running.pid

    wait_until(is_asked)


def wait_until_answered(stacks, running):
    wait_until(lambda: stacks.seconds_outside_python([running.pid], ask=False) == 0.0, 10)


def test_a_main_thread_in_c_code_does_not_answer(program):
    """The program runs Python, then C code until the test has noticed that, then Python again."""
    stacks = PythonStacks(unnamed_file("stacks"))
    running = program(IN_C, **stacks_variables(stacks._file, [sys.executable], os.environ))

    def away(ask=True):
        return stacks.seconds_outside_python([running.pid], ask=ask)

    assert away(ask=False) == away() == 0.0  # the second call asks for the first time
    running.stdin.write("\n")
    running.stdin.flush()
    wait_until(lambda: away() > 0.1)
    running.stdin.write("\n")
    running.stdin.flush()
    assert running.stdout.readline() == "python\n"
    wait_until(lambda: away(ask=False) == 0.0)
    assert "\0" not in stacks.stacks(running.pid)[0]["text"]
    assert stacks.stacks(running.pid)[0]["text"]
    away()
    assert stacks.seconds_outside_python([], ask=True) == 0.0  # the program has ended


def test_a_process_without_a_handler_is_not_asked():
    stacks = PythonStacks(unnamed_file("stacks"))
    with subprocess.Popen(["sleep", "100"]) as process:
        assert stacks.seconds_outside_python([process.pid], ask=True) == 0.0
        alive = process.poll() is None
        process.kill()
    assert alive


def test_an_ending_interpreter_is_not_killed_by_the_signal():
    """The interpreter drops its handlers long before its process ends."""
    stacks = PythonStacks(unnamed_file("stacks"))
    environ = {**os.environ, **stacks_variables(stacks._file, [sys.executable], os.environ)}
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", "import json"], env=environ) as running:
            while running.poll() is None:
                stacks.seconds_outside_python([running.pid], ask=True)
                stacks._asked = 0
        assert running.returncode == 0


def test_a_program_whose_parent_blocked_the_signals_answers(busy):
    asking = {python_stacks._ASK_SIGNAL, STACKS_SIGNAL}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, asking)
    try:
        stacks, running = busy()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    wait_until_asked(stacks, running)
    wait_until_answered(stacks, running)
    wait_until(lambda: stacks.stacks(running.pid)[0]["text"])


def test_a_program_that_blocks_the_signal_is_not_taken_for_one_in_c_code(busy):
    stacks, running = busy("signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())")
    for _ in range(5):
        assert stacks.seconds_outside_python([running.pid], ask=True) == 0.0
    assert not stacks._asked


@pytest.mark.parametrize("statement", [CLOSED, REUSED])
def test_a_program_that_closed_the_file_runs_on_and_keeps_its_own_files(busy, statement):
    stacks, running = busy(statement)
    wait_until_asked(stacks, running)
    wait_until_answered(stacks, running)
    assert running.poll() is None
    opened = Path(f"/proc/{running.pid}/fd").iterdir()
    own = [each for each in opened if int(each.name) > 2]
    assert len(own) == (8 if statement == REUSED else 0)
    assert not any(each.stat().st_size for each in own)
    assert stacks.seconds_outside_python([running.pid], ask=True) == 0.0
    assert not stacks._asked
