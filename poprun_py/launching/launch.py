"""The function ``launch``, which plans a job, gets its cores and IPUs, and runs the job.

The command line, the launcher process of the Python API and ``poprun-py scale`` call ``launch``.
The process that calls ``launch`` supervises the job, and receives signals such as SIGINT.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from poprun_py.display.formatting import bytes_text
from poprun_py.errors import StartError
from poprun_py.launching.attempts import Attempts, OnAttempt
from poprun_py.launching.job_ipus import ipus_of_job
from poprun_py.launching.launch_planning import inside, plan_and_lease, require_start
from poprun_py.launching.run_record import RunRecord
from poprun_py.launching.wait_for_resources import Wait
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.terminal import Console

_SHARED_MEMORY = "/dev/shm"
# The bytes of /dev/shm that Open MPI uses for each instance.
_MPI_SHARED_BYTES = 16 << 20

OnPlan = Callable[[LaunchPlan], None]


@dataclass(frozen=True, slots=True)
class Request:
    """A job to launch, with its environment and outputs.

    Attributes:
        job: The options of a launch, or a finished launch plan, which is run unchanged.
        environ: The launcher's environment variables; None for the variables of this process.
        output_folder: A folder for the instances' output, used if --output-dir is not given.
        descriptors: The file descriptors to which the instances' stdout and stderr are written.
    """

    job: LaunchConfig | LaunchPlan
    # Environment variables may contain secrets, so ``repr`` omits this field.
    environ: Mapping[str, str] | None = field(default=None, repr=False)
    output_folder: str | None = None
    descriptors: tuple[int, int] = (1, 2)

    @property
    def config(self) -> LaunchConfig:
        """The options of the launch."""
        return self.job.config if isinstance(self.job, LaunchPlan) else self.job


def launch(
    request: Request,
    console: Console,
    *,
    on_plan: OnPlan = lambda _: None,
    on_attempt: OnAttempt = lambda _: None,
) -> LaunchResult:
    """Launch a job, wait until all its processes have ended, and return its result.

    The job is restarted after a failure as often as --max-restarts allows. While the job runs, the
    working folder of this process is the folder in which the plan was made.

    Args:
        request: The job to launch, with its environment and outputs.
        console: The console that prints the launcher's messages.
        on_plan: A function that is called with the final plan: before the job waits for cores if
            the plan does not depend on other jobs, else when the job has its cores.
        on_attempt: A function that is called before each attempt, with the attempt's Job.

    Raises:
        UsageError: The options, hosts and machines do not fit together. Nothing was started.
        StartError: The job could not start, or --strict-binding found a wrong CPU binding.
    """

    def show(planned: LaunchPlan) -> None:
        on_plan(planned)
        for warning in plan_warnings(planned, is_launched=True):
            console.warn(warning)

    _require_main_thread()
    wait = Wait(request.config, console)
    with contextlib.ExitStack() as held:
        planned, lease = plan_and_lease(request.job, request.environ, console, wait, held, show)
        held.enter_context(inside(planned.folder))
        require_start(planned)
        _tell_before_start(planned, console)
        began = time.monotonic()
        record = held.enter_context(RunRecord(planned, console))
        lease.name_run(record.run_id)
        with ipus_of_job(planned, record.run_id, console, wait) as partition:
            record.note_resources(wait.seconds, shares_cores=lease.is_shared)
            result = Attempts(
                planned,
                record,
                console,
                cpus=lease.cpus,
                partition=partition,
                descriptors=request.descriptors,
                output_folder=request.output_folder,
                on_attempt=on_attempt,
            ).run()
        record.finish(result.exit_code, result.explanation)
    if warning := _separate_models(result):
        console.warn(warning)
    seconds = time.monotonic() - began
    console.log(f"the job ended with exit code {result.exit_code} after {seconds:.2f} s")
    return replace(
        result,
        run_id=record.run_id,
        report=record.report,
        was_interrupted=record.was_interrupted,
    )


def _tell_before_start(planned: LaunchPlan, console: Console) -> None:
    if planned.config.verbosity >= 2:
        from poprun_py.planning.views.command_text import folded

        console.log(f"running: {folded(planned.command)}")
    elif planned.config.verbosity == 1:
        from poprun_py.planning.views.command_summary import command_summary

        console.log(f"running: {command_summary(planned.command)}")
    if planned.network:
        console.log(f"the hosts communicate over the network {planned.network}")
    if planned.topology.instances_per_host > 1:
        _warn_of_little_shared_memory(console)


def _warn_of_little_shared_memory(console: Console) -> None:
    """Warn if /dev/shm has too little free space for MPI's messages, so that MPI is slow."""
    with contextlib.suppress(OSError):
        state = os.statvfs(_SHARED_MEMORY)
        free = state.f_bavail * state.f_frsize
        # If MPI cannot write to /dev/shm at all, it uses another folder, which is equally fast.
        if free < _MPI_SHARED_BYTES and os.access(_SHARED_MEMORY, os.W_OK):
            # Measured with two instances that use TCP instead of /dev/shm: a message of 4 bytes
            # takes 9 us instead of 2 us, and a message of 26 MB takes 100 ms instead of 28 ms.
            console.warn(
                f"{_SHARED_MEMORY} has only {bytes_text(free)} free, but MPI needs 16 MiB for each "
                "instance. MPI's own messages within this host therefore use TCP and take about 4 "
                f"times as long; popdist's collectives are not affected. Enlarge {_SHARED_MEMORY} "
                f"with docker run --shm-size=1g, or with mount -o remount,size=1g {_SHARED_MEMORY}"
            )


def _separate_models(result: LaunchResult) -> str:
    """Return a warning if each instance trained a separate model; empty for other jobs."""
    count = len(result.instances)
    if result.exit_code != 0 or count < 2 or not all(r.trained_alone for r in result.instances):
        return ""
    return (
        f"each of the {count} instances has trained a separate model, because no instance "
        "communicated with another instance. To train one model together, use "
        "DistributedDataParallel, horovod.torch or a poptorch.trainingModel; a trainer that looks "
        "for GPUs may need an option to use CPUs. If separate models are wanted, set "
        "POPDIST_SEPARATE_MODELS=1"
    )


def _require_main_thread() -> None:
    threading = sys.modules.get("threading")
    if threading is not None and threading.current_thread() is not threading.main_thread():
        raise StartError(
            "a plan can only be launched in the main thread, because only the main thread receives "
            "signals; in another thread, call poprun_py.launch, which launches the job in a "
            "separate process"
        )
