"""Attempts to run a job: its first start, and restarts after failures with growing pauses.

The supervisor runs each attempt as a separate job. If hosts were lost, a restart may use a new plan
without these hosts.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from popdist_py.environment import LOOPBACK, RESUME_EXIT_CODE, RUN_ID
from poprun_py.errors import StartError, start_errors
from poprun_py.instance.job_folders import CheckpointMemory
from poprun_py.launching.host_changes import JobHosts
from poprun_py.launching.job_cores import leases_place, share_of_plan
from poprun_py.launching.replanning import lost_hosts
from poprun_py.launching.restart_pauses import (
    FIRST_PAUSE,
    backoff_seconds,
    has_made_progress,
    pause,
    was_killed,
)
from poprun_py.launching.run_record import AttemptRecord, RunRecord
from poprun_py.launching.saved_states import SavedStates
from poprun_py.machines.host_list import Host
from poprun_py.machines.lease_messages import refusal_text, sharing_text
from poprun_py.machines.lease_sharing import SHARES_WITH_ALL
from poprun_py.machines.remote_leases import parse_other_jobs
from poprun_py.options.byte_sizes import size_in_bytes
from poprun_py.planning.binding_check import check_binding
from poprun_py.planning.core_sharing import has_advice, sharing_rule
from poprun_py.planning.instance_variables import attempt_variables
from poprun_py.planning.job_partition import PARTITION, HeldPartition
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.mpi_commands import end_signal_of_mpirun, network_of_mpirun
from poprun_py.planning.user_program import CALL_FILE, call_folder, short_name
from poprun_py.running.keyboard.keyboard_input import rewind_stdin, stdin_position
from poprun_py.running.supervise.job_description import (
    Command,
    Hosts,
    Job,
    JobFiles,
    JobLimits,
    Watchers,
    place_of_call,
    place_of_run,
)
from poprun_py.running.supervise.job_processes import JobProcesses
from poprun_py.running.supervise.launch_result import LaunchResult, Restart
from poprun_py.running.supervise.running_job import Reports
from poprun_py.running.supervise.signal_pipe import hold_signals
from poprun_py.running.supervise.supervisor import supervise
from poprun_py.terminal import Console, Log, command_name

_WITHOUT_POD = HeldPartition()

OnAttempt = Callable[[Job], None]


@dataclass(slots=True)
class Attempts:
    """All attempts of one launch to run its job.

    Attributes:
        plan: The launch plan of the current attempt, or of the next attempt before a restart.
        record: The object that records the run's attempts, timeline and metrics.
        console: The console that prints the launcher's messages.
        cpus: The CPUs that the job has leased on this machine; empty if it has no lease.
        partition: The partition with the job's IPUs, which all attempts use.
        descriptors: The file descriptors to which the instances' stdout and stderr are written.
        output_folder: A folder for the instances' output, used if --output-dir is not given.
        on_attempt: A function that is called before each attempt, with the attempt's Job.
    """

    plan: LaunchPlan
    record: RunRecord
    console: Console
    cpus: tuple[int, ...] = ()
    partition: HeldPartition = _WITHOUT_POD
    descriptors: tuple[int, int] = (1, 2)
    output_folder: str | None = None
    on_attempt: OnAttempt = lambda _: None
    _hosts: JobHosts = field(init=False)
    _saved: SavedStates = field(init=False)
    # The number of attempts that ended only because the job could use more hosts.
    _num_changes: int = field(default=0, init=False)
    _parent: int = field(default_factory=os.getppid, init=False)
    _states: CheckpointMemory = field(default_factory=CheckpointMemory, init=False)
    _processes: JobProcesses = field(default_factory=JobProcesses, init=False)
    # The result of the last attempt and the time of its end, and the last step of all attempts.
    _failed: LaunchResult | None = field(default=None, init=False)
    _ended_at: float = field(default=0.0, init=False)
    _reached_step: int = field(default=0, init=False)
    # The number of pauses since the last attempt after which the job was restarted without a pause.
    _num_pauses: int = field(default=0, init=False)
    # The names of the variables that wrappers of earlier attempts may have.
    _variables: set[str] = field(default_factory=set, init=False)
    _stdin_position: int | None = field(default_factory=stdin_position, init=False)
    # The value of time.monotonic() when the job's time limit began. The time in which the user
    # suspends (Ctrl-Z) or debugs the job is added to this value.
    _began: float = field(default_factory=lambda: time.monotonic(), init=False)

    def __post_init__(self) -> None:
        self._hosts = JobHosts(self.plan, self.console, self.cpus)
        self._saved = SavedStates(self._states, self.console)

    def run(self) -> LaunchResult:
        """Run the job; restart it after failures as often as --max-restarts and --timeout allow.

        A restart that only takes in more hosts does not count.
        """
        restart = 0
        with hold_signals(), contextlib.closing(self):
            while True:
                result, lost = self._attempt(restart)
                self._states.hold()  # all processes of the attempt may have been killed
                seconds = self._seconds_before_restart(result)
                restart += 1
                if not self._allows_restart(result, restart) or not self.has_time(seconds):
                    return result
                if not seconds:
                    self._num_pauses = 0
                elif not (self.plan.config.memory_checkpoints and was_killed(result)):
                    self._num_pauses += 1
                self._num_changes += result.ended_for_hosts
                number = self._prepare_restart(result, lost, restart - self._num_changes, seconds)
                if number:
                    return self._saved.finish(_ended_by(result, number, restart))

    def close(self) -> None:
        """End kept wrappers, and remove the states in memory."""
        self._processes.dismiss(is_restarted=False)
        self._states.release(is_kept=False)

    def _attempt(self, count: int) -> tuple[LaunchResult, Sequence[Host]]:
        """Run one attempt; return its result and the hosts that it has lost.

        A host or an instance can also be lost while a restart begins. Such a restart is a failed
        attempt, if the job may go on without its lost hosts, waits for them, or keeps its state in
        memory.

        Raises:
            StartError: The job could not start.
        """
        try:
            result = self.run_once(count)
        except StartError as error:
            if not count or not self._survives_failed_starts:
                raise
            code, reason = error.exit_code, str(error)
            result = LaunchResult(
                exit_code=code, reason=reason, may_restart=True, restart_count=count
            )
            if self._restart_after(result, count + 1) is Restart.NONE:
                result = self._saved.finish(result)
            self.record.end(result)
            return result, self._hosts.silent_hosts()
        return result, lost_hosts(self.plan, result)

    @property
    def _survives_failed_starts(self) -> bool:
        config = self.plan.config
        return config.allow_fewer_hosts or bool(config.wait_for_hosts) or config.memory_checkpoints

    def run_once(self, count: int) -> LaunchResult:
        """Run one attempt of the job; ``count`` is the number of restarts before this attempt."""
        planned = self.plan
        attempt = self.record.begin(planned, count)
        spent = time.monotonic() - self._began if count else 0.0
        job = job_of(planned, attempt, spent, self.partition, warn=self.console.warn)
        output_dir = job.files.output_dir or self.output_folder
        states = self._states.path
        files = replace(job.files, output_dir=output_dir, checkpoint_memory=states)
        of_next = partial(
            job_of, attempt=replace(attempt, restart_count=count + 1), partition=self.partition
        )
        job = replace(job, files=files, hosts=self._hosts.changeable(job.hosts, of_next))
        if planned.config.memory_checkpoints:
            names = {name for each in job.command.variables for name in each}
            job = replace(job, command=job.command.resetting(self._variables - names))
            self._variables |= names
        self.on_attempt(job)
        _make_folder_of_results(planned, count)
        if count:
            rewind_stdin(self._stdin_position)

        def on_started(reports: Reports) -> None:
            check_binding(planned, reports, self.console.binding, self.console.warn)
            self.record.prepare_page()

        began = time.monotonic()
        result = supervise(
            job,
            log=self.console.log,
            on_started=on_started,
            while_starting=self.record.prepare,
            descriptors=self.descriptors,
            restart_after=lambda result: self._restart_after(result, count + 1),
            on_signal=self._saved.on_signal,
            processes=self._processes,
        )
        if self._restart_after(result, count + 1) is Restart.NONE:
            result = self._saved.finish(result)
        self._note_restart(result, began)
        self.record.end(result)
        self._began += result.paused_seconds
        return replace(result, restart_count=count)

    def _note_restart(self, result: LaunchResult, began: float) -> None:
        """Report what the restart before the attempt that began at ``began`` has cost."""
        if self._failed is not None:
            from poprun_py.launching.restart_costs import restart_cost

            pause_seconds = began - self._ended_at
            cost = restart_cost(self._failed, pause_seconds, result, self._reached_step)
            if cost is not None:
                self.console.tell(f"the last restart {cost.text}")
                self.record.note_restart(cost)
        self._reached_step = max(self._reached_step, result.last_step or 0)
        self._failed, self._ended_at = result, time.monotonic()

    def _restart_after(self, result: LaunchResult, restart: int) -> Restart:
        """Return how the job is restarted after ``result``, by restart number ``restart``."""
        # The wrappers unlock the folder after this call, and the launcher still copies from it.
        self._states.hold()
        seconds = self._seconds_before_restart(result)
        if not self._allows_restart(result, restart) or self._seconds_left() <= seconds:
            return Restart.NONE
        # After a pause, the reason of the failure may be anything, so all processes start anew.
        is_anew = seconds or not self.plan.config.memory_checkpoints
        return Restart.NEW_MPIRUN if is_anew else Restart.SAME_WRAPPERS

    def _allows_restart(self, result: LaunchResult, restart: int) -> bool:
        if result.ended_for_hosts:
            return True
        failures = restart - self._num_changes
        return result.may_restart and failures <= self.plan.config.max_restarts

    def _seconds_before_restart(self, result: LaunchResult) -> float:
        """Return the pause before the restart after ``result``; 0 after progress.

        The pauses grow while the program itself fails. With states in memory, a kill from outside
        has the first pause, because the program has not caused the failure.
        """
        keeps_states = self.plan.config.memory_checkpoints
        if (keeps_states and has_made_progress(result)) or result.ended_for_hosts:
            return 0.0
        if keeps_states and was_killed(result):
            return FIRST_PAUSE
        return backoff_seconds(self._num_pauses + 1)

    def _seconds_left(self) -> float:
        limit = self.plan.config.timeout
        return math.inf if limit is None else self._began + limit - time.monotonic()

    def has_time(self, seconds: float) -> bool:
        """Return whether the job's time limit allows a pause of ``seconds``; warn if not."""
        left = self._seconds_left()
        if left > seconds:
            return True
        self.console.warn(
            f"the job is not restarted: its time limit of {self.plan.config.timeout:g} s leaves "
            f"{max(0.0, left):.1f} s, but the pause before a restart takes {seconds:g} s"
        )
        return False

    def _prepare_restart(
        self, result: LaunchResult, lost: Sequence[Host], restart: int, seconds: float
    ) -> int:
        """Report a failure, choose the hosts of the next attempt, and wait.

        Returns:
            0, or the number of the signal that ended the wait.
        """
        from poprun_py.launching.failure_report import report_text

        warn = self.console.warn
        if not result.ended_for_hosts:
            report = report_text(result, self.plan.instance_label)
            warn(report.removeprefix(f"{command_name()}: ").rstrip("\n"))
        self._hosts.note_end(result, lost)
        number = self._hosts.choose(
            lambda seconds: pause(seconds, self._parent), lambda: self._seconds_left() > 0
        )
        self.plan = self._hosts.plan
        if number or result.ended_for_hosts:
            return number
        when = f"in {seconds:g} s" if seconds else "at once"
        warn(f"restarting the job {when} (restart {restart} of {self.plan.config.max_restarts})")
        return pause(seconds, self._parent)


