"""Every program of the examples runs once with small sizes; `make test-examples` shows more of it.

``test_option_errors`` has the help and the errors of all programs, and each example has a file of
its own with what it computes.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys

import pytest
from support.repository import ROOT

from examples.common import sample_data

EXAMPLES = ROOT / "examples"
PROGRAMS = {
    str(path.relative_to(EXAMPLES))
    for path in EXAMPLES.rglob("*.py")
    if "__pycache__" not in path.parts and '__name__ == "__main__"' in path.read_text()
}
ONE_EPOCH = "--data-dir {data} --epochs 1 --items 50 --batch-size 25"
PIPELINE = (
    "--data-dir {data} --batch-size 4 --gradient-accumulation 7 --test-batch-size 4 "
    "--inference-iterations 4 --epochs 1 --workers 0 --steps 1"
)
TRAINING = (
    "--generated-data --generated-samples 24 --image-size 8 --model-size 8 --batch-size 4 "
    "--precision 32.32 --seed 3 --no-tensorboard --epochs 2 --log-dir ."
)
# Arguments of each program, and a pattern that finds the result in what it prints.
ALONE = {
    "cnns/datasets/sample.py": ("cifar-10 . --training 100 --test 100", "is in .*cifar-10"),
    "common/notebooks.py": ("{script}", r"made: \S+script\.ipynb"),
    "common/sample_data.py": ("cifar10 new --training 50 --test 20", "cifar10 is in new"),
    "course/data_parallel.py": (
        "--data-dir {data} --batch-size 8 --figure figure.svg", r"forward: 6 = 3 x M",
    ),
    "course/distributed_example.py": (
        ONE_EPOCH + " --show-environment",
        r"(?s)RANK= +which of them this is\n.*on 1 rank\(s\)",
    ),
    "course/fashion_mnist.py": (ONE_EPOCH, r"test accuracy \d"),
    "course/lfw_dataset.py": (
        "-path_to_folder {faces} -visualize_batch -output batch.png", "the batch is in batch.png",
    ),
    "course/sample_faces.py": ("faces", "404 pictures are now in faces"),
    "data_loading/data_loading.py": (
        "--items 32 --side 16 --batch-size 4 --workers 1 --synthetic-data",
        r"synthetic data +[\d,]+",
    ),
    "data_loading/figures.py": ("batching figure.svg", ""),
    "hands_on/compare.py": ("--steps 0 --only async --figure figure.svg", "modelled"),
    "hands_on/main.py": (
        "--data-dir {data} --precision 32.32 --model resnet18 --side 16 --batch-size 2 --steps 1 "
        "--epochs 1",
        r"\[Epoch 01\] loss: \d+\.\d{3}, acc: \d",
    ),
    "language_model.py": (
        "--text {text} --steps 2 --width 16 --layers 1 --heads 2 --context 8 --sample 5 "
        "--replicas 2 --validate-every 2",
        r"step +2  loss \d.* validation \d",
    ),
    "pipelining/figures.py": ("ramp-up --output figure.svg", ""),
    "pipelining/mnist_pipeline.py": (
        PIPELINE + " --device-iterations 4", r"Accuracy on test set: \d",
    ),
    "pipelining/notebooks.py": ("made", "made: walkthrough.ipynb, walkthrough_code_only.py"),
    "pipelining/walkthrough.py": (
        PIPELINE + " --training-iterations 4", r"Accuracy on test set: \d",
    ),
}  # fmt: skip
AFTER_A_TRAINING = {
    "cnns/train.py", "cnns/restore.py", "cnns/validation.py", "cnns/weight_avg.py", "cnns/curve.py",
}  # fmt: skip
SEARCHES = {
    "sweep.py": "--learning-rates 0.25 --csv trials.csv --program {trial}",
    "sweeps/optuna_study.py": "--trials 1 --epochs 1 --jobs 1",
    "sweeps/submitit_jobs.py": "--learning-rates 0.25 --program {trial}",
}
# tests/system runs train.py, and test_other_launchers runs ddp.py. The others start jobs that take
# long, or need Lightning.
ELSEWHERE = {
    "train.py", "ddp.py", "course/speed_up.py", "course/threads_or_processes.py",
    "course/lightning_example.py",
}  # fmt: skip

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Make small data sets and files, by the names that the arguments use."""
    folder = tmp_path_factory.mktemp("data")
    sample_data.make_fashion_mnist(folder, training=60, test=20)
    sample_data.make_mnist(folder, 120, 40)
    sample_data.make_cifar10(folder, training=20, test=10)
    (folder / "text").write_text("abcdefgh" * 100)
    (folder / "trial.py").write_text("print('test accuracy 25.0 %')")
    (folder / "script.py").write_text("# %% [markdown]\n# A title\n# %%\nprint(1)\n")
    faces = folder / "faces" / "somebody"
    faces.mkdir(parents=True)
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (40, 40), (60, 80, 120)).save(faces / "somebody_0001.jpg")
    return {
        "data": folder, "faces": faces.parent, "script": folder / "script.py",
        "text": folder / "text", "trial": folder / "trial.py",
    }  # fmt: skip


