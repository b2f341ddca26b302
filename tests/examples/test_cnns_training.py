"""The CNN programs as a whole: digits are learnt, instances do not matter, curves are drawn."""

from __future__ import annotations

import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch

from examples import cnn_programs as cnns

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]
MARKS = {"training-loss", "training-accuracy", "validation-accuracy", "last-accuracy",
         "learning-rate"}  # fmt: skip
TRAIN = str(cnns.FOLDER / "train.py")


@pytest.fixture(scope="module", autouse=True)
def programs():
    with cnns.imported():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Train for two epochs; returns the folder of the run."""
    words = (*cnns.TINY, "--epochs", "2", "--log-dir", str(tmp_path_factory.mktemp("logs")))
    return cnns.module("train").main(list(words)).folder


def curve(*words):
    return cnns.module("curve").main([*map(str, words)])


def only_run(folder):
    (run,) = folder.iterdir()
    return run


# --- the learning curve -----------------------------------------------------------------------


def test_curve_shows_what_the_tables_hold(finished, tmp_path, capsys):
    path = tmp_path / "curve.svg"
    curve(finished, "--figure", path)
    assert capsys.readouterr().out == f"the learning curve is in {path}\n"
    elements = list(ElementTree.parse(path).getroot().iter())
    assert {element.get("id") for element in elements} >= MARKS
    words = " ".join("".join(element.itertext()) for element in elements)
    last = float(cnns.table(finished / "validation.csv")[-1]["accuracy"])
    assert f"last {last:.2f} %" in words
    assert "RN8, 1 replicas, 4 images a step, precision 32.32" in words
    before = path.read_bytes()
    curve(finished, "--figure", path)
    assert path.read_bytes() == before


def test_what_is_no_run_is_refused_in_one_line(finished, tmp_path, capsys):
    broken = shutil.copytree(finished, tmp_path / "run")
    (broken / "training.csv").write_text("step,epoch,loss\n1,0.5\n")
    without = shutil.copytree(finished, tmp_path / "without")
    (without / "validation.csv").unlink()
    cases = {
        broken: "training.csv is empty or damaged",
        without: "has no validation.csv",
        tmp_path / "nowhere": "has no training.csv",
    }
    for folder, said in cases.items():
        with pytest.raises(SystemExit) as caught:
            curve(folder, "--figure", tmp_path / "curve.svg")
        assert caught.value.code == 2
        found = capsys.readouterr().err
        assert said in found
        assert found.count("\n") == 1
    assert not (tmp_path / "curve.svg").exists()


@pytest.mark.long
def test_curve_of_a_training_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cnns.module("curve"), "TRAINING", 128)
    monkeypatch.setattr(cnns.module("curve"), "TEST", 100)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    curve("--figure", tmp_path / "curve.svg", "--epochs", "1")
    assert "micro-batch 8 x accumulation 1 x 8 replicas" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["curve.svg"]


# --- pipelines --------------------------------------------------------------------------------


def test_pipeline_is_trained_and_validated(tmp_path):
    words = (*cnns.TINY, "--epochs", "1", "--gradient-accumulation-count", "3")
    train = cnns.module("train").main
    whole = train([*words, "--log-dir", str(tmp_path / "whole")])
    cut = ("--pipeline", "--shards", "2", "--pipeline-splits", "layer2.0")
    pipelined = train([*words, *cut, "--log-dir", str(tmp_path / "pipelined")])
    assert pipelined.accuracy == whole.accuracy
    for name, value in weights(pipelined.folder).items():
        torch.testing.assert_close(value, weights(whole.folder)[name])


# --- whole trainings --------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(
    "norm",
    [("--BN-span", "4"), pytest.param(("--group-norm",), marks=pytest.mark.long)],
    ids=" ".join,
)
def test_instances_do_not_matter_to_the_bit(poprun, tmp_path, norm):
    words = (*cnns.TINY, "--deterministic", "--generated-samples", "64", "--epochs", "2", *norm)
    alone = cnns.module("train").main(
        [*words, "--replicas", "4", "--log-dir", str(tmp_path / "alone")]
    )
    done = poprun(
        "--share-cores", "yes", "-n", "2", "--num-replicas", "4", "--env", "OMP_NUM_THREADS=1",
        sys.executable, TRAIN, *words, "--log-dir", tmp_path / "two",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    two = only_run(tmp_path / "two")
    states = [weights(folder) for folder in (alone.folder, two)]
    assert cnns.same(*states)
    for part in ("training", "validation"):
        assert cnns.table(alone.folder / f"{part}.csv") == cnns.table(two / f"{part}.csv")


def weights(folder) -> dict[str, torch.Tensor]:
    return dict(cnns.module("checkpoints").weights(folder).model)


@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.timeout(600)
def test_digits_are_learnt_to_97_per_cent(poprun, tmp_path):
    cnns.module("datasets.sample").main(
        ["cifar-10", str(tmp_path), "--training", "4320", "--test", "357"]
    )
    done = poprun(
        "--share-cores", "yes", "--num-instances", "2", "--num-replicas", "8",
        sys.executable, TRAIN, "--config", "digits_resnet8", "--data-dir", tmp_path,
        "--log-dir", tmp_path / "logs", "--seed", "0", timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path / "logs")
    accuracies = [float(row["accuracy"]) for row in cnns.table(run / "validation.csv")]
    assert len(accuracies) == 12
    assert accuracies[-1] > 97
    assert f"validation accuracy {accuracies[-1]:.2f} %" in done.stdout
    last, average = re.search(r"last epoch (\S+) %, mean of 3 (\S+) % ", done.stdout).groups()
    better = "average" if float(average) >= float(last) else "last weights"
    assert f"{run / 'weights.pt'} has the {better}" in done.stdout
    assert max(float(average), float(last)) > 97
