"""The folder of compiled executables: shared by processes, apart for other models and options."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from support.models import quiet_options
from torch import nn

import popdist_py.poptorch as poptorch


class Slow(nn.Module):
    """Notes when it is traced."""

    def __init__(self, log):
        super().__init__()
        self.log = log
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        from popdist_py.poptorch import phase

        if phase.is_tracing():
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
