"""Programs in a new Python: the profiles that they ask PopTorch for, and how they fail."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
from poptorch.forked_program import ForkedProgram
from support.models import Mlp
from support.trace_tables import query

import popdist_py.poptorch as poptorch
from popdist_py.timeline import spans

_PROGRAM = """
import torch
import popdist_py.poptorch as poptorch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x), poptorch.identity_loss(self.layer(x).sum(), reduction="none")

channel = poptorch.profiling.Channel("mine")
options = poptorch.Options().showCompilationProgressBar(False)
%s
module = Model()
model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
"""
_STEPS = """
channel.instrument(model, "compile")
model.compile(torch.ones(2, 4))
for _ in range(5):
    with channel.tracepoint("one"):
        model(torch.ones(2, 4))
"""
_NAMES = "SELECT name, COUNT(*) FROM slice GROUP BY name"


def run(folder, options="", steps=_STEPS, *, fails=False, **variables):
    code = (_PROGRAM % options) + steps
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(sys.path), **variables}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ, cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == fails, done.stderr
    assert "[warning]" not in done.stderr  # torch.profiler says this and that
    return files_in(folder), done.stderr


def files_in(folder):
    return [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]


def assert_has_all_steps(trace):
    counts = dict(query(trace, _NAMES))
    assert counts["one"] == counts["step"] == counts["update"] == "5"
    # What began before the recording, in compiling, is not there.
    assert int(counts["backward"]) >= 1
    nested = query(
        trace,
        "SELECT COUNT(*) FROM slice s JOIN slice p ON s.parent_id = p.id"
        " WHERE s.name = 'update' AND p.name = 'step'",
    )
    assert nested == [("5",)]
    return counts


# What is registered for the end of the program is done here: a fork ends without it.
_FORKED = """
import atexit
at_end = []
atexit.register = lambda function, *args: at_end.append((function, args))
"""
_END = """
for function, args in at_end:
    function(*args)
"""


def test_a_program_that_enables_profiling_gets_a_timeline(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.py"
    program.write_text(_FORKED + (_PROGRAM % 'options.enableProfiling("reports")') + _STEPS + _END)
    with contextlib.closing(ForkedProgram(program)) as running:
        assert running.wait() == 0, running.stderr.read()
    trace = tmp_path / "reports" / "instance-0.timeline.json.gz"
    assert list(trace.parent.iterdir()) == [trace]
    assert_has_all_steps(trace)


@pytest.mark.sweep
def test_a_program_that_fails_has_a_profile_and_logs_its_exception(tmp_path):
    # torchvision has operators that the library defines too: it comes second here.
    steps = _STEPS + "import torchvision\ntorchvision.models.resnet18\nraise RuntimeError('told')\n"
    found, errors = run(tmp_path, 'options.enableProfiling("reports")', steps, fails=True)
    assert list(map(str, found)) == ["reports/instance-0.timeline.json.gz"]
    assert_has_all_steps(tmp_path / found[0])
    assert "[poptorch::python] [critical]" in errors
    assert errors.count("RuntimeError: told") == 1


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("options", "variables", "folder"),
    [
        (
            'options._Popart.setEngineOptions({"autoReport.all": "true",'
            ' "autoReport.directory": "there"})',
            {},
            "there/",
        ),
        (
            "",
            {"POPLAR_ENGINE_OPTIONS": '{"autoReport.outputExecutionProfile":"true"}'},
            "",
        ),
        (
            "",
            {"PVTI_OPTIONS": '{"enable":"true", "directory":"pvti"}'},
            "pvti/",
        ),
    ],
)
def test_who_asks_for_a_profile_gets_a_timeline(tmp_path, options, variables, folder):
    (found,), _ = run(tmp_path, options, **variables)
    assert str(found) == f"{folder}instance-0.timeline.json.gz"
    counts = assert_has_all_steps(tmp_path / found)
    if "PVTI_OPTIONS" in variables:
        assert counts["compile"] == "2"  # the library's, and the channel's
        assert query(tmp_path / found, "SELECT name FROM thread WHERE name LIKE 'channel%'") == [
            ("channel mine",)
        ]


def test_who_does_not_ask_gets_no_files(tmp_path, monkeypatch):
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all":"false"}')
    monkeypatch.setenv("PVTI_OPTIONS", '{"enable":"false"}')
    monkeypatch.chdir(tmp_path)
    spans._begin_as_asked(os.environ)
    exec((_PROGRAM % "") + _STEPS, {})
    assert spans._recorder is None
    assert files_in(tmp_path) == []


@pytest.mark.sweep
def test_traces_of_torch_are_part_of_the_timeline(tmp_path):
    """Of the steps that its schedule chooses, inside our spans of these steps."""
    steps = """
import torch.profiler as profiler
import time
model.compile(torch.ones(2, 4))
chosen = profiler.schedule(wait=1, warmup=1, active=2)
with profiler.profile(
    activities=[profiler.ProfilerActivity.CPU],
    schedule=chosen,
    on_trace_ready=poptorch.profiling.into_timeline,
) as one:
    for number in range(6):
        with channel.tracepoint(f"step {number}"):
            model(torch.ones(2, 4))
        one.step()
        time.sleep(0.02)  # steps lie further apart than the clocks of both may differ
"""
    (found,), _ = run(tmp_path, steps=steps, PVTI_OPTIONS='{"enable":"true"}')
    rows = query(
        tmp_path / found,
        "SELECT DISTINCT mine.name FROM slice mine JOIN slice torch"
        " ON torch.ts >= mine.ts - 1000000 AND torch.ts + torch.dur <= mine.ts + mine.dur + 1000000"
        " WHERE mine.name LIKE 'step _' AND torch.name LIKE 'aten::%' ORDER BY mine.name",
    )
    assert {("step 2",), ("step 3",)} <= set(rows)
    assert ("step 5",) not in rows
    assert ("step 0",) not in rows


def test_without_a_timeline_channels_return_what_they_are_given():
    channel = poptorch.profiling.Channel("mine")
    model = Mlp()
    assert channel.instrument(model, "forward") is model
    assert "forward" not in vars(model)
    with channel.tracepoint("step"):
        pass
    poptorch.profiling.into_timeline(None)


@pytest.mark.sweep
def test_a_folder_that_cannot_be_made_is_an_error_of_poptorch(tmp_path):
    (tmp_path / "file").touch()
    code = 'options.enableProfiling("file/reports")'
    steps = """
try:
    model.compile(torch.ones(2, 4))
except poptorch.Error as error:
    assert "the folder file/reports for the profile: Not a directory" in str(error), error
else:
    raise AssertionError
"""
    assert [str(path) for path in run(tmp_path, code, steps)[0]] == ["file"]
