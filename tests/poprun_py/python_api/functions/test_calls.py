"""Jobs that call a function in every instance."""

from __future__ import annotations

import linecache
import os
import subprocess
import sys

import numpy as np
import pytest
from support.repository import ROOT

import poprun_py
from poprun_py.errors import JobFailedError
from poprun_py.python_api.functions import run_call
from poprun_py.python_api.functions.packed_call import write_call

pytestmark = pytest.mark.mpi


def call(function, *args, num_instances=2, **options):
    """Return the values that a function returned in each instance of a job."""
    return poprun_py.launch(function, args=args, num_instances=num_instances, **options)


def test_a_closure_runs_in_each_instance_with_its_own_copy_of_the_arguments():
    factor = 3

    def work(numbers, *, scale):
        import popdist_py

        numbers += popdist_py.getInstanceIndex()
        inherited = [name for name in os.environ if name.startswith("POPDIST_CALL")]
        return numbers * factor * scale, sys.argv, popdist_py.getNumInstances(), inherited

    given = np.zeros(3)
    values = poprun_py.launch(work, (given,), {"scale": 2}, num_instances=2)
    assert [value[0].tolist() for value in values] == [[0, 0, 0], [6, 6, 6]]
    assert [value[1:] for value in values] == [(sys.argv, 2, [])] * 2
    assert given.tolist() == [0, 0, 0]


# The code of a notebook cell is not in a file; linecache has its lines.
CELL = """
def fail():
    raise FloatingPointError("loss is nan")

def work():
    import popdist_py, signal
    if popdist_py.getInstanceIndex() == 1:
        fail()
    signal.pause()
"""


def test_an_exception_has_the_instance_and_its_traceback_and_ends_the_job(capfd):
    cell: dict = {"__name__": "__main__"}
    linecache.cache["<cell 3>"] = (len(CELL), None, CELL.splitlines(keepends=True), "<cell 3>")
    exec(compile(CELL, "<cell 3>", "exec"), cell)
    with pytest.raises(FloatingPointError, match="loss is nan") as caught:
        call(cell["work"])
    (note,) = caught.value.__notes__
    assert note.startswith("raised in instance 1 on ")
    assert [frame.name for frame in caught.traceback][1:] == ["call", "launch"]  # one of ours
    text = str(caught.value.__cause__)
    # The traceback begins in the user's own code.
    assert text.count("File ") == 2
    assert 'File "<cell 3>", line 8, in work' in text
    shown = capfd.readouterr().err
    assert shown.count("FloatingPointError: loss is nan") == 1
    assert 'raise FloatingPointError("loss is nan")' in shown


@pytest.mark.parametrize(
    ("end", "how"),
    [
        pytest.param(lambda: os._exit(0), "exit code 0", marks=pytest.mark.sweep),
        pytest.param(lambda: os.kill(os.getpid(), 9), "signal SIGKILL", marks=pytest.mark.sweep),
        (
            lambda: sys.exit("no data"),
            "exit code 1 before the function returned; the last line of its stderr is",
        ),
    ],
)
def test_an_instance_that_exits_early_fails_the_job(end, how):
    with pytest.raises(JobFailedError, match=f"instance 0 on .* ended with {how}") as caught:
        call(end, num_instances=1)
    assert caught.value.result.instances[0].index == 0


@pytest.mark.sweep
def test_the_value_of_sys_exit_is_none():
    assert call(lambda: sys.exit(), num_instances=1) == [None]


def test_the_error_names_the_part_of_a_result_that_cannot_be_pickled():
    def work():
        import threading

        return {"model": [1, threading.Lock()]}

    with pytest.raises(JobFailedError, match=r"instance 0 on .* \(dict, at \['model'\]\[1\]\)"):
        call(work, num_instances=1)


@pytest.mark.sweep
def test_a_restart_calls_the_function_again(tmp_path):
    marker = tmp_path / "there"

    def work():
        if not marker.exists():
            marker.touch()
            raise OSError("first time")
        return "well"

    assert call(work, num_instances=1, max_restarts=1) == ["well"]


def run_python(code, tmp_path, *words, cwd=None):
    path = tmp_path / "script.py"
    path.write_text(code)
    done = subprocess.run(
        [sys.executable, path, *words], capture_output=True, text=True, timeout=100, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=cwd or tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_results_and_exceptions_have_the_classes_of_the_script(tmp_path):
    """Modules beside the script are found. The script itself is not run again."""
    (tmp_path / "beside.py").write_text("def value():\n    return 42\n")
    code = """
import poprun_py
import sys
import traceback
import beside

class MineError(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code
    def __reduce__(self):
        return MineError, (self.code,)

class Point:
    def __init__(self, x):
        self.x = x

def work(point):
    assert sys.argv[1] == "word"
    return Point(point.x + beside.value())

def fail():
    raise MineError(7)

(point,) = poprun_py.launch(work, args=(Point(1),))
print(isinstance(point, Point), point.x)
try:
    poprun_py.start(fail).result()
except MineError as error:
    print(error.code, error.__notes__)
    print([frame.name for frame in traceback.extract_tb(error.__traceback__)])
"""
    value, failure, frames = run_python(code, tmp_path, "word").splitlines()
    assert value == "True 43"
    assert failure.startswith("7 ['raised in instance 0 on ")
    assert frames == "['<module>', 'result']"


@pytest.mark.sweep
def test_packages_beside_the_script_are_found_from_any_folder(tmp_path):
    package, elsewhere = tmp_path / "beside_package", tmp_path / "elsewhere"
    for folder in (package, elsewhere):
        folder.mkdir()
    (package / "__init__.py").write_text("from beside_package.deep import twice\n")
    (package / "deep.py").write_text("def twice(x):\n    return 2 * x\n")
    code = """
import poprun_py
from beside_package import twice
print(poprun_py.launch(twice, (21,)))
"""
    assert run_python(code, tmp_path, cwd=elsewhere) == "[42]\n"


def test_with_a_safe_path_the_first_folder_of_pythonpath_stays(tmp_path):
    """``-P`` removes the folder of the script, so nothing else may be removed."""
    (tmp_path / "popdist_py.py").write_text("raise SystemExit('found')\n")
    done = subprocess.run(
        [sys.executable, "-P", run_call.__file__, tmp_path, "work"], capture_output=True,
        text=True, check=False, env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.stderr == "found\n"


@pytest.mark.sweep
def test_a_large_result_is_not_copied_by_either_process(tmp_path):
    """With 64 MB, neither process may grow by more than 1.2 times of that."""
    code = """
import poprun_py
import numpy as np
import torch

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000

def work():
    import numpy as np
    import torch
    array, tensor = np.full(8_000_000, 2, np.float32), torch.full((8_000_000,), 2.0)
    before = peak()
    import atexit
    # When this runs, the file has been written.
    atexit.register(lambda: print(f"instance {peak() - before:.0f}", flush=True))
    return array, tensor

before = peak()
((array, tensor),) = poprun_py.launch(work)
assert float(array.sum()) == float(tensor.sum()) == 16_000_000
print(f"parent {peak() - before:.0f}")
"""
    printed = dict(line.rsplit(" ", 1) for line in run_python(code, tmp_path).splitlines())
    instance = next(int(value) for key, value in printed.items() if "instance" in key)
    assert instance < 0.2 * 64
    assert 60 < int(printed["parent"]) < 1.2 * 64


def test_the_program_of_a_call_run_by_hand_says_that_launch_runs_it(tmp_path):
    program = write_call(tmp_path, max, [1, 2])
    done = subprocess.run(program, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr == "max can only be run by poprun_py.launch() from a Python program\n"
