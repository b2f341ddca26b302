"""Functions that join and leave the job, and that read the launcher's environment variables.

This module holds the communicators of this instance. This module imports mpi4py only if the job has
several instances, and never imports torch. The data of collectives do not pass through this module.
"""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar

from popdist_py import heartbeat
from popdist_py.collectives import Communicator
from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.environment import (
    POD,
    CollectiveSettings,
    InstanceEnvironment,
    is_popdist_environment,
)
from popdist_py.errors import InstanceLostError, NotInitialisedError, require_package
from popdist_py.run_files import place
from popdist_py.timeline import spans

__all__ = [
    "check_process",
    "communicator",
    "environment",
    "execute_on_instances",
    "finalize",
    "init",
    "ipus_of_pod",
    "is_initialised",
    "is_launched",
]

Result = TypeVar("Result")

# MPICH's process manager sets this variable in each process that it starts.
_HYDRA = "PMI_FD"
# Open MPI and MPICH store the number of processes and the process's rank in these variables.
_RANKS_OF_MPI = (("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"), ("PMI_SIZE", "PMI_RANK"))

_communicator: Communicator | None = None
# The communicator of the innermost execute_on_instances() call in this thread or task.
_active_group: ContextVar[Communicator | None] = ContextVar("_active_group", default=None)
_communicators_by_group: dict[tuple[int, ...], Communicator] = {}
_failed_groups: set[tuple[int, ...]] = set()


def is_launched() -> bool:
    """Tell whether this process was started by poprun-py."""
    return is_popdist_environment(os.environ)


def environment() -> InstanceEnvironment:
    """Return the values that the launcher set for this instance, or defaults without the launcher.

    Raises:
        WireError: The variables are incomplete or contradict one another.
    """
    return InstanceEnvironment.from_environ(os.environ)


def ipus_of_pod() -> int | None:
    """Return the number of the pod's IPUs that the launcher reserves for this instance.

    The number is a power of two. The result is None if the job does not use a pod, or if the
    launcher did not start this process.

    Raises:
        WireError: The variables are incomplete or contradict one another.
    """
    if not is_launched() or os.environ.get(POD, "none") in ("", "none"):
        return None
    instance = environment()
    return 1 << (instance.num_local_replicas * instance.num_ipus_per_replica - 1).bit_length()


def init() -> None:
    """Join the other instances of the job; a second call does nothing.

    MPI is started only if the launcher has started several instances, and not in a job with
    checkpoints in memory (``--memory-checkpoints``), whose restarts are faster without MPI. After
    this call, an uncaught exception ends the whole job, so that the other instances do not wait in
    a collective for ever.

    Raises:
        WireError: The launcher's variables are incomplete, or differ from the rank and size that
            MPI reports.
    """
    global _communicator
    if _communicator is not None:
        return
    instance = environment()
    heartbeat.begin()
    place.begin()
    if instance.num_instances == 1:
        if not is_launched():
            _warn_of_other_processes()
        _communicator = SoloCommunicator()
        return
    _communicator = _join(instance)
    _install_abort_hook()
    atexit.register(finalize)


def _warn_of_other_processes() -> None:
    """Warn if mpirun started several processes without poprun-py. Each of them then runs alone.

    Only the process with the MPI rank 0 logs the warning.
    """
    for size, rank in _RANKS_OF_MPI:
        if os.environ.get(size, "1") != "1" and os.environ.get(rank) == "0":
            import logging

            logging.getLogger("popdist").warning(
                "MPI started %s processes without poprun-py. The processes are not connected: each "
                "process is instance 0 of 1. Start the program with poprun-py -n %s",
                os.environ[size], os.environ[size],
            )  # fmt: skip
            return


def _join(instance: InstanceEnvironment) -> Communicator:
    """Connect to the other instances, over sockets or over MPI."""
    require_package("numpy", "popdist_py.init()")
    from popdist_py.collectives.between_hosts.socket_meeting import address_of_relay, connect_job

    settings = CollectiveSettings.from_environ(os.environ)
    address = address_of_relay(os.environ, instance)
    if address is not None:
        # The import comes first, because it takes long and the other instances would wait for it.
        from popdist_py.collectives.communicators.join import join_job

        return join_job(settings, connect_job(address, instance, settings, os.environ))
    return _join_over_mpi(instance, settings)


def _join_over_mpi(instance: InstanceEnvironment, settings: CollectiveSettings) -> Communicator:
    """Start MPI, and compare MPI's rank and size with the launcher's."""
    if _HYDRA in os.environ:
        # An instance that ends with an error must not wait for other instances in MPICH's
        # MPI_Finalize.
        import mpi4py

        mpi4py.rc.finalize = False
    from popdist_py.collectives.between_hosts.mpi_start import start_mpi

    start_mpi(instance.num_local_instances)
    from popdist_py.collectives.communicators.join import join_job
    from popdist_py.errors import WireError

    world = join_job(settings)
    if (world.instance_index, world.num_instances) != (
        instance.instance_index,
        instance.num_instances,
    ):
        raise WireError(
            f"MPI reports rank {world.instance_index} of {world.num_instances}, but the POPDIST_* "
            f"variables describe instance {instance.instance_index} of {instance.num_instances}. "
            "Start the program with poprun-py, or unset the POPDIST_* variables"
        )
    return world


