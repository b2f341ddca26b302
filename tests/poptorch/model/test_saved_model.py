"""Saved models, executables and the cache."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from support.models import Mlp, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch import saving


def test_a_saved_model_continues_where_it_was(tmp_path):
    model = Mlp()
    options = quiet_options().randomSeed(3)
    training = poptorch.trainingModel(
        model, options, poptorch.optim.Adam(model.parameters(), lr=0.1)
    )
    training(*classified(4))
    training.save(tmp_path / "new" / "model.bin")
    loaded = poptorch.load(tmp_path / "new" / "model.bin")
    assert loaded.isCompiled()
    assert loaded.rng_state == training.rng_state
    for step in range(2):
        ours, theirs = training(*classified(4, seed=step)), loaded(*classified(4, seed=step))
        torch.testing.assert_close(ours[1], theirs[1])
    assert type(training.model).__name__ == "PoptorchMlp"


def test_executables_without_the_model(tmp_path, monkeypatch):
    file = tmp_path / "model.bin"
    x, _ = classified(3)
    offline = poptorch.inferenceModel(Mlp(), quiet_options().useOfflineIpuTarget())
    offline.compileAndExport(file, x, export_model=False)
    with pytest.raises(AssertionError, match="loadExecutable"):
        poptorch.load(file)
    model = Mlp()
    inference = poptorch.inferenceModel(model, quiet_options())
    inference.loadExecutable(file)
    assert inference.isCompiled()
    torch.testing.assert_close(inference(x), model(x).detach())


def test_offline_models_are_loaded_with_a_device(tmp_path):
    file = tmp_path / "model.bin"
    x, _ = classified(4)
    offline = poptorch.inferenceModel(Mlp(), quiet_options().useOfflineIpuTarget())
    offline.compileAndExport(file, x)
    seen = []
    loaded = poptorch.load(file, lambda options: seen.append(options.modelName("loaded")))
    assert loaded(x).shape == (4, 4)
    assert loaded.options.model_name == "loaded"


def test_where_files_go(tmp_path, caplog):
    inference = poptorch.inferenceModel(Mlp(), quiet_options())
    inference(classified(2)[0])
    inference.save(tmp_path)
    assert (tmp_path / "model.poptorch").exists()
    assert "is a folder" in caplog.text
    with pytest.raises(AssertionError, match="is a file"):
        inference.save(tmp_path / "model.poptorch" / "deeper")


def test_bad_files(tmp_path, monkeypatch):
    bad = tmp_path / "bad"
    bad.write_text("not a model")
    inference = poptorch.inferenceModel(Mlp(), quiet_options())
    for act in (lambda: poptorch.load(bad), lambda: inference.loadExecutable(bad)):
        with pytest.raises(poptorch.Error, match="Invalid file"):
            act()
    inference(classified(2)[0])
    monkeypatch.setattr(saving, "__version__", "0.0.0")
    inference.save(tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="version mismatch"):
        poptorch.load(tmp_path / "old")


class Slow(nn.Module):
    """Notes when it is traced."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        from popdist_py.poptorch import tracing

        if tracing.is_tracing():
            with Path(self.log).open("a") as file:
                file.write("traced\n")
            time.sleep(0.3)
        return self.inner(x)


def _compile(log, cache):
    options = quiet_options().enableExecutableCaching(cache)
    poptorch.inferenceModel(Slow(log), options).compile(torch.ones(1, 2))


def test_processes_share_one_compilation(tmp_path):
    log, cache = str(tmp_path / "log"), tmp_path / "cache"
    spawn = multiprocessing.get_context("fork")
    processes = [spawn.Process(target=_compile, args=(log, str(cache))) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(40)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "traced\n"
    assert len(list(cache.iterdir())) == 1


def test_different_models_and_options_have_their_own_files(tmp_path):
    def compiled(model, **change):
        options = quiet_options().enableExecutableCaching(str(tmp_path))
        for name, value in change.items():
            getattr(options, name)(value)
        inference = poptorch.inferenceModel(model, options)
        return inference(torch.ones(4, 2)), inference

    compiled(nn.Linear(2, 2))
    model = nn.Linear(2, 2)
    out, _ = compiled(model)
    torch.testing.assert_close(out, model(torch.ones(4, 2)).detach())
    assert len(list(tmp_path.iterdir())) == 1
    compiled(nn.Linear(2, 3))
    compiled(nn.Linear(2, 2), deviceIterations=2)
    assert len(list(tmp_path.iterdir())) == 3


class Refuses(nn.Module):
    """Cannot be compiled while ``path`` exists."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def forward(self, x):
        if self.path.exists():
            raise ValueError("refused")
        return 2 * x


def test_a_compilation_that_failed_leaves_the_next_one_to_compile(tmp_path):
    reason, cache = tmp_path / "reason", tmp_path / "cache"
    reason.touch()
    inference = poptorch.inferenceModel(
        Refuses(reason), quiet_options().enableExecutableCaching(str(cache))
    )
    with pytest.raises(ValueError, match="refused"):
        inference(torch.ones(2))
    reason.unlink()
    assert inference(torch.ones(2)).tolist() == [2, 2]
    assert len(list(cache.iterdir())) == 1
