"""The folder of compiled executables: shared by processes, apart for other models and options."""

from __future__ import annotations

import importlib
import linecache
import multiprocessing
import sys
import time
from pathlib import Path

import pytest
import torch
from support.models import quiet_options
from support.unreadable_files import UNREADABLE, make_unreadable
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.compilation import executable_cache


class Slow(nn.Module):
    """Notes when it is traced."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        from popdist_py.poptorch import forward_phase

        if forward_phase.is_tracing():
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


def _cached(folder, model=None, strategy=None, change=None):
    options = quiet_options().enableExecutableCaching(str(folder)).deviceIterations(4)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    if change is not None:
        change(options)
    inference = poptorch.inferenceModel(model or nn.Linear(2, 2), options)
    inference(torch.ones(4, 2))
    return inference


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        with poptorch.Block("a"):
            x = self.first(x)
        with poptorch.Block("b"):
            return self.second(x)


def _ipus(inference):
    return inference._compiled.executable.placement.num_ipus


def test_a_strategy_does_not_find_what_was_compiled_for_another(tmp_path):
    a, b = poptorch.Stage, poptorch.ShardedExecution
    assert _ipus(_cached(tmp_path, TwoBlocks(), b(a("a"), a("b")))) == 2
    assert _ipus(_cached(tmp_path, TwoBlocks(), b(a("a", "b")))) == 1
    assert _ipus(_cached(tmp_path, TwoBlocks(), b(a("a").ipu(1), a("b").ipu(3)))) == 4
    assert len(list(tmp_path.iterdir())) == 3
    assert _ipus(_cached(tmp_path, TwoBlocks(), b(a("a"), a("b")))) == 2
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "strategies",
    [
        (poptorch.ShardedExecution("a", "b"), poptorch.PipelinedExecution("a", "b")),
        (
            poptorch.SerialPhasedExecution("a", "b"),
            poptorch.SerialPhasedExecution("a", "b").setTensorsLiveness(
                poptorch.Liveness.OffChipAfterFwd
            ),
            poptorch.SerialPhasedExecution("a", "b").useSeparateBackwardPhase(),
            poptorch.SerialPhasedExecution(poptorch.Phase("a").ipus(1), "b"),
            poptorch.SerialPhasedExecution(["a", "b"]),
            poptorch.ParallelPhasedExecution("a", "b"),
            poptorch.ParallelPhasedExecution("a", "b").sendTensorsOffChipAfterFwd(),
        ),
        tuple(poptorch.PipelinedExecution(stage) for stage in poptorch.AutoStage),
    ],
)
def test_strategies_describe_all_that_was_set(strategies):
    described = {
        repr(poptorch.Options().setExecutionStrategy(s)._description()) for s in strategies
    }
    assert len(described) == len(strategies)


def test_a_cached_model_is_found_by_everything_that_compiling_depends_on(tmp_path, monkeypatch):
    def dropped(p):
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(p))

    def began(ipu):
        return nn.Sequential(poptorch.BeginBlock(nn.Linear(2, 2), "a", ipu_id=ipu))

    increment = poptorch.AutoStage.SameAsIpu
    ways = [
        lambda: _cached(tmp_path),
        lambda: _cached(tmp_path, change=lambda options: options.disableModuleNamescope()),
        lambda: _cached(tmp_path, change=lambda options: options.enableStableNorm(True)),
        lambda: _cached(
            tmp_path, change=lambda options: options.Precision.setPartialsType(torch.half)
        ),
        lambda: _cached(tmp_path, nn.Sequential(nn.ReLU(), nn.Tanh())),
        lambda: _cached(tmp_path, nn.Sequential(nn.Tanh(), nn.ReLU())),
        lambda: _cached(tmp_path, dropped(0.0)),
        lambda: _cached(tmp_path, dropped(0.5)),
        lambda: _cached(tmp_path, began(0), increment),
        lambda: _cached(tmp_path, began(1), increment),
    ]
    for number, way in enumerate(ways, 1):
        way()
        assert len(list(tmp_path.iterdir())) == number
    for way in ways:
        way()
    assert len(list(tmp_path.iterdir())) == len(ways)
    for place in (executable_cache, torch):
        monkeypatch.setattr(place, "__version__", "0.0.0")
        _cached(tmp_path)
        monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == len(ways) + 2


def test_a_training_model_is_compiled_again_when_its_forward_was_edited(tmp_path, monkeypatch):
    source = tmp_path / "edited.py"
    text = (
        "import torch\n"
        "import popdist_py.poptorch as poptorch\n"
        "class Edited(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(2, 2)\n"
        "    def forward(self, x):\n"
        "        return poptorch.identity_loss({} * self.layer(x), 'sum')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for factor in (1, 2, 1):
        source.write_text(text.format(factor))
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        linecache.clearcache()
        importlib.invalidate_caches()
        model = importlib.import_module("edited").Edited()
        options = quiet_options().enableExecutableCaching(str(tmp_path / "cache"))
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        poptorch.trainingModel(model, options, optimizer)(torch.ones(1, 2))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_the_folder_of_the_cache_can_move(tmp_path):
    _cached(tmp_path / "one")
    (tmp_path / "one").rename(tmp_path / "two")
    _cached(tmp_path / "two")
    assert len(list((tmp_path / "two").iterdir())) == 1


@pytest.mark.parametrize("how", UNREADABLE)
def test_a_cached_executable_that_cannot_be_read_is_compiled_again(tmp_path, monkeypatch, how):
    log, cache = tmp_path / "log", tmp_path / "cache"
    _compile(str(log), str(cache))
    (file,) = cache.iterdir()
    make_unreadable(file, how, monkeypatch)
    for _ in range(2):
        _compile(str(log), str(cache))
    assert log.read_text() == 2 * "traced\n"
    assert list(cache.iterdir()) == [file]
