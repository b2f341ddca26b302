"""The attempts of a launch. Each attempt is one job for the supervisor.

An attempt after a restart may have another plan, which leaves out the hosts that were lost.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from popdist_py.environment import LOOPBACK, RUN_ID
from poprun_py.errors import LaunchError, start_errors
from poprun_py.launching.launch_planning import without_lost_hosts
from poprun_py.launching.run_record import AttemptRecord, RunRecord
from poprun_py.machines.host_list import Host
from poprun_py.machines.leases import FOLDER_VARIABLE
from poprun_py.planning.binding_check import check_binding
from poprun_py.planning.instance_variables import attempt_variables
from poprun_py.planning.job_placement import share_of_placements
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.mpi_commands import end_signal_of_mpirun, network_of_mpirun
from poprun_py.planning.user_program import CALL_FILE, call_folder, short_name
from poprun_py.running.keyboard.keyboard_input import rewind_stdin, stdin_position
from poprun_py.running.supervise.file_transfer import place_of_call, place_of_run
from poprun_py.running.supervise.job import (
    Command,
    Hosts,
    Job,
    JobFiles,
    JobLimits,
    LaunchResult,
    Watchers,
)
from poprun_py.running.supervise.supervisor import supervise
from poprun_py.terminal import Console, Log, command_name

if TYPE_CHECKING:
    from poprun_py.planning.partition_variables import HeldPartition

OnAttempt = Callable[[Job], None]


class Attempts:
    """The attempts of one launch.

    Args:
        planned: The plan of the first attempt.
        record: The RunRecord in which the attempts are recorded.
        console: The console that prints the launcher's messages.
        cpus: The CPUs that the job has leased on this machine; empty without a lease.
        partition: The IPUs of the job, the same for all attempts; None without a pod.
        descriptors: The descriptors to which the instances' stdout and stderr are written.
        output_folder: A folder for the instances' output, used if --output-dir is not given.
        on_attempt: A function that is called with the job before each attempt.
    """

    def __init__(
        self,
        planned: LaunchPlan,
        record: RunRecord,
        console: Console,
        *,
        cpus: tuple[int, ...] = (),
        partition: HeldPartition | None = None,
        descriptors: tuple[int, int] = (1, 2),
        output_folder: str | None = None,
        on_attempt: OnAttempt | None = None,
    ) -> None:
        self.plan = planned
        self._record = record
        self._console = console
        self._cpus, self._partition = cpus, partition
        self._descriptors = descriptors
        self._output_folder = output_folder
        self._on_attempt = on_attempt
        self._stdin_position = stdin_position()
        # The start of the time limit, in seconds of time.monotonic(). If the user stops the job
        # (Ctrl-Z) or debugs it, the start is moved forward by the seconds of that pause.
        self._began = time.monotonic()

    def run(self, count: int) -> LaunchResult:
        """Run one attempt of the job, which was restarted ``count`` times before."""
        planned, record = self.plan, self._record
        attempt = record.begin(planned, count)
        spent = time.monotonic() - self._began if count else 0.0
        job = job_of(
            planned,
            record.run_id,
            attempt,
            count,
            spent,
            self._partition,
            warn=self._console.warn,
        )
        if job.files.output_dir is None:
            job = replace(job, files=replace(job.files, output_dir=self._output_folder))
        if self._on_attempt is not None:
            self._on_attempt(job)
        _make_folder_of_results(planned, count)
        if count:
            rewind_stdin(self._stdin_position)
        try:
            result = supervise(
                job,
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
        """Report a failure before restart number ``restart``. If allowed, leave out lost hosts.

        Args:
            result: The result of the attempt that failed.
            restart: The number of the restart, from 1.
            seconds: The pause before the restart, in seconds.
        """
        from poprun_py.launching.failure_report import report_text

        config, warn = self.plan.config, self._console.warn
        report = report_text(result, self.plan.instance_label)
        warn(report.removeprefix(f"{command_name()}: ").rstrip("\n"))
        if config.allow_fewer_hosts:
            self.plan = without_lost_hosts(self.plan, result, warn, self._cpus)
        warn(f"restart {restart} of {config.max_restarts} in {seconds:g} s")

    def has_time(self, seconds: float) -> bool:
        """Return whether a pause of ``seconds`` would end before the time limit; warn if not."""
        limit = self.plan.config.timeout
        left = math.inf if limit is None else self._began + limit - time.monotonic()
        if left > seconds:
            return True
        self._console.warn(
            f"no restart: the time limit of {limit:g} s leaves {max(0.0, left):.1f} s, and the "
            f"pause before a restart is {seconds:g} s"
        )
        return False

    def _check_binding(self, reports: dict[int, dict[str, Any]]) -> None:
        check_binding(self.plan, reports, self._console.binding, self._console.warn)


def _make_folder_of_results(planned: LaunchPlan, restart_count: int) -> None:
    """Make the folder for a function's results if the job calls a function.

    Raises:
        StartError: The folder of the call was removed, or its disk is full.
    """
    call = call_folder(planned.config.program)
    if call is not None:
        with start_errors("the folder for the function's results cannot be made"):
            place_of_call(call, restart_count).folder.mkdir(0o700)


def job_of(
    planned: LaunchPlan,
    run_id: str,
    attempt: AttemptRecord,
    restart_count: int = 0,
    spent_seconds: float = 0.0,
    partition: HeldPartition | None = None,
    *,
    warn: Log = lambda _: None,
) -> Job:
    """Return one attempt of a plan as a job for the supervisor.

    Args:
        planned: The plan.
        run_id: The name of the run.
        attempt: The record of the attempt.
        restart_count: The number of restarts before this attempt.
        spent_seconds: The seconds of the time limit that earlier attempts have used.
        partition: The IPUs of the job; None without a pod.
        warn: A function that takes warnings about the leases on other hosts.
    """
    return Job(
        command=_command(planned, run_id, attempt, restart_count, partition),
        hosts=_hosts(planned, run_id, warn, is_restart=restart_count > 0),
        limits=JobLimits(
            timeout=planned.config.timeout,
            spent=spent_seconds,
            hang_timeout=planned.config.hang_timeout,
            grace=planned.config.grace,
        ),
        files=_files(planned, attempt, restart_count),
        watchers=_watchers(planned, run_id, attempt, partition),
    )


def _command(
    planned: LaunchPlan,
    run_id: str,
    attempt: AttemptRecord,
    restart_count: int,
    partition: HeldPartition | None,
) -> Command:
    of_all = {
        **attempt_variables(run_id, restart_count, planned.config.max_restarts),
        **planned.travelling_variables,
        **attempt.variables,
    }
    return Command(
        words=planned.command,
        environ=planned.mpirun_environ,
        variables=tuple(
            {
                **of_all,
                **planned.channel_variables(index),
                # The job's partition may differ from the planned partition, so its
                # environment variables replace those of the planned partition. The variables that
                # the user has set replace all other variables of the same name.
                **(partition.variables(index) if partition is not None else {}),
                **dict(each.user_env),
            }
            for index, each in enumerate(planned.instances)
        ),
        stdin_instance=planned.config.stdin_instance,
        end_signal=end_signal_of_mpirun(planned.command),
    )


def _hosts(planned: LaunchPlan, run_id: str, warn: Log, *, is_restart: bool) -> Hosts:
    hosts = planned.topology.hosts
    of_instances = [hosts[each.instance.host_index] for each in planned.instances]
    names = tuple(planned.hostnames.get(host.name, "") for host in of_instances)
    others = [host for host in hosts if not host.is_local]
    if not others:
        return Hosts(names=names, network=LOOPBACK)
    return Hosts(
        names=names,
        others=frozenset(index for index, host in enumerate(of_instances) if not host.is_local),
        listen=_listen_address(others, planned.network),
        network=network_of_mpirun(planned.command, planned.network),
        leases=_leases(planned, run_id, is_restart=is_restart),
        refusal_of=partial(_refusal_of, planned, warn),
        explain_failed_start=partial(_explain_failed_start, planned),
    )


def _files(planned: LaunchPlan, attempt: AttemptRecord, restart_count: int) -> JobFiles:
    folder, spans = attempt.folder, attempt.spans
    of_run = None if folder is None else place_of_run(Path(folder))
    call = call_folder(planned.config.program)
    of_call = None if call is None else place_of_call(call, restart_count)
    return JobFiles(
        output_dir=folder,
        places=tuple(place for place in (of_run, spans, of_call) if place is not None),
        call=None if call is None else call / CALL_FILE,
        spans=None if spans is None else spans.folder,
    )


def _watchers(
    planned: LaunchPlan, run_id: str, attempt: AttemptRecord, partition: HeldPartition | None
) -> Watchers:
    config = planned.config
    only = config.only_output_from_instance
    if partition is not None and partition.partition is not None:
        name: str | None = partition.partition.name
    else:
        name = config.vipu_partition or planned.environ.get("IPUOF_VIPU_API_PARTITION_ID")
    return Watchers(
        output=config.output,
        only_output_from=None if only is None else frozenset(only),
        live=config.live,
        recorders=attempt.recorders,
        run_id=run_id,
        program=short_name(config.program),
        ipus=() if config.offline_mode else tuple(_ipus(planned, partition)),
        partition=name,
    )


def _ipus(planned: LaunchPlan, held: HeldPartition | None) -> Iterator[range]:
    """Yield the IPUs of each instance, numbered within the partition."""
    for each in planned.instances:
        instance = each.instance
        yield (
            instance.ipus
            if held is None
            else held.ipus(instance.ipus, instance.ild, planned.topology.ipus_per_ild)
        )


def _leases(planned: LaunchPlan, run_id: str, *, is_restart: bool) -> dict[int, dict[str, Any]]:
    """Return the lease requests for the other hosts, keyed by the host's first instance."""
    if os.environ.get(FOLDER_VARIABLE, "").lower() == "none":
        return {}
    topology = planned.topology
    placements = tuple(p.placement for p in planned.instances)
    found = {}
    for index, host in enumerate(topology.hosts):
        share = share_of_placements(topology, planned.machines, placements, index)
        if not host.is_local and share.cpus:
            found[index * topology.instances_per_host] = {
                "cpus": sorted(share.cpus),
                "numa_nodes": sorted(share.numa_nodes),
                "program": short_name(planned.config.program),
                "run_id": run_id,
                # Another job may have taken the cores before a restart. The restarted job then
                # shares the cores with that job.
                "may_share": planned.config.share_cores or is_restart,
                "within": planned.environ.get(RUN_ID, ""),
            }
    return found


