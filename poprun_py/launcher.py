"""Plans a launch, and runs one: ``launch(config)`` is ``run(plan(config))``.

config -> inputs -> plan -> command -> supervisor -> result
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from poprun_py.command_name import command_name
from poprun_py.config.launch_config import LaunchConfig
from poprun_py.errors import (
    LaunchError,
    StartError,
    TimeLimitError,
    UsageError,
    explain_os_error,
)
from poprun_py.hosts.host_list import Host
from poprun_py.job_recorders import JobRecorders
from poprun_py.job_timeline import JobTimeline
from poprun_py.output.program_files import FilePlace, place_of_run
from poprun_py.planning.binding_check import check_binding
from poprun_py.planning.inputs import Purpose, gather_inputs, hosts_of, is_described, with_instances
from poprun_py.planning.launch_plan import LaunchPlan, make_plan
from poprun_py.planning.mpi_arguments import split_mpi_arguments
from poprun_py.planning.mpi_commands import Mpi
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.planning.topology import make_topology
from poprun_py.planning.user_program import require_program, resolve_program, standard_input
from poprun_py.planning.variables import attempt_variables
from poprun_py.run_record import RunRecord
from poprun_py.supervision.restart import lost_hosts, pause, run_with_restarts
from poprun_py.supervision.supervisor import Job, LaunchResult, supervise

if TYPE_CHECKING:
    from poprun_py.observation.records import Recorder

__all__ = ["Console", "launch", "plan", "run"]

Log = Callable[[str], None]


class Console(Protocol):
    """Takes what the launcher says while a job runs."""

    def log(self, line: str, /) -> None:
        """Take a line of the launcher's own log."""

    def warn(self, sentence: str, /) -> None:
        """Take what the user should know at any verbosity."""

    def binding(self, line: str, /) -> None:
        """Take what the kernel says of an instance's binding."""

    def tell(self, sentence: str, /) -> None:
        """Take what became of something that the user asked for, at any verbosity."""


@dataclass(frozen=True, slots=True)
class _Callbacks:
    """A console made of functions."""

    log: Log
    warn: Log
    binding: Log
    tell: Log


def _silent(_: str) -> None:
    """Log nothing."""


# --- planning -----------------------------------------------------------------------------------


def plan(
    config: LaunchConfig,
    *,
    environ: Mapping[str, str] | None = None,
    mpi: Mpi | None = None,
    hosts: tuple[Host, ...] | None = None,
    contact_hosts: bool = False,
) -> LaunchPlan:
    """Return everything that launching ``config`` would do; starts nothing of it.

    What does not fit the machines that are found is planned with a warning, since it may be meant
    for larger ones; it cannot be launched. What does not fit machines that ``config`` describes is
    refused.

    Args:
        config: what is asked for.
        environ: the launcher's environment; ``os.environ`` by default.
        mpi: the MPI to use; found by default.
        hosts: where instances may run; by default those that ``config`` names, else those of the
            environment, else this machine.
        contact_hosts: fill and ask other hosts first, as a launch does. Else they are planned for
            by what is remembered of them.

    Raises:
        UsageError: the options, hosts and machines do not fit together.
        StartError: no MPI is installed, or a host cannot take part.
    """
    if not isinstance(config, LaunchConfig):
        raise UsageError(f"{config!r} cannot be planned: expected a LaunchConfig")
    environ = os.environ if environ is None else environ
    config = replace(config, program=resolve_program(config.program))
    # What is wrong with the options alone is refused before any host is asked.
    found = hosts_of(config, environ) if hosts is None else hosts
    if config.nproc_per_node is not None:
        config = with_instances(config, found)
        # An allocation is compared with the number of instances, which is known now.
        found = hosts_of(config, environ) if hosts is None else hosts
    config, mpi_arguments = split_mpi_arguments(config)
    topology = make_topology(config, found)
    purpose = Purpose.LAUNCH if contact_hosts else Purpose.DRY_RUN
    inputs = gather_inputs(config, environ, purpose, hosts=topology.hosts, mpi=mpi)
    made = make_plan(config, topology, mpi_arguments, inputs, enforce=is_described(config))
    return replace(made, folder=_working_folder())


def _working_folder() -> str:
    """Return the folder in which this process is; empty if it was deleted."""
    try:
        return os.getcwd()  # noqa: PTH109 (of any bytes, and without an object)
    except OSError:
        return ""


def without_lost_hosts(planned: LaunchPlan, result: LaunchResult, warn: Log) -> LaunchPlan:
    """Plan the same job on the hosts that are left; the old plan where that is not possible."""
    hosts = planned.topology.hosts
    lost = lost_hosts(result, lambda i: hosts[planned.instances[i].instance.host_index].name)
    left = tuple(host for host in hosts if host.name not in lost)
    if not lost or not left:
        return planned
    try:
        fewer = plan(planned.config, environ=planned.environ, hosts=left, contact_hosts=True)
        fewer.require_fit()
    except (UsageError, StartError) as error:
        warn(f"the job does not fit on the hosts without {', '.join(sorted(lost))}: {error}")
        return planned
    warn(f"going on without {', '.join(sorted(lost))}")
    return fewer