def _make_folder_of_results(planned: LaunchPlan, restart_count: int) -> None:
    """If the job calls a Python function, make the folder for the function's results."""
    call = call_folder(planned.config.program)
    if call is not None:
        with start_errors("the folder for the function's results cannot be made"):
            place_of_call(call, restart_count).folder.mkdir(0o700)


def _ended_by(result: LaunchResult, number: int, restart: int) -> LaunchResult:
    """Return the failed attempt's result, changed to say that a signal prevented the restart."""
    return replace(
        result,
        # SIGUSR1 asks the job to stop in a state from which it can be resumed. Between two
        # attempts, the job can always be resumed.
        exit_code=RESUME_EXIT_CODE if number == signal.SIGUSR1 else 128 + number,
        reason=f"{signal.Signals(number).name} received before restart {restart}",
        hung=(),
        may_restart=False,
    )


# --- from a plan to the Job that the supervisor runs ----------------------------------------------


def job_of(
    planned: LaunchPlan,
    attempt: AttemptRecord,
    spent_seconds: float = 0.0,
    partition: HeldPartition = _WITHOUT_POD,
    *,
    warn: Log = lambda _: None,
) -> Job:
    """Return the Job with which the supervisor runs one attempt of a plan.

    Earlier attempts have used ``spent_seconds`` of the job's time limit. ``warn`` is called with
    each warning about core leases on other hosts.
    """
    config = planned.config
    return Job(
        command=_command(planned, attempt, partition),
        hosts=_hosts(planned, attempt, warn),
        limits=JobLimits(
            timeout=config.timeout,
            spent=spent_seconds,
            hang_timeout=config.hang_timeout,
            grace=config.grace,
        ),
        files=_files(planned, attempt),
        watchers=_watchers(planned, attempt, partition),
    )


