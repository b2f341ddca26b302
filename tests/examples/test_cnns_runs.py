"""What runs of the CNN programs leave: folders, tables, checkpoints, accuracies, averages."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

import popdist_py
from examples import cnn_programs as cnns

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]
# 26 images to validate with: no multiple of a batch.
WORDS = (*cnns.TINY, "--optimiser", "momentum", "--epochs", "6", "--logs-per-epoch", "2",
         "--generated-samples", "26", "--valid-batch-size", "4")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def programs():
    with cnns.imported():
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train; returns the folder of the run."""
    return train("--log-dir", tmp_path_factory.mktemp("logs")).folder


def train(*words):
    return cnns.module("train").main([*WORDS, *map(str, words)])


def program(name, folder, *words):
    return cnns.module(name).main(["--restore-path", str(folder), *map(str, words)])


def refused(call, capsys):
    """Return the one line of a usage error."""
    with pytest.raises(SystemExit) as caught:
        call()
    error = capsys.readouterr().err
    assert caught.value.code == 2
    assert error.count("\n") == 1, error
    return error


# --- folders ------------------------------------------------------------------------------------


def test_a_run_is_in_a_private_folder_of_its_own(run):
    version = re.escape(popdist_py.__version__)
    assert re.fullmatch(rf"RN8_bs4_BN_32\.32_v{version}_[A-Za-z0-9]{{3}}", run.name)
    assert {path.name for path in run.iterdir()} == {
        "arguments.json", "ckpt", "log.txt", "training.csv", "validation.csv",
    }  # fmt: skip
    assert run.stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o777 for path in run.rglob("*") if path.is_file()}
    assert modes == {0o600}


def test_a_name_that_is_taken_is_never_used(tmp_path, monkeypatch):
    log = cnns.module("log")
    monkeypatch.setattr(cnns.module("run_folder").secrets, "choice", lambda _: "x")
    args = arguments("--log-dir", tmp_path, "--name-prefix", "first", "--name-suffix", "try")
    folder = log.Run(args).folder
    assert folder.name == f"first_RN8_bs4_BN_32.32_v{popdist_py.__version__}_xxx_try"
    with pytest.raises(ValueError, match="is full of runs: give another --log-dir"):
        log.Run(args)
    assert [path.name for path in folder.iterdir()] == ["arguments.json"]


def arguments(*words):
    parser = cnns.module("configurations").parse
    return parser([*WORDS, *map(str, words)], "", "")


def test_where_no_folder_can_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    error = refused(lambda: train("--log-dir", tmp_path / "file"), capsys)
    assert f"{tmp_path / 'file'}" in error
    error = refused(lambda: train("--log-dir", tmp_path, "--name-prefix", "../a"), capsys)
    assert "--name-prefix ../a: a part of a folder's name is accepted, without /" in error


def test_tables_lines_and_arguments(run, capsys):
    rows = cnns.table(run / "training.csv")
    assert [row["step"] for row in rows] == [str(step) for step in range(3, 37, 3)]
    assert list(rows[0]) == ["step", "epoch", "loss", "accuracy", "rate"]
    line = (run / "log.txt").read_text().splitlines()[1]
    assert re.fullmatch(
        r"step 3 \| epoch 0\.50 \| loss \d+\.\d{3} \| accuracy \d+\.\d % \| lr [\d.e-]+ \| "
        r"\d+ img/s",
        line,
    )
    assert float(rows[0]["loss"]) == pytest.approx(float(line.split()[7]), abs=5e-4)
    found = json.loads((run / "arguments.json").read_text())
    assert (found["model_size"], found["global_batch_size"]) == ("8", 4)


def test_checkpoints_that_an_average_needs_are_kept(run):
    assert [path.name for path in sorted(run.glob("ckpt/*"))] == [
        f"step-{step:012}.checkpoint" for step in range(12, 37, 6)
    ]


def test_tensorboard_has_both_parts(tmp_path):
    folder = train("--log-dir", tmp_path, "--tensorboard", "--epochs", "1").folder
    (events,) = folder.glob("tensorboard/events*")
    content = events.read_bytes()
    assert b"training/loss" in content
    assert b"validation/accuracy" in content


# --- validation ---------------------------------------------------------------------------------


def test_checkpoints_have_the_accuracies_that_training_printed(run, capsys):
    capsys.readouterr()
    found = program("validation", run, "--all")
    printed = capsys.readouterr().out.splitlines()
    rows = cnns.table(run / "validation.csv")[-5:]
    assert found == [float(row["accuracy"]) for row in rows]
    lines = (run / "log.txt").read_text().splitlines()
    assert printed == [line for line in lines if " | validation accuracy " in line][-5:]
    assert program("validation", run) == found[-1:]


