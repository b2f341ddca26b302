"""The batch scripts of examples/deploy/slurm, submitted as they are to a real Slurm."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, wait_until
from lab import slurm
from lab.slurm import Slurm
from support.own_commands import make_commands

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(240)]
SCRIPTS = ROOT / "examples/deploy/slurm"
ACCURACY = re.compile(r"test accuracy ([\d.]+) %")


@pytest.fixture(scope="module")
def cluster(lab):
    """Slurm on the hosts of the module's lab."""
    reason = slurm.missing()
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    return Slurm(lab)


@pytest.fixture
def project(tmp_path):
    """Make a folder where the scripts find the examples, and an environment with the commands."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    commands = make_commands(ROOT, tmp_path / "commands")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").write_text(
        f"export OMP_NUM_THREADS=1 PATH={commands}:{Path(sys.executable).parent}:$PATH\n"
    )
    return tmp_path


def submit(cluster, project, *words):
    """Run sbatch to the end of the job; returns what the script wrote."""
    done = cluster.run("sbatch", "--wait", f"--chdir={project}", "--output=out-%a", *words,
                       timeout=180)  # fmt: skip
    out = "".join(path.read_text() for path in sorted(project.glob("out-*")))
    assert done.returncode == 0, done.stderr + out
    return out


@pytest.mark.parametrize("name", ["one_node", "two_nodes"])
def test_a_training(cluster, project, name):
    out = submit(cluster, project, SCRIPTS / f"{name}.sbatch")
    assert float(ACCURACY.search(out)[1]) > 90


def test_an_array_is_a_run_for_each_rate(cluster, project):
    out = submit(cluster, project, SCRIPTS / "array.sbatch")
    assert len(ACCURACY.findall(out)) == 3
    rates = sorted(path.name.split("-")[1] for path in (project / "runs").glob("rate-*"))
    assert rates == ["0.001", "0.003", "0.01"]


def test_a_training_goes_on_after_its_limit(cluster, project):
    """The signal is sent by hand, since Slurm counts limits in minutes."""
    submitted = cluster.run("sbatch", "--parsable", f"--chdir={project}", "--output=out",
                            SCRIPTS / "requeue.sbatch", "--steps", "300", "--width", "32",
                            "--validate-every", "10", "--sample", "0")  # fmt: skip
    job, out = submitted.stdout.strip(), project / "out"
    try:
        wait_until(lambda: out.exists() and "step " in out.read_text(), 60, "no step was made")
        cluster.run("scancel", "--batch", "--signal=USR1", job)
        report = project / "runs" / f"slurm-{job}" / "report.json"
        wait_until(lambda: _attempts(report) == 2, 150, f"not started again: {out.read_text()}")
        wait_until(lambda: _exit_code(report) == 0, 60, f"no end: {out.read_text()}")
    finally:
        cluster.run("scancel", job)
    assert "step  300" in out.read_text()


def _attempts(report):
    return len(list(report.parent.glob("attempt-*")))


def _exit_code(report):
    return json.loads(report.read_text()).get("exit_code")
