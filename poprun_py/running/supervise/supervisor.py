"""The supervisor, which starts mpirun, handles the events of a job, and returns the result.

A ``Job`` contains the command, the variables of each instance, and the limits, so the supervisor
does not depend on the MPI implementation or on the hardware.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from poprun_py.errors import StartError, start_errors
from poprun_py.instance import process_control
from poprun_py.instance.job_folders import folder_locations, remove_abandoned
from poprun_py.running.supervise import outcome
from poprun_py.running.supervise.instance_output import InstanceOutput
from poprun_py.running.supervise.job_description import Command, Job
from poprun_py.running.supervise.job_processes import JobProcesses
from poprun_py.running.supervise.launch_result import LaunchResult, Restart, describe
from poprun_py.running.supervise.launcher_folder import SOCKET_NAME, mpirun_folder_variables
from poprun_py.running.supervise.mpirun_process import Mpirun, mpirun_open_files
from poprun_py.running.supervise.running_job import Reports, RunningJob
from poprun_py.running.supervise.signal_pipe import SignalPipe

# The seconds that instances have to report their ends after mpirun has ended.
_REPORT_SECONDS = 10.0
# The seconds that a keeper has to replace a wrapper that was killed.
_KEEPER_SECONDS = 0.5
_PARTS_OF_MPI = (
    "programs have started MPI, but no single mpirun has started the wrappers of all instances"
)
# The longest wait for an event while a job is ending, and while it is running.
_ENDING_WAIT_SECONDS, _WAIT_SECONDS = 0.2, 1.0


def supervise(
    job: Job,
    *,
    log: Callable[[str], None],
    on_started: Callable[[Reports], None] | None = None,
    while_starting: Callable[[], None] = lambda: None,
    descriptors: tuple[int, int] = (1, 2),
    restart_after: Callable[[LaunchResult], Restart] = lambda _: Restart.NONE,
    on_signal: Callable[[int], None] = lambda _: None,
    processes: JobProcesses | None = None,
) -> LaunchResult:
    """Run ``job`` to its end and return its result.

    No process of the job is left running, except kept wrappers without programs.

    Args:
        job: The job.
        log: Writes a line of the launcher's own log.
        on_started: Called once, when all programs run, with the reports of their wrappers.
        while_starting: Called once, while mpirun starts the wrappers.
        descriptors: The file descriptors of the launcher's stdout and stderr.
        restart_after: Tells whether and how the job is restarted after a result.
        on_signal: Called with each signal to the launcher, before the job ends because of it.
        processes: The wrappers that the attempt before this one has kept, if any. This attempt
            keeps its wrappers here for the next attempt.

    Raises:
        StartError: The job could not start.
    """
    processes = processes or JobProcesses()
    processes.prepare(job)
    try:
        output = InstanceOutput(job, descriptors, log)
        parts = RunningJob(job, output, processes.folder, on_started, processes.control, on_signal)
        try:
            with contextlib.ExitStack() as resources:
                signals = _start(parts, processes, resources)
                while_starting()
                return _run(parts, processes, signals, restart_after)
        except StartError as error:
            explain = job.hosts.explain_failed_start
            # If the launcher knows no reason, the other hosts may know why the job did not start.
            is_unexplained = parts.began > 0.0 and not parts.shutdown.is_refused
            if is_unexplained and explain is not None and (problems := explain()):
                raise StartError(f"{error}. {problems}") from None
            raise
    except BaseException:
        processes.is_kept = False
        raise
    finally:
        processes.close()


def _start(
    parts: RunningJob, processes: JobProcesses, resources: contextlib.ExitStack
) -> SignalPipe:
    """Start mpirun for wrappers that are not kept; return the signals for the loop."""
    job, output, control, began = parts.job, parts.output, parts.control, time.monotonic()

    def start(
        job: Job, words: tuple[str, ...], on_signal: Callable[[int], None] = lambda _: None
    ) -> Mpirun:
        command = replace(job.command, words=words)
        return Mpirun(
            replace(job, command=command),
            _environment(parts, command),
            control.address,
            selector,
            output.log,
            mpirun_files,
            on_signal,
        )

    with start_errors("the launcher cannot run the job"):
        open_files = process_control.raise_open_files()
        resources.callback(process_control.set_open_files, open_files)
        mpirun_files = mpirun_open_files(job, open_files)
        if mpirun_files != open_files:
            # Only mpirun may open more files. Programs get the user's own limit.
            parts.open_files = open_files
        signals = SignalPipe(resources)
        selector = processes.open_selector()
        selector.register(signals, selectors.EVENT_READ, parts.on_signals)
        resources.callback(selector.unregister, signals)
        resources.callback(output.close)
        resources.callback(parts.keyboard.close)
        # Orphaned processes of a killed wrapper or mpirun become children of the launcher, which
        # ends these processes after the job.
        if not process_control.become_subreaper():
            # A Python program that launches jobs does not expect to adopt orphans outside a job.
            resources.callback(process_control.end_as_subreaper)
        resources.callback(processes.end)
        if not processes.kept:
            processes.open_control(control, job)
        control.begin_next(parts, processes.kept, job.num_instances)
        mpirun = processes.mpirun
        if mpirun is None or processes.words:
            on_signal = parts.shutdown.on_signal_of_mpirun
            mpirun = processes.mpirun = start(job, processes.words, on_signal)
        else:
            mpirun.begin_next(output.log, parts.shutdown.on_signal_of_mpirun)
    # The following preparations take place while mpirun starts.
    parts.begin(mpirun, selector, began, partial(processes.start_next, start))
    resources.callback(parts.end_questions)
    parts.begin_next()
    if processes.words:
        remove_abandoned(folder_locations())
    return signals


def _run(
    parts: RunningJob,
    processes: JobProcesses,
    signals: SignalPipe,
    restart_after: Callable[[LaunchResult], Restart],
) -> LaunchResult:
    """Handle the events of a job until the job has ended, and return the job's result."""
    selector = processes.selector
    output, control, mpirun = parts.output, parts.control, parts.mpirun
    while not _is_over(parts, processes, restart_after):
        for key, events in selector.select(_wait_seconds(parts)):
            key.data(key.fileobj, events)
        has_just_ended = mpirun.has_just_ended()
        if _needs_mpirun(parts) and (has_just_ended or _lacks_mpirun(parts, processes)):
            has_ended = mpirun.ended_at is not None
            parts.shutdown.on_end_of_mpirun(
                f"mpirun ended with {describe(mpirun.code)}" if has_ended else _PARTS_OF_MPI,
                is_early=parts.is_any_running,
            )
        now = time.monotonic()
        for each in parts.timed:
            each.on_time(now)
        control.pause(output.is_full)
    for index in control.peers:
        output.finish(index)
    view = parts.observer.finish(time.monotonic())
    output.show_panel(())
    _drain_output(parts, selector, signals)
    result = replace(_result(parts), view=view)
    parts.answer_end(result)
    return result


