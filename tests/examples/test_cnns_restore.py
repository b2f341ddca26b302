"""A training of the CNN programs that is stopped or killed ends as one that ran through."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

import popdist_py
from examples import cnn_programs as cnns
from popdist_py import checkpoint

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]
WORDS = (*cnns.TINY, "--optimiser", "momentum", "--logs-per-epoch", "2", "--ckpts-per-epoch", "0.5",
         "--epochs", "4", "--batches-per-step", "1")  # fmt: skip
STEPS = 24
# Two instances of two replicas, each long enough to be stopped in the middle.
JOB = ("--share-cores", "yes", "--num-instances", "2", "--num-replicas", "4", "--env",
       "OMP_NUM_THREADS=1", "--output", "plain", "--grace", "60")  # fmt: skip
LARGER = (*cnns.TINY, "--generated-samples", "96", "--logs-per-epoch", "3", "--epochs", "6",
          "--ckpts-per-epoch", "0.5", "--optimiser", "momentum",
          "--precision", "16.32")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def programs():
    with cnns.imported():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Train without a stop; returns the folder of the run."""
    return train("--log-dir", tmp_path_factory.mktemp("whole")).folder


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Stop in the middle of the third epoch; returns the folder of the run."""
    return stopped_after(14, tmp_path_factory.mktemp("stopped"))


@pytest.fixture
def copy(stopped, tmp_path):
    """Return a copy of the stopped run."""
    return shutil.copytree(stopped, tmp_path / "run")


def train(*words):
    return cnns.module("train").main([*WORDS, *map(str, words)])


def restore(folder, *words):
    return cnns.module("restore").main(["--restore-path", str(folder), *map(str, words)])


def stopped_after(calls, folder, *words):
    """Train until a stop is asked for after so many calls; returns the folder of the run."""

    @contextlib.contextmanager
    def requests():
        left = iter(range(calls - 1))
        yield lambda: next(left, None) is None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cnns.module("instances"), "stop_requests", requests)
        with pytest.raises(SystemExit) as caught:
            train("--log-dir", folder, *words)
    assert caught.value.code == popdist_py.RESUME_EXIT_CODE == 75
    (run,) = folder.iterdir()
    return run


def assert_alike(folder, whole):
    for name in ("training.csv", "validation.csv"):
        assert cnns.table(folder / name) == cnns.table(whole / name)
    assert cnns.same(cnns.training_in(folder), cnns.training_in(whole))


@pytest.mark.parametrize(
    "calls",
    [
        # The middle of an epoch, the first call, the end of an epoch, and the last call but one.
        *(14, 1, 12, 23),
        *(
            pytest.param(n, marks=pytest.mark.long)
            for n in range(1, STEPS)
            if n not in (1, 12, 14, 23)
        ),
    ],
)
def test_a_stopped_training_ends_as_one_that_ran_through(whole, tmp_path, calls):
    folder = stopped_after(calls, tmp_path)
    assert restore(folder).steps == STEPS
    assert_alike(folder, whole)
    log = (folder / "log.txt").read_text()
    assert f"stopped after step {calls}; go on with: python " in log
    assert f"resumed after step {calls}: {folder}" in log


def test_speed_counts_no_image_of_before_the_stop(copy, monkeypatch):
    """The line of step 15 is of three calls, one of them after the stop."""
    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: next(seconds))
    monkeypatch.setattr(cnns.module("training"), "time", clock)
    log, speeds = cnns.module("log"), []
    own = log.Run.training
    monkeypatch.setattr(
        log.Run,
        "training",
        lambda self, *values: (speeds.append(values[-1]), own(self, *values))[1],
    )
    restore(copy)
    assert speeds == [4.0, 12.0, 12.0, 12.0]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(copy, whole, capsys):
    newest = max(copy.glob("ckpt/*.checkpoint"))
    assert newest.name == "step-000000000014.checkpoint"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    restore(copy)
    said = capsys.readouterr().out
    assert "checkpoint of step 14 is damaged: going on from step 12" in said
    assert_alike(copy, whole)


def test_rows_after_the_checkpoint_are_cut_off_and_earlier_ones_stay(copy, capsys):
    extra = "15,9.0,9.0,9.0,9.0,9.0\n18,9.0,9"  # the last one is not whole
    with (copy / "training.csv").open("a") as file:
        file.write(extra)
    run = cnns.module("log").Run(arguments(copy), copy)
    before = cnns.table(copy / "training.csv")[:-2]
    run.go_on(14)
    assert cnns.table(copy / "training.csv") == before
    run.go_on(2)
    assert (copy / "training.csv").exists() == any(int(row["step"]) <= 2 for row in before)
    assert not list(copy.glob(".*"))
    capsys.readouterr()


def arguments(folder):
    return cnns.module("restore").arguments_of(folder, {}, {})


REFUSED = [
    (("--model-size", "14"), "--model-size 14 is given, and {} was trained with 8, which stays"),
    (("--batch-size", "2"), "--batch-size 2 is given"),
    (("--optimiser", "SGD"), "--optimiser SGD is given"),
    (("--seed", "4"), "--seed 4 is given"),
    (("--log-dir", "elsewhere"), "--log-dir elsewhere is given"),
    (("--config", "cifar10_resnet8"), "was trained without --config, which stays"),
    (("--replicas", "3"), "3 replicas with micro-batches of 4 do not reach it; take --replicas 1"),
    (("--gradient-accumulation-count", "2"), "a global batch of 4 images is asked for"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda value: str(value)[:24])
def test_what_would_make_another_training_is_refused(stopped, words, said, capsys):
    before = contents(stopped)
    with pytest.raises(SystemExit) as caught:
        restore(stopped, *words)
    error = capsys.readouterr().err.replace(str(stopped), "{}")
    assert caught.value.code == 2
    assert said in error
    assert error.count("\n") == 1
    assert contents(stopped) == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (14, ("--batches-per-step", "3", "--logs-per-epoch", "1")),
        (14, ("--logs-per-epoch", "5", "--ckpts-per-epoch", "3")),
        (1, ("--batches-per-step", "1000", "--logs-per-epoch", "1")),
    ],
    ids=str,
)
def test_other_logging_goes_on_to_the_same_bits(whole, stopped, tmp_path, calls, words):
    """Restore in the middle of an epoch, after an even or an odd number of updates."""
    if calls == 14:
        folder = shutil.copytree(stopped, tmp_path / "run")
    else:
        folder = stopped_after(calls, tmp_path)
    assert restore(folder, *words).steps == STEPS
    assert_same_training(folder, whole)


def assert_same_training(folder, whole):
    """Compare all but the position in the data, which depends on the length of a call."""
    found, expected = (cnns.training_in(each) for each in (folder, whole))
    assert cnns.same(found["training"], expected["training"])
    for one, other in zip(found["instances"], expected["instances"], strict=True):
        assert cnns.same(one["buffers"], other["buffers"])
        assert cnns.same(one["host_buffers"], other["host_buffers"])


@pytest.mark.parametrize(
    "words",
    [
        ("--precision", "16.16"),
        ("--gradient-accumulation-count", "2", "--batch-size", "2", "--optimiser", "RMSProp"),
        pytest.param(
            ("--replicas", "2", "--batch-size", "2", "--deterministic"), marks=pytest.mark.sweep
        ),
        pytest.param(("--optimiser", "LARS", "--precision", "16.32"), marks=pytest.mark.sweep),
        pytest.param(
            ("--lr-schedule", "exponential", "--generated-samples", "31"), marks=pytest.mark.sweep
        ),
    ],
    ids=" ".join,
)
def test_how_often_it_logs_and_saves_changes_no_weight(tmp_path, words):
    """The images after the last full global batch of an epoch are left out in both."""
    length = ("--generated-samples", "26", "--epochs", "2", "--warmup-epochs", "1", *words)
    logging = [
        ("--logs-per-epoch", "6", "--batches-per-step", "1", "--no-validation"),
        ("--logs-per-epoch", "1", "--batches-per-step", "1000", "--ckpts-per-epoch", "1"),
        ("--logs-per-epoch", "1", "--batches-per-step", "4", "--ckpts-per-epoch", "3"),
        ("--logs-per-epoch", "4", "--batches-per-step", "1000", "--ckpts-per-epoch", "0.5"),
    ]
    runs = [
        train("--log-dir", tmp_path / str(number), *length, *each)
        for number, each in enumerate(logging)
    ]
    assert len({run.steps for run in runs}) == 1
    for run in runs[1:]:
        assert_same_training(run.folder, runs[0].folder)


def test_a_checkpoint_of_before_rates_of_updates_goes_on(copy, whole, monkeypatch):
    """Earlier versions saved neither a scheduler nor its base rates."""
    link = cnns.module("train").poptorch.PoplarExecutor.load_training_state

    def older(self, shared, instances):
        settings = [
            {name: value for name, value in group.items() if name != "initial_lr"}
            for group in shared["settings"]
        ]
        rest = {name: value for name, value in shared.items() if name != "scheduler"}
        link(self, {**rest, "settings": settings}, instances)

    monkeypatch.setattr(cnns.module("train").poptorch.PoplarExecutor, "load_training_state", older)
    restore(copy)
    found, expected = (cnns.training_in(each)["training"] for each in (copy, whole))
    assert cnns.same(found["model"], expected["model"])
    assert cnns.same(found["settings"], expected["settings"])


def test_more_epochs_and_other_logs_are_accepted(copy, capsys):
    found = restore(copy, "--epochs", "5", "--logs-per-epoch", "3", "--weight-avg-count", "2")
    assert found.steps == 30
    capsys.readouterr()
    assert restore(copy).steps == 30  # the folder says so now
    assert "nothing is left to train after step 30: give more --epochs" in capsys.readouterr().out


def test_processes_that_load_images_make_no_difference(whole, tmp_path):
    folder = stopped_after(14, tmp_path, "--workers", "2")
    restore(folder, "--workers", "1")
    # Starting them draws a number of the host's, so that its random state is another one.
    assert cnns.table(folder / "training.csv") == cnns.table(whole / "training.csv")
    found, expected = (cnns.training_in(each)["training"] for each in (folder, whole))
    assert cnns.same(found, expected)


def test_the_replicas_of_the_launcher_are_kept(tmp_path, monkeypatch):
    """So that it goes on without the launcher too."""
    args = cnns.module("configurations").parse(["--generated-data", "--BN-span", "1"], "", "")
    monkeypatch.setattr(cnns.module("batch_sizes"), "replicas", lambda _: 4)
    cnns.module("run_folder").write_arguments(tmp_path, args)
    assert cnns.module("run_folder").read_arguments(tmp_path)["replicas"] == 4


def test_other_replicas_keep_the_global_batch(tmp_path, capsys):
    words = ("--batch-size", "2", "--gradient-accumulation-count", "2", "--no-validation")
    found = train("--log-dir", tmp_path, *words)
    found = restore(found.folder, "--replicas", "2", "--epochs", "5")
    assert "micro-batch 2 x accumulation 1 x 2 replicas" in capsys.readouterr().out
    assert found.steps == 30


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda run: shutil.rmtree(run), "has no arguments.json: give the folder that train.py"),
        (lambda run: (run / "arguments.json").write_text("{"), "is damaged or another program's"),
        (lambda run: (run / "arguments.json").write_text("{}"), "is damaged or another program's"),
        (lambda run: shutil.rmtree(run / "ckpt"), "has no checkpoint in ckpt/"),
        (
            lambda run: [path.write_bytes(b"") for path in run.glob("ckpt/*")],
            "has only damaged checkpoints in ckpt/",
        ),
        (
            lambda run: checkpoint.Checkpoints(run / "ckpt").save(99, b"somebody else's"),
            "checkpoint of step 99 in {}/ckpt does not contain the state of a training",
        ),
    ],
    ids=["gone", "cut", "other", "none", "damaged", "somebody's"],
)
@pytest.mark.parametrize("program", ["restore", "validation", "weight_avg"])
def test_a_folder_of_something_else_is_one_line(copy, damage, said, program, capsys):
    damage(copy)
    before = contents(copy)
    with pytest.raises(SystemExit) as caught:
        cnns.module(program).main(["--restore-path", str(copy)])
    error = capsys.readouterr().err.replace(str(copy), "{}")
    assert caught.value.code == 2
    assert said in error
    assert error.count("\n") == 1
    assert contents(copy) == before


@pytest.fixture(scope="module")
def whole_job(shared_poprun, tmp_path_factory):
    """Train in a job without a stop; returns the folder of the run."""
    folder = tmp_path_factory.mktemp("job")
    done = shared_poprun(*JOB, cnns.FOLDER / "train.py", *LARGER, "--log-dir", folder)
    assert done.returncode == 0, done.stderr
    return next(folder.iterdir())


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_job_goes_on_to_the_same_bits(poprun, whole_job, tmp_path, how):
    job = poprun(*JOB, cnns.FOLDER / "train.py", *LARGER, "--log-dir", tmp_path, start=True)
    assert any(line.startswith("step 14 ") for line in job.stdout)
    job.send_signal(signal.SIGTERM if how == "stop" else signal.SIGKILL)
    said, _ = job.communicate(timeout=110)
    (cut,) = tmp_path.iterdir()
    words = [cnns.FOLDER / "restore.py", "--restore-path", cut]
    if how == "stop":
        assert job.returncode == popdist_py.RESUME_EXIT_CODE
        told = shlex.split(said.partition("go on with: ")[2].splitlines()[0])
        launcher = ["poprun-py", "--num-instances", "2", "--num-replicas", "4"]
        assert told == [*launcher, *map(str, words)]
    done = poprun(*JOB, *words)
    assert done.returncode == 0, done.stderr
    assert "resumed after step " in done.stdout
    assert_alike(cut, whole_job)


@pytest.mark.long
def test_a_program_alone_stops_at_a_checkpoint_too(tmp_path):
    words = [sys.executable, cnns.FOLDER / "train.py", *LARGER, "--log-dir", tmp_path]
    with subprocess.Popen(
        list(map(str, words)), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(cnns.FOLDER.parents[1])},
    ) as program:  # fmt: skip
        assert any(line.startswith("step 24 ") for line in program.stdout)
        program.send_signal(signal.SIGTERM)
        said = program.communicate(timeout=110)[0]
    assert program.returncode == 75
    assert "stopped after step " in said
