"""The main loop of the CNN programs: its lines, its rates, its options, how it ends."""

from __future__ import annotations

import math
import os
import shlex
import signal

import pytest

from examples import cnn_programs as cnns
from popdist_py.poptorch.update.device_optimizer import DeviceOptimizer

pytestmark = [pytest.mark.examples, pytest.mark.timeout(300)]
SHORT = (*cnns.TINY, "--batches-per-step", "1", "--no-validation", "--iterations", "2")
# With gradient accumulation, and without.
PODS = {
    "mk2_resnet50_mlperf_pod16_bs20": 0.66,
    "mk2_resnet50_mlperf_pod256_lars": 0.60,
}


@pytest.fixture(scope="module", autouse=True)
def programs():
    with cnns.imported():
        yield


@pytest.fixture
def train(tmp_path):
    """Call train.py with words; runs are logged in the test's folder."""

    def call(*words):
        return cnns.module("train").main([*map(str, words), "--log-dir", str(tmp_path)])

    return call


def refused(train, capfd, code, *words):
    """A training that ends in one line on stderr."""
    with pytest.raises(SystemExit) as left:
        train(*words)
    lines = [line for line in capfd.readouterr().err.splitlines() if "error: " in line]
    assert left.value.code == code
    assert len(lines) == 1
    return lines[0]


# --- what a training leaves -------------------------------------------------------------------


@pytest.fixture
def rates(monkeypatch):
    """Return a list to which each weight update on the device appends its learning rate."""
    found, own = [], DeviceOptimizer._update

    def update(self, loss_scale):
        (rate,) = {group["lr"] for group in self._optimizer.param_groups}
        found.append(rate)
        own(self, loss_scale)

    monkeypatch.setattr(DeviceOptimizer, "_update", update)
    return found


@pytest.mark.parametrize("batches_per_step", [1, 1000])
def test_a_training_logs_validates_and_saves(train, capfd, rates, batches_per_step):
    result = train(
        *cnns.TINY, "--epochs", "3", "--logs-per-epoch", "2", "--ckpts-per-epoch", "0.5",
        "--batches-per-step", batches_per_step, "--warmup-epochs", "1",
    )  # fmt: skip
    assert (result.steps, result.stopped) == (18, False)
    training = cnns.table(result.folder / "training.csv")
    assert [int(row["step"]) for row in training] == [3, 6, 9, 12, 15, 18]
    validation = cnns.table(result.folder / "validation.csv")
    # Every other epoch, and the end.
    assert [int(row["step"]) for row in validation] == [12, 18]
    saved = sorted(path.name for path in (result.folder / "ckpt").iterdir())
    assert len(saved) == 2, saved
    assert float(validation[-1]["accuracy"]) == result.accuracy
    out = capfd.readouterr().out.splitlines()
    assert out[0] == (
        "RN8 on random images (cifar-10): 18 steps of 4 images, micro-batch 4 x accumulation 1 "
        "x 1 replica of 1 instance"
    )
    assert out[-1].endswith(f"img/s, log in {result.folder}")
    assert out == (result.folder / "log.txt").read_text().splitlines()
    # 2^-7 x 4 images, after an epoch of 6 steps; tenths of it from half of the training on, and
    # hundredths from three quarters on. Each step has the rate of its middle, also where a call of
    # the device makes three.
    base = 4 / 128
    wanted = [base * (step + 0.5) / 6 for step in range(6)] + [base] * 3
    assert rates == pytest.approx([*wanted, *[base / 10] * 4, *[base / 100] * 5])
    assert [float(row["rate"]) for row in training] == pytest.approx(rates[2::3])


def test_iterations_are_done_and_no_more(train):
    result = train(*cnns.TINY, "--no-validation", "--iterations", "14", "--logs-per-epoch", "2")
    # Calls of 2 updates: both the epochs of 6 and the training end with one.
    assert result.steps == 14
    rows = cnns.table(result.folder / "training.csv")
    assert int(rows[-1]["step"]) == 14
    assert float(rows[-1]["epoch"]) == pytest.approx(14 / 6)
    # The last step has the rate of its middle, in a warm-up of 5 epochs.
    assert float(rows[-1]["rate"]) == pytest.approx(4 / 128 * 13.5 / 30)
    assert result.accuracy is None