def _environment(parts: RunningJob, command: Command) -> dict[str, str]:
    """Return the environment of the mpirun that executes a command."""
    control = parts.control
    environ = {
        **mpirun_folder_variables(parts.folder, command.words, command.environ),
        **{name: value for name, value in command.environ.items() if name != "_"},
        "POPRUN_CONTROL": control.address,
        "POPRUN_TOKEN": control.token,
    }
    if not parts.keyboard.is_there:
        environ["POPRUN_STDIN"] = str(parts.folder / SOCKET_NAME)
        environ["POPRUN_STDIN_READER"] = str(command.stdin_instance)
    # MPICH 5 does not pass the last environment variable on, so an unimportant one comes last.
    environ["_"] = command.words[0]
    return environ


def _needs_mpirun(parts: RunningJob) -> bool:
    """Tell whether the job ends with mpirun.

    With checkpoints in memory, the wrappers leave mpirun when they connect. Programs that start MPI
    need mpirun even then.
    """
    has_left = parts.job.hosts.keeps_state and parts.control.is_complete
    return not has_left or any(peer.started_mpi for peer in parts.control.peers.values())


def _lacks_mpirun(parts: RunningJob, processes: JobProcesses) -> bool:
    """Tell whether programs run without a request to end, and no mpirun serves all of them."""
    is_served = parts.mpirun.ended_at is None and (
        processes.is_whole or not parts.control.is_complete
    )
    return not is_served and parts.is_any_running and parts.shutdown.asked_at is None


