"""Saved models, executables and the cache."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from poptorch.unreadable_files import UNREADABLE, make_unreadable
from support.damage import damaged
from support.models import Mlp, assert_equal_weights, classified, quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.model import saved_model
from popdist_py.poptorch.model.saved_model import SavedModel


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


def test_a_compiled_model_is_exported_as_it_goes_on(tmp_path):
    x, y = classified(4)
    models = [Mlp(), Mlp()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training = poptorch.trainingModel(model, quiet_options(), optimizer)
        for step in range(3):
            training(x, y)
            if model is models[0] and step == 1:
                training.compileAndExport(tmp_path / "model.bin", x, y)
                with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
                    training.compileAndExport(tmp_path / "other.bin", x[:2], y[:2])
    assert_equal_weights(*models, rtol=0, atol=0)


@pytest.mark.parametrize("offline", [False, True])
def test_a_validation_model_beside_an_exported_training(tmp_path, offline):
    x, y = classified(4)
    model, options = Mlp(), quiet_options()
    if offline:
        options.useOfflineIpuTarget()
    training = poptorch.trainingModel(model, options)
    training.compileAndExport(tmp_path / "training.bin", x, y)
    validation = poptorch.inferenceModel(training, quiet_options())
    torch.testing.assert_close(validation(x), model(x).detach())
    validation.compileAndExport(tmp_path / "validation.bin", x)
    loaded = poptorch.load(tmp_path / "training.bin")
    beside = poptorch.inferenceModel(loaded.model, quiet_options())
    beside.loadExecutable(tmp_path / "validation.bin")
    for _ in range(2):
        before = beside(x)
        loaded(x, y)
        assert not torch.equal(beside(x), before)
        torch.testing.assert_close(beside(x), loaded.model(x).detach())


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
    monkeypatch.setattr(saved_model, "__version__", "0.0.0")
    inference.save(tmp_path / "old")
    monkeypatch.undo()
    with pytest.raises(AssertionError, match="version mismatch"):
        poptorch.load(tmp_path / "old")


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_saved_model_that_cannot_be_read_is_an_error_that_names_it(tmp_path, monkeypatch, how):
    inference = poptorch.inferenceModel(Mlp(), quiet_options())
    inference(classified(2)[0])
    inference.save(tmp_path / "model.bin")
    make_unreadable(tmp_path / "model.bin", how, monkeypatch)
    for act in (poptorch.load, inference.loadExecutable):
        with pytest.raises(poptorch.Error, match=r"model\.bin.*Compile and save the model again"):
            act(tmp_path / "model.bin")


def test_the_version_of_a_file_is_read_before_what_it_says_of_this_package(tmp_path, monkeypatch):
    inference = poptorch.inferenceModel(nn.Linear(2, 2), quiet_options())
    inference(torch.ones(2, 2))
    monkeypatch.setattr(saved_model, "__version__", "0.0.0")
    inference.save(tmp_path / "old")
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "popdist_py.poptorch.options.options", None)
    with pytest.raises(AssertionError, match="version mismatch"):
        poptorch.load(tmp_path / "old")


@pytest.fixture
def saved(tmp_path):
    """Return the file of a small model."""
    inference = poptorch.inferenceModel(nn.Linear(1, 1), quiet_options())
    inference(torch.ones(1, 1))
    inference.save(tmp_path / "model.bin")
    return tmp_path / "model.bin"


def test_a_model_that_others_can_write_to_is_not_loaded(saved):
    for path, mode in ((saved, 0o666), (saved.parent, 0o777)):
        before = path.stat().st_mode & 0o777
        path.chmod(mode)
        with pytest.raises(poptorch.Error, match=rf"Invalid file .*chmod go-w {path}$"):
            poptorch.load(saved)
        path.chmod(before)
    assert poptorch.load(saved) is not None


def test_nobody_else_can_write_to_what_is_saved(tmp_path):
    inference = poptorch.inferenceModel(nn.Linear(1, 1), quiet_options())
    inference(torch.ones(1, 1))
    before = os.umask(0)
    try:
        inference.save(tmp_path / "model.bin")
    finally:
        os.umask(before)
    assert (tmp_path / "model.bin").stat().st_mode & 0o777 == 0o644
    poptorch.load(tmp_path / "model.bin")


def test_what_was_saved_without_a_seal_is_loaded(saved):
    whole = saved.read_bytes()
    saved.write_bytes(whole[whole.index(b"PK") :])
    out = poptorch.load(saved)(torch.ones(1, 1))
    assert out.shape == (1, 1)


def test_a_damaged_model_is_said(saved):
    whole = saved.read_bytes()
    # Within the weights: nothing but the seal can tell.
    saved.write_bytes(whole[:1500] + bytes([whole[1500] ^ 1]) + whole[1501:])
    with pytest.raises(poptorch.Error, match=r"model\.bin: the file is damaged\. Compile and save"):
        poptorch.load(saved)


@pytest.mark.sweep
def test_a_model_that_is_damaged_anywhere_is_not_loaded(saved):
    for how, data in damaged(saved.read_bytes()):
        saved.write_bytes(data)
        try:
            with pytest.raises(poptorch.Error, match=r"Invalid file .*model\.bin"):
                SavedModel.read(saved)
        except pytest.fail.Exception:
            pytest.fail(f"read though {how}")
