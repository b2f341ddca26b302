"""A model with 1.1 GB of weights, which fits on no IPU, started in each possible way.

Each way either warns once and runs the model, or refuses it with exit code 1.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys

import pytest
from support.repository import ROOT

pytestmark = [pytest.mark.sweep, pytest.mark.mpi]
# These jobs take three seconds of a core each, and other cases show the same.
_long = functools.partial(pytest.param, marks=pytest.mark.long)

# The host's weights are expanded from one element; those of the device need 1.15 GB.
PROGRAM = """
import torch
NAMES


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("first", "second"):
            weight = torch.zeros(1).expand(12000, 12000)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))

    def forward(self, x):
        return x @ self.first @ self.second


options = poptorch.Options().showCompilationProgressBar(False)
options.Emulator.replicaExecution("loop")
CHANGE
model = poptorch.inferenceModel(Model(), options)
for _ in range(2):
    model(torch.ones(1, 12000))
print("the model has run")
"""
OURS = "from popdist_py import poptorch"
SDK = "import poptorch"
NAMED = 'options.Emulator.device("mk2")'
LACKING = (
    r"Out of memory on IPU 0: [\d,]+ bytes used on the fullest tile but tiles only have 638,976"
)


@pytest.fixture
def commands(tmp_path):
    """Return the words of each command that starts a program."""
    launcher = tmp_path / "bin" / "poprun"
    launcher.parent.mkdir()
    launcher.write_text(
        f"#!{sys.executable}\nfrom poprun_py.__main__ import main\nmain()\n", encoding="utf-8"
    )
    launcher.chmod(0o755)
    return {
        "python": [sys.executable],
        "popdist_py": [sys.executable, "-m", "popdist_py"],
        "poprun-py": [sys.executable, "-m", "poprun_py"],
        "poprun": [str(launcher)],
    }


@pytest.mark.parametrize(
    ("command", "words", "names", "change", "variables", "refused"),
    [
        ("python", (), OURS, "", {}, False),
        _long("python", (), OURS, NAMED, {}, True),
        ("popdist_py", (), SDK, "", {}, True),
        _long("popdist_py", (), SDK, "", {"POPDIST_IPU_MEMORY": "warn"}, False),
        _long("popdist_py", ("--ipu-model", "mk2"), OURS, "", {}, True),
        ("poprun-py", (), OURS, "", {}, False),
        _long("poprun-py", (), SDK, "", {}, False),
        _long("poprun-py", (), SDK, NAMED, {}, True),
        _long("poprun-py", ("--ipu-model", "mk2"), OURS, "", {}, True),
        ("poprun", (), SDK, "", {}, True),
        _long("poprun", (), SDK, "", {"POPDIST_IPU_MEMORY": "warn"}, False),
        _long("poprun", (), OURS, "", {}, False),
        _long("poprun", ("--ipu-model", "mk2"), SDK, "", {}, True),
    ],
)
def test_it_warns_once_or_is_refused(
    commands, script, tmp_path, command, words, names, change, variables, refused
):
    program = script(PROGRAM.replace("NAMES", names).replace("CHANGE", change))
    done = subprocess.run(
        [*commands[command], *words, str(program)], cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False, timeout=280,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if "Out of memory" in line]
    assert len(said) == 1, done.stderr
    assert re.search(LACKING, said[0])
    assert done.returncode == refused, done.stderr
    assert ("the model has run" in done.stdout) == (not refused)
    assert ("[warning]" in said[0]) == (not refused)
    assert ("turns this warning into an error" in said[0]) == (not refused)