@pytest.mark.parametrize("words", [("--replicas", "3"), ("--valid-batch-size", "7")])
def test_every_image_counts_once_for_any_split(run, words, capsys):
    (accuracy,) = program("validation", run, *words)
    row = cnns.table(run / "validation.csv")[-1]
    assert accuracy == float(row["accuracy"])
    assert (accuracy * 26 / 100).is_integer() or accuracy * 26 / 100 == pytest.approx(
        round(accuracy * 26 / 100)
    )


def test_random_roundings_do_not_reach_the_validation(tmp_path, capsys):
    found = train("--log-dir", tmp_path, "--precision", "16.16", "--epochs", "2")
    assert program("validation", found.folder) == [found.accuracy]
    assert program("validation", found.folder, "--replicas", "2") == [found.accuracy]


def test_another_model_is_one_line(run, capsys):
    error = refused(lambda: program("validation", run, "--model-size", "14"), capsys)
    assert "is of another model: layer1.1.conv1.weight is missing there and [16, 16, 3, 3]" in error
    error = refused(lambda: program("validation", run, "--dataset", "cifar-100"), capsys)
    assert "[10, 64] there and [100, 64] here" in error


@pytest.mark.parametrize("name", ["validation", "weight_avg"])
def test_another_configuration_than_the_runs_is_one_line(run, capsys, name):
    error = refused(lambda: program(name, run, "--config", "cifar10_resnet8"), capsys)
    assert "--config cifar10_resnet8 is given" in error
    assert "was trained with none, whose options count: leave it out" in error


@pytest.mark.long
@pytest.mark.mpi
def test_two_instances_find_the_same_accuracies(run, poprun, capsys):
    capsys.readouterr()
    program("validation", run, "--all")
    alone = capsys.readouterr().out
    job = ("--share-cores", "yes", "--num-instances", "2", "--num-replicas", "4")
    words = ("--output", "plain", cnns.FOLDER / "validation.py", "--restore-path", run, "--all")
    done = poprun(*job, *words)
    assert (done.returncode, done.stdout) == (0, alone), done.stderr


# --- averages -----------------------------------------------------------------------------------


def states(run):
    return [each.model for each in cnns.module("checkpoints").read(run, 5)]


@pytest.mark.parametrize(("kind", "decay"), [("mean", 1.0), ("exponential", 0.5)])
def test_an_average_is_that_of_the_last_weights(run, kind, decay):
    weight_avg = cnns.module("weight_avg")
    args = argparse.Namespace(weight_avg=kind, weight_avg_decay=0.5)
    found = weight_avg.mean_of(states(run), weight_avg.shares(args, 5))
    name = "layer1.0.conv1.weight"
    each = [state[name].double().numpy() for state in states(run)]
    parts = [decay**age for age in (4, 3, 2, 1, 0)]
    expected = sum(part * one for part, one in zip(parts, each, strict=True)) / sum(parts)
    torch.testing.assert_close(found[name].double().numpy(), expected, rtol=1e-7, atol=1e-8)
    assert found[name].dtype == torch.float32
    assert found["bn1.num_batches_tracked"] == states(run)[-1]["bn1.num_batches_tracked"]


def test_weights_in_half_are_added_up_in_double():
    weight_avg = cnns.module("weight_avg")
    large, small = torch.tensor([60000.0]).half(), torch.tensor([2048.0]).half()
    assert weight_avg.mean_of([{"w": large}] * 5, [0.2] * 5)["w"] == large
    found = weight_avg.mean_of([{"w": small}, {"w": small + 2}], [0.5, 0.5])["w"]
    assert found.dtype == torch.float16
    assert found == torch.tensor([2049.0]).half()


def test_the_better_weights_are_written(run, monkeypatch, capsys):
    before = program("validation", run)[0]
    capsys.readouterr()
    found = program("weight_avg", run)
    line = capsys.readouterr().out
    assert re.fullmatch(
        rf"last epoch {before:.1f} %, mean of 5 {found.average:.1f} % \([+-]\d+\.\d.*\): \S+/"
        r"weights\.pt has the (average|last weights)\n",
        line,
    )
    assert accuracy_of(run, found.path) == max(found.last, found.average)
    assert found.path.stat().st_mode & 0o777 == 0o600
    # An average that is worse: noise instead of weights.
    weight_avg = cnns.module("weight_avg")
    monkeypatch.setattr(weight_avg, "mean_of", lambda found, _: noise(found[-1]))
    monkeypatch.setattr(weight_avg, "with_statistics", lambda state, *_: state)
    monkeypatch.setattr(weight_avg.Validation, "accuracy", lambda _, state: score(state, run))
    found = program("weight_avg", run)
    assert "(-40.0): " in capsys.readouterr().out
    assert cnns.same(torch.load(found.path, weights_only=True), states(run)[-1])


def noise(state):
    return {name: torch.ones_like(value) for name, value in state.items()}


def score(state, run):
    return 90.0 if cnns.same(dict(state), states(run)[-1]) else 50.0


