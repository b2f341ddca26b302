"""Whole programs, started as their users start them: by torchrun and by the launcher.

Lightning, Accelerate, Transformers, the elastic agent, and Horovod's calls beside a process group.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.trainers, pytest.mark.timeout(400)]

_HERE = Path(__file__).parent
_PROGRAMS = {
    "lightning": "pytorch_lightning",
    "accelerate": "accelerate",
    "transformers": "transformers",
}


@pytest.fixture
def started(tmp_path, poprun, monkeypatch):
    """Give a function that runs a program on two ranks and returns what they printed."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")

    def by_torchrun(program, *arguments, options=()):
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        found = subprocess.run(
            [sys.executable, *words, *options, program, *arguments],
            env={**os.environ, "PYTHONPATH": str(_HERE.parent.parent)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
        return _reports(found)

    def by_poprun(program, *arguments, options=()):
        words = ["-n", "2", "--num-replicas", "2", *options, sys.executable, program, *arguments]
        return _reports(poprun(*words, timeout=180))

    return {"torchrun": by_torchrun, "poprun": by_poprun}


def _reports(found):
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line for line in found.stdout.splitlines() if '"digest"' in line]
    reports = [json.loads(line[line.index("{") :]) for line in lines]
    # The last of each rank: gloo aborts now and then at its end, and the agent starts again.
    last = {report["rank"]: report for report in reports}
    assert sorted(last) == [0, 1]
    return list(last.values())


@pytest.mark.parametrize("name", _PROGRAMS)
def test_a_trainer_ends_with_the_same_weights_over_popdist_and_gloo(started, name):
    pytest.importorskip(_PROGRAMS[name], reason=f"{name} is not installed")
    program = _HERE / f"{name}_program.py"
    default = "gloo" if name == "lightning" else "auto"
    runs = [
        ("torchrun", "gloo", (), "gloo"),
        # The launcher's option replaces the back end that the program names.
        ("poprun", default, ("--torch-backend", "popdist"), "popdist"),
    ]
    if name == "accelerate":
        # Each job imports for many seconds, and all trainers pass the name on to torch.
        runs.append(("torchrun", "popdist", (), "popdist"))
    digests = set()
    for launcher, named, options, expected in runs:
        for report in started[launcher](program, named, options=options):
            assert report["backend"] == expected
            digests.add(report["digest"])
    assert len(digests) == 1


_DEFAULTS = """
import torch
from accelerate import Accelerator
from transformers import TrainingArguments

size = TrainingArguments(output_dir="out", report_to=[]).world_size
accelerator = Accelerator()
model = torch.nn.Linear(2, 2)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
print("sizes", size, accelerator.num_processes)
"""


@pytest.mark.parametrize(("given", "size"), [({}, 2), ({"ACCELERATE_USE_CPU": "false"}, 1)])
def test_trainers_with_their_defaults_train_together_or_a_warning_says_so(
    poprun, script, given, size
):
    for name in ("accelerate", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    done = poprun("-n", "2", "--output", "plain", script(_DEFAULTS), env=given, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"sizes {size} {size}") == 2
    assert done.stderr.count("each of the 2 instances has trained a separate model") == 2 - size


def test_the_elastic_agent_starts_failed_ranks_again(started):
    program = _HERE / "elastic_program.py"
    digests = {
        report["digest"]
        # Over gloo some versions of torch fail to start ranks again.
        for backend, way in (("popdist", "fails"), ("gloo", "works"))
        for report in started["torchrun"](program, backend, way, options=("--max-restarts", "1"))
    }
    assert len(digests) == 1


def test_calls_of_horovod_work_beside_a_process_group(started):
    reports = started["poprun"](_HERE / "horovod_program.py")
    assert len({report["digest"] for report in reports}) == 1
