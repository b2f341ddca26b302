"""Runs a plan in this process, which gets the signals: plan -> command -> supervisor -> result.

From Python a job has a process of its own, which calls this (python_api/).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from poprun_py.console import Console, Log
from poprun_py.errors import StartError, TimeLimitError
from poprun_py.launching.attempts import Attempts, Begins
from poprun_py.launching.launch_planning import (
    lease,
    require_start,
    without_lost_hosts,
    working_folder,
)
from poprun_py.launching.run_recording import RunRecording
from poprun_py.machines.leases import Lease
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.user_program import short_name
from poprun_py.running.supervise.job import LaunchResult
from poprun_py.running.supervise.restart import run_with_restarts
from poprun_py.texts import bytes_text

_SHARED_MEMORY = "/dev/shm"
# What Open MPI takes there for each instance.
_MPI_SHARED_BYTES = 16 << 20


def run(
    planned: LaunchPlan,
    console: Console,
    *,
    descriptors: tuple[int, int] = (1, 2),
    held: Lease | None = None,
    progress: Log | None = None,
    output_folder: str | None = None,
    begins: Begins | None = None,
) -> LaunchResult:
    """Run a plan to its end, again after a failure if it may be; nothing of it is left running.

    Meanwhile this process is in the folder in which the plan was made.

    Args:
        planned: what to run; everything that decides it stands in there.
        console: takes what the launcher says.
        descriptors: where the instances' stdout and stderr go.
        held: what the job has leased of this machine, given back at its end; by default what the
            plan takes is leased now.
        progress: takes whom the job waits for, if it has to; an empty line at last.
        output_folder: for what the instances write, where no --output-dir keeps it.
        begins: told of each attempt before it begins.

    Raises:
        UsageError: the machines cannot take the job; nothing was started.
        StartError: the launch could not start, or --strict-binding and the kernel disagrees.
        TimeLimitError: the job ran into its time limit, or hung; ``result`` tells the rest.
    """
    with contextlib.ExitStack() as at_end:
        if held is not None:
            at_end.enter_context(held)
        _require_main_thread()
        planned.require_fit()
        for warning in plan_warnings(planned, is_launched=True):
            console.warn(warning)
        with _inside(planned.folder):
            require_start(planned)
            if held is None:
                held = at_end.enter_context(lease(planned, console, progress=progress))
            result = _run_here(planned, console, descriptors, held, progress, output_folder, begins)
    if result.timed_out or result.hung:
        raise TimeLimitError(f"{result.reason}: all instances were ended", result)
    return result


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Be in a plan's folder: paths that the user gave are relative to it.

    Raises:
        StartError: it is gone.
    """
    if folder in ("", working_folder()):
        yield
        return
    before = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            os.chdir(folder)
        except OSError as error:
            raise StartError(
                f"the plan runs in the folder {folder} where it was made: {error.strerror}; make "
                "the folder, or make a new plan"
            ) from None
        try:
            yield
        finally:
            os.fchdir(before)
    finally:
        os.close(before)


def _tell_of_little_shared_memory(planned: LaunchPlan, console: Console) -> None:
    """Say how slow MPI becomes where its messages do not fit into /dev/shm.

    It takes another folder, as fast, where it cannot write there.
    """
    if planned.topology.instances_per_host < 2:
        return
    with contextlib.suppress(OSError):
        state = os.statvfs(_SHARED_MEMORY)
        free = state.f_bavail * state.f_frsize
        if free < _MPI_SHARED_BYTES and os.access(_SHARED_MEMORY, os.W_OK):
            # Measured with two instances: 4 bytes in 9 us instead of 2, 26 MB in 100 ms, not 28.
            console.warn(
                f"{_SHARED_MEMORY} has {bytes_text(free)} free, and MPI wants 16 MiB for each "
                "instance: its own messages within this host take TCP, some 4 times as long; "
                "popdist's collectives do not. Make it larger: docker run --shm-size=1g, mount -o "
                f"remount,size=1g {_SHARED_MEMORY}"
            )


def _run_here(
    planned: LaunchPlan,
    console: Console,
    descriptors: tuple[int, int],
    lease: Lease,
    progress: Log | None,
    output_folder: str | None,
    begins: Begins | None,
) -> LaunchResult:
    from poprun_py.launching.partition_lifetime import partition_for_job

    config = planned.config
    if planned.network:
        console.log(f"the hosts talk to one another over {planned.network}")
    _tell_of_little_shared_memory(planned, console)
    with contextlib.closing(RunRecording(planned, console)) as recording:
        lease.name_run(recording.run_id)
        ipus = partition_for_job(
            config,
            planned.environ,
            console,
            run_id=recording.run_id,
            program=short_name(config.program),
            num_ilds=planned.topology.num_ilds,
            progress=progress,
            waited_seconds=lease.waited_seconds,
        )
        with ipus as partition:
            attempts = Attempts(
                planned,
                recording,
                console,
                descriptors,
                partial(without_lost_hosts, held=lease),
                partition,
                output_folder=output_folder,
                begins=begins,
            )
            try:
                result = run_with_restarts(
                    attempts.run,
                    config.max_restarts,
                    attempts.failed,
                    has_time=attempts.has_time,
                )
            except KeyboardInterrupt as interrupt:
                # The signal came while no job was running: before a start, or after the end.
                recording.interrupt(getattr(interrupt, "signal", signal.SIGINT))
                raise
        recording.finish(result)
    if warning := _separate_models(result):
        console.warn(warning)
    return replace(result, run_id=recording.run_id, was_interrupted=recording.was_interrupted)


def _separate_models(result: LaunchResult) -> str:
    """Return a warning if each instance trained a model of its own; otherwise empty."""
    count = len(result.instances)
    if result.exit_code != 0 or count < 2 or not all(r.trained_alone for r in result.instances):
        return ""
    return (
        f"each of the {count} instances has trained a model of its own: none has communicated with "
        "another one. Train one model together with DistributedDataParallel, horovod.torch or a "
        "poptorch.trainingModel; a trainer that looks for GPUs may need to be told that it runs on "
        "CPUs. Where separate models are meant, set POPDIST_SEPARATE_MODELS=1"
    )


def _require_main_thread() -> None:
    threading = sys.modules.get("threading")
    if threading is not None and threading.current_thread() is not threading.main_thread():
        raise StartError(
            "a plan is run in the main thread only, which gets the signals; poprun_py.launch runs "
            "it in a process of its own"
        )
