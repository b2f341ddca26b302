"""Only the buckets of DistributedDataParallel move to memory that the ranks share."""

import gc
import resource
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values
from torch.nn.parallel import DistributedDataParallel

from popdist_py.torch_backend.buckets import mover_of

WIDTH = 600  # makes the bucket of a layer too large for the one-shot algorithm


def _windows():
    """Return the begin and the end of each shared window in this process."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:popdist" in line:
            begin, end = line.split()[0].split("-")
            found.append((int(begin, 16), int(end, 16)))
    return found


def _is_shared(tensor):
    return any(begin <= tensor.data_ptr() < end for begin, end in _windows())


def _model(**options):
    torch.manual_seed(7)
    layers = (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH))
    return DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1, **options)


def _step(model, rank, step):
    model.zero_grad(set_to_none=False)
    torch.manual_seed(10 * step + rank)
    model(torch.randn(4, WIDTH)).square().mean().backward()


def _gradients(model):
    return [parameter.grad.clone() for parameter in model.parameters()]


def _train(rank, options):
    """Compare training with popdist and gloo; return the shared gradients and window counts."""
    dist.all_reduce(torch.zeros(1))
    before = len(_windows())
    ours = _model(gradient_as_bucket_view=True, **options)
    theirs = _model(process_group=dist.new_group(backend="gloo"), **options)
    for step in range(4):
        for model in (ours, theirs):
            _step(model, rank, step)
        torch.testing.assert_close(_gradients(ours), _gradients(theirs))
    weights = [parameter.grad for parameter in ours.parameters() if parameter.dim() == 2]
    shared = [_is_shared(gradient) for gradient in weights]
    during = len(_windows()) - before
    assert not any(_is_shared(gradient) for gradient in _gradients(theirs))
    del ours, model, weights
    gc.collect()
    return shared, during, len(_windows()) - before


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"find_unused_parameters": True}, marks=pytest.mark.sweep)]
)
def test_buckets_move_and_their_memory_goes_with_them(options):
    for shared, during, after in values(run_ranks(2, _train, options)):
        assert shared == [True, True]
        assert 0 < during <= 3  # the windows of the first step are gone
        assert after == 0


def _reduce_in_a_hook(rank):
    mine = torch.full((WIDTH * WIDTH,), rank + 1.0)

    def hook(gradient):
        dist.all_reduce(mine)
        return gradient

    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(hook)
    address = mine.data_ptr()
    weight.sum().backward()
    return mine[0].item(), mine.data_ptr() == address, _is_shared(mine)


def test_a_programs_own_tensor_stays_where_it_is():
    assert values(run_ranks(2, _reduce_in_a_hook)) == [(3.0, True, False)] * 2


def _engine_run_backward(bucket):
    """Pass a bucket to the group as the reducer does."""
    return mover_of([bucket])


def test_a_bucket_stays_of_which_the_program_has_a_numpy_array():
    bucket = torch.zeros(100)
    memory = np.ones(400, np.uint8)
    _engine_run_backward(bucket)(memory)
    assert bucket.data_ptr() == memory.ctypes.data
    bucket = torch.zeros(100)
    gradient = bucket[20:30].view(5, 2).numpy()
    assert _engine_run_backward(bucket) is None
    assert not gradient.any()


def _uneven(rank):
    """Run more steps on one rank than on the other, so the other's calls come from join()."""
    models = [_model(), _model(process_group=dist.new_group(backend="gloo"))]
    for model in models:
        with model.join():
            for step in range(2 + 2 * rank):
                _step(model, rank, step)
    if rank == 1:
        torch.testing.assert_close(*map(_gradients, models))


@pytest.mark.sweep
def test_a_rank_whose_bucket_is_no_bucket_goes_the_private_way_with_the_others():
    values(run_ranks(2, _uneven))


def _train_where_nothing_can_be_shared(rank):
    from popdist_py.collectives.communicators import group_communicator
    from popdist_py.collectives.within_host.shared_window import WindowError

    calls = []

    def refuse(*_):
        calls.append(1)
        raise WindowError("no memory")

    dist.all_reduce(torch.zeros(1))
    group_communicator.Window = refuse
    model = _model(gradient_as_bucket_view=True)
    for step in range(3):
        _step(model, rank, step)
    shared = [_is_shared(parameter.grad) for parameter in model.parameters()]
    return shared, len(calls), _gradients(model)[0].numpy()


@pytest.mark.sweep
def test_without_memory_to_share_buckets_stay_where_they_are():
    ours, others = values(run_ranks(2, _train_where_nothing_can_be_shared, fresh=True))
    for shared, tries, _ in (ours, others):
        assert not any(shared)
        assert tries == 1
    torch.testing.assert_close(torch.tensor(ours[2]), torch.tensor(others[2]), rtol=0, atol=0)


def _page_faults_of_a_step(rank, is_distributed):
    torch.manual_seed(0)
    model = torch.nn.Linear(3000, 3000, bias=False)  # 36 MB; glibc maps each such block separately
    if is_distributed:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x = torch.ones(1, 3000)
    counts = []
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model.zero_grad()
        model(x).sum().backward()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts[8:])  # the heap sometimes grows by one more block


@pytest.mark.sweep
def test_memory_that_a_step_frees_is_kept_for_the_next_one():
    pages = 36_000_000 // 4096
    assert min(values(run_ranks(2, _page_faults_of_a_step, False, fresh=True))) > pages / 2
    assert max(values(run_ranks(2, _page_faults_of_a_step, True, fresh=True))) < pages / 10
