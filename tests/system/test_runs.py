"""Runs of real jobs: their names, folders and reports, over restarts and side by side."""

from __future__ import annotations

import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest
from support.processes import wait_until

from poprun_py import LaunchConfig, launch

pytestmark = pytest.mark.mpi

TWO = ("--num-instances", "2", "--num-replicas", "2")
FAILS_ONCE = (
    "sh",
    "-c",
    "echo $POPRUN_RUN_ID attempt $POPDIST_RESTART_COUNT, torchrun: $TORCHELASTIC_RUN_ID "
    "$TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; [ $POPDIST_RESTART_COUNT = 1 ] || "
    "exit 7",
)


def report_of(folder: Path):
    return json.loads((folder / "report.json").read_text())


def names(folder: Path):
    return sorted(path.name for path in folder.iterdir())


def test_every_attempt_is_kept_with_why_it_ended(poprun, tmp_path):
    done = poprun(*TWO, "--output-dir", "out", "--max-restarts", "3", *FAILS_ONCE)
    assert done.returncode == 0, done.stderr
    assert "failed first: exit code 7" in done.stderr
    assert "restarting the job in 1 s (restart 1 of 3)" in done.stderr
    run = (tmp_path / "out" / "latest").resolve()
    assert names(tmp_path / "out") == [run.name, "latest"]
    assert names(run) == ["attempt-1", "attempt-2", "report.html", "report.json"]
    said = [f"{run.name} attempt {n}, torchrun: {run.name} {n} of 3\n" for n in (0, 1)]
    first = [(run / "attempt-1" / f"instance-{i}.stdout").read_text() for i in (0, 1)]
    # One that was stopped may not have come to it.
    assert set(first) - {""} == {said[0]}
    assert [(run / "attempt-2" / f"instance-{i}.stdout").read_text() for i in (0, 1)] == [
        said[1]
    ] * 2
    report = report_of(run)
    assert (report["run_id"], report["state"], report["exit_code"]) == (run.name, "ended", 0)
    assert report["folder"] == str(tmp_path)
    assert report["program"] == list(FAILS_ONCE)
    assert "mpirun" in report["command"]
    assert report["plan"]["num_instances"] == 2
    assert {"poprun-py", "python", "torch"} <= set(report["versions"])
    first, second = report["attempts"]
    assert [a["number"] for a in (first, second)] == [1, 2]
    assert [a["folder"] for a in (first, second)] == ["attempt-1", "attempt-2"]
    assert [a["restart_count"] for a in (first, second)] == [0, 1]
    assert [a["cause"] for a in (first, second)] == ["failed", "completed"]
    assert [a["exit_code"] for a in (first, second)] == [7, 0]
    assert first["reason"].endswith("ended with exit code 7")
    assert first["hosts"] == ["localhost"]
    assert {7, 0} >= {i["exit_code"] for i in second["instances"]}
    times = [report["began_at"], first["began_at"], first["ended_at"], second["began_at"],
             second["ended_at"], report["ended_at"]]  # fmt: skip
    moments = [datetime.fromisoformat(text) for text in times]
    assert all(moment.tzinfo for moment in moments)
    assert moments == sorted(moments)


def test_runs_side_by_side_keep_apart(poprun, tmp_path):
    program = ("sh", "-c", "echo $POPRUN_RUN_ID; sleep 0.1")
    shared = {"POPRUN_LEASES": "none"}
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(poprun, "--output-dir", "out", *program, env=shared) for _ in range(2)
        ]
        told = {job.result().stdout.partition(">:")[2].strip() for job in jobs}
    assert len(told) == 2
    assert names(tmp_path / "out") == [*sorted(told), "latest"]
    for name in told:
        run = tmp_path / "out" / name
        assert (run / "attempt-1" / "instance-0.stdout").read_text() == f"{name}\n"
        assert report_of(run)["exit_code"] == 0
    assert (tmp_path / "out" / "latest").resolve().name in told