def _refusal_of(planned: LaunchPlan, warn: Log, index: int, answer: dict[str, Any]) -> str:
    """Return why the job cannot lease cores on an instance's host; empty if leasing works."""
    from poprun_py.machines.lease_messages import refusal_text, sharing_text
    from poprun_py.machines.remote_leases import parse_other_jobs

    host = planned.topology.hosts[planned.instances[index].instance.host_index].name
    if problem := answer.get("problem"):
        warn(f"no cores of host {host} are kept from other jobs: {problem}")
    if shared := answer.get("shared_with"):
        warn(sharing_text(f"cores of host {host}", parse_other_jobs(shared, "").leases))
    others = answer.get("other_jobs")
    return refusal_text(host, parse_other_jobs(others, "")) if others else ""


def _listen_address(others: list[Host], network: str) -> str:
    """Return the address of this machine to which the other hosts connect."""
    from poprun_py.machines.host_networks import listen_address

    return listen_address(others, network)


def _explain_failed_start(planned: LaunchPlan) -> str:
    """Check the hosts after a failed start, because mpirun's messages seldom name the reason.

    Returns:
        Sentences about possible causes; empty if all hosts pass the checks.

    Raises:
        StartError: The checks have found the cause on a host.
    """
    from poprun_py.machines.host_checks import diagnose

    return diagnose(
        planned.config,
        planned.topology.hosts,
        mpirun=planned.command[0],
        environ=planned.environ,
        network=planned.network,
    )