# --- running ------------------------------------------------------------------------------------


def launch(
    job: LaunchConfig | LaunchPlan,
    *,
    log: Log = _silent,
    environ: Mapping[str, str] | None = None,
    warn: Log = _silent,
    tell_binding: Log | None = None,
    descriptors: tuple[int, int] = (1, 2),
) -> LaunchResult:
    """Run a configuration or a plan to its end; nothing of it is left running.

    Args:
        job: what to run.
        log: takes the launcher's own log, line by line.
        environ: the launcher's environment; by default that of the plan, which for a configuration
            is ``os.environ``.
        warn: takes what the user should know at any verbosity.
        tell_binding: takes what the kernel says of each instance's binding; ``log`` by default.
        descriptors: where the instances' stdout and stderr go.

    Raises:
        UsageError: the configuration does not fit hosts and machines; nothing was started.
        StartError: the launch could not start, or --strict-binding and the kernel disagrees.
        TimeLimitError: the job ran into its time limit, or hung; ``result`` tells the rest.
    """
    _require_main_thread()
    if not isinstance(job, LaunchPlan):
        job = plan(job, environ=environ, contact_hosts=True)
    elif environ is not None:
        job = replace(job, environ=dict(environ))
    return run(job, _Callbacks(log, warn, tell_binding or log, tell=log), descriptors=descriptors)


def run(
    planned: LaunchPlan, console: Console, *, descriptors: tuple[int, int] = (1, 2)
) -> LaunchResult:
    """Run a plan to its end, again after a failure if it may be; nothing of it is left running.

    Meanwhile this process is in the folder in which the plan was made.

    Args:
        planned: what to run; everything that decides it stands in there.
        console: takes what the launcher says.
        descriptors: where the instances' stdout and stderr go.

    Raises:
        UsageError: the machines cannot take the job; nothing was started.
        StartError: the launch could not start, or --strict-binding and the kernel disagrees.
        TimeLimitError: the job ran into its time limit, or hung; ``result`` tells the rest.
    """
    _require_main_thread()
    planned.require_fit()
    for warning in plan_warnings(planned):
        console.warn(warning)
    with _inside(planned.folder):
        result = _run_here(planned, console, descriptors)
    if result.timed_out or result.hung:
        raise TimeLimitError(f"{result.reason}: all instances were ended", result)
    return result


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    """Be in a plan's folder: paths that the user gave are relative to it.

    Raises:
        StartError: it is gone.
    """
    if folder in ("", _working_folder()):
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


def _run_here(planned: LaunchPlan, console: Console, descriptors: tuple[int, int]) -> LaunchResult:
    config = planned.config
    # The wrapper looks for the program as the instance that it is in front of: with its PATH.
    require_program(config.program, {**planned.environ, **dict(planned.instances[0].user_env)})
    if planned.network:
        console.log(f"the hosts talk to one another over {planned.network}")
    record = RunRecord(planned)
    try:
        timeline = JobTimeline(planned, record.folder.path if record.folder else None)
        console.log(f"the run is {record.run_id}")
        with contextlib.closing(timeline), contextlib.closing(JobRecorders()) as recorders:
            attempts = _Attempts(planned, record, timeline, recorders, console, descriptors)
            result = run_with_restarts(
                attempts.run, config.max_restarts, attempts.failed, attempts.pause
            )
            _finish_timeline(timeline, console)
        record.finish(result)
    finally:
        _write_page(record, console)
        record.close()
        if record.trouble:
            console.warn(record.trouble)
    return replace(result, run_id=record.run_id)


def _write_page(record: RunRecord, console: Console) -> None:
    """Write the page of a run that has ended; its result does not depend on it."""
    if record.folder is None or not record.has_begun:
        return
    try:
        from poprun_py.page_file import write_page
        from poprun_py.runs.run_files import RunFiles

        path = write_page(RunFiles(record.folder.path.resolve()))
        console.log(f"the page of the run is {path}")
    except OSError as error:
        console.warn(explain_os_error(error, "the page of the run cannot be written"))
    except Exception as error:  # whatever its files hold
        console.warn(f"the page of the run cannot be written ({error})")


def _finish_timeline(timeline: JobTimeline, console: Console) -> None:
    """Make the trace of a job that has ended; its result does not depend on it."""
    try:
        if told := timeline.finish():
            console.tell(told)
    except OSError as error:
        console.warn(explain_os_error(error, "the timeline cannot be written"))


def _require_main_thread() -> None:
    threading = sys.modules.get("threading")
    if threading is not None and threading.current_thread() is not threading.main_thread():
        raise StartError("a job can be launched from the main thread only, which gets the signals")


