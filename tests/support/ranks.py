"""Runs a function as the ranks of a process group: real processes, forked from one with torch.

The server that forks them imports torch once in a test session, so that a job of ranks starts in a
tenth of a second. A rank may be killed, or hang: the others' results come all the same.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "popdist_py.torch_backend.process_group"]
)


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: its value, or the text and the class names of its error.

    Attributes:
        value: what the function returned.
        error: traceback, or "" without one.
        kinds: names of the error's class and its bases.
        exit_code: of the process; negative for a signal, None if it had to be killed here.
    """

    value: object = None
    error: str = ""
    kinds: tuple[str, ...] = ()
    exit_code: int | None = 0


def run_ranks(count, function, *args, backend="popdist", timeout=30.0, limit=60.0, environ=None):
    """Return the outcome of ``function(rank, *args)`` on ``count`` ranks of one process group.

    Args:
        count: number of ranks.
        function: of a test module; found again there by its name.
        args: pickled.
        backend: of the group, or None for no group at all.
        timeout: of the group, in seconds.
        limit: seconds after which ranks that still run are killed.
        environ: variables to set.
    """
    path, name = function.__code__.co_filename, function.__name__
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        started = []
        for rank in range(count):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_be_rank,
                args=(theirs, path, name, args, rank, count, backend, timeout, folder, environ),
                daemon=True,
            )
            process.start()
            theirs.close()
            started.append((process, ours))
        return _outcomes(started, limit)


def values(outcomes):
    """Return what the ranks returned; fail with the first traceback if one of them failed."""
    for rank, outcome in enumerate(outcomes):
        assert not outcome.error, f"rank {rank}: {outcome.error}"
        assert outcome.exit_code == 0, f"rank {rank} ended with {outcome.exit_code}"
    return [outcome.value for outcome in outcomes]


def _outcomes(started, limit):
    import time

    end = time.monotonic() + limit
    found = {}
    open_pipes = {pipe: rank for rank, (_, pipe) in enumerate(started)}
    while open_pipes and time.monotonic() < end:
        for pipe in wait(list(open_pipes), end - time.monotonic()):
            rank = open_pipes.pop(pipe)
            try:
                found[rank] = pipe.recv()
            except EOFError:
                found[rank] = Outcome()
    outcomes = []
    for rank, (process, pipe) in enumerate(started):
        process.join(max(0.0, end - time.monotonic()) + 1.0)
        hung = process.is_alive()
        if hung:
            process.kill()
            process.join()
        known = found.get(rank, Outcome(error="no result", kinds=()))
        code = None if hung else process.exitcode
        outcomes.append(Outcome(known.value, known.error, known.kinds, code))
        pipe.close()
        process.close()
    return outcomes


def _be_rank(pipe, path, name, args, rank, count, backend, timeout, folder, environ):
    os.environ.update(environ or {})
    import torch
    import torch.distributed as dist

    import popdist_py.torch_backend  # noqa: F401

    torch.set_num_threads(1)
    try:
        module = importlib.util.module_from_spec(
            spec := importlib.util.spec_from_file_location("rank_program", path)
        )
        spec.loader.exec_module(module)
        if backend is not None:
            store = dist.FileStore(f"{folder}/store", count)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=timeout),
            )
        value = getattr(module, name)(rank, *args)
        if backend is not None and dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(Outcome(value))
    except BaseException as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        pipe.send(Outcome(error=traceback.format_exc(), kinds=kinds))
    pipe.close()
