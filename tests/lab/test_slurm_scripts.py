"""The batch scripts of examples/deploy/slurm, submitted as they are to a real Slurm.

Their `poprun-py` is a script that adds an option to the example's: two epochs in place of ten.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.processes import wait_until
from support.repository import ROOT

from tools.running.own_commands import make_commands

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(360)]
SCRIPTS = ROOT / "examples/deploy/slurm"
ACCURACY = re.compile(r"test accuracy ([\d.]+) %")


@pytest.fixture
def project(tmp_path):
    """Make a folder where the scripts find the examples, and an environment with the commands."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = make_commands(ROOT, tmp_path / "commands")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    short = tmp_path / "short"
    short.mkdir()
    (short / "poprun-py").write_text(
        "#!/bin/sh\n"
        'case "$*" in *examples/train.py*) set -- "$@" --epochs 2; esac\n'
        f'exec {commands}/poprun-py "$@"\n'
    )
    (short / "poprun-py").chmod(0o755)
    (tmp_path / ".venv" / "bin" / "activate").write_text(
        f"export OMP_NUM_THREADS=1 PATH={short}:{commands}:{Path(sys.executable).parent}:$PATH\n"
    )
    return tmp_path


def submit(cluster, project, *words):
    """Submit a script from the project's folder; returns the number of the job."""
    return cluster.submit(f"--chdir={project}", "--output=out-%a", *words)


def output(project):
    """Return what the jobs of a script wrote."""
    return "".join(path.read_text() for path in sorted(project.glob("out-*")))


def run(cluster, project, script):
    """Run a script to its end; returns its output."""
    job = submit(cluster, project, SCRIPTS / script)
    assert cluster.wait_for(job) == {"COMPLETED"}, output(project)
    return output(project)


@pytest.mark.parametrize("name", [pytest.param("one_node", marks=pytest.mark.long), "two_nodes"])
def test_a_training(cluster, project, name):
    out = run(cluster, project, f"{name}.sbatch")
    assert float(ACCURACY.search(out)[1]) > 50


def test_an_array_is_a_run_for_each_rate(cluster, project):
    out = run(cluster, project, "array.sbatch")
    assert len(ACCURACY.findall(out)) == 3
    rates = sorted(path.name.split("-")[1] for path in (project / "runs").glob("rate-*"))
    assert rates == ["0.001", "0.003", "0.01"]


@pytest.mark.long
def test_a_training_goes_on_after_its_limit(cluster, project):
    """The signal is sent by hand, since Slurm counts limits in minutes."""
    job = submit(cluster, project, SCRIPTS / "requeue.sbatch", "--steps", "300", "--width", "32",
                 "--validate-every", "10", "--sample", "0")  # fmt: skip
    try:
        wait_until(lambda: "step " in output(project), 60, "no step was made")
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        wait_until(lambda: cluster.states(job) == {"PENDING"}, 60, "it was not queued again")
        # Slurm lets a job that was queued again wait for two minutes.
        wait_until(lambda: cluster.states(job) == {"COMPLETED"}, 240, "it did not end well")
    finally:
        cluster.run("scancel", job)
    assert len(list((project / "runs" / f"slurm-{job}").glob("attempt-*"))) == 2
    assert "step  300" in output(project)
