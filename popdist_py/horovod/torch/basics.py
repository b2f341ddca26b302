"""Horovod's basic functions, such as ``init``, ``rank`` and ``size``.

``init()`` stores the ranks and sizes of the process in this module.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from popdist_py import context
from popdist_py.collectives import Communicator
from popdist_py.horovod.common.util import ccl_built, ddl_built, gloo_built, mpi_built

# ``horovod.torch`` exports these names. Only modules of this package use ``ProcessSet``,
# ``check_process_set`` and ``communicator``, so these names are not exported.
__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "rocm_built",
    "shutdown",
    "size",
]


@dataclass(frozen=True, slots=True)
class _Place:
    """The ranks and sizes of this process, which public functions such as ``rank`` return."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


_place: _Place | None = None


class ProcessSet:
    """The set of all processes. Other process sets are not available."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """The ranks of all processes."""
        return list(range(size()))

    def included(self) -> bool:
        """Return True, because every process is a member of this set."""
        return True

    def rank(self) -> int:
        """Return this process's rank."""
        return rank()

    def size(self) -> int:
        """Return the number of processes."""
        return size()


global_process_set = ProcessSet()


def init(
    comm: Sequence[int] | Any | None = None, process_sets: Sequence[Any] | str | None = None
) -> None:
    """Connect this process to the other instances of the job.

    A program may call this function before or after ``popdist.init()``. A second call does nothing.

    Args:
        comm: This argument must not be given, because every instance of the job is a rank.
        process_sets: This argument must not be given, because process sets are not available.

    Raises:
        ValueError: The caller gave ``comm`` or ``process_sets``.
        WireError: The launcher's environment variables are incomplete.
    """
    global _place
    if comm or process_sets:
        raise ValueError(
            "horovod.torch.init() does not accept comm and process_sets, because every instance "
            "of the job is a rank. Call init() without arguments. To make calls on a subset of "
            "the ranks, use popdist_py.execute_on_instances()"
        )
    if _place is not None:
        return
    context.init()
    here = context.environment()
    world = context.communicator()
    # Launchers place instances on hosts in different orders. An instance therefore cannot compute
    # the local indices of other instances, so all instances exchange their local indices.
    everyone = world.all_gather_object((here.local_instance_index, here.num_local_instances))
    own = world.instance_index
    with_same_local_rank = [
        i for i, (local, _) in enumerate(everyone) if local == here.local_instance_index
    ]
    _place = _Place(
        rank=own,
        size=world.num_instances,
        local_rank=here.local_instance_index,
        local_size=here.num_local_instances,
        cross_rank=with_same_local_rank.index(own),
        cross_size=len(with_same_local_rank),
        is_homogeneous=len({local_size for _, local_size in everyone}) == 1,
    )


def shutdown() -> None:
    """Undo ``init()``.

    The process stays connected to the job, because the program may still use PopDist.
    """
    global _place
    _place = None


def is_initialized() -> bool:
    """Tell whether the program has called ``init()``, and not called ``shutdown()`` since then."""
    return _place is not None


def _initialised() -> _Place:
    if _place is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _place


def communicator() -> Communicator:
    """Return the communicator of the job, or of the group inside ``execute_on_instances``.

    Raises:
        ValueError: The program has not called ``init()``.
    """
    _initialised()
    return context.communicator()


def check_process_set(process_set: Any) -> None:
    """Raise ValueError if ``process_set`` is neither None nor ``global_process_set``."""
    if process_set is not None and process_set is not global_process_set:
        raise ValueError(
            f"process_set={process_set!r}: expected global_process_set. To make calls on a subset "
            "of the ranks, use popdist_py.execute_on_instances()"
        )


def rank() -> int:
    """Return the index of this instance, a number from 0 to ``size()`` - 1."""
    return _initialised().rank


def size() -> int:
    """Return the number of instances; 1 if the program runs without the launcher."""
    return _initialised().size


def local_rank() -> int:
    """Return the index of this instance among the instances of its host."""
    return _initialised().local_rank


def local_size() -> int:
    """Return the number of instances on this host."""
    return _initialised().local_size


def cross_rank() -> int:
    """Return the index of this instance among the instances with the same local rank."""
    return _initialised().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have an instance with the local rank of this instance."""
    return _initialised().cross_size


def is_homogeneous() -> bool:
    """Tell whether all hosts have the same number of instances."""
    return _initialised().is_homogeneous


def mpi_enabled() -> bool:
    """Tell whether MPI connects the instances of this job; False for a single process."""
    return "mpi4py.MPI" in sys.modules


def mpi_threads_supported() -> bool:
    """Tell whether several threads of a program may call MPI while collectives run.

    Raises:
        ValueError: The program has not called ``init()``.
    """
    _initialised()
    if not mpi_enabled():
        return False
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_enabled() -> bool:
    """Tell whether Gloo connects the instances; always False."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL; always 0, because NCCL is not used."""
    return 0


def cuda_built() -> bool:
    """Tell whether CUDA is used; always False."""
    return False


def rocm_built() -> bool:
    """Tell whether ROCm is used; always False."""
    return False