def test_a_run_that_is_running_says_so_also_when_its_launcher_was_killed(poprun, look, tmp_path):
    def state():
        (run,) = json.loads(look("runs", "out", "--format", "json").stdout)["runs"]
        return run["state"], run["tags"], run["note"]

    labels = ("--run-name", "mine", "--tag", "lr=0.1", "--note", "why")
    process = poprun("--output-dir", "out", *labels, "sh", "-c", "echo on; sleep 1000", start=True)
    assert "on" in process.stdout.readline()
    assert state() == ("running", {"lr": "0.1"}, "why")
    shown = look("--status=mine").stdout.splitlines()
    assert shown[1:3] == ["tags: lr=0.1", "note: why"]
    status = json.loads(look("--status=mine", "--status-format", "json").stdout)
    assert (status["tags"], status["note"]) == ({"lr": "0.1"}, "why")
    report = report_of(tmp_path / "out" / "latest")
    assert report["state"] == "running"
    assert report["launcher"] == {"host": os.uname().nodename, "pid": process.pid}
    assert (report["exit_code"], report["ended_at"]) == (None, None)
    (attempt,) = report["attempts"]
    assert (attempt["number"], attempt["cause"], attempt["ended_at"]) == (1, None, None)
    process.kill()
    process.wait(60)
    wait_until(lambda: not poprun.survivors())
    assert report_of(tmp_path / "out" / "latest") == report
    assert state() == ("lost", {"lr": "0.1"}, "why")


def test_a_run_that_the_user_names_goes_on_with_its_next_attempt(poprun, tmp_path):
    named = {"POPRUN_RUN_ID": "job-17"}
    words = ("--output-dir", "out", "--output", "plain", "sh", "-c")
    done = poprun(*words, "echo $POPRUN_RUN_ID; exit 75", env=named)
    assert (done.returncode, done.stdout) == (75, "job-17\n")
    done = poprun(*words, "echo again", env=named)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "poprun-py: the report is out/job-17/report.html\n"
    run = tmp_path / "out" / "job-17"
    assert (run / "attempt-1" / "instance-0.stdout").read_text() == "job-17\n"
    assert (run / "attempt-2" / "instance-0.stdout").read_text() == "again\n"
    report = report_of(run)
    assert [a["cause"] for a in report["attempts"]] == ["checkpoint", "completed"]
    assert report["exit_code"] == 0
    assert report["began_at"] <= report["attempts"][0]["began_at"]


def test_a_run_that_runs_is_not_joined_by_another_launcher(poprun, tmp_path):
    named = {"POPRUN_RUN_ID": "job-17", "POPRUN_LEASES": "none"}
    process = poprun(
        "--output-dir", "out", "sh", "-c", "echo on; sleep 1000", start=True, env=named
    )
    assert "on" in process.stdout.readline()
    before = report_of(tmp_path / "out" / "job-17")
    done = poprun("--output-dir", "out", "true", env=named)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "POPRUN_RUN_ID=job-17: the run of this name in out has not ended" in done.stderr
    assert report_of(tmp_path / "out" / "job-17") == before
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert report_of(tmp_path / "out" / "job-17")["attempts"][0]["cause"] == "signal"


