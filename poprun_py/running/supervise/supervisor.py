"""The supervisor, which runs a job from the start of mpirun to its result, in one loop.

A ``Job`` has the command, the values for each instance, and the limits, so the supervisor does not
depend on MPI or on the hardware. The other modules of this package hold a connection or a process,
or make a decision. The supervisor connects them.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from popdist_py.errors import counted
from poprun_py.errors import StartError, explain_os_error, start_errors
from poprun_py.instance import control_protocol, process_control
from poprun_py.instance.job_folders import folder_locations, remove_abandoned
from poprun_py.running.keyboard.keyboard_input import KeyboardInput, open_terminal
from poprun_py.running.keyboard.suspension import take_signal
from poprun_py.running.screen.tagged_output import OutputStream, tag_width
from poprun_py.running.supervise import outcome
from poprun_py.running.supervise.control_channel import ControlChannel, Peer
from poprun_py.running.supervise.file_transfer import FileTransfer
from poprun_py.running.supervise.frame_dispatch import FrameDispatcher, Reports
from poprun_py.running.supervise.hang_detection import HangCheck, HangDetector
from poprun_py.running.supervise.host_clocks import HostClocks
from poprun_py.running.supervise.inspection import holdings
from poprun_py.running.supervise.instance_output import InstanceOutput
from poprun_py.running.supervise.job import Cause, Job, LaunchResult, StackGroup, describe
from poprun_py.running.supervise.job_start import Finding, ProgramStart, StartDiagnosis
from poprun_py.running.supervise.launcher_folder import (
    SOCKET_NAME,
    make_launcher_folder,
    make_shared_memory_folder,
    mpirun_folder_variables,
)
from poprun_py.running.supervise.mpirun_process import Mpirun, mpirun_open_files
from poprun_py.running.supervise.resource_shortage import ShortageCheck
from poprun_py.running.supervise.shutdown import JobShutdown
from poprun_py.running.supervise.signal_pipe import SignalPipe
from poprun_py.running.supervise.stacks import StackCollector, groups_text
from poprun_py.running.supervise.time_limits import JobPauses, TimeLimits
from poprun_py.terminal import may_colour

if TYPE_CHECKING:
    from poprun_py.running.watch.job_observer import JobObserver
    from poprun_py.running.watch.job_view import JobView

# The time for instances to report their ends after the end of mpirun.
_REPORT_SECONDS = 10.0
# The longest wait for an event while a job is ending, and while it is running.
_ENDING_WAIT_SECONDS, _WAIT_SECONDS = 0.2, 1.0
# The time for mpirun to end after the last instance. It is shorter after the loss of a host,
# because mpirun's daemon there never answers.
_MPIRUN_SECONDS, _MPIRUN_SECONDS_AFTER_LOSS = 10.0, 1.0
_CANNOT_RUN = "the launcher cannot run the job"


class Timed(Protocol):
    """A part of the supervisor that acts at certain times."""

    def next_deadline(self) -> float:
        """Return the time at which ``on_time`` next has work to do; inf for never."""

    def on_time(self, now: float) -> None:
        """Do the work that is due; called after every event, even before the deadline."""


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
        supervisor = _Supervisor(job, Path(folder.path), log, on_started, descriptors)
        try:
            with supervisor:
                return supervisor.run()
        except StartError as error:
            explain = job.hosts.explain_failed_start if supervisor.can_hosts_explain else None
            if problems := explain() if explain is not None else "":
                raise StartError(f"{error}. {problems}") from None
            raise
    finally:
        folder.remove()


class _Supervisor:
    """Runs one job in one thread, and handles the events of the control channel."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        log: Callable[[str], None],
        on_started: Callable[[Reports], None] | None,
        descriptors: tuple[int, int],
    ) -> None:
        self._job = job
        self._folder = folder
        self._output = InstanceOutput(job, descriptors, log)
        self._log = self._output.log
        self._mpirun: Mpirun | None = None
        self._control = control = ControlChannel(job.num_instances, self)
        self._peers = control.peers
        self._diagnosis = StartDiagnosis(
            job.num_instances, job.hosts.explain_failed_start, self._on_finding
        )
        self._shutdown = JobShutdown(job, control, self._log, self._output.say, self._on_shutdown)
        self._limits = TimeLimits(job.limits.grace, self._on_limit)
        self._shortages = ShortageCheck(folder.parent)
        self._stacks = StackCollector(control)
        self._clocks = HostClocks(job.files.spans, job.hosts.others, control.send_to)
        limit = job.limits.hang_timeout
        self._hangs = HangDetector(limit) if limit is not None else None
        self._pauses = JobPauses(
            control, self._shutdown, self._limits, self._hangs, self._output, self._show_view
        )
        self._keyboard = KeyboardInput(
            job.command.stdin_instance,
            control,
            self._output,
            self._pauses.on_debugger,
            terminal=open_terminal(),
            is_passed_on=job.command.stdin_instance in job.hosts.others,
            is_shown=self._output.is_terminal,
            tag_width=lambda index: tag_width(index, job.watchers.output),
        )
        self._pauses.set_keyboard(self._keyboard)
        files = FileTransfer(job.files.places, job.hosts.others, job.files.call)
        self._start = ProgramStart(
            job, control, files, self._shutdown, self._settings_of, self._on_all_told
        )
        self._frames = FrameDispatcher(
            job=job,
            on_started=on_started,
            output=self._output,
            control=control,
            shutdown=self._shutdown,
            limits=self._limits,
            shortages=self._shortages,
            stacks=self._stacks,
            files=files,
            start=self._start,
            clocks=self._clocks,
            hangs=self._hangs,
            suspension=self._pauses.suspension,
            keyboard=self._keyboard,
        )

    @property
    def can_hosts_explain(self) -> bool:
        """Whether other hosts may know why the job did not start, as no reason is known yet."""
        return self._mpirun is not None and not self._shutdown.is_refused

    def __enter__(self) -> _Supervisor:
        """Acquire resources; if one fails, the resources acquired before it are released."""
        with start_errors(_CANNOT_RUN), contextlib.ExitStack() as resources:
            self._open_files = process_control.raise_open_files()
            resources.callback(process_control.set_open_files, self._open_files)
            self._mpirun_files = mpirun_open_files(self._job, self._open_files)
            self._signals = resources.enter_context(SignalPipe())
            self._selector = resources.enter_context(selectors.DefaultSelector())
            self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
            resources.callback(self._output.close)
            resources.callback(self._keyboard.close)
            resources.callback(self._control.close)
            self._control.open(self._selector, self._folder, self._job.hosts.listen)
            token = self._control.token if self._job.hosts.listen is not None else ""
            if (memory := make_shared_memory_folder(self._folder, token)) is not None:
                resources.callback(memory.remove)
            # Orphans of a killed wrapper become children of the launcher, which ends them after the
            # job.
            if not process_control.become_subreaper():
                # A Python program that launches jobs does not expect to get orphans outside a job.
                resources.callback(process_control.end_as_subreaper)
            resources.callback(self._diagnosis.end)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    # --- the loop -------------------------------------------------------------------------

    def run(self) -> LaunchResult:
        """Start mpirun and handle events until everything has ended."""
        job, began = self._job, time.monotonic()
        with start_errors(_CANNOT_RUN):
            self._mpirun = mpirun = Mpirun(
                job.command.words,
                self._environment(),
                self._control.address,
                self._selector,
                self._log,
                self._mpirun_files,
                network=job.hosts.network,
                on_signal=self._shutdown.on_signal_of_mpirun,
                end_signal=job.command.end_signal,
            )
        self._resources.callback(mpirun.end)
        # The following preparations take place while mpirun starts.
        self._shortages.begin()
        self._frames.observer = observer = self._make_observer(began)
        remove_abandoned(folder_locations())
        if job.limits.timeout is not None:
            self._limits.begin(time.monotonic(), job.limits.timeout, job.limits.spent)
        self._diagnosis.begin(time.monotonic())
        timed: list[Timed] = [
            self._diagnosis,
            self._limits,
            self._control,
            self._pauses.suspension,
            self._keyboard,
            self._stacks,
            observer,
            self._shutdown,
            mpirun,
            self._output,
        ]
        if self._hangs is not None:
            timed.insert(
                0, HangCheck(self._hangs, self._stacks, self._shutdown, mpirun, self._is_blocked)
            )
        while not self._is_over(mpirun):
            for key, events in self._selector.select(self._wait_seconds(timed, mpirun)):
                key.data(key.fileobj, events)
            if mpirun.has_just_ended():
                self._shutdown.on_end_of_mpirun(
                    f"mpirun ended with {describe(mpirun.code)}", is_early=self._is_any_running()
                )
            now = time.monotonic()
            for each in timed:
                each.on_time(now)
            self._control.pause(self._output.is_full)
        for peer in self._peers.values():
            self._output.finish(peer)
        view = observer.finish(time.monotonic())
        self._output.show_panel(())
        self._drain_output()
        return self._result(mpirun, time.monotonic() - began, view)

    def _wait_seconds(self, timed: list[Timed], mpirun: Mpirun) -> float:
        is_ending = self._shutdown.asked_at is not None or mpirun.is_expected_to_end
        longest = _ENDING_WAIT_SECONDS if is_ending else _WAIT_SECONDS
        seconds = min(each.next_deadline() for each in timed) - time.monotonic()
        return min(longest, max(0.0, seconds))

    def _is_over(self, mpirun: Mpirun) -> bool:
        """Tell whether all instances have reported their ends and mpirun has ended."""
        if self._control.is_complete and not self._is_any_running():
            if not mpirun.is_expected_to_end:
                self._control.broadcast(control_protocol.BYE, None)
                is_host_lost = any((p.instance_end or {}).get("lost") for p in self._peers.values())
                mpirun.expect_end(
                    _MPIRUN_SECONDS_AFTER_LOSS if is_host_lost else _MPIRUN_SECONDS,
                    time.monotonic(),
                )
            return mpirun.ended_at is not None
        return mpirun.ended_at is not None and (
            not self._is_any_running() or time.monotonic() > mpirun.ended_at + _REPORT_SECONDS
        )

    def _is_any_running(self) -> bool:
        return any(peer.instance_end is None for peer in self._peers.values())

    def _is_blocked(self) -> bool:
        """Tell whether the reader of the output, or a debugger, makes the instances wait."""
        return self._output.is_full or self._keyboard.is_debugging

    def _environment(self) -> dict[str, str]:
        """Return the environment of mpirun."""
        command = self._job.command
        environ = {
            **mpirun_folder_variables(self._folder, command.words, command.environ),
            **{name: value for name, value in command.environ.items() if name != "_"},
            "POPRUN_CONTROL": self._control.address,
            "POPRUN_TOKEN": self._control.token,
        }
        if not self._keyboard.is_there:
            environ["POPRUN_STDIN"] = str(self._folder / SOCKET_NAME)
            environ["POPRUN_STDIN_READER"] = str(command.stdin_instance)
        # MPICH 5 does not pass the last variable to other hosts, so an unimportant variable comes
        # last.
        environ["_"] = command.words[0]
        return environ

    def _make_observer(self, began: float) -> JobObserver:
        from poprun_py.running.watch.job_observer import JobObserver, RoundTimes
        from poprun_py.running.watch.job_view import JobView, LiveView
        from poprun_py.running.watch.records import Recorders

        job = self._job
        live = LiveView(
            panel_size=lambda: self._output.panel_size,
            show_panel=self._output.show_panel,
            say=self._output.say,
            has_colour=may_colour(job.command.environ),
            is_hidden=lambda: self._keyboard.is_debugging,
        )
        return JobObserver(
            job=JobView(run_id=job.watchers.run_id, pid=os.getpid(), program=job.watchers.program),
            began=began,
            times=RoundTimes.of(
                job.num_instances,
                is_live=job.watchers.live,
                is_recorded=bool(job.watchers.recorders),
            ),
            ask=lambda index: self._control.send_to(index, control_protocol.OBSERVE, None),
            tell=lambda straggler: self._output.say(straggler.sentence),
            show=live.show if job.watchers.live else None,
            recorders=Recorders(job.watchers.recorders, self._output.say),
            epoch=lambda: time.time() - time.monotonic(),
        )

    # --- connections: control_channel.ChannelEvents ---------------------------------------

    def make_streams(self, index: int) -> tuple[OutputStream, OutputStream]:
        """Return the streams for a new instance's stdout and stderr."""
        return self._output.make_streams(index)

    def connected(self, peer: Peer) -> None:
        """Start all programs once every wrapper has connected."""
        if self._shutdown.asked_at is not None:
            self._control.send(peer, control_protocol.STOP, [0, signal.SIGTERM])
            return
        if not self._control.is_complete:
            return
        self._diagnosis.end()
        if self._mpirun is not None:
            self._mpirun.all_connected()
        self._start.begin()

    def received(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Handle a frame from an instance's wrapper."""
        self._frames.dispatch(peer, kind, value)

    def disconnected(self, peer: Peer) -> None:
        """Handle the end of the connection to a wrapper."""
        self._frames.on_disconnect(peer)

    def accept_failed(self, error: OSError) -> None:
        """End the job if some of its instances can no longer connect."""
        connected = (
            f"{len(self._peers)} of {counted(self._job.num_instances, 'instance')} connected"
        )
        problem = explain_os_error(error, f"{connected}, no more can be")
        if self._control.is_complete:
            self._log(problem)
        else:
            self._shutdown.end(Cause.REFUSED, problem)

    def stranger_refused(self, sentence: str) -> None:
        """Warn of a connection by a process that does not belong to the job."""
        self._output.say(sentence)

    def inspected(self, want: str, answer: Callable[[str], None]) -> None:
        """Answer a process of this host that inspects the job."""
        now = time.monotonic()
        if want == "stacks":
            self._stacks.collect(lambda groups: answer(groups_text(groups)), now)
        elif want == "status" and self._frames.observer is not None:
            self._frames.observer.request(lambda view: answer(view.json_text()), now)
        elif want == "holdings":
            answer(json.dumps(holdings(self._job, self._peers)))
        else:
            answer("")

    def _settings_of(self, peer: Peer) -> dict[str, Any]:
        """Return the settings for a wrapper that starts its program."""
        settings: dict[str, Any] = {"sample_seconds": None}
        if self._hangs is not None:
            settings["sample_seconds"] = self._hangs.check_interval
            settings["look_seconds"] = self._hangs.activity.sample_interval
        settings["steps"] = bool(self._job.watchers.recorders)  # whether wrappers report each step
        settings["grace_seconds"] = self._job.limits.grace
        if self._mpirun_files != self._open_files and peer.host == socket.gethostname():
            # Programs get the user's own limit. Only mpirun's limit was raised.
            settings["open_files"] = self._open_files
        return {**settings, **self._keyboard.start_of(peer.index)}

    def _on_all_told(self) -> None:
        """Begin to serve the programs, after all wrappers were told to start them."""
        for index in self._peers:
            self._clocks.ask(index)
        self._keyboard.begin(self._selector)
        count = len(self._peers)
        self._log(f"{counted(count, 'instance')} {'starts' if count == 1 else 'start'}")

    def _on_signals(self, _: Any, __: int) -> None:
        for number, reason in self._signals.take():
            if number == signal.SIGTSTP:
                self._pauses.suspend()
            elif number == signal.SIGQUIT:
                self._keyboard.let_go()
                take_signal(number)
            elif number == signal.SIGWINCH:
                self._keyboard.resized()
                self._show_view()
            else:
                if number == signal.SIGINT:
                    self._output.shorten_interrupts()
                self._shutdown.on_signal(number, reason)

    def _show_view(self) -> None:
        if self._frames.observer is not None:
            self._frames.observer.show_again(time.monotonic())

    # --- ending ---------------------------------------------------------------------------

    def _on_finding(self, finding: Finding) -> None:
        output = "" if self._mpirun is None else self._mpirun.output
        sentence = finding.sentence(len(self._peers), self._job.num_instances, output)
        if finding.is_reason:
            self._shutdown.end(Cause.REFUSED, sentence)
        else:
            self._output.say(f"warning: {sentence}")

    def _on_limit(self, cause: Cause, reason: str) -> None:
        """End a job that has reached a limit; at its time limit, collect the stacks first."""
        if cause is not Cause.TIME_LIMIT:
            self._shutdown.end(cause, reason)
            return

        def end(groups: tuple[StackGroup, ...]) -> None:
            if self._shutdown.stop is not None:
                self._shutdown.end_with_stacks(self._shutdown.stop.hung, groups)

        self._shutdown.decide(cause, reason)
        self._stacks.collect(end, time.monotonic())

    def _on_shutdown(self, now: float) -> None:
        self._output.stopped_at = now
        if not self._control.is_complete:
            # mpirun may wait for a host that was lost. No program has started, so none needs time
            # to save.
            self._diagnosis.end()
            if self._mpirun is not None:
                self._mpirun.stop(now)

    def _drain_output(self) -> None:
        """Write the rest of the output; after a stop, its readers have only limited time."""
        began = time.monotonic()
        while not self._output.is_written:
            for key, events in self._selector.select(0):
                if key.fileobj is self._signals:
                    key.data(key.fileobj, events)
            now = time.monotonic()
            self._limits.on_time(now)
            if self._shutdown.stop is not None and self._output.stopped_at is None:
                # All instances ended before they were asked to end.
                self._output.stopped_at = began
            self._output.write(now, wait_seconds=0.1)

    def _result(self, mpirun: Mpirun, seconds: float, view: JobView) -> LaunchResult:
        for line in mpirun.output.splitlines():
            self._log(f"mpirun: {line}")
        stop = self._shutdown.stop
        ending = outcome.Ending(
            job=self._job,
            files=self._folder.parent,
            shortage=self._shortages.result(
                has_mpirun_failed=mpirun.code != 0, was_stopped=stop is not None
            ),
            peers=self._peers,
            visible_instances=self._output.visible_instances,
            seconds=seconds,
            mpirun_code=mpirun.code,
            mpirun_output=mpirun.output,
            stop=stop,
        )
        result = outcome.launch_result(ending)
        if result.exit_code != 0 or self._job.watchers.live:
            self._output.begin_report()
        return replace(result, paused_seconds=self._limits.paused_seconds, view=view)
