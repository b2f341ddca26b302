"""The supervisor, which runs a job from the start of mpirun to its result, in one loop.

A ``Job`` has the command, the values for each instance, and the limits, so the supervisor does not
depend on MPI or on the hardware.
"""

from __future__ import annotations

import contextlib
import selectors
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from poprun_py.errors import StartError, start_errors
from poprun_py.instance import control_protocol, process_control
from poprun_py.instance.job_folders import folder_locations, remove_abandoned
from poprun_py.running.supervise import outcome
from poprun_py.running.supervise.instance_output import InstanceOutput
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.launch_result import LaunchResult, describe
from poprun_py.running.supervise.launcher_folder import (
    SOCKET_NAME,
    make_launcher_folder,
    make_shared_memory_folder,
    mpirun_folder_variables,
)
from poprun_py.running.supervise.mpirun_process import Mpirun, mpirun_open_files
from poprun_py.running.supervise.running_job import Reports, RunningJob
from poprun_py.running.supervise.signal_pipe import SignalPipe

# The time for instances to report their ends after the end of mpirun.
_REPORT_SECONDS = 10.0
# The longest wait for an event while a job is ending, and while it is running.
_ENDING_WAIT_SECONDS, _WAIT_SECONDS = 0.2, 1.0
# The time for mpirun to end after the last instance. It is shorter after the loss of a host,
# because mpirun's daemon there never answers.
_MPIRUN_SECONDS, _MPIRUN_SECONDS_AFTER_LOSS = 10.0, 1.0
_CANNOT_RUN = "the launcher cannot run the job"


def supervise(
    job: Job,
    *,
    log: Callable[[str], None],
    on_started: Callable[[Reports], None] | None = None,
    descriptors: tuple[int, int] = (1, 2),
) -> LaunchResult:
    """Run ``job`` to its end and return its result; no process of the job is left running.

    Args:
        job: The job.
        log: Writes a line of the launcher's own log.
        on_started: Called once, when all programs run, with the reports of their wrappers.
        descriptors: The launcher's stdout and stderr, for the output of the instances.

    Raises:
        StartError: The job could not start.
    """
    folder = make_launcher_folder()
    try:
        output = InstanceOutput(job, descriptors, log)
        supervisor = _Supervisor(job, Path(folder.path), output, on_started)
        try:
            with contextlib.ExitStack() as resources:
                return supervisor.run(resources)
        except StartError as error:
            explain = job.hosts.explain_failed_start if supervisor.can_hosts_explain else None
            if problems := explain() if explain is not None else "":
                raise StartError(f"{error}. {problems}") from None
            raise
    finally:
        folder.remove()