def _command(planned: LaunchPlan, attempt: AttemptRecord, partition: HeldPartition) -> Command:
    max_restarts = planned.config.max_restarts
    of_all = {
        **attempt_variables(attempt.run_id, attempt.restart_count, max_restarts),
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
                # The job may use another partition than planned. The environment variables of the
                # used partition replace the planned variables. Environment variables that the user
                # has set override all others.
                **partition.variables(index),
                **dict(each.user_env),
            }
            for index, each in enumerate(planned.instances)
        ),
        # MPI arguments of single instances are only for wrappers that run the same instance again.
        words_for=(
            None
            if planned.compact or planned.config.instance_mpi_local_args
            else planned.command_for
        ),
        stdin_instance=planned.config.stdin_instance,
        end_signal=end_signal_of_mpirun(planned.command),
    )


def _hosts(planned: LaunchPlan, attempt: AttemptRecord, warn: Log) -> Hosts:
    hosts = planned.topology.hosts
    of_instances = [hosts[each.instance.host_index] for each in planned.instances]
    names = tuple(planned.hostnames.get(host.name, "") for host in of_instances)
    given = tuple(host.name for host in of_instances)
    others = [host for host in hosts if not host.is_local]
    if not others:
        return Hosts(names=names, given=given, network=LOOPBACK)
    from poprun_py.machines.host_checks import diagnose
    from poprun_py.machines.host_networks import listen_address

    return Hosts(
        names=names,
        given=given,
        others=frozenset(index for index, host in enumerate(of_instances) if not host.is_local),
        listen=listen_address(others, planned.network),
        network=network_of_mpirun(planned.command, planned.network),
        leases=_leases(planned, attempt),
        refusal_of=partial(_refusal_of, planned, warn),
        # If mpirun fails to start the instances, its messages seldom name the reason.
        explain_failed_start=partial(
            diagnose,
            planned.config,
            hosts,
            mpirun=planned.command[0],
            environ=planned.environ,
            network=planned.network,
        ),
    )


