"""Where a program's files are: its own, and nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys

from support.repository import ROOT

from popdist_py.run_files.place import claim

_SHOW = "from popdist_py.run_files.place import run_file; print(run_file('x'))"


def shown(code: str, place: str | None) -> list[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    if place is not None:
        environ["POPDIST_RUN_FILES"] = place
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_first_process_has_them_and_keeps_them():
    environ = {"POPDIST_RUN_FILES": "/runs/a:b/instance-0"}
    assert claim(environ, 7) == "/runs/a:b/instance-0"
    assert claim(environ, 8) == ""
    assert claim(environ, 7) == "/runs/a:b/instance-0"


def test_without_the_launcher_there_are_none():
    assert claim({}, 7) == ""
    assert claim({"POPDIST_RUN_FILES": ""}, 7) == ""
    assert shown(_SHOW, None) == ["None"]


def test_a_started_child_has_none(tmp_path):
    code = f"{_SHOW}; import subprocess, sys; subprocess.run([sys.executable, '-c', {_SHOW!r}])"
    assert sorted(shown(code, f"{tmp_path}/i")) == sorted([f"{tmp_path}/i.x", "None"])


def test_a_program_that_joined_its_job_has_them(tmp_path):
    """Also if it has nothing to write before a process that it starts."""
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {_SHOW!r}])"
    assert shown(f"import popdist_py; popdist_py.init(); {child}", f"{tmp_path}/i") == ["None"]


def test_a_forked_child_has_none(tmp_path):
    fork = "import os; child = os.fork(); child and os.waitpid(child, 0)"
    begun = "from popdist_py.run_files.place import run_file, begin; begin()"
    code = f"{begun}; {fork}; print(run_file('x'))"
    assert shown(code, f"{tmp_path}/i") == ["None", f"{tmp_path}/i.x"]


def test_a_program_that_replaces_itself_keeps_them(tmp_path):
    again = f"os.execv(sys.executable, [sys.executable, '-c', {_SHOW!r}])"
    code = f"{_SHOW}; import os, sys; sys.stdout.flush(); {again}"
    assert shown(code, f"{tmp_path}/i") == [f"{tmp_path}/i.x"] * 2