class _Supervisor:
    """Runs one job in one thread."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        output: InstanceOutput,
        on_started: Callable[[Reports], None] | None,
    ) -> None:
        self._job = job
        self._folder = folder
        self._output = output
        self._log = output.log
        self._parts = RunningJob(job, output, folder, on_started)
        self._mpirun: Mpirun | None = None

    @property
    def can_hosts_explain(self) -> bool:
        """Whether other hosts may know why the job did not start, as no reason is known yet."""
        return self._mpirun is not None and not self._parts.shutdown.is_refused

    def run(self, resources: contextlib.ExitStack) -> LaunchResult:
        """Start mpirun and handle events until everything has ended.

        Args:
            resources: Releases what the job has acquired, also after an error.
        """
        job, parts, output, began = self._job, self._parts, self._output, time.monotonic()
        with start_errors(_CANNOT_RUN):
            open_files = process_control.raise_open_files()
            resources.callback(process_control.set_open_files, open_files)
            mpirun_files = mpirun_open_files(job, open_files)
            if mpirun_files != open_files:
                # Programs get the user's own limit. Only mpirun's limit was raised.
                parts.open_files = open_files
            signals = resources.enter_context(SignalPipe())
            selector = resources.enter_context(selectors.DefaultSelector())
            selector.register(signals, selectors.EVENT_READ, parts.on_signals)
            resources.callback(output.close)
            resources.callback(parts.keyboard.close)
            resources.callback(parts.control.close)
            parts.control.open(selector, self._folder, job.hosts.listen)
            token = parts.control.token if job.hosts.listen is not None else ""
            if (memory := make_shared_memory_folder(self._folder, token)) is not None:
                resources.callback(memory.remove)
            # Orphans of a killed wrapper become children of the launcher, which ends them after the
            # job.
            if not process_control.become_subreaper():
                # A Python program that launches jobs does not expect to get orphans outside a job.
                resources.callback(process_control.end_as_subreaper)
            resources.callback(parts.diagnosis.end)
            self._mpirun = mpirun = Mpirun(
                job,
                self._environment(),
                parts.control.address,
                selector,
                self._log,
                mpirun_files,
                parts.shutdown.on_signal_of_mpirun,
            )
            resources.callback(mpirun.end)
        # The following preparations take place while mpirun starts.
        parts.begin(mpirun, selector, began)
        remove_abandoned(folder_locations())
        while not self._is_over(mpirun):
            for key, events in selector.select(self._wait_seconds(mpirun)):
                key.data(key.fileobj, events)
            if mpirun.has_just_ended():
                parts.shutdown.on_end_of_mpirun(
                    f"mpirun ended with {describe(mpirun.code)}", is_early=parts.is_any_running
                )
            now = time.monotonic()
            for each in parts.timed:
                each.on_time(now)
            parts.control.pause(output.is_full)
        for index in parts.control.peers:
            output.finish(index)
        view = parts.observer.finish(time.monotonic())
        output.show_panel(())
        self._drain_output(selector, signals)
        return replace(self._result(mpirun, time.monotonic() - began), view=view)

    def _environment(self) -> dict[str, str]:
        """Return the environment of mpirun."""
        command, control = self._job.command, self._parts.control
        environ = {
            **mpirun_folder_variables(self._folder, command.words, command.environ),
            **{name: value for name, value in command.environ.items() if name != "_"},
            "POPRUN_CONTROL": control.address,
            "POPRUN_TOKEN": control.token,
        }
        if not self._parts.keyboard.is_there:
            environ["POPRUN_STDIN"] = str(self._folder / SOCKET_NAME)
            environ["POPRUN_STDIN_READER"] = str(command.stdin_instance)
        # MPICH 5 does not pass the last variable to other hosts, so an unimportant variable comes
        # last.
        environ["_"] = command.words[0]
        return environ

    def _wait_seconds(self, mpirun: Mpirun) -> float:
        is_ending = self._parts.shutdown.asked_at is not None or mpirun.is_expected_to_end
        longest = _ENDING_WAIT_SECONDS if is_ending else _WAIT_SECONDS
        seconds = min(each.next_deadline() for each in self._parts.timed) - time.monotonic()
        return min(longest, max(0.0, seconds))

    def _is_over(self, mpirun: Mpirun) -> bool:
        """Tell whether all instances have reported their ends and mpirun has ended."""
        control, is_any_running = self._parts.control, self._parts.is_any_running
        if control.is_complete and not is_any_running:
            if not mpirun.is_expected_to_end:
                control.broadcast(control_protocol.BYE, None)
                ends = [peer.instance_end or {} for peer in control.peers.values()]
                is_host_lost = any(end.get("lost") for end in ends)
                mpirun.expect_end(
                    _MPIRUN_SECONDS_AFTER_LOSS if is_host_lost else _MPIRUN_SECONDS,
                    time.monotonic(),
                )
            return mpirun.ended_at is not None
        return mpirun.ended_at is not None and (
            not is_any_running or time.monotonic() > mpirun.ended_at + _REPORT_SECONDS
        )

    def _drain_output(self, selector: selectors.BaseSelector, signals: SignalPipe) -> None:
        """Write the rest of the output; after a stop, its readers have only limited time."""
        parts, output, began = self._parts, self._output, time.monotonic()
        while not output.is_written:
            for key, events in selector.select(0):
                if key.fileobj is signals:
                    key.data(key.fileobj, events)
            now = time.monotonic()
            parts.limits.on_time(now)
            if parts.shutdown.stop is not None and output.stopped_at is None:
                # All instances ended before they were asked to end.
                output.stopped_at = began
            output.write(now, wait_seconds=0.1)

    def _result(self, mpirun: Mpirun, seconds: float) -> LaunchResult:
        parts = self._parts
        for line in mpirun.output.splitlines():
            self._log(f"mpirun: {line}")
        stop = parts.shutdown.stop
        ending = outcome.Ending(
            job=self._job,
            files=self._folder.parent,
            shortage=parts.shortages.result(
                has_mpirun_failed=mpirun.code != 0, was_stopped=stop is not None
            ),
            peers=parts.control.peers,
            visible_instances=self._output.visible_instances,
            seconds=seconds,
            mpirun_code=mpirun.code,
            mpirun_output=mpirun.output,
            stop=stop,
        )
        result = outcome.launch_result(ending)
        if result.exit_code != 0 or self._job.watchers.live:
            self._output.begin_report()
        return replace(result, paused_seconds=parts.limits.paused_seconds)
