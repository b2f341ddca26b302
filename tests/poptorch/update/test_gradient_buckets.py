"""The order in which buckets of gradients are reduced, with reductions that only take note."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from popdist_py.collectives.background import Background
from popdist_py.poptorch.update import gradient_buckets
from popdist_py.poptorch.update.compressed.compression import Reduction


def buckets(calls, *, in_two=True, fails=()):
    """Return three buckets of one parameter; ``calls`` gets what is done, and to which of them."""

    def reduction_of(array, shapes):
        number = len(shapes_seen)
        shapes_seen.append(shapes)

        def start():
            calls.append(f"start {number}")
            if number in fails:
                raise ValueError(number)

        return Reduction(start, (lambda: calls.append(f"finish {number}")) if in_two else None)

    shapes_seen = []
    flat = torch.zeros(30)
    views = [flat[start : start + 10] for start in (0, 10, 20)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buckets, "_BUCKET_BYTES", 1)
        return gradient_buckets.Buckets(
            views, SimpleNamespace(background=Background()), reduction_of
        )


def test_a_bucket_starts_before_the_one_before_is_finished():
    calls = []
    made = buckets(calls)
    made.zero(overlap=False)
    assert list(made.reduced()) == [(2,), (1,), (0,)]
    assert calls == ["start 0", "start 1", "finish 0", "start 2", "finish 1", "finish 2"]


def test_a_reduction_in_one_call_is_done_with_it():
    calls = []
    made = buckets(calls, in_two=False)
    made.zero(overlap=False)
    assert list(made.reduced()) == [(2,), (1,), (0,)]
    assert calls == ["start 0", "start 1", "start 2"]


def test_what_an_abandoned_backward_started_is_finished_before_the_next():
    calls = []
    made = buckets(calls)
    for _ in range(2):
        made.zero(overlap=True)
        for index in (2, 1, 0):
            made.on_grad_ready(index)
        list(made.reduced())
    calls.clear()
    made.zero(overlap=True)
    made.on_grad_ready(2)  # and then it raises
    made.zero(overlap=False)
    list(made.reduced())
    assert calls[:3] == ["start 0", "finish 0", "start 0"]


def test_a_start_that_fails_is_not_finished():
    calls = []
    made = buckets(calls, fails=(1,))
    made.zero(overlap=False)
    with pytest.raises(ValueError, match="1"):
        list(made.reduced())
    assert "finish 1" not in calls
