"""Asynchronous calls overlap with computation, also in the backward pass."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values
from torch.nn.parallel import DistributedDataParallel

from popdist_py import activities


def _compute_beside(rank):
    """Return the seconds from the end of a call to the end of a concurrent computation."""
    dist.all_reduce(torch.zeros(1))
    gradients, matrix = torch.ones(1 << 20), torch.ones(300, 300)
    ended = []
    work = dist.all_reduce(gradients, async_op=True)
    work.get_future().add_done_callback(lambda _: ended.append(time.monotonic()))
    limit = time.monotonic() + 30.0
    while not ended and time.monotonic() < limit:
        torch.linalg.matrix_power(matrix, 50)  # releases the interpreter's lock
    computed = time.monotonic()
    work.wait()
    return computed - ended[0] if ended else -1.0


def test_a_call_that_nobody_waits_for_ends_while_the_program_computes():
    assert min(values(run_ranks(2, _compute_beside))) >= 0


class _Begins:
    """A listener of activities that records the start of each reduction."""

    def __init__(self):
        self.moments = []

    def begun(self, activity, name, begin):
        if activity == activities.REDUCING and name == "all_reduce":
            self.moments.append(begin)

    def ended(self, *_):
        pass

    def step(self, *_):
        pass


def _reductions_within_backward(rank):
    """Count, for each step, the reductions that began before and after the last gradient."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    torch.manual_seed(7)
    layers = [torch.nn.Linear(900, 900) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=3)
    last = []
    layers[0].weight.register_hook(lambda _: last.append(time.monotonic_ns()))
    inputs = torch.randn(256, 900)
    counts = []
    for _ in range(8):
        begins = _Begins()
        activities.listen(begins)
        model(inputs).square().mean().backward()
        activities.listen(None)
        early = sum(moment < last[-1] for moment in begins.moments)
        counts.append((early, len(begins.moments) - early))
    return counts


@pytest.mark.sweep
def test_the_first_buckets_are_reduced_before_backward_ends():
    # On a busy machine, the reducing thread may not run during one step.
    for counts in values(run_ranks(2, _reductions_within_backward)):
        assert any(early >= 2 and late >= 1 for early, late in counts[2:]), counts
