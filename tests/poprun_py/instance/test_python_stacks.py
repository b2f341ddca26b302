"""Signals that ask a program whether its main thread runs Python."""

from __future__ import annotations

import os
import subprocess
import sys

from support.processes import wait_until

from poprun_py.instance.program_environment import stacks_variables
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
