"""Training programs on two back ends of torch.distributed: what they end with must be the same.

A file of tests holds its programs as functions ``name(rank)`` that return parameters and other
values; all of them run over both back ends in one job of ranks, since each job costs its imports.
"""

from __future__ import annotations

import io
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

_BACKENDS = ("popdist", "gloo")


@dataclass(frozen=True)
class Failure:
    """The traceback of a program that failed."""

    text: str


def found_over_both(count, run, limit=110.0):
    """Return what every program returned, as {back end: [rank: {program: value}]}.

    Args:
        count: number of ranks.
        run: ``run(rank, folder)`` of a test module, which returns ``run_programs(...)``.
        limit: of all, in seconds.
    """
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        written = values(run_ranks(count, run, folder, backend=None, limit=limit, fresh=True))
    ranks = [torch.load(io.BytesIO(data), weights_only=False) for data in written]
    return {backend: [found[backend] for found in ranks] for backend in _BACKENDS}


def run_programs(rank, count, folder, programs):
    """Return the bytes of what each program returned over each back end, or how it failed."""
    found = {}
    for backend in _BACKENDS:
        dist.init_process_group(
            backend,
            store=dist.FileStore(f"{folder}/{backend}", count),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=30),
        )
        found[backend] = {program.__name__: _outcome(program, rank) for program in programs}
        dist.destroy_process_group()
    written = io.BytesIO()
    torch.save(found, written)  # a tensor in a pipe would end with its process
    return written.getvalue()


def _outcome(program, rank):
    torch.manual_seed(7)
    try:
        return _portable(program(rank))
    except Exception:
        return Failure(traceback.format_exc())


def assert_same(found, name, exact=True):
    """Compare a program's values over the back ends, rank by rank.

    Args:
        found: from ``found_over_both``.
        name: of the program.
        exact: bit by bit; else as close as floating point numbers of that type are expected to be.
    """
    for backend in _BACKENDS:
        for rank, of_rank in enumerate(found[backend]):
            failure = of_rank[name]
            assert not isinstance(failure, Failure), f"{backend}, rank {rank}: {failure.text}"
    for ours, gloos in zip(*(found[backend] for backend in _BACKENDS), strict=True):
        _compare(ours[name], gloos[name], exact)


def assert_equal_on_all_ranks(found, name):
    """Check that a program ended with the same values on every rank, over our back end."""
    first, *others = found["popdist"]
    for other in others:
        _compare(other[name], first[name], exact=True)


def _compare(value, expected, exact):
    # torch.testing.assert_close imports for a second.
    assert type(value) is type(expected)
    if isinstance(value, dict):
        assert value.keys() == expected.keys()
        _compare(list(value.values()), list(expected.values()), exact)
    elif isinstance(value, list):
        assert len(value) == len(expected)
        for item, other in zip(value, expected, strict=True):
            _compare(item, other, exact)
    elif isinstance(value, torch.Tensor):
        assert value.dtype == expected.dtype
        tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
        assert torch.allclose(value, expected, **tolerance), (value - expected).abs().max()
    else:
        assert value == expected


def _portable(value):
    """Return values with parameters as plain tensors."""
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        return full.detach().clone()
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    return value
