"""The packages that a program imports before it forks a spare, and the states without a spare."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest
from support.repository import ROOT

from poprun_py.instance.prepared_python import PreparedPython, _fixed, may_prepare

HOOK = ROOT / "poprun_py" / "instance" / "diagnostics_hook"


@pytest.fixture
def start(monkeypatch):
    monkeypatch.syspath_prepend(str(HOOK))
    return importlib.import_module("poprun_prepared_start")


def write(folder, **texts):
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)


def test_packages_of_the_script_and_of_modules_beside_it_are_found(start, tmp_path):
    write(
        tmp_path,
        script="import os, json.tool as t\nfrom torch.utils.data import DataLoader\nimport own\n"
        "from . import x\ndef main(): import late\nif True: import conditional\n",
        own="import script, decimal\nfrom numpy import array\n",
    )
    names, _ = start._imported_names(str(tmp_path / "script.py"), str(tmp_path), set())
    assert names == ["os", "json.tool", "torch.utils.data", "decimal", "numpy"]


@pytest.mark.parametrize(
    ("statement", "names"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", ["os"]),
        ("print()", ["os"]),
        ("import sets_variable", ["os", "os"]),
        ("from . import unknown", ["os"]),
        ("@print\ndef f(): pass", ["os"]),
        ("def f(a=print()): pass", ["os"]),
        ("class A: print()", ["os"]),
        ("a = print()", ["os"]),
        ("from __future__ import annotations", ["os", "__future__", "torch"]),
        ("import defines\n'text'\na = 1", ["os", "torch"]),
    ],
)
def test_no_package_is_imported_after_a_statement_that_may_set_variables(
    start, tmp_path, statement, names
):
    write(
        tmp_path,
        script=f"'''A text.'''\n# a comment\nimport os\n{statement}\nimport torch\n",
        sets_variable="import os\nos.environ['OMP_NUM_THREADS'] = '1'\n",
        defines="'''A text.'''\ndef f(a=1): print()\n"
        "class A(object):\n    b = 1\n    def c(self): f()\n",
    )
    assert start._imported_names(str(tmp_path / "script.py"), str(tmp_path), set())[0] == names


def test_nothing_is_imported_after_a_module_that_is_not_installed(start, tmp_path):
    write(tmp_path, script="import os\nimport no_such_module\nimport torch\n")
    assert start._first_imports(str(tmp_path / "script.py"), str(tmp_path)) == ["os"]


def test_only_installed_packages_are_imported(start, tmp_path, monkeypatch):
    write(tmp_path, users_module="")
    monkeypatch.syspath_prepend(str(tmp_path))
    # MPI can start only once under a wrapper.
    names = ("torch", "fractions", "sys", "users_module", "no_such_module", "mpi4py")
    assert [start._is_installed(each) for each in names] == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("words", "argv", "script"),
    [
        (["python", "program.py", "a"], ["program.py", "a"], "program.py"),
        (["python", "-u", "-m", "pack.mod", "a"], ["-m", "a"], "pack/mod.py"),
        (["python", "-m", "pack"], ["-m"], "pack/__main__.py"),
        (["python", "-m", "elsewhere"], ["-m"], None),
        (["python", "-c", "pass"], ["-c"], None),
        (["python"], [""], None),
    ],
)
def test_the_script_is_found_by_the_command(start, tmp_path, monkeypatch, words, argv, script):
    (tmp_path / "pack").mkdir()
    for name in ("program.py", "pack/mod.py", "pack/__main__.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", argv)
    found = start._script()
    assert (found and os.path.relpath(found)) == script


def test_files_beside_the_script_that_hide_modules_are_found(start, tmp_path):
    (tmp_path / "json").mkdir()
    write(tmp_path, script="")
    assert not start._hidden(str(tmp_path))  # a folder without __init__.py hides nothing
    (tmp_path / "json" / "__init__.py").touch()
    assert start._hidden(str(tmp_path))


@pytest.mark.parametrize(
    ("code", "goes_on"),
    [
        ("p._is_alone() or os._exit(0)", True),
        ("import numpy; p._is_alone() or os._exit(0)", True),  # OpenBLAS has threads
        (
            "import threading, time\nthreading.Thread(target=time.sleep, args=[9], daemon=True)"
            ".start(); p._is_alone() or os._exit(0)",
            False,
        ),
        ("p._ACCELERATORS = ('/dev/zer',); p._is_alone() or os._exit(0)", True),
        (
            "p._ACCELERATORS = ('/dev/zer',); f = open('/dev/zero'); p._is_alone() or os._exit(0)",
            False,
        ),
        ("sys.meta_path.insert(0, p._MpiBlocker(lambda: os._exit(0)))\nimport mpi4py", True),
        ("sys.meta_path.insert(0, p._MpiBlocker(lambda: os._exit(0)))\nimport mpi4py.MPI", False),
    ],
)
def test_a_process_with_threads_or_an_accelerator_or_mpi_forks_no_spare(code, goes_on):
    begin = (
        f"import os, sys; sys.path.insert(0, {str(HOOK)!r}); import poprun_prepared_start as p\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{begin}{code}\nprint('goes on')"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (done.stdout == "goes on\n") is goes_on


def test_an_ended_spare_leaves_no_zombie():
    spare, pid = PreparedPython(), os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
    spare._pid = pid
    spare.end()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    spare.close_requests()
    spare.program_ended()


def test_programs_of_two_restarts_draw_other_numbers(warm, script):
    program = script(
        f"import os, sys; sys.path.insert(0, {str(HOOK)!r}); import poprun_prepared_start as p\n"
        "import random, numpy, torch\n"
        "for _ in range(2):\n"
        "    if os.fork() == 0:\n"
        "        p._seed_again()\n"
        "        print(random.random(), numpy.random.rand(), torch.rand(()).item())\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    done = subprocess.run([*warm, program], capture_output=True, text=True, check=True)
    assert len(set(done.stdout.split())) == 6


@pytest.mark.parametrize(
    ("changed", "command", "expected"),
    [
        ({}, "/usr/bin/python3.11", True),
        ({}, "bash", False),
        ({"TORCHELASTIC_RESTART_COUNT": "3"}, "python", False),  # no restart is left
        ({"TORCHELASTIC_MAX_RESTARTS": ""}, "python", False),
    ],
)
def test_a_process_is_prepared_if_a_restart_may_follow(changed, command, expected):
    counts = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3"}
    environ = {**counts, **changed}
    assert may_prepare([command, "program.py"], environ) is expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [("-I a.py", False), ("-uE a.py", False), ("-B -S a.py", False), ("-X Idea a.py -I", True)],
)
def test_no_process_is_prepared_if_python_does_not_run_the_hook(words, expected):
    environ = {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "1"}
    assert may_prepare(["python", *words.split()], environ) is expected


def test_only_variables_without_effect_on_imports_may_differ_between_attempts():
    first = {"OMP_NUM_THREADS": "1", "MASTER_PORT": "1", "POPDIST_STACKS": "1"}
    assert _fixed(first) == _fixed({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert _fixed(first) != _fixed({**first, "OMP_NUM_THREADS": "2"})
