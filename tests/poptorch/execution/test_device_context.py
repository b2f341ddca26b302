"""What surrounds every forward, whoever runs it."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from popdist_py.poptorch.execution.device_context import DeviceContext
from popdist_py.poptorch.tracing import current_forward


@contextmanager
def noting(log, name):
    log.append(name)
    try:
        yield
    finally:
        log.append(f"end of {name}")


def context(log, **values):
    state = SimpleNamespace(swapped_in=lambda: noting(log, "tensors"))
    return DeviceContext(state=state, **{"training": True, **values})


@pytest.mark.parametrize("tracing", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_a_forward_sees_where_it_is(training, tracing):
    log = []
    modes = (lambda: noting(log, "first"), lambda: noting(log, "second"))
    with torch.set_grad_enabled(not training):
        with context(log, training=training, modes=modes).enter(tracing=tracing):
            assert torch.is_grad_enabled() == training
            assert (current_forward.is_training(), current_forward.is_tracing()) == (
                training,
                tracing,
            )
        assert torch.is_grad_enabled() != training
    assert not current_forward.is_running()
    assert log == [
        "tensors", "first", "second", "end of second", "end of first", "end of tensors",
    ]  # fmt: skip


def test_a_mode_that_fails_leaves_nothing_behind():
    log = []

    def broken():
        raise OSError("no such mode")

    with torch.set_grad_enabled(False):
        with pytest.raises(OSError, match="no such mode"):
            context(log, modes=(broken,)).enter()
        assert not torch.is_grad_enabled()
    assert log == ["tensors", "end of tensors"]
    assert not current_forward.is_running()


@pytest.mark.parametrize("is_random", [False, True])
def test_the_hosts_random_stream_is_kept_from_what_draws(is_random):
    before = torch.get_rng_state()
    with context([], is_random=is_random).enter():
        torch.rand(3)
    assert torch.equal(before, torch.get_rng_state()) == is_random


def test_torch_reads_no_values_by_itself(monkeypatch):
    # torch.compile() switches the checks off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def reads():
        return (
            torch.distributions.Distribution._validate_args,
            torch.backends.mha.get_fastpath_enabled(),
        )

    before = reads()
    with context([]).enter():
        assert reads() == (False, False)
    assert reads() == before == (True, True)