def accuracy_of(run, path):
    args = cnns.module("validation").arguments_of(run, {})
    images = cnns.module("datasets").load(args, training=False)
    network = cnns.module("models").create(args, images.num_classes)
    validation = cnns.module("validation").Validation(network, args, images)
    accuracy = validation.accuracy(torch.load(path, weights_only=True))
    validation.close()
    return accuracy


def test_statistics_come_from_training_images(run):
    weight_avg, models = cnns.module("weight_avg"), cnns.module("models")
    args = cnns.module("validation").arguments_of(run, {})
    images = cnns.module("datasets").load(args, training=True)
    state = states(run)[-1]
    found = weight_avg.with_statistics(state, args, images)
    # By hand: the mean of what micro-batches have.
    network = models.create(args, 10)
    network.load_state_dict(state)
    means = []
    network.bn1.register_forward_hook(lambda _, inputs, __: means.append(inputs[0].mean((0, 2, 3))))
    options = cnns.module("ipu_options").training_options(args)
    loader = cnns.module("datasets").loader(args, options, images, training=True)
    with torch.no_grad():
        for pictures, _ in loader:
            network.train()(pictures)
    expected = torch.stack(means).mean(0)
    torch.testing.assert_close(found["bn1.running_mean"], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found["conv1.weight"], state["conv1.weight"])
    assert found.keys() == state.keys()


@pytest.mark.parametrize(
    "words",
    [("--weight-avg", "exponential", "--precision", "16.16"),
     ("--weight-avg", "mean", "--group-norm"), ("--weight-avg", "mean", "--no-validation")],
    ids=lambda words: words[-1],
)  # fmt: skip
def test_a_training_averages_at_its_end(tmp_path, words, capsys):
    folder = train("--log-dir", tmp_path, *words).folder
    assert f"{words[1]} of 5 " in capsys.readouterr().out
    assert cnns.module("torch").load(folder / "weights.pt", weights_only=True).keys()


@pytest.mark.parametrize("ids", ["99", "0 99", "0 17"])
def test_ids_are_checked_before_anything_is_trained(tmp_path, ids, capsys):
    error = refused(lambda: train("--log-dir", tmp_path, "--select-ipus", *ids.split()), capsys)
    assert f"--select-ipus {ids.split()[-1]}: " in error
    assert "its devices with 1 IPU have the ids 0 to 15" in error
    assert list(tmp_path.iterdir()) == []


def test_an_average_at_the_end_validates_on_the_chosen_device(tmp_path, capsys):
    folder = train("--log-dir", tmp_path, "--weight-avg", "mean", "--select-ipus", "0", "1").folder
    assert "mean of " in capsys.readouterr().out
    assert (folder / "weights.pt").is_file()


# --- Weights & Biases ---------------------------------------------------------------------------


def test_without_the_package_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("popdist_py.metrics.wandb_sink.find_spec", lambda _: None)
    error = refused(lambda: train("--log-dir", tmp_path / "logs", "--wandb"), capsys)
    assert "--wandb needs the package wandb, which is not installed" in error
    assert not (tmp_path / "logs").exists()


@pytest.mark.parametrize("mode", ["offline", pytest.param("online", marks=pytest.mark.long)])
def test_only_online_needs_a_login(tmp_path, mode):
    pytest.importorskip("wandb")
    words = [cnns.FOLDER / "train.py", *WORDS, "--epochs", "1", "--wandb", "--log-dir", "logs"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environ |= {"HOME": str(tmp_path), "WANDB_MODE": mode, "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(cnns.FOLDER.parents[1])}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=tmp_path, env=environ, timeout=100,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if mode == "online":
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith("train.py: error: --wandb: nobody is")
        assert not (tmp_path / "logs").exists()
    else:
        assert done.returncode == 0, done.stderr
        (record,) = tmp_path.glob("logs/*/wandb/offline-run-*/run-*.wandb")
        for name in (b"validation/accuracy", b"memory/ipu_percent", b"memory/host_bytes"):
            assert name in record.read_bytes()
        assert record.stat().st_mode & 0o777 == 0o600


def test_memory_utilisation_is_logged_with_the_other_metrics(tmp_path, monkeypatch):
    logged = {}

    class Run:
        def log(self, values, step):
            logged.setdefault(step, {}).update(values)

        def finish(self):
            pass

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(
        "popdist_py.metrics.wandb_sink.find_spec", lambda _: SimpleNamespace(origin="x")
    )
    monkeypatch.setattr(
        "popdist_py.metrics.wandb_sink.import_module",
        lambda _: SimpleNamespace(init=lambda **_: Run()),
    )
    train("--log-dir", tmp_path, "--wandb", "--epochs", "1", "--no-validation")
    assert logged
    for values in logged.values():
        assert values["training/loss"] > 0
        # The code and weights of a small network need only a part of the tiles' memory.
        assert 0 < values["memory/ipu_percent"] < 100
        assert 1e5 < values["memory/ipu_bytes"] < 900e6
        assert 1e7 < values["memory/host_bytes"] < psutil.virtual_memory().total
        assert 0 < values["memory/host_percent"] <= 100
