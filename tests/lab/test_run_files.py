"""What programs of other hosts leave in the folder of the run."""

from __future__ import annotations

import sys

import pytest
from support.repository import ROOT

from poprun_py.past_runs.recorded_run import read_run
from poprun_py.past_runs.run_files import find_run

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

PROGRAM = ROOT / "tests" / "system" / "run_files_program.py"


def test_files_of_other_hosts_are_in_the_run_folder(lab, tmp_path):
    """Instance 1 is on another host than the launcher, and logs once, alone."""
    parent = tmp_path / "runs"
    done = lab[0].poprun("--host", "node[0-1]", "--num-instances", "2", "--num-replicas", "2",
                         "--ipus-per-replica", "2", "--ipu-model=mk2", f"--output-dir={parent}",
                         sys.executable, PROGRAM, "processes")  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = read_run(find_run(str(parent / "latest")))
    assert run.problems == ()
    (attempt,) = run.attempts
    assert [path.name for path in attempt_files(run)] == [
        "instance-0.values.jsonl",
        "instance-1.values.jsonl",
    ]
    assert [each.step for each in attempt.values if "loss" in each.values] == list(range(1, 11))
    assert [each.values for each in attempt.values if "alone" in each.values] == [{"alone": 1.0}]
    assert attempt.devices[0]["models"][0]["name"] == "Pipeline"
    assert {path.stat().st_mode & 0o777 for path in attempt_files(run)} == {0o600}


def attempt_files(run):
    return sorted(run.files.attempts()[1].glob("instance-*.values.jsonl"))