def test_a_loss_that_is_not_finite_ends_in_one_line_and_saves_nothing(train, capfd, tmp_path):
    said = refused(
        train, capfd, 1, *cnns.TINY, "--no-validation", "--epochs", "4", "--warmup-epochs", "2",
        "--base-learning-rate-exponent", "60",
    )  # fmt: skip
    assert "--base-learning-rate-exponent" in said
    (folder,) = tmp_path.iterdir()
    assert str(folder) in said
    losses = [float(row["loss"]) for row in cnns.table(folder / "training.csv")]
    assert not math.isfinite(losses[-1])
    assert all(map(math.isfinite, losses[:-1]))


def test_a_validation_that_fails_loses_no_training(train, capfd, monkeypatch, tmp_path):
    def damaged(self):
        raise ValueError("000001.JPEG cannot be decoded")

    monkeypatch.setattr(cnns.module("validation").Validation, "_right_answers", damaged)
    assert "JPEG" in refused(train, capfd, 2, *cnns.TINY, "--iterations", "2")
    assert [path.name for path in tmp_path.glob("*/ckpt/*")] == ["step-000000000002.checkpoint"]


def test_without_the_launcher_sigterm_asks_to_stop(train, capfd, monkeypatch):
    """It saves after the call that runs, says how to go on, and SIGTERM means what it meant."""
    log = cnns.module("log")
    own = log.Run.training

    def logged(self, step, *values, **names):
        os.kill(os.getpid(), signal.SIGTERM)
        return own(self, step, *values, **names)

    monkeypatch.setattr(log.Run, "training", logged)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        train(*cnns.TINY, "--epochs", "5", "--batches-per-step", "1", "--logs-per-epoch", "3",
              "--name-suffix", "two words")  # fmt: skip
    assert left.value.code == 75
    assert signal.getsignal(signal.SIGTERM) is before
    line = capfd.readouterr().out.splitlines()[-1]
    said, _, command = line.partition("; go on with: ")
    assert said == "stopped after step 2"
    _, program, *words = shlex.split(command)
    monkeypatch.setattr(log.Run, "training", own)
    assert program == str(cnns.FOLDER / "restore.py")
    result = cnns.module("restore").main(words)
    assert (result.steps, result.stopped) == (30, False)


def test_a_progress_bar_is_for_terminals(train, capfd):
    train(*SHORT)
    assert "step/s" not in capfd.readouterr().err


# --- options ----------------------------------------------------------------------------------


def test_one_selected_ipu_trains_and_another_one_validates(train):
    assert train(*cnns.TINY, "--iterations", "2", "--select-ipus", "0").accuracy is not None


def test_a_pipeline_without_splits_lists_them(train, capfd):
    assert (
        train("--pipeline", "--shards", "4", "--dataset", "imagenet", "--model-size", "18") is None
    )
    out = capfd.readouterr().out.splitlines()
    assert out[0].startswith("--pipeline-splits")
    assert "layer3.1" in out
    assert "conv1" not in out


every_option = pytest.mark.parametrize(
    "words",
    [
        "--pipeline --shards 2 --pipeline-splits layer2.0 --available-memory-proportion 0 1 .3 .4",
        "--pipeline --shards 2 --pipeline-splits layer2.0 --pipeline-schedule Interleaved",
        "--pipeline --shards 2 --pipeline-splits layer2.0 --pipeline-schedule Sequential",
        "--pipeline --shards 1 --pipeline-splits layer2.0 --pipeline-schedule Sequential "
        "--enable-recompute",
        "--shards 2 --sharding-exclude-filter layer1 --sharding-include-filter layer",
        "--optimiser LARS --lr-schedule exponential --label-smoothing 0.1",
        "--optimiser RMSProp --lr-schedule cosine",
        "--optimiser momentum --lr-schedule polynomial_decay_lr",
        "--precision 16.16 --enable-half-partials --device mk2",
        "--precision 16.32 --no-stochastic-rounding",
        "--eight-bit-io --replicas 2 --BN-span 2",
        "--no-hostside-norm --group-norm --groups 4",
        "--synthetic-data --fp-exceptions",
        "--select-ipus 0 1",
        "--deterministic --gradient-accumulation-count 3",
        "--weight-avg mean --ckpts-per-epoch 3",
        "--model resnext --model-size 11",
        "--model efficientnet --model-size B0 --image-size 32",
    ],
)  # fmt: skip


