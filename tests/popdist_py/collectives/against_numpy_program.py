"""Random collective calls of one instance, compared with NumPy; run by test_against_numpy.py.

Every instance derives the inputs of all instances from the seed of a case. It computes its expected
result with NumPy. As a program, this module makes one case on one path, and prints the
difference:

    poprun-py -n 2 --oversubscribe python against_numpy_program.py PATH 'Case("all_reduce", ...)'

PATH holds the variables of ``jobs.ways``, such as ``TEST_NUM_HOSTS=2``, and may be empty. For a
call of torch.distributed, PATH is one of ``TORCH_PATHS``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from jobs import HOSTS, ways
from random_calls import CALLS, TORCH_CALLS, Run
from random_cases import BITWISE, Case, DifferenceError, bits_of, plain, storage

import popdist_py
from popdist_py import context
from popdist_py.horovod import torch as hvd

# The hosts of the ranks of torch.distributed.
TORCH_PATHS = ("one host", "two hosts", "a host for each rank")
_SECONDS = 20


def refusal_of(case: Case) -> tuple[type[Exception], ...]:
    """Return the errors that a call may raise on all instances; empty if it must succeed."""
    kind = {"bfloat16": "f", "complex32": "c"}.get(case.dtype, storage(case.dtype).kind)
    kind = "V" if case.dtype.startswith("float8") else kind
    is_torchs, is_horovods = case.call.startswith("torch_"), case.call.startswith("hvd_")
    if case.call in REDUCING:
        is_number = case.call == "all_reduce_number"
        has_no_mean = kind == "b" if is_torchs or is_horovods else kind in "biu" and not is_number
        if (
            (case.op == "mean" and has_no_mean)
            or (case.op in BITWISE and kind not in "biu")
            or (is_torchs and case.op in ("max", "min") and kind == "c")
        ):
            return (TypeError, ValueError)
        if case.call == "torch_all_reduce" and case.op == "prod" and kind == "c":
            return (ValueError,)
    # Expanded arrays of NumPy are read-only, even empty ones.
    overlaps = "expanded" in case.layouts and case.shape[:1] > (1,)
    overlaps = overlaps and not (case.as_torch and 0 in case.shape)
    if case.call in IN_PLACE and ("read_only" in case.layouts or overlaps):
        return (ValueError,)
    return ()


REDUCING = frozenset(name for name in (*CALLS, *TORCH_CALLS) if "reduce" in name)
IN_PLACE = frozenset({"all_reduce", "all_reduce_container", "hvd_allreduce_", "torch_all_reduce"})


def outcomes(
    cases: Sequence[Case], count: int, instance: int, groups: dict[Any, Any] | None = None
) -> list[tuple[str, list[bytes], str]]:
    """Make all calls, and return the outcome of each case.

    An outcome is the difference, the digests of the result, and the refusal.
    An unexpected error ends the job, because other instances may wait for this one.
    """
    found = []
    later: deque[tuple[int, Any, bytes]] = deque(maxlen=20)
    for number, case in enumerate(cases):
        instances = case.group or tuple(range(count))
        outcome = ("", [], "")
        if instance in instances:
            make = functools.partial(_outcome, case, instances, instance, groups, later, number)
            is_of_all = len(instances) == count or groups is not None
            outcome = make() if is_of_all else context.execute_on_instances(instances, make)
        found.append(outcome)
    for number, result, before in later:
        if bits_of(plain(result, cases[number].dtype)) != before and not found[number][0]:
            found[number] = ("a later call changed the result", *found[number][1:])
    return found


def _outcome(
    case: Case,
    instances: tuple[int, ...],
    instance: int,
    groups: dict[Any, Any] | None,
    later: deque[tuple[int, Any, bytes]],
    number: int,
) -> tuple[str, list[bytes], str]:
    run = Run(case, instances, instance)
    if groups is not None:
        run.process_group = groups[instances]
    call, expected = (CALLS if groups is None else TORCH_CALLS)[case.call], refusal_of(case)
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of complex32
            call(run)
            run.check_inputs()
    except DifferenceError as error:
        return str(error), run.same, ""
    except Exception as error:
        if expected and isinstance(error, expected):
            text = str(error)
            return "the refusal has several lines" if "\n" in text else "", [], text
        error.add_note(f"case {number}: {case}")
        raise
    if expected:
        return "was not refused", run.same, ""
    for result in run.results[:3]:
        array = plain(result, case.dtype)
        if array.nbytes < 10_000:
            later.append((number, result, bits_of(array)))
    # The digests are only compared with those of other instances.
    return "", [hashlib.blake2b(data, digest_size=8).digest() for data in run.same], ""


def on_paths(cases: Sequence[Case], paths: Sequence[str]) -> list[list[Any]]:
    """Return the outcomes of the library's own calls on each path."""
    found = []
    for path, communicator in ways([f"{path},POPDIST_HANG_TIMEOUT={_SECONDS}" for path in paths]):
        name = path.rpartition(",")[0]
        hvd.init()
        try:
            count, instance = communicator.num_instances, communicator.instance_index
            hosts = int(os.environ.get(HOSTS, "1"))
            # Groups of execute_on_instances() join here.
            with _naming(name), _as_on(hosts, instance, count):
                found.append(list(outcomes(cases, count, instance)))
        finally:
            hvd.shutdown()
    return found


