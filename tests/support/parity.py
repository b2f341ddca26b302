"""Training programs on two back ends of torch.distributed: what they end with must be the same.

A file of tests holds its programs as functions ``name(rank)`` that return parameters and other
values; all of them run in one job of ranks a back end, since each job costs its start.
"""

from __future__ import annotations

import io
import traceback
from dataclasses import dataclass

import torch
from support.ranks import run_ranks


@dataclass(frozen=True)
class Failure:
    """The traceback of a program that failed."""

    text: str


def run_programs(rank, programs):
    """Return what each program returned, by its name, or how it failed."""
    found = {}
    for program in programs:
        torch.manual_seed(7)
        try:
            found[program.__name__] = _portable(program(rank))
        except Exception:
            found[program.__name__] = Failure(traceback.format_exc())
    written = io.BytesIO()
    torch.save(found, written)  # a tensor in a pipe would end with its process
    return written.getvalue()


def outcomes_of(count, run, backend, limit=100.0):
    """Return what ``run`` found on every rank over a back end."""
    outcomes = run_ranks(count, run, backend=backend, limit=limit, timeout=20.0)
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"{backend}, rank {rank}: {outcome.error}"
        assert outcome.exit_code == 0, f"{backend}, rank {rank} ended with {outcome.exit_code}"
    return [torch.load(io.BytesIO(outcome.value), weights_only=False) for outcome in outcomes]


def assert_same(name, ours, theirs, exact=True):
    """Compare a program's values over the back ends, rank by rank.

    Args:
        name: of the program.
        ours: of every rank, from ``outcomes_of``.
        theirs: the same over gloo.
        exact: bit by bit; else as close as floating point numbers of that type are expected to be.
    """
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for backend, found in (("popdist", mine), ("gloo", other)):
            if isinstance(found[name], Failure):
                raise AssertionError(f"rank {rank} over {backend}: {found[name].text}")
        tolerance = {"rtol": 0, "atol": 0} if exact else {}
        torch.testing.assert_close(mine[name], other[name], **tolerance, equal_nan=True)


def assert_equal_on_all_ranks(name, found):
    """Check that a program ended with the same values on every rank."""
    for other in found[1:]:
        torch.testing.assert_close(other[name], found[0][name], rtol=0, atol=0)


def _portable(value):
    """Return values with parameters as plain tensors, which a pipe carries."""
    if isinstance(value, torch.Tensor):
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        return full.detach().clone()
    if isinstance(value, dict):
        return {key: _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    return value
