"""Pipelining: the tutorial's program, its profile, its figures and its notebook."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys

import pytest
import torch
from support.repository import ROOT

from popdist_py.ipu.graph import Placement
from popdist_py.ipu.schedule import schedule
from popdist_py.ipu.settings import Settings

FOLDER = ROOT / "examples" / "pipelining"
_SMALL = (
    "--batch-size", "4", "--gradient-accumulation", "7", "--device-iterations", "4",
    "--test-batch-size", "4", "--inference-iterations", "8", "--learning-rate", "0.003",
    "--epochs", "3", "--workers", "0",
)  # fmt: skip
_ONE_STEP = (*_SMALL, "--epochs", "1", "--steps", "1")

pytestmark = [pytest.mark.examples, pytest.mark.timeout(150)]


@pytest.fixture(scope="module")
def example():
    """Import a module of the example by name, as its programs do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield importlib.import_module
        torch.set_num_threads(threads)
        for name in ("mnist_pipeline", "figures", "profile_folder", "notebooks"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def mnist(example, tmp_path_factory):
    example("mnist_pipeline")  # which finds the next module
    folder = tmp_path_factory.mktemp("data")
    importlib.import_module("common.sample_data").make_mnist(folder, 1440, 352)
    return folder


@pytest.fixture(scope="module")
def trained(example, mnist):
    return example("mnist_pipeline").main([*_SMALL, "--data-dir", str(mnist)])


@pytest.fixture(scope="module")
def profiles(example, tmp_path_factory):
    """Write the profiles of both strategies, and of a pipeline with an offloaded optimiser."""
    program, files = example("mnist_pipeline"), example("profile_folder")
    made = {}
    for name, words in {
        "pipelined": (),
        "sharded": ("--strategy", "sharded"),
        "offloaded": ("--offload-optimiser",),
    }.items():
        _, args = program.parse_arguments([*_SMALL, *words])
        options = program.get_training_options(args).showCompilationProgressBar(False)
        options.Emulator.replicaExecution("loop")  # nothing is run
        model = program.get_training_model(options, program.Network(), 0.001)
        pictures = torch.zeros(112, 1, 28, 28)
        model.compile(pictures, torch.zeros(112, dtype=torch.long))
        made[name] = tmp_path_factory.mktemp(name)
        files.write_profile(made[name], model, args.strategy)
    return made


def refused(call, words, capsys):
    """Return the one line of an error of the arguments."""
    with pytest.raises(SystemExit) as caught:
        call(words)
    shown = capsys.readouterr().err
    assert caught.value.code == 2
    assert shown.count("\n") == 1, shown
    return shown


def run(folder, *words, **environ):
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder, capture_output=True, text=True, timeout=120, check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **environ},
    )  # fmt: skip


def test_pipelined_training_learns_digits(trained):
    assert trained.accuracy > 80


def test_sharded_training_gives_the_same_weights(example, mnist, trained):
    words = [*_SMALL, "--strategy", "sharded", "--offload-optimiser", "--data-dir", str(mnist)]
    other = example("mnist_pipeline").main(words)
    assert other.accuracy == trained.accuracy
    for name, value in other.model.state_dict().items():
        assert torch.equal(value, trained.model.state_dict()[name]), name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gradient-accumulation", "6"), "give 7 or more"),
        (("--inference-iterations", "3"), "give 4 or more"),
        (("--batch-size", "52"), "a step takes 1,456 pictures and there are 1,440"),
        (("--data-dir", "/dev/null"), "/dev/null"),
        (("--profile", "--profile-dir", "/dev/null/profile"), "/dev/null/profile"),
    ],
)
def test_what_cannot_be_done_is_one_line(example, mnist, words, message, capsys):
    program = example("mnist_pipeline")
    assert message in refused(program.main, [*_SMALL, "--data-dir", str(mnist), *words], capsys)


