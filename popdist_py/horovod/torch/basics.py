"""Who this process is among the instances, in Horovod's words: rank, size, local and cross rank.

The state of the room lives here: whether ``init()`` was called, and what it found.
Nothing here reduces or moves data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from popdist_py import context
from popdist_py.collectives import Communicator

__all__ = [
    "ProcessSet",
    "ccl_built",
    "check_process_set",
    "communicator",
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
    """Where this process is: the same numbers as in ``horovod.common.basics``."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool


_place: _Place | None = None


class ProcessSet:
    """The set of all processes, which is the only one here."""

    process_set_id = 0

    @property
    def ranks(self) -> list[int]:
        """All ranks."""
        return list(range(size()))

    def included(self) -> bool:
        """Tell whether this process is a member: always."""
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
    """Join the other instances of the job; before or after ``popdist.init()``, and again at will.

    Args:
        comm: must be absent: Horovod's ranks are all instances of the job.
        process_sets: must be absent, as there are none.

    Raises:
        ValueError: ``comm`` or ``process_sets`` is given.
        WireError: the launcher's variables are incomplete.
    """
    global _place
    if comm or process_sets:
        raise ValueError(
            "horovod.torch.init(comm, process_sets): the ranks are all instances of the job; call "
            "init() without arguments, and popdist_py.execute_on_instances() for some of them"
        )
    if _place is not None:
        return
    context.init()
    here = context.environment()
    world = context.communicator()
    # Rank and size on each host, of every instance: launchers differ in how they fill the hosts.
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
    """Forget ``init()``. The job itself is left at exit, since PopDist may still use it."""
    global _place
    _place = None


def is_initialized() -> bool:
    """Tell whether ``init()`` was called, and ``shutdown()`` was not."""
    return _place is not None


def _initialised() -> _Place:
    if _place is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _place


def communicator() -> Communicator:
    """Return the communicator of the job, or of the group inside of ``execute_on_instances``.

    Raises:
        ValueError: ``init()`` was not called.
    """
    _initialised()
    return context.communicator()


def check_process_set(process_set: Any) -> None:
    """Refuse every set of processes but that of all.

    Raises:
        ValueError: it is another one.
    """
    if process_set is not None and process_set is not global_process_set:
        raise ValueError(
            f"process_set={process_set!r}: expected global_process_set; for some of the instances "
            "use popdist_py.execute_on_instances()"
        )


def rank() -> int:
    """Return the index of this instance, 0 to ``size()`` - 1."""
    return _initialised().rank


def size() -> int:
    """Return the number of instances; 1 without the launcher."""
    return _initialised().size


def local_rank() -> int:
    """Return the index of this instance among those of its host."""
    return _initialised().local_rank


def local_size() -> int:
    """Return the number of instances on this host."""
    return _initialised().local_size


def cross_rank() -> int:
    """Return the index of this instance among those with the same local rank: that of its host."""
    return _initialised().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have an instance of this local rank."""
    return _initialised().cross_size


def is_homogeneous() -> bool:
    """Tell whether all hosts have equally many instances."""
    return _initialised().is_homogeneous


def mpi_built() -> bool:
    """Tell whether MPI can connect the instances: always."""
    return True


def mpi_enabled() -> bool:
    """Tell whether MPI connects the instances of this job; a lone process starts no MPI."""
    return "mpi4py.MPI" in sys.modules


def mpi_threads_supported() -> bool:
    """Tell whether a program may call MPI from several threads beside the collectives.

    Raises:
        ValueError: ``init()`` was not called.
    """
    _initialised()
    if not mpi_enabled():
        return False
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def gloo_built() -> bool:
    """Tell whether Gloo connects the instances: never."""
    return False


def gloo_enabled() -> bool:
    """Tell whether Gloo connects the instances: never."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL, 0: there is none."""
    return 0


def ddl_built() -> bool:
    """Tell whether IBM's DDL is used: never."""
    return False


def ccl_built() -> bool:
    """Tell whether oneCCL is used: never."""
    return False


def cuda_built() -> bool:
    """Tell whether CUDA is used: never."""
    return False


def rocm_built() -> bool:
    """Tell whether ROCm is used: never."""
    return False
