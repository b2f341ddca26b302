"""examples/sweeps: trials of Optuna are jobs that are pruned, fail and go on; tasks of submitit."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from support.processes import survivors, wait_until
from support.repository import ROOT

FOLDER = ROOT / "examples" / "sweeps"
STUDY = FOLDER / "optuna_study.py"
PROGRAM = """
import sys
rate = float(sys.argv[sys.argv.index("--learning-rate") + 1])
if rate > 1:
    sys.exit("the loss is nan")
print(f"test accuracy {100 * rate:.1f} %")
"""

pytestmark = [
    pytest.mark.examples,
    pytest.mark.mpi,
    pytest.mark.timeout(300),
    # Of Optuna and its storage, on new Pythons.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture
def example(monkeypatch):
    """Import a program of the folder, as its own script does."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in ("optuna_study", "submitit_jobs"):
        sys.modules.pop(name, None)


def fake_training():
    """Return a training that takes no time, or is far too slow; it travels by value."""

    def train(learning_rate, width, epochs):
        import time

        if width == 13:
            raise ValueError("the loss is nan")
        for epoch in range(1, epochs + 1):
            print(f"epoch {epoch}: accuracy {100 * learning_rate:.2f} %", flush=True)
            if width == 60:
                time.sleep(600 * (epoch == 2))  # the job is stopped, or the test is too late
        return 100 * learning_rate

    return train


def test_trials_end_in_every_way_and_the_study_goes_on(example, monkeypatch, tmp_path, capsys):
    program = example("optuna_study")
    monkeypatch.setattr(program, "train", fake_training())
    file = tmp_path / "study.log"
    study = program.open_study(file, "digits")
    for rate, width in ((0.1, 10), (0.2, 11), (0.25, 12), (0.28, 13), (0.001, 60)):
        study.enqueue_trial({"learning_rate": rate, "width": width})
    words = ["--num-instances", "1", "--num-replicas", "1", "--storage", str(file), "--epochs", "4"]
    assert program.main([*words, "--trials", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "5 trials: 3 ended well, 1 pruned, 1 failed" in lines
    assert lines[-1] == "best: 25.0 % with learning rate 0.25000, width 12"
    rows = {line.split()[2]: line for line in lines[1:-2]}
    assert rows["13"].endswith("failed   ValueError: the loss is nan")
    assert rows["60"].endswith("pruned   after epoch 2")

    # What the sampler would try next is not always good enough to be ended well.
    study.enqueue_trial({"learning_rate": 0.29, "width": 14})
    assert program.main([*words, "--trials", "1"]) == 0
    assert "\n6 trials: " in capsys.readouterr().out


def test_a_job_has_the_time_limit_and_the_pod_of_the_study(example, monkeypatch):
    program = example("optuna_study")
    started = []

    def start(_, **given):
        started.append((given["timeout"], given["pod"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(program.poprun_py, "start", start)
    trial = program.optuna.trial.FixedTrial({"learning_rate": 0.1, "width": 10})
    for words in ([], ["--timeout", "7", "--pod", "lab"]):
        with pytest.raises(KeyboardInterrupt):
            program.run_trial(trial, program.parse_arguments(words))
    assert started == [(None, None), (7, "lab")]


def test_ctrl_c_stops_the_jobs_and_the_study(tmp_path):
    name, value = "STUDY_TEST_MARK", f"study-{os.getpid()}-{time.monotonic_ns()}"
    words = ["--num-instances", "1", "--num-replicas", "1", "--epochs", "1000000"]
    study = subprocess.Popen(
        [sys.executable, STUDY, *words],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        wait_until(lambda: len(survivors(f"{name}={value}")) > 3, 30)  # a job has begun
        study.send_signal(signal.SIGINT)
        stdout, stderr = study.communicate(timeout=110)
    finally:
        study.kill()
    assert study.returncode == 130, stderr
    assert "Traceback" not in stderr
    assert "pruned   interrupted" in stdout
    wait_until(lambda: not survivors(f"{name}={value}"), 30, "processes of the study are left")


@pytest.mark.long
def test_trials_share_a_pod(tmp_path):
    """Each takes all IPUs of the pod, so that one waits for the other."""
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "POPRUN_PODS": str(tmp_path / "pods"),
    }  # fmt: skip

    def run(*words):
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    make = "from poprun_py.command.pods.pod_command import main; main()"
    made = run("-c", make, "create", "pod", "lab", "--type", "POD4")
    assert made.returncode == 0, made.stderr
    words = ("--pod", "lab", "--num-instances", "1", "--num-replicas", "4", "--trials", "2")
    done = run(STUDY, *words, "--epochs", "1")
    assert done.returncode == 0, done.stderr
    assert "2 trials: 2 ended well" in done.stdout
    refused = run(STUDY, *words[:4], "--num-replicas", "64", "--trials", "1", "--study", "large")
    assert refused.returncode == 1
    assert re.search(r"failed   \w+Error: .*IPU", refused.stdout), refused.stdout


def test_tasks_of_submitit_are_gathered(script, tmp_path):
    words = ["--program", script(PROGRAM), "--num-instances", "1", "--num-replicas", "1"]
    done = subprocess.run(
        [sys.executable, FOLDER / "submitit_jobs.py", *words, "--learning-rates", "0.25", "2"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["0.25", "25.0", "%"]
    assert re.search(r"2 +-  instance 0 on .* failed first", lines[2]), lines
    assert lines[-1] == "best: learning rate 0.25 with 25.0 %"


def test_slurm_is_asked_for_what_is_given(example, monkeypatch, tmp_path):
    program = example("submitit_jobs")
    srun = tmp_path / "srun"  # submitit looks whether there is one
    srun.touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    words = ["--cluster", "slurm", "--folder", str(tmp_path / "logs")]
    more = ["--partition", "batch", "--cpus", "3", "--minutes", "7"]
    asked = []
    for given in (words, words + more):
        executor = program.executor_of(program.parse_arguments(given))
        assert executor.folder == tmp_path / "logs"
        parameters = executor._executor.parameters
        asked.append([parameters.get(name) for name in ("partition", "cpus_per_task", "time")])
    assert asked == [[None, 2, 60], ["batch", 3, 7]]


def test_slurm_is_refused_where_there_is_none(example, monkeypatch, capsys):
    program = example("submitit_jobs")
    monkeypatch.setattr(program.submitit.AutoExecutor, "which", staticmethod(lambda: "local"))
    with pytest.raises(SystemExit) as caught:
        program.main(["--cluster", "slurm"])
    assert caught.value.code == 2
    assert "this machine does not have srun" in capsys.readouterr().err