def _files(planned: LaunchPlan, attempt: AttemptRecord) -> JobFiles:
    folder, spans = attempt.folder, attempt.spans
    of_run = None if folder is None else place_of_run(Path(folder))
    call = call_folder(planned.config.program)
    of_call = None if call is None else place_of_call(call, attempt.restart_count)
    return JobFiles(
        output_dir=folder,
        output_limit=size_in_bytes(planned.config.log_limit),
        places=tuple(place for place in (of_run, spans, of_call) if place is not None),
        call=None if call is None else call / CALL_FILE,
        spans=None if spans is None else spans.folder,
    )


def _watchers(planned: LaunchPlan, attempt: AttemptRecord, held: HeldPartition) -> Watchers:
    config, per_ild = planned.config, planned.topology.ipus_per_ild
    only = config.only_output_from_instance
    named = config.vipu_partition or planned.environ.get(PARTITION)
    instances = () if config.offline_mode else planned.topology.instances
    return Watchers(
        output=config.output,
        only_output_from=None if only is None else frozenset(only),
        live=config.live,
        recorders=attempt.recorders,
        run_id=attempt.run_id,
        program=short_name(config.program),
        labels=attempt.labels,
        ipus=tuple(held.ipus(each.ipus, each.ild, per_ild) for each in instances),
        partition=named if held.partition is None else held.partition.name,
    )


def _leases(planned: LaunchPlan, attempt: AttemptRecord) -> dict[int, dict[str, Any]]:
    """Return the requests to lease cores of other hosts, keyed by each host's first instance."""
    if leases_place() is None:
        return {}
    config, topology = planned.config, planned.topology
    found = {}
    for index, host in enumerate(topology.hosts):
        share = share_of_plan(planned, index)
        if not host.is_local and share.cpus:
            found[index * topology.instances_per_host] = {
                "cpus": sorted(share.cpus),
                "numa_nodes": sorted(share.numa_nodes),
                "program": short_name(planned.config.program),
                "run_id": attempt.run_id,
                # Another job may lease these cores between a failure and the restart. The restarted
                # job then shares the cores with the other job.
                "sharing": SHARES_WITH_ALL if attempt.restart_count else sharing_rule(config),
                "is_shareable": share.is_shareable,
                "within": planned.environ.get(RUN_ID, ""),
            }
    return found


def _refusal_of(planned: LaunchPlan, warn: Log, index: int, answer: dict[str, Any]) -> str:
    """Return an error text if other jobs hold the cores of an instance's host; else no text."""
    host = planned.topology.hosts[planned.instances[index].instance.host_index].name
    if problem := answer.get("problem"):
        warn(
            f"the cores of this job on host {host} are not leased, so other jobs may use the same "
            f"cores: {problem}"
        )
    if shared := answer.get("shared_with"):
        leases, advice = parse_other_jobs(shared, "").leases, has_advice(planned.config)
        if leases:
            warn(sharing_text(leases, host=host, has_advice=advice))
    if not (others := answer.get("other_jobs")):
        return ""
    leases, queue = parse_other_jobs(others, "")
    return refusal_text(leases, queue, host=host)
