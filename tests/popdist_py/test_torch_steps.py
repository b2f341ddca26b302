"""The start hook that counts the steps of a program's optimizers, in real processes."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from support.repository import ROOT

from popdist_py.environment import AUTOMATIC
from poprun_py.instance.progress_memory import ProgressMemory

HOOK = ROOT / "popdist_py" / "start_hook"

# Loops as their users write them, with the number of steps that the launcher should see.
TRAIN = """
import torch
weights = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weights], lr=0.1)
def step():
    weights.sum().backward()
    optimizer.step()
for _ in range(3):
    step()
"""
LOADER = f"""{TRAIN}
class Trained(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        step()
        return weights.detach()
for _ in torch.utils.data.DataLoader(Trained(), num_workers=1):
    pass
"""
COMPILED = f"""{TRAIN}
compiled = torch.compile(optimizer.step, backend="eager")
def whole():
    step()
    optimizer.zero_grad()
whole = torch.compile(whole, backend="eager")
for _ in range(3):
    weights.sum().backward()
    compiled()
    whole()
"""
CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {TRAIN!r}], check=True)"


def counted(*command, **variables):
    """Run a program as a wrapper does; return its steps and what its heartbeat does."""
    memory = ProgressMemory()
    environ = {
        **os.environ, **memory.variables(), "PYTHONPATH": str(HOOK),
        "POPDIST_SDK_NAMES": "no", **variables,
    }  # fmt: skip
    subprocess.run(command, env=environ, check=True, timeout=100, cwd="/")
    progress = memory.progress() or [0, 0, 0, 0]
    return progress[0], progress[3] == AUTOMATIC


@pytest.mark.sweep
def test_a_program_behind_a_shell_is_counted_without_a_call():
    """The library is not on the path of the program, and its only parent is a shell."""
    shell = 'python=$1; shift; "$python" "$@"; exit $?'
    assert counted("sh", "-c", shell, "sh", sys.executable, "-c", LOADER) == (3, True)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "steps", "variables"),
    [
        (CHILD, 0, {}),
        (f"{TRAIN}{CHILD}", 3, {}),
        (COMPILED, 9, {}),
        (TRAIN, 0, {"POPDIST_COUNT_STEPS": "no"}),
        (TRAIN.replace("range(3)", "range(1)"), 1, {}),
    ],
    ids=["a child", "beside a child", "compiled", "off", "one step"],
)
def test_what_is_counted_of_other_programs(program, steps, variables):
    assert counted(sys.executable, "-c", program, **variables) == (steps, steps > 0)


@pytest.fixture
def hook(monkeypatch):
    monkeypatch.syspath_prepend(str(HOOK))
    return importlib.import_module("popdist_torch_steps")


@pytest.mark.parametrize(
    ("variables", "is_wanted"),
    [
        ({}, True),
        ({"POPDIST_COUNT_STEPS": "no"}, False),
        ({"POPDIST_COUNT_STEPS": "0"}, False),
        ({"POPDIST_COUNT_STEPS": " No "}, False),
        ({"POPDIST_COUNT_STEPS": "yes"}, True),
        ({"POPDIST_HEARTBEAT": ""}, False),
    ],
)
def test_the_variable_turns_counting_off(hook, monkeypatch, variables, is_wanted):
    found = []
    monkeypatch.setattr(
        hook.popdist_import_hook, "run_at_import", lambda name, _: found.append(name)
    )
    monkeypatch.setattr(hook.os, "environ", {"POPDIST_HEARTBEAT": "/proc/1/fd/3", **variables})
    hook.start()
    assert found == ["torch.optim.optimizer"] * is_wanted


def test_an_older_torch_or_one_that_has_changed_is_left_alone(hook, monkeypatch):
    monkeypatch.setattr(hook, "_is_program", lambda: True)
    executed = []
    hook._execute_and_register(executed.append, SimpleNamespace())
    assert len(executed) == 1
    registered = []
    optim = SimpleNamespace(
        register_optimizer_step_pre_hook=registered.append,
        register_optimizer_step_post_hook=registered.append,
    )
    hook._execute_and_register(executed.append, optim)
    before, after = registered
    monkeypatch.setitem(sys.modules, "popdist_py.torch_loops", None)  # it cannot be imported
    path = list(sys.path)
    for _ in range(2):
        before(object(), (), {})
        after(object(), (), {})
    assert sys.path == path


def test_threads_that_step_first_at_the_same_time_make_one_loop(hook, monkeypatch):
    hooks = hook._Hooks()
    made, seen = [], []

    def make():
        made.append(SimpleNamespace(begin_update=seen.append, end_update=seen.append))
        if len(made) == 1:  # another thread steps while the loop is made
            other = threading.Thread(target=lambda: (hooks.begin("other"), hooks.end("other")))
            other.start()
            other.join()
        return made[-1]

    monkeypatch.setattr(hook, "_make_loop", make)
    hooks.begin("first")
    hooks.end("first")
    assert len(made) == 1
    assert seen == ["first", "first"]


def test_only_the_first_python_below_the_wrapper_is_the_program(hook):
    with subprocess.Popen(["sleep", "60"]) as shell:
        assert hook._parent_unless_python(str(shell.pid)) == str(os.getpid())
        shell.kill()
    assert hook._parent_unless_python(str(os.getpid())) == ""
    assert hook._parent_unless_python("0") == ""