def _wait_seconds(parts: RunningJob) -> float:
    is_ending = parts.shutdown.asked_at is not None or parts.mpirun.is_expected_to_end
    longest = _ENDING_WAIT_SECONDS if is_ending else _WAIT_SECONDS
    seconds = min(each.next_deadline() for each in parts.timed) - time.monotonic()
    return min(longest, max(0.0, seconds))


def _is_over(
    parts: RunningJob,
    processes: JobProcesses,
    restart_after: Callable[[LaunchResult], Restart],
) -> bool:
    """Tell whether all instances have ended, and mpirun has ended or the wrappers are kept."""
    control, mpirun, is_any_running = parts.control, parts.mpirun, parts.is_any_running
    if control.is_complete and not is_any_running:
        if not mpirun.is_expected_to_end:
            restart = _restart_after(parts, restart_after)
            if restart is Restart.SAME_WRAPPERS and _awaits_keepers(parts):
                return False
            if restart is Restart.SAME_WRAPPERS and _may_keep_wrappers(parts):
                processes.is_kept = True
                return True
            control.say_bye(is_restarted=restart is not Restart.NONE)
            mpirun.expect_end(processes.end_seconds, time.monotonic())
        return mpirun.ended_at is not None and not _awaits_wrappers(parts)
    if not _needs_mpirun(parts):
        return False
    return mpirun.ended_at is not None and (
        not is_any_running or time.monotonic() > mpirun.ended_at + _REPORT_SECONDS
    )


def _awaits_wrappers(parts: RunningJob) -> bool:
    """Tell whether wrappers that have left mpirun still have time to release their folders."""
    has_time = parts.job.hosts.keeps_state and time.monotonic() < parts.mpirun.end_by
    return has_time and parts.control.is_any_open


def _restart_after(parts: RunningJob, restart_after: Callable[[LaunchResult], Restart]) -> Restart:
    """Tell how the job is restarted, after all instances have ended."""
    try:
        return restart_after(outcome.launch_result(_ending(parts)))
    except StartError:
        return Restart.NONE


def _awaits_keepers(parts: RunningJob) -> bool:
    """Tell whether the keeper of a killed wrapper still has time to replace the wrapper."""
    since = time.monotonic() - _KEEPER_SECONDS
    peers = parts.control.peers.values()
    return any(peer.lost_at > since and not peer.connection.is_open for peer in peers)


def _may_keep_wrappers(parts: RunningJob) -> bool:
    """Tell whether the wrappers that are left can run other programs."""
    # MPI cannot start twice under the same wrapper: the second MPI_Init would wait for ever.
    return not any(peer.started_mpi for peer in parts.control.peers.values())


def _drain_output(parts: RunningJob, selector: selectors.BaseSelector, signals: SignalPipe) -> None:
    """Write the rest of the output; a stopped job waits a limited time for its reader."""
    output, began = parts.output, time.monotonic()
    while not output.is_written:
        for key, events in selector.select(0):
            if key.fileobj is signals:
                key.data(key.fileobj, events)
        now = time.monotonic()
        parts.limits.on_time(now)
        if parts.shutdown.stop is not None and output.stopped_at is None:
            # All instances ended before the launcher asked them to end.
            output.stopped_at = began
        output.on_time(now, wait_seconds=0.1)


def _result(parts: RunningJob) -> LaunchResult:
    for line in parts.mpirun.output.splitlines():
        parts.output.log(f"mpirun: {line}")
    result = outcome.launch_result(_ending(parts))
    if result.exit_code != 0 or parts.job.watchers.live:
        parts.output.begin_report()
    stop = parts.shutdown.stop
    return replace(
        result,
        paused_seconds=parts.limits.paused_seconds,
        ending_seconds=0.0 if stop is None else time.monotonic() - stop.at,
    )


def _ending(parts: RunningJob) -> outcome.Ending:
    mpirun, stop = parts.mpirun, parts.shutdown.stop
    return outcome.Ending(
        job=parts.job,
        files=parts.folder.parent,
        shortage=parts.shortages.result(
            has_mpirun_failed=mpirun.code != 0, was_stopped=stop is not None
        ),
        peers=parts.control.peers,
        visible_instances=parts.output.visible_instances,
        seconds=time.monotonic() - parts.began,
        mpirun_code=mpirun.code,
        mpirun_output=mpirun.output,
        stop=stop,
    )
