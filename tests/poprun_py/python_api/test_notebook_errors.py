"""In IPython, an error shows one traceback of the user's code, and instances print none."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys

import pytest
from support.repository import ROOT

from poprun_py.display import user_traceback
from poprun_py.display.user_traceback import UserTraceback
from poprun_py.errors import JobFailedError, UsageError
from poprun_py.python_api.functions.results import RemoteTraceback

CELLS = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance(colors="nocolor")
for cell in sys.argv[1:]:
    print("--- cell", flush=True)
    shell.run_cell(cell, store_history=True)
    sys.stderr.flush()
"""
# One instance fails, and the launcher ends the other one.
DEFINITIONS = """
import os, time, poprun_py
def helper(index):
    return [1, 2][index]
def train(index):
    while os.environ["RANK"] == "1": time.sleep(60)
    return helper(index)
options = dict(num_instances=2, share_cores=True)
"""
LINE = "-" * 75
HEAD = LINE + "\n{}{:>65}\n"
TITLE = "Traceback (most recent call last)"


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Run cells in IPython; returns a function that returns the output of the cell with words."""
    pytest.importorskip("IPython")
    sources = [
        DEFINITIONS,
        "poprun_py.launch(train, args=(5,), **options)",
        "poprun_py.launch(train, args=(5,), nuum_instances=2)",
        "poprun_py.LaunchConfig(num_instances=-1)",
        "job = poprun_py.start(train, args=(6,), **options)",
        "job.result()",
        "print(job.output(stream='stderr'))",
        "poprun_py.launch(train, args=(7,), output_dir='out', **options)",
    ]
    done = subprocess.run(
        [sys.executable, "-c", CELLS, *sources],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path_factory.mktemp("cells"),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=True, timeout=100,
    )  # fmt: skip
    outputs = dict(zip(sources, done.stdout.split("--- cell\n")[1:], strict=True))
    return lambda words: next(text for source, text in outputs.items() if words in source)


@pytest.mark.mpi
class TestIPython:
    def test_a_failing_function_shows_one_traceback_of_the_users_code(self, cells):
        text = cells("args=(5,), **options")
        assert re.sub(r"(instance 0) on .*", r"\1", text.replace("~", "^")) == (
            HEAD.format("IndexError", TITLE) + "  Cell In[2], line 1\n"
            "    poprun_py.launch(train, args=(5,), **options)\n"
            "in the instance:\n"
            "  Cell In[1], line 6, in train\n"
            "    return helper(index)\n"
            "           ^^^^^^^^^^^^^\n"
            "  Cell In[1], line 3, in helper\n"
            "    return [1, 2][index]\n"
            "           ^^^^^^^^^^^^^\n"
            "IndexError: list index out of range\n"
            "raised in instance 0\n"
        )

    @pytest.mark.parametrize(
        ("source", "sentence"),
        [
            ("nuum_instances", "unknown option 'nuum_instances'; did you mean num_instances?"),
            ("num_instances=-1", "num_instances -1: expected a whole number of at least 1"),
        ],
    )
    def test_a_wrong_option_shows_the_users_line_and_the_message(self, cells, source, sentence):
        text = cells(source)
        assert text.startswith(HEAD.format("UsageError", TITLE) + "  Cell In[")
        *_, code, message = text.splitlines()
        assert code.startswith("    poprun_py.")
        assert message.startswith(f"UsageError: {sentence}")
        assert len(text.splitlines()) == 5

    def test_a_result_of_a_started_job_shows_one_traceback(self, cells):
        text = cells("job.result()")
        assert text.count("IndexError: ") == text.count("in helper") == 1
        assert "handle.py" not in text
        # The instances' output has the traceback, because nobody may ask for the result.
        assert "IndexError: list index out of range" in cells("job.output")

    def test_output_that_is_kept_has_the_traceback(self, cells):
        assert re.search(r"^\[1,[01]\]<stderr>:IndexError: ", cells("args=(7,)"), re.M)


def raised(error, text=""):
    """Return an error with a frame of this file and a cause."""
    try:
        raise error from (RemoteTraceback(text) if text else None)
    except Exception as caught:
        return caught


REMOTE = f"""Traceback (most recent call last):
  File "/a/train.py", line 3, in train
    model(x)
  File "{ROOT}/popdist_py/poptorch/model.py", line 9, in __call__
    self.forward(x)
    ~~~~^^^
  File "/a/train.py", line 8, in forward
    raise KeyError(x)
KeyError: 'x'
"""


def test_frames_of_the_library_are_left_out():
    error = raised(KeyError("x"), REMOTE)
    error.add_note("raised in instance 3 on h")
    lines = user_traceback.traceback_lines(error)
    assert [lines[0], *lines[4:]] == [
        LINE, "in the instance:",
        '  File "/a/train.py", line 3, in train', "    model(x)",
        '  File "/a/train.py", line 8, in forward', "    raise KeyError(x)",
        "KeyError: 'x'", "raised in instance 3 on h",
    ]  # fmt: skip
    assert lines[2].startswith(f'  File "{__file__}", line ')


def test_an_error_of_the_library_is_shown_below_the_traceback_of_the_instance():
    lines = raised(JobFailedError("instance 0 raised KeyError"), REMOTE)._render_traceback_()
    assert lines[-2:] == ["KeyError: 'x'", "JobFailedError: instance 0 raised KeyError"]
    chained = REMOTE + "\nDuring handling of the above exception:\n\n" + REMOTE
    lines = raised(UsageError("wrong"), chained)._render_traceback_()
    assert lines.count("Traceback (most recent call last):") == 2


def test_outside_ipython_python_shows_the_whole_traceback():
    assert user_traceback.running_ipython() is None
    error = raised(KeyError("x"), REMOTE)
    assert not hasattr(error, "_render_traceback_")


def test_an_error_with_a_long_name_has_a_title():
    kind = type("A" * 80, (Exception,), {})
    assert user_traceback.traceback_lines(raised(kind("x")))[1] == f"{'A' * 80} {TITLE}"


def test_an_error_with_a_rendering_can_be_pickled():
    error = raised(KeyError("x"), REMOTE)
    error._render_traceback_ = UserTraceback(error)
    assert error._render_traceback_()[-1] == "KeyError: 'x'"
    again = pickle.loads(pickle.dumps(error))
    assert again.args == ("x",)
    assert again._render_traceback_() == []