@pytest.mark.parametrize("text", ["[]", "nonsense", '{"attempts": [1]}'])
def test_another_report_of_that_name_is_kept(look, tmp_path, text):
    run = tmp_path / "out" / "mine"
    run.mkdir(parents=True)
    (run / "report.json").write_text(text)
    done = look("--output-dir", "out", "touch", "started", env={"POPRUN_RUN_ID": "mine"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "report.json is not the report of a run" in done.stderr
    assert (run / "report.json").read_text() == text
    assert names(tmp_path / "out") == ["mine"]
    assert not (tmp_path / "started").exists()


def test_a_program_that_does_not_start_is_in_the_report(poprun, tmp_path):
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x7fELF nonsense")
    broken.chmod(0o755)
    done = poprun("--output-dir", "out", "./broken")
    assert done.returncode == 3, done.stderr
    report = report_of(tmp_path / "out" / "latest")
    (attempt,) = report["attempts"]
    assert (report["state"], report["exit_code"], attempt["cause"]) == ("ended", 3, "refused")
    assert "cannot run" in attempt["reason"]
    assert report["reason"] == attempt["reason"]


def test_without_a_folder_nothing_is_written_and_the_run_has_a_name_all_the_same(
    poprun, look, tmp_path
):
    done = poprun(*TWO, "--output", "plain", "sh", "-c", "echo $POPRUN_RUN_ID")
    first, second = done.stdout.split()
    assert first == second
    assert datetime.strptime(first[:15], "%Y%m%d-%H%M%S")
    assert list(tmp_path.iterdir()) == []
    refused = look("true", env={"POPRUN_RUN_ID": "a/b"})
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    refused = look("--env", "POPRUN_RUN_ID=x", "true")
    assert (refused.returncode, "POPRUN_RUN_ID" in refused.stderr) == (2, True)


def test_a_job_inside_an_instance_has_a_name_of_its_own(poprun):
    inner = (sys.executable, "-m", "poprun_py", "--output", "plain", "sh", "-c")
    script = "echo $POPRUN_RUN_ID; " + " ".join(inner) + " 'echo $POPRUN_RUN_ID'"
    done = poprun("--output", "plain", "sh", "-c", script, env={"POPRUN_RUN_ID": "outer"})
    outer, own = done.stdout.split()
    assert outer == "outer"
    assert own.startswith("20")


def test_the_result_names_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = launch(LaunchConfig(program=("true",), output_dir="out"))
    assert (tmp_path / "out" / "latest").resolve().name == result.run_id


TRAINING = """
import os, sys
import torch
import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

popdist_py.init()
torch.set_num_threads(1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def forward(self, inputs, labels=None):
        scores = self.layer(inputs)
        return scores if labels is None else torch.nn.functional.cross_entropy(scores, labels)

options = poptorch.DistributedOptions()
options.showCompilationProgressBar(False)
torch.manual_seed(1)
model = Net()
training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
inference = poptorch.inferenceModel(model, options)
checkpoints = TrainingCheckpoints("checkpoints", training)
step, _ = checkpoints.resume()
# The program ends with os._exit(), which is quick. On a busy machine, sys.exit() can take so long
# that the other instance fails first, because this instance has left the group.
is_last = os.environ["POPDIST_RESTART_COUNT"] == "1"
for step in range(step + 1, 100):
    training(torch.ones(1, 2), torch.zeros(1, dtype=torch.long))
    if step % 4 == 0:
        checkpoints.save(step)
    if step == 6:
        for batch in range(5):
            if batch == 2 and is_last and os.environ["RANK"] == "1":
                os._exit(9)
            inference(torch.ones(1, 2))
        if os.environ["RANK"] == "1":
            os._exit(9)
"""


@pytest.mark.sweep
@pytest.mark.timeout(240)
def test_a_failure_after_a_resume_is_told_in_the_users_steps(poprun, script, tmp_path):
    words = (*TWO, "--output-dir", "out", "--max-restarts", "1")
    done = poprun(*words, script(TRAINING), timeout=200)
    assert done.returncode == 9, done.stderr
    assert ", after inference call 5 after training step 6\n" in done.stderr
    assert ", after inference call 2 after training step 6\n" in done.stderr
    first, second = report_of(tmp_path / "out" / "latest")["attempts"]
    assert (first["resumed_step"], second["resumed_step"]) == (None, 4)
    told = second["first_failure"]
    assert (told["index"], told["training_step"], told["inference_calls"]) == (1, 6, 2)
    assert told["resumed_step"] == 4
