"""Gradients are summed over the instances only after the last state is complete in memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch

from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.poptorch.update.compressed.compression import Reduction
from popdist_py.poptorch.update.gradient_buckets import Buckets
from popdist_py.torch_states import memory_copies


def test_no_bucket_is_reduced_before_the_copy_is_complete():
    views = list(torch.zeros(8).split(4))
    copies, complete_at_reduction = [], []

    def reduction_of(array, shapes):
        return Reduction(lambda: complete_at_reduction.append(copies[-1].done()))

    buckets = Buckets(views, SoloCommunicator(), reduction_of)
    with ThreadPoolExecutor(1) as thread:
        # During the first window, the buckets learn how many gradients they get. During the second
        # one, the gradients are reduced as soon as they are complete.
        for overlap in (False, True):
            buckets.zero(overlap=overlap)
            copies.append(thread.submit(time.sleep, 0.2))
            memory_copies._unfinished.add(copies[-1])
            for index in (1, 0):
                buckets.on_grad_ready(index)
            assert copies[-1].done() == overlap
            list(buckets.reduced())
    assert complete_at_reduction == [True, True]
    assert not memory_copies._unfinished
