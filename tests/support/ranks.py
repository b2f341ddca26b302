"""Runs a function as the ranks of a process group, in processes that stay alive for the session.

The server that forks the processes imports torch once in a session. A process whose function has
returned waits for the next function and is a rank of a new group then, so that a call takes
milliseconds. A rank may be killed, or hang: the others' results come all the same, and another
process takes its place in the next call.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import util
from multiprocessing.connection import wait

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "pytest",
        "hypothesis",
        "torch",
        "torch.distributed",
        "torch._dynamo",  # DDP and optimizers import it
        "popdist_py.torch_backend.process_group",
    ]
)


@dataclass(frozen=True)
class Outcome:
    """The value of one rank, or the text and the class names of its error.

    Attributes:
        value: what the function returned.
        error: traceback, or "" without one.
        kinds: names of the error's class and its bases.
        exit_code: of the process, or 0 if it waits for the next function; negative for a signal,
            None if it had to be killed here.
    """

    value: object = None
    error: str = ""
    kinds: tuple[str, ...] = ()
    exit_code: int | None = 0


@dataclass(frozen=True)
class _Call:
    path: str
    function: str
    args: tuple[object, ...]
    rank: int
    count: int
    backend: str | None
    timeout: float
    folder: str
    is_last: bool


class _Process:
    """A process that is one rank after another."""

    def __init__(self, environ):
        self.pipe, theirs = _context.Pipe()
        self.process = _context.Process(target=_be_ranks, args=(theirs, environ), daemon=True)
        self.process.start()
        theirs.close()


# Those that wait for a function.
_waiting: list[_Process] = []
_MOST_WAITING = 4


def run_ranks(
    count, function, *args, backend="popdist", timeout=30.0, limit=60.0, environ=None, fresh=False
):
    """Return the outcome of ``function(rank, *args)`` on ``count`` ranks of one process group.

    The function restores what it changes in its process, patched names above all; else its test
    asks for fresh processes.

    Args:
        count: number of ranks.
        function: of a test module; found again there by its name.
        args: pickled.
        backend: of the group, or None for no group at all.
        timeout: of the group, in seconds.
        limit: seconds after which ranks that still run are killed.
        environ: variables to set, in fresh processes.
        fresh: whether the ranks are new processes, which end after the function.
    """
    path, name = function.__code__.co_filename, function.__name__
    fresh = fresh or environ is not None
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = []
        for rank in range(count):
            one = _waiting.pop() if _waiting and not fresh else _Process(environ)
            one.pipe.send(
                _Call(path, name, args, rank, count, backend, timeout, folder, is_last=fresh)
            )
            ranks.append(one)
        return _outcomes(ranks, limit)


def values(outcomes):
    """Return what the ranks returned; fail with the tracebacks of those that failed."""
    failed = [
        f"rank {rank} ended with {outcome.exit_code}: {outcome.error}"
        for rank, outcome in enumerate(outcomes)
        if outcome.error or outcome.exit_code != 0
    ]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def _outcomes(ranks, limit):
    end = time.monotonic() + limit
    found, stays = {}, {}
    open_pipes = {one.pipe: rank for rank, one in enumerate(ranks)}
    while open_pipes and time.monotonic() < end:
        for pipe in wait(list(open_pipes), end - time.monotonic()):
            rank = open_pipes.pop(pipe)
            try:
                found[rank], stays[rank] = pipe.recv()
            except EOFError:
                found[rank] = Outcome()
    outcomes = []
    for rank, one in enumerate(ranks):
        known = found.get(rank, Outcome(error="no result", kinds=()))
        if stays.get(rank) and len(_waiting) < _MOST_WAITING:
            _waiting.append(one)
            code = 0
        else:
            code = _end(one, end)
        outcomes.append(Outcome(known.value, known.error, known.kinds, code))
    return outcomes


def _end(one, end):
    """End a process; return its exit code, or None where it had to be killed."""
    one.pipe.close()
    one.process.join(max(0.0, end - time.monotonic()) + 1.0)
    hung = one.process.is_alive()
    if hung:
        one.process.kill()
        one.process.join()
    code = None if hung else one.process.exitcode
    one.process.close()
    return code


def _end_waiting():
    while _waiting:
        _end(_waiting.pop(), time.monotonic() + 10)


# Before multiprocessing kills its processes.
util.Finalize(None, _end_waiting, exitpriority=100)


def _be_ranks(pipe, environ):
    os.environ.update(environ or {})
    import torch

    import popdist_py.torch_backend  # noqa: F401

    torch.set_num_threads(1)
    programs = {}
    gc.freeze()
    before = _state()
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        outcome = _outcome_of(call, programs)
        # Groups that nothing refers to leave their memory and descriptors.
        gc.collect()
        gc.freeze()
        stays = not (call.is_last or outcome.error) and _state() == before
        pipe.send((outcome, stays))
        if not stays:
            return


def _state():
    """Return settings of the process that a function may have left changed."""
    import torch

    return (
        dict(os.environ),
        [signal.getsignal(number) for number in (signal.SIGALRM, signal.SIGINT, signal.SIGTERM)],
        [thread.name for thread in threading.enumerate()],
        torch.get_num_threads(),
        torch.get_default_dtype(),
    )


def _outcome_of(call, programs):
    import torch.distributed as dist

    try:
        if call.path not in programs:
            spec = importlib.util.spec_from_file_location(f"program_{len(programs)}", call.path)
            programs[call.path] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(programs[call.path])
        if call.backend is not None:
            store = dist.FileStore(f"{call.folder}/store", call.count)
            dist.init_process_group(
                call.backend,
                store=store,
                rank=call.rank,
                world_size=call.count,
                timeout=timedelta(seconds=call.timeout),
            )
        value = getattr(programs[call.path], call.function)(call.rank, *call.args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return Outcome(value)
    except BaseException as error:
        kinds = tuple(kind.__name__ for kind in type(error).__mro__)
        return Outcome(error=traceback.format_exc(), kinds=kinds)