def on_torch_paths(
    cases: Sequence[Case], paths: Sequence[str], count: int, folder: str
) -> list[list[Any]]:
    """Return the outcomes of the calls of torch.distributed on each path."""
    rank = int(os.environ.get("RANK", "0")) if count > 1 else 0
    found = []
    for number, path in enumerate(paths):
        with _naming(path), _torch_path(path, rank, count):
            dist.init_process_group(
                "popdist",
                store=dist.FileStore(f"{folder}/{number}", count),
                rank=rank,
                world_size=count,
                timeout=timedelta(seconds=_SECONDS),
            )
            try:
                groups: dict[Any, Any] = {tuple(range(count)): dist.group.WORLD}
                for ranks in sorted({case.group for case in cases if case.group}):
                    groups.setdefault(ranks, dist.new_group(list(ranks)))
                found.append(list(outcomes(cases, count, rank, groups)))
            finally:
                dist.destroy_process_group()
    return found


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Add the path to the text of an error."""
    try:
        yield
    except Exception as error:
        error.add_note(f"on the path {path!r}")
        raise


@contextlib.contextmanager
def _torch_path(path: str, rank: int, count: int) -> Iterator[None]:
    """Put the ranks on one host, on two hosts, or on a host for each rank."""
    alone = {"POPDIST_SHARED_MEMORY": "0"} if path == "a host for each rank" else {}
    num_hosts = 2 if path == "two hosts" and count > 1 else 1
    with mock.patch.dict(os.environ, alone), _as_on(num_hosts, rank, count) as asked:
        yield
    # The path is real only if the ranks asked for their name spaces.
    assert asked or num_hosts == 1


@contextlib.contextmanager
def _as_on(num_hosts: int, rank: int, count: int) -> Iterator[list[str]]:
    """Put the processes on several hosts, by a PID name space for each host.

    Yields:
        A list that is empty until a process asks for its name space.
    """
    readlink = os.readlink
    asked: list[str] = []

    def of_host(name: Any, **more: Any) -> str:
        if str(name) != "/proc/self/ns/pid":
            return readlink(name, **more)
        asked.append(str(name))
        return f"pid:[{rank * num_hosts // count}]"

    with contextlib.ExitStack() as patches:
        if num_hosts > 1:
            patches.enter_context(mock.patch.object(os, "readlink", of_host))
        yield asked


def _main(path: str, text: str) -> None:
    case = eval(text)
    if case.call in CALLS:
        ((outcome,),) = on_paths([case], [path])
    else:
        popdist_py.init()
        folder, count = popdist_py.broadcast(tempfile.mkdtemp()), popdist_py.getNumInstances()
        ((outcome,),) = on_torch_paths([case], [path], count, folder)
    print(outcome[0] or outcome[2] or "as NumPy says", [data.hex() for data in outcome[1]])


if __name__ == "__main__":
    _main(*sys.argv[1:])