def communicator() -> Communicator:
    """Return the communicator for collective calls of this thread or task.

    Inside ``execute_on_instances()``, the communicator connects only the listed instances. A job
    with one instance does not need a call of ``init()``.

    Raises:
        NotInitialisedError: The job has several instances and ``init()`` was not called.
    """
    if (group := _active_group.get()) is not None:
        return group
    if _communicator is not None:
        return _communicator
    if environment().num_instances == 1:
        return SoloCommunicator()
    raise NotInitialisedError(
        "popdist_py.init() was not called. In this job of "
        f"{environment().num_instances} instances, call popdist_py.init() before the "
        "first collective call"
    )


def check_process() -> None:
    """Raise an error in a forked child of an instance, if the job has several instances.

    Raises:
        ForkedProcessError: This process was forked from an instance.
    """
    if _communicator is not None:
        _communicator.background.check_process()


def is_initialised() -> bool:
    """Tell whether this process has joined the job and has not left it since."""
    return _communicator is not None


def finalize() -> None:
    """Leave the job.

    Python also calls this function when the process exits. A second call does nothing.
    """
    global _communicator
    world, _communicator = _communicator, None
    _failed_groups.clear()
    while _communicators_by_group:
        _communicators_by_group.popitem()[1].close()
    if world is not None:
        world.close()


def execute_on_instances(
    instances: Iterable[int], func: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result | None:
    """Call ``func(*args, **kwargs)`` on the listed instances, and return its result there.

    On the other instances, this function returns ``None`` at once. Collective calls in ``func``
    involve only the listed instances.

    Args:
        instances: The instance indices, for example ``{0}`` or ``range(2)``.
        func: The function that the listed instances call.
        args: Positional arguments of ``func``.
        kwargs: Keyword arguments of ``func``.

    Raises:
        TypeError: ``instances`` is a single index, or ``func`` is not callable.
        ValueError: No instance of the job has one of the given indices, so ``func`` would not be
            called.
    """
    # ``instances`` may be an iterator, so it is read only once. ``instances`` may also be an array,
    # whose truth value would be ambiguous.
    indices = frozenset(instances) if isinstance(instances, Iterable) else None
    if indices is None or not callable(func):
        raise TypeError(
            f"execute_on_instances({instances!r}, {func!r}): expected a set of instance indices, "
            "such as {0}, and a function"
        )
    instance = environment()
    if indices and indices.isdisjoint(range(instance.num_instances)):
        raise ValueError(
            f"execute_on_instances({instances!r}, ...): no instance has one of these indices. The "
            f"job has {_counted(instance.num_instances)}"
        )
    if instance.instance_index not in indices:
        return None
    if _communicator is None:
        return func(*args, **kwargs)
    participants = indices & set(_communicator.instances)
    group = _group(tuple(sorted(participants)))
    token = _active_group.set(group)
    try:
        with spans.among("" if group is _communicator else _numbers(participants)):
            return func(*args, **kwargs)
    finally:
        _active_group.reset(token)


def _numbers(instances: Iterable[int]) -> str:
    return ",".join(map(str, sorted(instances)))


def _counted(num_instances: int) -> str:
    """Return a text that names all instances of the job."""
    return f"the instances 0 to {num_instances - 1}" if num_instances > 1 else "instance 0 only"


def _group(instances: tuple[int, ...]) -> Communicator:
    """Return the communicator of a group of instances. A group's first call creates it."""
    assert _communicator is not None
    if len(instances) == _communicator.num_instances:
        return _communicator
    if instances not in _communicators_by_group:
        if len(instances) > 1:
            check_process()
        from popdist_py.collectives.communicators.join import join_group

        if instances in _failed_groups:
            raise InstanceLostError(
                f"execute_on_instances({set(instances)}): this instance cannot join the group "
                "again, because an earlier attempt was interrupted or failed"
            )
        settings = CollectiveSettings.from_environ(os.environ)
        # If joining the group fails here, other instances may be waiting at any step of the join. A
        # second attempt would begin at the first step, so this instance never makes one.
        _failed_groups.add(instances)
        _communicators_by_group[instances] = join_group(instances, settings, _communicator)
        _failed_groups.discard(instances)
    return _communicators_by_group[instances]


def _install_abort_hook() -> None:
    """Install a hook that ends the process at once after an uncaught exception.

    Without this hook, mpi4py would finalise MPI at exit. Finalising MPI waits for the other
    instances, which may be waiting for this instance. The previous exception hook prints the
    traceback.
    """
    previous_hook = sys.excepthook

    def abort(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        try:
            previous_hook(kind, value, trace)
        except BaseException:
            traceback.print_exc()
        _leave(130 if issubclass(kind, KeyboardInterrupt) else 1)

    sys.excepthook = abort


def _leave(code: int) -> None:
    """Flush the output, then end the process with ``code`` without finalising MPI."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(code)
