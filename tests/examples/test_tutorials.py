"""The tutorials' programs, with their imports and data paths changed only, do what they say."""

from __future__ import annotations

import importlib
import struct
import sys

import numpy as np
import pytest
from conftest import ROOT

pytestmark = pytest.mark.timeout(150)


@pytest.fixture
def tutorial(monkeypatch):
    """Import a tutorial by name, as its own process would."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "tutorials"))
    torch = importlib.import_module("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield importlib.import_module
    torch.set_num_threads(threads)
    for name in ("data_loading", "optimisation", "pipelining"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="session")
def mnist(tmp_path_factory):
    """Write scikit-learn's digits, 28 by 28, in MNIST's own files; torchvision reads them."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pictures = np.kron(digits.images, np.ones((3, 3)))  # 24 by 24
    pictures = (np.pad(pictures, ((0, 0), (2, 2), (2, 2))) * 15.9).astype(np.uint8)
    folder = tmp_path_factory.mktemp("data")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, part in (("train", slice(0, 1440)), ("t10k", slice(1440, None))):
        images, labels = pictures[part], digits.target[part].astype(np.uint8)
        header = struct.pack(">IIII", 2051, len(images), 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 2049, len(labels))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())
    return folder


def test_data_loading_measures_loader_and_model(tutorial, capsys):
    figures = tutorial("data_loading").main(
        ["--items", "64", "--side", "16", "--batch-size", "4", "--replicas", "2", "--workers", "1"]
    )
    assert set(figures) == {"DataLoader", "real data"}
    assert all(value > 0 for value in figures.values())
    assert "global batch 8, 2 steps" in capsys.readouterr().out


def test_data_loading_with_synthetic_data(tutorial):
    figures = tutorial("data_loading").main(
        ["--items", "32", "--side", "16", "--batch-size", "4", "--workers", "1", "--synthetic-data"]
    )
    assert figures["synthetic data"] > 0


@pytest.mark.parametrize(
    "strategy", ["pipelined", pytest.param("sharded", marks=pytest.mark.sweep)]
)
def test_pipelining_learns_digits(tutorial, mnist, strategy, capsys):
    accuracy = tutorial("pipelining").main(
        ["--data-dir", str(mnist), "--batch-size", "4", "--gradient-accumulation", "7",
         "--device-iterations", "4", "--test-batch-size", "4", "--inference-iterations", "8",
         "--epochs", "3", "--learning-rate", "0.003", "--workers", "1", "--strategy", strategy,
         "--offload-optimiser"]
    )  # fmt: skip
    assert accuracy > 80
    assert "Accuracy on test set" in capsys.readouterr().out


def test_pipelining_without_data_is_explained(tutorial, tmp_path):
    with pytest.raises(SystemExit, match="expected its idx files"):
        tutorial("pipelining").main(["--data-dir", str(tmp_path)])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            ["--precision", "32.32", "--replicas", "2", "--batch-size", "8", "--side", "16",
             "--steps", "12"],
            marks=pytest.mark.sweep,
        ),
        ["--precision", "16.16", "--eight-bit-io", "--async-dataloader", "--batch-size", "8",
         "--side", "32", "--steps", "7"],
    ],
)  # fmt: skip
def test_optimisation_lowers_the_loss(tutorial, options):
    losses = tutorial("optimisation").main(
        ["--batch-size", "4", "--gradient-accumulation", "3", "--epochs", "2", *options]
    )
    assert len(losses) == 2
    assert losses[1] < losses[0]


def test_what_does_not_fit_is_refused_with_advice(tutorial):
    """As the hands-on session's first command on hardware."""
    from popdist_py.poptorch import Error

    with pytest.raises(Error, match="Out of memory on IPU 0") as caught:
        tutorial("optimisation").main(
            ["--model", "resnet101", "--side", "64", "--batch-size", "64"]
        )
    assert "half precision" in str(caught.value)