@pytest.fixture
def run(processes, tmp_path):
    """Run a program in the test's folder; it ends well."""

    def call(program: str, *words: str) -> str:
        done = processes.run(EXAMPLES / program, *words, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.mark.parametrize("program", ALONE)
def test_a_program_runs_alone(program, run, places, tmp_path):
    words, result = ALONE[program]
    shown = run(program, *words.format(**places).split())
    assert re.search(result, shown), shown
    if "figure.svg" in words:
        assert "</svg>" in (tmp_path / "figure.svg").read_text()


def test_cnns_are_trained_gone_on_with_validated_averaged_and_drawn(run, tmp_path):
    shown = run("cnns/train.py", *TRAINING.split())
    assert "RN8 on random images (cifar-10): 12 steps of 4 images" in shown
    (folder,) = tmp_path.iterdir()
    shown = run("cnns/restore.py", "--restore-path", str(folder), "--epochs", "3")
    assert "resumed after step 12: " in shown
    (accuracy,) = re.findall(r"epoch 3.* validation accuracy (\S+) %", shown)
    validated = run("cnns/validation.py", "--restore-path", str(folder))
    assert f"validation accuracy {accuracy} %" in validated
    assert "weights.pt has the " in run("cnns/weight_avg.py", "--restore-path", str(folder))
    figure = tmp_path / "curve.svg"
    run("cnns/curve.py", str(folder), "--figure", str(figure))
    assert "</svg>" in figure.read_text()


@pytest.mark.mpi
@pytest.mark.parametrize(
    "program",
    ["sweep.py", "sweeps/submitit_jobs.py",
     # Its job trains with torch, which takes seven seconds of a core. test_sweeps starts it, too.
     pytest.param("sweeps/optuna_study.py", marks=pytest.mark.long)],
)  # fmt: skip
def test_a_search_starts_a_job_and_shows_its_accuracy(program, run, places):
    words = f"{SEARCHES[program]} --num-instances 1 --num-replicas 1"
    shown = run(program, *words.format(**places).split())
    assert re.search(r"^best: .*\d", shown, re.MULTILINE), shown


def _shown_by_programs(programs: list[tuple[str, ...]]) -> str:
    """Run programs of the examples, one after the other; return what they print."""
    import torch

    threads, random, argv, path = (
        torch.get_num_threads(), torch.get_rng_state(), sys.argv, list(sys.path),
    )  # fmt: skip
    modules = set(sys.modules)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            for name, *words in programs:
                program = EXAMPLES / name
                sys.argv = [str(program), *words]
                sys.path.insert(0, str(program.parent))
                runpy.run_path(str(program), run_name="__main__")
        return shown.getvalue()
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
        sys.argv, sys.path[:] = argv, path
        for name in set(sys.modules) - modules:
            if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


# torch keeps the address of a process group until its process ends, so one program that makes a
# group is all that a job of the fixture can run.
IN_THE_SESSIONS_JOB = {
    "mpi.py": (
        # With the default tolerance there are 180 iterations.
        "--size 12 --tolerance 0.001",
        r"^12 x 12 points on 2 rank\(s\): 40 iterations",
    ),
    "course/speed_up_instance.py": (
        # The start took from 1970 to now.
        "--batch-size 8 --steps 1 --began 1",
        r'"start": \d{10}\..*"with reduction": \d',
    ),
}


@pytest.mark.mpi
def test_programs_for_jobs_run_on_two_instances(instances):
    programs = [(name, *words.split()) for name, (words, _) in IN_THE_SESSIONS_JOB.items()]
    first, second = instances.run(_shown_by_programs, programs)
    for _, result in IN_THE_SESSIONS_JOB.values():
        assert len(re.findall(result, first, re.MULTILINE)) == 1, first
    assert second == ""


def test_no_program_is_left_out():
    shown = {
        *ALONE,
        *AFTER_A_TRAINING,
        *IN_THE_SESSIONS_JOB,
        *SEARCHES,
        *ELSEWHERE,
    }
    assert shown == PROGRAMS