def test_data_of_the_user_are_left_alone(example, tmp_path, capsys):
    """A part of MNIST is neither completed nor replaced."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "train-images-idx3-ubyte").write_bytes(b"mine")
    words = [*_SMALL, "--data-dir", str(tmp_path)]
    assert "complete it" in refused(example("mnist_pipeline").main, words, capsys)
    assert [path.name for path in raw.iterdir()] == ["train-images-idx3-ubyte"]


def test_profiles_show_that_sharded_execution_has_one_ipu_at_a_time(example, profiles, capsys):
    read = example("profile_folder").read_profile
    pipelined, sharded = (read(profiles[name]) for name in ("pipelined", "sharded"))
    assert set(sharded.at_work) == {1}
    assert len(sharded.at_work) == 7 * 2 * 4
    assert max(pipelined.at_work) == 4
    assert len(pipelined.at_work) < len(sharded.at_work)
    assert pipelined.cycles < sharded.cycles
    assert sum(pipelined.busy) > sum(sharded.busy)

    page = (profiles["sharded"] / "profile.html").read_text()
    assert "56 steps before the update; 1.0 IPUs work at a time,\n1 at most" in page
    assert not re.search(r"(src|href)=", page)
    names = {path.name for path in profiles["sharded"].iterdir()}
    assert {"execution.txt", "memory.txt", "schedule.svg"} <= names

    file = profiles["pipelined"] / "both.svg"
    folders = [str(profiles[name]) for name in ("pipelined", "sharded")]
    example("figures").main(["--compare", *folders, "--output", str(file)])
    assert "pipelined-forward-0-1" in file.read_text()
    assert "sharded-backward-0-8" in file.read_text()
    assert re.search(r"work in a step +[1-3]\.\d, 4 at most +1\.0, 1 at most\n", shown(capsys))


def shown(capsys):
    return capsys.readouterr().out


def test_an_offloaded_optimiser_needs_less_memory_and_more_time(example, profiles):
    read = example("profile_folder").read_profile
    here, there = (read(profiles[name]) for name in ("pipelined", "offloaded"))
    assert all(less < more for less, more in zip(there.needed, here.needed, strict=True))
    assert there.cycles > here.cycles
    on, off = (example("figures").optimiser_costs(10, offload=flag) for flag in (False, True))
    assert all(on[0])
    assert not any(off[0])
    assert all(less < more for less, more in zip(on[1], off[1], strict=True))


def test_what_is_no_profile_is_one_line(example, profiles, tmp_path, capsys):
    draw = example("figures").main
    words = ["--compare", str(tmp_path), str(tmp_path), "--output", str(tmp_path / "f.svg")]
    assert "schedule.json: No such file" in refused(draw, words, capsys)
    for name in ("schedule", "execution", "memory"):
        (tmp_path / f"{name}.json").write_text(json.dumps({}))
    assert "is not a profile" in refused(draw, words, capsys)


@pytest.mark.parametrize("ipus", range(2, 9))
def test_where_a_pipeline_is_full(example, ipus):
    """For four IPUs after nine steps, as the tutorial's picture shows, which is 2N + 1.

    In steps of one forward or backward each it is 3 (N - 1) for all N, in pipeline cycles 2N - 1.
    """
    drawn = example("figures").one_update(ipus, 3 * ipus)
    full = drawn.steps_until_full
    assert full == 3 * (ipus - 1)
    assert (full == 2 * ipus + 1) == (ipus == 4)
    assert drawn.full_from == 2 * ipus - 1
    ramp_up = drawn.cycles[:full]
    assert [ramp_up.count(cycle) for cycle in range(1, 2 * ipus - 1)] == (
        [1] * (ipus - 1) + [2] * (ipus - 1)
    )
    again = schedule(
        Placement(tuple(range(ipus)), tuple(range(ipus))),
        Settings(accumulation=3 * ipus, strategy="grouped"),
    )
    assert again.steps_until_full == 4 * ipus - 5
    assert again.full_from == 2 * ipus - 1
    last = max(cell.step for cell in drawn.rows[0] if cell.action == "forward")
    after = [[cell.action for cell in row[full:last]] for row in drawn.rows]
    assert all(set(row) == {"forward", "backward"} for row in after)
    assert any(row[full - 1].action == "idle" for row in drawn.rows)


@pytest.mark.parametrize(
    ("words", "marks"),
    [
        (("ramp-up",), ("all-ipus-work", "after 9 steps", "ramp-up-backward-3-5")),
        (("ramp-up", "--micro-batches", "6"), ("7 would",)),
        (("ramp-up", "--ipus", "3"), ("3 IPUs: after 6 steps",)),
        (("strategies",), ("pipelined: 22 steps", "sharded: 64 steps", "1.0 of 4 IPUs")),
        (("progression",), ("progression-backward-0-11", "#5fbf77", "#e0605e")),
        (("offload",), ("state-on-2", "update-off-2", "off the chip")),
    ],
)
def test_figures_are_the_same_each_time(example, tmp_path, words, marks):
    files = [tmp_path / name for name in ("one.svg", "two.svg")]
    for file in files:
        example("figures").main([*words, "--output", str(file)])
    text = files[0].read_text()
    assert text == files[1].read_text()
    assert [mark for mark in marks if mark not in text] == []


def test_in_the_progression_only_the_first_micro_batch_has_colours(example):
    figures = example("figures")
    drawn = figures.one_update(4, 10)
    coloured = {
        (cell.action, cell.micro_batch)
        for row in drawn.rows
        for cell in row
        if figures.fill_first(cell) in (figures.GREEN, figures.RED)
    }
    assert coloured == {("forward", 1), ("backward", 1)}


def test_the_notebook_is_what_the_script_makes(example):
    for name, text in example("notebooks").make().items():
        assert (FOLDER / name).read_text() == text, f"run examples/pipelining/notebooks.py: {name}"


@pytest.mark.long
def test_the_notebook_runs(mnist):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FOLDER / "walkthrough.ipynb", 4)
    (at,) = [
        index
        for index, cell in enumerate(notebook.cells)
        if "parameters" in cell.metadata.get("tags", [])
    ]
    small = (
        f"epochs, batch_size, gradient_accumulation, training_iterations = 1, 4, 7, 4\n"
        f"test_batch_size, inference_iterations, workers, data_dir = 4, 8, 1, {str(mnist)!r}"
    )
    notebook.cells.insert(at + 1, nbformat.v4.new_code_cell(small))
    where = {"metadata": {"path": str(FOLDER)}}
    NotebookClient(notebook, timeout=120, resources=where).execute()
    outputs = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("gradient_accumulation=7" in text for text in outputs)
    assert any("IPU3 .  .  .  F1 B1" in text for text in outputs)
    assert any("Accuracy on test set" in text for text in outputs)


def test_the_walkthrough_without_its_text_is_a_script_too(mnist, tmp_path):
    words = (
        "--epochs", "1", "--batch-size", "4", "--gradient-accumulation", "7",
        "--training-iterations", "4", "--test-batch-size", "4", "--inference-iterations", "8",
        "--workers", "1", "--steps", "2",
    )  # fmt: skip
    done = run(tmp_path, FOLDER / "walkthrough_code_only.py", *words, "--data-dir", mnist)
    assert "Epoch 1/1\n" in done.stdout
    assert "Accuracy on test set" in done.stdout


def test_commands_of_the_tutorial(mnist, tmp_path):
    """Debug messages, and a profile with a timeline; the data are where they are looked for."""
    (tmp_path / "mnist_data").symlink_to(mnist)
    program = FOLDER / "mnist_pipeline.py"
    done = run(
        tmp_path, program, *_ONE_STEP, "--debug", "--profile", "--profile-dir", "pipeline_profile"
    )
    assert "[poptorch::python] [debug]" in done.stderr
    assert "1/1" in done.stderr
    assert done.stdout.splitlines()[-1].startswith(
        "profile: open pipeline_profile/profile.html in a browser"
    )
    names = {path.name for path in (tmp_path / "pipeline_profile").iterdir()}
    assert {"profile.html", "instance-0.timeline.json.gz"} <= names


@pytest.mark.long
@pytest.mark.timeout(250)  # two jobs
def test_two_instances_print_once(mnist, poprun):
    words = (FOLDER / "mnist_pipeline.py", *_ONE_STEP, "--data-dir", mnist)
    job = ("--num-instances", 2, "--num-replicas", 2)
    done = poprun(*job, "--ipus-per-replica", 4, *words, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Accuracy on test set") == 1
    assert done.stdout.count("Epoch 1/1") == 1
    refused = poprun(*job, *words, timeout=100)
    assert refused.returncode != 0
    assert "start with --ipus-per-replica 4" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.long
def test_missing_data_are_made_and_told(example, tmp_path, capsys):
    program = example("mnist_pipeline")
    program.prepare_mnist(tmp_path / "new")
    assert shown(capsys).count("\n") == 1
    assert len(program.get_mnist(tmp_path / "new", train=True)) == 60_000
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["MNIST"]
    program.prepare_mnist(tmp_path / "new")
    assert shown(capsys) == ""
