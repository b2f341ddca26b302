"""Heartbeat, stop question and stacks of real programs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import wait_until
from support.repository import ROOT

from popdist_py import environment, heartbeat
from poprun_py import process_info
from poprun_py.command.cli import run
from poprun_py.instance import control_protocol, progress_memory, python_stacks
from poprun_py.instance.program_environment import stacks_variables
from poprun_py.instance.progress_memory import unnamed_file
from poprun_py.instance.python_stacks import PythonStacks
from poprun_py.running.supervise.launcher_queries import _temporary_folders

TWO = ("--num-instances", "2", "--num-replicas", "2")
HOOK = ROOT / "poprun_py" / "instance" / "diagnostics_hook"


def test_both_ends_agree_on_the_shared_words():
    names = ("_STEP", "_POLLS", "_PROPOSED", "_AGREED", "_BEGUN", "_CALLS", "_RESUMED", "_DOING")
    assert [getattr(progress_memory, n) for n in names] == [getattr(heartbeat, n) for n in names]
    assert set(progress_memory.ProgressMemory().variables()) == {environment.HEARTBEAT}
    assert set(stacks_variables(0, ("sh",), {})) == {environment.STACKS}


def test_a_program_that_has_compiled_has_progress_from_then_on():
    """A program that has compiled has progress from then on, also without ``init()``."""
    shared = progress_memory.ProgressMemory()
    assert shared.progress() is None
    shared._words[progress_memory._DOING] = environment.COMPILING
    assert shared.progress() == [0, 0, 0, environment.COMPILING]
    shared._words[progress_memory._DOING] = environment.BETWEEN_CALLS
    assert shared.progress() == [0, 0, 0, environment.BETWEEN_CALLS]


def test_wrapper_sees_steps_and_decides_on_the_stop(tmp_path):
    shared, stacks = progress_memory.ProgressMemory(), PythonStacks(unnamed_file("stacks"))
    assert shared.progress() is None
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, popdist_py\n"
            "from popdist_py import heartbeat\n"
            "popdist_py.init()\n"
            "for line in sys.stdin:\n"
            "    heartbeat.step()\n"
            "    print(popdist_py.stopRequested(), flush=True)\n",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **shared.variables(), **stacks_variables(stacks._file, ("sh",), {})},
    ) as program:

        def ask():
            program.stdin.write("\n")
            program.stdin.flush()

        ask()
        assert program.stdout.readline() == "False\n"
        assert (shared.progress(), shared.polls()) == ([1, 0, 0, 0], 1)
        shared.propose_stop(3)
        assert shared.polls() == 1
        ask()
        assert program.stdout.readline() == "False\n"
        ask()  # waits for the agreement
        wait_until(lambda: shared.polls() == 3)
        shared.propose_stop(4)
        assert shared.polls() == 3
        assert program.stdout.readline() == "False\n"
        ask()
        shared.agree_stop(4)
        assert program.stdout.readline() == "True\n"
        found = stacks.stacks(program.pid)
        assert "in <module>" in found[0]["text"]
        program.stdin.close()


def test_process_that_does_not_catch_the_signal_lives(tmp_path):
    with subprocess.Popen(["sleep", "30"]) as program:
        found = PythonStacks(unnamed_file("stacks")).stacks(program.pid)
        alive = program.poll() is None
        program.kill()
    assert alive
    assert [(process["pid"], process["text"]) for process in found] == [(program.pid, "")]


def test_stacks_of_many_processes_fit_into_a_frame(monkeypatch):
    stacks = PythonStacks(unnamed_file("stacks"))
    many = [os.getpid()] * 40
    monkeypatch.setattr(process_info, "descendants", lambda _: many)
    monkeypatch.setattr(process_info, "state_and_handler", lambda *_: ("S", True))
    monkeypatch.setattr(stacks, "_stacks_of", lambda *_: "\u00e4" * python_stacks._MAX_TEXT)
    found = stacks.stacks(os.getpid())
    assert len(json.dumps({"processes": found})) < control_protocol.MAX_PAYLOAD
    assert found[0]["text"]


def test_launcher_with_another_folder_for_temporary_files_is_found():
    with subprocess.Popen(["sleep", "30"], env={**os.environ, "TMPDIR": "/else/where"}) as job:
        try:
            # The environment of a program that has just begun is still empty.
            wait_until(lambda: Path("/else/where") in _temporary_folders(job.pid))
        finally:
            job.kill()


def python_with_hook(code, cwd, *, check=True, **variables):
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=check,
    )
    return done.stdout


def test_hook_leaves_no_trace_in_the_program(tmp_path):
    code = (
        "import os, sys; print(os.environ.get('PYTHONPATH'), 'diagnostics_hook' in str(sys.path))"
    )
    assert python_with_hook(code, tmp_path, PYTHONPATH=str(HOOK)) == "None False\n"
    both = f"{HOOK}:{tmp_path}"
    assert python_with_hook(code, tmp_path, PYTHONPATH=both) == f"{tmp_path} False\n"


def test_hook_runs_the_users_own_sitecustomize(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    code = "import sitecustomize; print(sitecustomize.__file__)"
    both = f"{HOOK}:{tmp_path}"
    assert python_with_hook(code, "/", PYTHONPATH=both) == f"mine\n{tmp_path}/sitecustomize.py\n"


@pytest.mark.parametrize("name", ["pt_gloo_runloop", "another"])
def test_a_program_ends_after_gloos_threads_have_let_go(tmp_path, name):
    """A thread that takes the lock of Python too late ends without a word, or crashes Python."""
    is_gloo = name == "pt_gloo_runloop"
    # Without the lock; the other one until long after the end, however busy the machine is.
    runs = "hashlib.pbkdf2_hmac('sha256', b'a', b'b', 100_000)" if is_gloo else "c.pause()"
    code = (
        "import ctypes, hashlib, os, sys, threading, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "def work():\n"
        "    path = f'/proc/self/task/{threading.get_native_id()}/comm'\n"
        f"    open(path, 'w').write({name!r})\n"
        "    named.set()\n"
        f"    {runs}\n"
        "    os.write(1, b'let go')\n"
        "c, named = ctypes.CDLL(None), threading.Event()\n"
        "threading.Thread(target=work, daemon=True).start()\n"
        "named.wait()\n"
    )
    shown = python_with_hook(code, tmp_path, check=is_gloo, PYTHONPATH=str(HOOK))
    assert shown == ("let go" if is_gloo else "")


@pytest.mark.mpi
def test_stacks_of_a_running_job_and_signals_that_are_passed_on_once(
    poprun, script, tmp_path, capsys
):
    program = script(
        "import os, signal, time\n"
        "def tell(number, frame): print('got', signal.Signals(number).name, flush=True)\n"
        "for number in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, tell)\n"
        "def rest():\n"
        "    print('ready', flush=True)\n"
        "    while True: time.sleep(1000)\n"
        "def work():\n"
        "    print('ready', flush=True)\n"
        "    while True: sum(range(1000))\n"
        "work() if os.environ['RANK'] == '1' else rest()\n"
    )
    job = poprun(*TWO, "--output-dir", "out", program, start=True)
    files = [tmp_path / "out" / "latest" / "attempt-1" / f"instance-{i}.stdout" for i in range(2)]
    wait_until(lambda: all(f.exists() and "ready" in f.read_text() for f in files))

    def stacks(pid):
        assert run(["--stacks", str(pid)]) == 0
        return capsys.readouterr().out

    shown = stacks(job.pid)
    assert "in work" in shown
    assert "in rest" in shown
    assert "instance 0 (1)" in shown
    assert job.poll() is None
    instance = next(pid for pid in poprun.survivors() if is_program(pid, program))
    assert "in work" in stacks(instance)
    for number, name in ((signal.SIGUSR1, "SIGUSR1"), (signal.SIGUSR2, "SIGUSR2")):
        job.send_signal(number)
        wait_until(lambda name=name: all(f"got {name}" in file.read_text() for file in files))
    job.terminate()
    job.communicate(timeout=60)
    assert job.returncode == 143
    for file in files:
        assert file.read_text().splitlines() == ["ready", "got SIGUSR1", "got SIGUSR2"]


def is_program(pid, program):
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2] == [str(program).encode()]


def test_stacks_of_a_process_without_a_job(capsys):
    assert run(["--stacks", str(os.getpid())]) == 3
    assert "no job of yours" in capsys.readouterr().err