@every_option
def test_every_option_trains(train, words):
    result = train(*SHORT, *words.split())
    assert result.steps == 2
    (row,) = cnns.table(result.folder / "training.csv")[-1:]
    assert math.isfinite(float(row["loss"]))


@pytest.mark.parametrize(
    "words",
    [
        "--pipeline --shards 2 --pipeline-splits layer2.0 --gradient-accumulation-count 4",
        "--eight-bit-io --gradient-accumulation-count 4",
        "--no-hostside-norm --gradient-accumulation-count 4",
    ],
)  # fmt: skip
def test_placement_and_transfer_change_no_result(train, words):
    """Where layers run, and what computes the normalisation, is not what is computed."""
    plain = train(*SHORT, "--gradient-accumulation-count", "4", "--group-norm", "--groups", "4")
    other = train(*SHORT, *words.split(), "--group-norm", "--groups", "4")
    losses = [
        [float(row["loss"]) for row in cnns.table(each.folder / "training.csv")]
        for each in (plain, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--model-size 9", 2, "8, 14, 20, 32, 44, 56"),
        ("--generated-samples 3", 2, "3 images are fewer than a global batch of 4"),
        ("--learning-rate-decay 0.1 0.2 0.3", 2, "--learning-rate-decay"),
        ("--pipeline --shards 2 --pipeline-splits layr2.0", 2, "layer2.0"),
        ("--generated-samples 99 --data-dir nowhere --no-generated-data", 2, "nowhere"),
        ("--name-prefix a/b", 2, "--name-prefix"),
    ],
)
def test_what_cannot_be_trained_is_one_line(train, capfd, words, code, said, tmp_path):
    assert said in refused(train, capfd, code, *SHORT, *words.split())
    assert not list(tmp_path.iterdir())


def test_a_model_that_the_device_has_no_room_for_is_one_line(train, capfd):
    words = (*SHORT, "--image-size", "128", "--batch-size", "64", "--generated-samples", "64",
             "--device", "mk1")  # fmt: skip
    assert "memory" in refused(train, capfd, 1, *words)


# Instance 1 has another folder of data than the others.
OTHER_DATA = """\
import sys

sys.path.insert(0, {folder!r})
import train

import popdist_py

popdist_py.init()
*words, data, other = sys.argv[1:]
train.main([*words, "--data-dir", other if popdist_py.getInstanceIndex() == 1 else data])
"""


@pytest.mark.mpi
def test_data_that_one_instance_lacks_are_told_in_one_line(poprun, script, tmp_path):
    """An instance with an error does not get to where others would wait for it."""
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
        for file in ("test_batch.bin", *(f"data_batch_{n}.bin" for n in range(1, 6))):
            (tmp_path / name / file).write_bytes(bytes(4 * 3073))
    (tmp_path / "cut" / "data_batch_2.bin").unlink()
    job = ("--share-cores", "yes", "--num-instances", "2", "--num-replicas", "2", "--output",
           "plain", "--env", "OMP_NUM_THREADS=1")  # fmt: skip
    program = script(OTHER_DATA.format(folder=str(cnns.FOLDER)))
    words = ("--dataset", "cifar-10", "--model-size", "8", "--batch-size", "2", "--log-dir", "logs")
    done = poprun(*job, program, *words, tmp_path / "whole", tmp_path / "cut")
    assert done.returncode == 2
    assert done.stderr.count(f"error: {tmp_path / 'cut'} has no data_batch_2.bin: ") == 1, (
        done.stderr
    )
    assert not (tmp_path / "logs").exists()


# --- the pods ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PODS)
def test_configurations_of_pods_fit_on_their_ipus(name):
    """ResNet-50 at full size: images of 224 by 224, micro-batches of 20; by the model."""
    args = cnns.module("configurations").combine(
        {"config": name, "generated_data": True, "generated_samples": 6000}
    )
    assert (args.device, args.image_size, args.batch_size) == ("mk2", 224, 20)
    report = cnns.memory_report(args)
    (ipu,) = report.ipus
    assert ipu.fullest_tile / ipu.tile_bytes == pytest.approx(PODS[name], abs=0.01)
    # Without recomputation they do not.
    args.enable_recompute = False
    (ipu,) = cnns.memory_report(args).ipus
    assert ipu.fullest_tile > ipu.tile_bytes
