"""A training of wrapped models tells where its time goes, and on how many samples it trained."""

from __future__ import annotations

import time

import pytest
import torch
from support.models import Mlp, quiet_options

from popdist_py import activities, poptorch
from popdist_py.activities import ledger
from popdist_py.poptorch.checkpoint import TrainingCheckpoints
from popdist_py.poptorch.enums import DataLoaderMode

SLOW_SECONDS = 0.002


class SlowData(torch.utils.data.Dataset):
    """Takes a while for each element."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(SLOW_SECONDS)
        return torch.full((6,), float(index)), torch.tensor(index % 4)


@pytest.fixture
def spent(monkeypatch):
    """Count anew; returns what returns the seconds of each activity by now."""
    monkeypatch.setattr(ledger, "_words", None)
    monkeypatch.setattr(ledger, "_last_step", (0, 0, 0, 0))
    activities.begin()

    def read():
        words = ledger._words[ledger._NANOSECONDS :]
        return {name: words[index] / 1e9 for index, name in enumerate(activities.NAMES)}

    return read


@pytest.fixture
def trained():
    """A training model of batches of two elements, two micro-batches at a time, and its options."""
    options = quiet_options()
    options.Training.gradientAccumulation(2)
    model = Mlp()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options, optimizer), options, model


def test_a_step_is_made_of_its_activities(spent, trained):
    model, options, _ = trained
    begin = time.perf_counter()
    for x, y in poptorch.DataLoader(options, SlowData(), batch_size=2):
        model(x, y)
    elapsed = time.perf_counter() - begin
    seconds = spent()
    for name in ("compiling", "computing", "transferring", "reducing", "updating"):
        assert seconds[name] > 0, name
    assert seconds["loading"] >= 24 * SLOW_SECONDS
    told = sum(spent for name, spent in seconds.items() if name != "other")
    assert told <= elapsed, "no moment is counted twice"
    assert seconds["validating"] == seconds["saving"] == 0
    assert ledger._words[ledger._SAMPLES] == 24
    assert ledger._words[ledger._TIMED_STEPS] == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_in_another_process_is_waited_for(spent, trained, workers):
    _, options, _ = trained
    loader = poptorch.DataLoader(
        options, SlowData(), batch_size=2, num_workers=workers, mode=DataLoaderMode.Async,
        async_options={"sharing_strategy": poptorch.SharingStrategy.Fork},
    )  # fmt: skip
    for _ in loader:
        pass
    loader.terminate()
    assert spent()["loading"] > 0
    # The other process loads into its own ledger.
    assert ledger._words[ledger._TIMED_STEPS] == 0


def test_inference_is_validation_and_no_step(spent, trained):
    _, _, model = trained
    inference = poptorch.inferenceModel(model, quiet_options())
    inference(torch.zeros(2, 6))
    assert spent()["validating"] > 0
    assert spent()["computing"] == 0
    assert ledger._words[ledger._SAMPLES] == 0


def test_checkpoints_are_saved_and_loaded_beside_steps(spent, trained, tmp_path):
    model, options, _ = trained
    loader = poptorch.DataLoader(options, SlowData(), batch_size=2)
    checkpoints = TrainingCheckpoints(tmp_path, model, loader)
    for x, y in checkpoints.batches():
        model(x, y)
        break
    before = spent()["saving"]
    checkpoints.save(1)
    saved = spent()["saving"]
    assert saved > before
    checkpoints.resume()
    assert spent()["saving"] > saved