class _Attempts:
    """The runs of one job, one after another; a restart may go on with another plan.

    Args:
        planned: the plan of the first run.
        record: what is kept of them.
        timeline: where they record what they do when.
        recorders: who records their steps.
        console: takes what the launcher says.
        descriptors: where the instances' stdout and stderr go.
    """

    def __init__(
        self,
        planned: LaunchPlan,
        record: RunRecord,
        timeline: JobTimeline,
        recorders: JobRecorders,
        console: Console,
        descriptors: tuple[int, int],
    ) -> None:
        self.plan = planned
        self._record = record
        self._timeline = timeline
        self._recorders = recorders
        self._console = console
        self._descriptors = descriptors
        self._began = time.monotonic()  # later by what does not count towards a limit

    def run(self, count: int) -> LaunchResult:
        """Run the job after ``count`` restarts."""
        planned, record = self.plan, self._record
        folder = record.begin(planned, count)
        spent = time.monotonic() - self._began if count else 0.0
        try:
            result = supervise(
                _job(
                    planned,
                    count,
                    spent,
                    run_id=record.run_id,
                    folder=folder,
                    spans=self._timeline.begin(planned, folder),
                    recorders=self._recorders.begin(folder),
                ),
                log=self._console.log,
                on_started=self._check_binding,
                descriptors=self._descriptors,
            )
        except LaunchError as error:
            record.refuse(error)
            raise
        record.end(result)
        self._began += result.paused_seconds
        return result

    def failed(self, result: LaunchResult, restart: int, seconds: float) -> None:
        """Report a failure, and decide on which hosts restart number ``restart`` runs."""
        from poprun_py.views.report import report_text

        config, warn = self.plan.config, self._console.warn
        report = report_text(result, self.plan.instance_label)
        warn(report.removeprefix(f"{command_name()}: ").rstrip("\n"))
        if config.allow_fewer_hosts:
            self.plan = without_lost_hosts(self.plan, result, warn)
        warn(f"restart {restart} of {config.max_restarts} in {seconds:g} s")

    def pause(self, seconds: float) -> int:
        """Wait before a restart, no longer than the time limit leaves; returns a signal, or 0."""
        limit = self.plan.config.timeout
        if limit is not None:
            seconds = min(seconds, self._began + limit - time.monotonic())
        return pause(seconds)

    def _check_binding(self, reports: dict[int, dict[str, Any]]) -> None:
        check_binding(self.plan, reports, self._console.binding, self._console.warn)


def _job(
    planned: LaunchPlan,
    restart_count: int,
    spent_seconds: float,
    *,
    run_id: str,
    folder: str | None = None,
    spans: FilePlace | None = None,
    recorders: tuple[Recorder, ...] = (),
) -> Job:
    """Return what is to be supervised for one attempt at a plan."""
    config, hosts = planned.config, planned.topology.hosts
    others = [host for host in hosts if not host.is_local]
    of_run = None if folder is None else place_of_run(Path(folder))
    everywhere = {
        **attempt_variables(run_id, restart_count, config.max_restarts),
        **planned.travelling_variables,
    }
    reader = config.stdin_instance
    is_reader_local = hosts[planned.instances[reader].instance.host_index].is_local
    return Job(
        command=planned.command,
        variables=tuple(
            {**everywhere, **planned.channel_variables(i)} for i in range(len(planned.instances))
        ),
        environ={
            **planned.mpirun_environ,
            **(standard_input(reader) if is_reader_local else {}),
        },
        stdin_instance=reader,
        only_output_from=(
            frozenset(config.only_output_from_instance)
            if config.only_output_from_instance is not None
            else None
        ),
        output=config.output,
        output_dir=folder,
        others=frozenset(
            index
            for index, each in enumerate(planned.instances)
            if not hosts[each.instance.host_index].is_local
        ),
        places=tuple(place for place in (of_run, spans) if place is not None),
        spans=None if spans is None else spans.folder,
        timeout_seconds=config.timeout,
        spent_seconds=spent_seconds,
        hang_timeout=config.hang_timeout,
        grace_seconds=config.grace,
        listen=_listen_address(others, planned.network) if others else None,
        hosts=tuple(
            planned.hostnames.get(hosts[p.instance.host_index].name, "") for p in planned.instances
        ),
        explain_failed_start=(lambda: _explain_failed_start(planned)) if others else None,
        ipus=() if config.offline_mode else tuple(p.instance.ipus for p in planned.instances),
        run_id=run_id,
        program=_short_name(config.program),
        live=config.live,
        recorders=recorders,
        partition=config.vipu_partition or planned.environ.get("IPUOF_VIPU_API_PARTITION_ID"),
    )


def _short_name(program: tuple[str, ...]) -> str:
    """Return what people call a program: its script, behind an interpreter too, or its module."""
    scripts = (word for word in program[:3] if word.endswith((".py", ".sh")))
    if "-m" in program[:2]:
        return " ".join(program[program.index("-m") :][:2])
    return next(scripts, program[0]).rpartition("/")[2]


def _listen_address(others: list[Host], network: str) -> str:
    """Return this machine's address that the other hosts reach."""
    from poprun_py.hosts.survey import listen_address

    return listen_address(others, network)


def _explain_failed_start(planned: LaunchPlan) -> None:
    """Ask the hosts why a launch did not start: mpirun's own words seldom name the reason.

    Raises:
        StartError: the reason, if a host shows one.
    """
    from poprun_py.hosts.survey import diagnose

    diagnose(
        planned.config,
        planned.topology.hosts,
        mpirun=planned.command[0],
        environ=planned.environ,
    )
