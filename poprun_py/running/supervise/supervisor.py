"""Runs a launch: starts the command, talks to every instance's wrapper, ends all in good order.

Knows no MPI and no topology: it gets a command, what to tell each instance, and limits. The only
module that acts: the others of this folder hold a connection or a process, or return what to do.
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
from typing import TYPE_CHECKING, Any

from popdist_py.environment import MPI_NETWORK, RESUME_EXIT_CODE
from popdist_py.errors import counted
from poprun_py.errors import StartError, explain_os_error, start_errors
from poprun_py.instance import control_protocol, process_control
from poprun_py.instance.cgroups import process_state
from poprun_py.instance.job_folders import folder_locations, remove_abandoned
from poprun_py.running.keyboard.keyboard_input import KeyboardInput, open_terminal
from poprun_py.running.keyboard.suspension import Suspension, take_signal
from poprun_py.running.screen.screen import OutputStream, keep_end, tag_width
from poprun_py.running.supervise import outcome, stacks
from poprun_py.running.supervise.caught_signals import CaughtSignals
from poprun_py.running.supervise.control_channel import ControlChannel, Peer
from poprun_py.running.supervise.file_transfer import FileTransfer
from poprun_py.running.supervise.hang_detection import HangWatch, Look
from poprun_py.running.supervise.host_clocks import HostClocks
from poprun_py.running.supervise.inspection import holdings
from poprun_py.running.supervise.instance_output import InstanceOutput
from poprun_py.running.supervise.job import (
    Cause,
    Job,
    LaunchResult,
    Progress,
    StackGroup,
    describe,
)
from poprun_py.running.supervise.mpirun_process import Mpirun, enough_files, lines_of_daemon
from poprun_py.running.supervise.private_folder import (
    SOCKET_NAME,
    is_full,
    make_memory_folder,
    make_private_folder,
    mpirun_files_in,
)
from poprun_py.running.supervise.startup import Startup
from poprun_py.running.supervise.stop_policy import StopPolicy
from poprun_py.running.supervise.time_limits import Limits, Timed
from poprun_py.terminal import may_colour

if TYPE_CHECKING:
    from poprun_py.running.watch.job_observer import JobObserver
    from poprun_py.running.watch.job_view import JobView

# Between the end of mpirun and giving up on instances that say nothing.
_SILENCE_SECONDS = 10.0
# The longest wait for an event: while a job ends, and else.
_ENDING_WAIT_SECONDS, _WAIT_SECONDS = 0.2, 1.0
# The time for mpirun to end after the last instance, and after the loss of a host, whose daemon
# never answers.
_MPIRUN_SECONDS, _MPIRUN_SECONDS_OF_LOST_HOST = 10.0, 1.0
_SHARED_MEMORY = Path("/dev/shm")
_CANNOT_RUN = "the launcher cannot run the job"

Started = Callable[[dict[int, dict[str, Any]]], None]
Groups = tuple[StackGroup, ...]


def supervise(
    job: Job,
    *,
    log: Callable[[str], None],
    on_started: Started | None = None,
    descriptors: tuple[int, int] = (1, 2),
) -> LaunchResult:
    """Run ``job`` to its end and return how it ended; nothing of it is left running.

    Args:
        job: What to run.
        log: Takes a line of the launcher's own log.
        on_started: Called once with what every wrapper reported after starting its program.
        descriptors: Where the instances' stdout and stderr go.

    Raises:
        StartError: The job could not start.
    """
    folder = make_private_folder()
    try:
        supervisor = _Supervisor(job, Path(folder.path), log, on_started, descriptors)
        try:
            with supervisor:
                return supervisor.run()
        except StartError as error:
            explain = job.hosts.explain_failed_start if supervisor.may_be_explained else None
            if doubts := explain() if explain is not None else "":
                raise StartError(f"{error}. {doubts}") from None
            raise
    finally:
        folder.remove()


class _Supervisor:
    """One run of one job. Everything happens in ``run``, in one thread."""

    def __init__(
        self,
        job: Job,
        folder: Path,
        log: Callable[[str], None],
        on_started: Started | None,
        descriptors: tuple[int, int],
    ) -> None:
        self._job = job
        self._on_started = on_started
        self._folder = folder
        self._output = InstanceOutput(job, descriptors, log)
        self._log = self._output.log
        self._paused_seconds = 0.0
        self._had_no_room = self._had_no_shm = False
        self._refused = 0  # processes, in this control group, before the job
        self._control = ControlChannel(job.num_instances, self)
        self._peers = self._control.peers
        self._startup = Startup(job.hosts.names, job.hosts.explain_failed_start)
        self._unleased = set(job.hosts.leases)  # instances that have not answered
        self._limits = Limits(job.limits.grace)
        self._stack_requests = stacks.StackRequests()
        self._files = FileTransfer(job.files.places, job.hosts.others, job.files.call)
        self._ungiven = set(self._files.receivers)  # instances that have not answered
        self._clocks = HostClocks(job.files.spans, job.hosts.others, self._control.send_to)
        self._watch = (
            HangWatch(job.limits.hang_timeout) if job.limits.hang_timeout is not None else None
        )
        self._is_judging = False  # whether a job that seems to hang does: by its stacks
        self._observer: JobObserver | None = None
        self._mpirun: Mpirun | None = None
        self._stopping = StopPolicy(job, self._control, self._log, self._output.say)
        self._suspension = Suspension(self._stop_here)
        self._keyboard = KeyboardInput(
            job.command.stdin_instance,
            self._control,
            self._output,
            self._on_debugger,
            terminal=open_terminal(),
            is_passed_on=job.command.stdin_instance in job.hosts.others,
            is_shown=self._output.is_terminal,
            tag_width=lambda index: tag_width(index, job.watchers.output),
        )

    @property
    def may_be_explained(self) -> bool:
        """Whether other hosts may know why the job does not start: mpirun was there and failed."""
        return self._mpirun is not None and not self._stopping.is_refused

    # --- in and out -----------------------------------------------------------------------

    def __enter__(self) -> _Supervisor:
        """Acquire what the run needs; what was acquired is released also if the rest fails."""
        with start_errors(_CANNOT_RUN), contextlib.ExitStack() as resources:
            self._open_files = process_control.raise_open_files()
            resources.callback(process_control.set_open_files, self._open_files)
            self._mpirun_files = enough_files(self._job, self._open_files)
            self._signals = resources.enter_context(CaughtSignals())
            self._selector = resources.enter_context(selectors.DefaultSelector())
            self._selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
            resources.callback(self._output.close)
            resources.callback(self._keyboard.close)
            resources.callback(self._control.close)
            self._control.open(self._selector, self._folder, self._job.hosts.listen)
            token = self._control.token if self._job.hosts.listen is not None else ""
            if (memory := make_memory_folder(self._folder, token)) is not None:
                resources.callback(memory.remove)
            # Orphans of a killed wrapper become the launcher's children, and are ended at the end.
            if not process_control.become_subreaper():
                # A program that launches jobs by itself does not expect to collect others' orphans.
                resources.callback(process_control.end_as_subreaper)
            resources.callback(self._end_mpirun)
            resources.callback(self._startup.end)
            self._resources = resources.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def _end_mpirun(self) -> None:
        if self._mpirun is not None:
            self._mpirun.end()

    def run(self) -> LaunchResult:
        """Start the command and serve it until everything has ended."""
        job, began = self._job, time.monotonic()
        address, token = self._control.address, self._control.token
        environ = {
            **mpirun_files_in(self._folder, job.command.words, job.command.environ),
            **{name: value for name, value in job.command.environ.items() if name != "_"},
            "POPRUN_CONTROL": address,
            "POPRUN_TOKEN": token,
            **({} if self._keyboard.is_there else self._stdin_variables()),
            # MPICH 5 gives other hosts all variables but the last. A shell sets this one too.
            "_": job.command.words[0],
        }
        with start_errors(_CANNOT_RUN):
            self._mpirun = mpirun = Mpirun(
                job.command.words,
                environ,
                address,
                self._selector,
                self._log,
                self._mpirun_files,
                network=self._job.hosts.network,
                end_signal=self._job.command.end_signal,
            )
        self._refused = process_state().get("refused", 0)  # while mpirun starts
        self._observer = observer = self._make_observer(began)  # likewise
        remove_abandoned(folder_locations())
        if job.limits.timeout is not None:
            self._limits.begin(time.monotonic(), job.limits.timeout, job.limits.spent)
        self._startup.begin(time.monotonic())
        while not self._is_over(mpirun):
            for key, events in self._selector.select(self._patience(mpirun)):
                key.data(key.fileobj, events)
            if mpirun.has_just_ended():
                self._stopping.on_end_of_mpirun(
                    f"mpirun ended with {describe(mpirun.code)}", is_early=self._is_any_connected()
                )
            self._on_time(mpirun, time.monotonic())
        for peer in self._peers.values():
            self._output.finish(peer)
        view = observer.finish(time.monotonic())
        self._output.show_panel(())
        self._drain()
        return self._result(mpirun, time.monotonic() - began, view)

    def _stdin_variables(self) -> dict[str, str]:
        """Return the variables that tell instances of this host where to ask for their input."""
        return {
            "POPRUN_STDIN": str(self._folder / SOCKET_NAME),
            "POPRUN_STDIN_READER": str(self._job.command.stdin_instance),
        }

    def _make_observer(self, began: float) -> JobObserver:
        """Return what looks at the instances."""
        from poprun_py.running.watch.job_observer import JobObserver, RoundTimes
        from poprun_py.running.watch.job_view import LiveView
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
            run_id=job.watchers.run_id,
            pid=os.getpid(),
            program=job.watchers.program,
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

    # --- instances: control_channel.Listener ----------------------------------------------

    def make_streams(self, index: int) -> tuple[OutputStream, OutputStream]:
        """Return stdout and stderr of a new instance."""
        return self._output.make_streams(index)

    def joined(self, peer: Peer) -> None:
        """Once every wrapper is there, let all programs start at once."""
        if self._stopping.asked_at is not None:
            self._control.send(peer, control_protocol.STOP, [0, signal.SIGTERM])
            return
        if not self._control.is_complete:
            return
        self._startup.end()
        if self._mpirun is not None:
            self._mpirun.has_started_all()
        if problem := self._startup.misplaced(self._peers):
            self._stopping.end(Cause.REFUSED, problem)
            return
        for index, request in self._job.hosts.leases.items():
            self._control.send_to(index, control_protocol.LEASE, request)
        if not self._job.hosts.leases:
            self._give_files()

    def _on_lease(self, peer: Peer, answer: dict[str, Any]) -> None:
        """A host is leased, or not; once all are, let the programs start."""
        self._unleased.discard(peer.index)
        if refusal := self._job.hosts.refusal_of(peer.index, answer):
            self._stopping.end(Cause.REFUSED, refusal)
        elif not self._unleased and self._stopping.asked_at is None:
            self._give_files()

    def _give_files(self) -> None:
        """Send other hosts what their programs read; once all have it, let the programs start."""
        for index in self._files.receivers:
            self._control.send_parts_to(
                index, control_protocol.INPUT_FILE, self._files.given_parts()
            )
        if not self._ungiven:
            self._start_programs()

    def _on_given(self, peer: Peer, answer: dict[str, str]) -> None:
        """An instance has what its program reads, or its host cannot keep it."""
        self._ungiven.discard(peer.index)
        if problem := answer.get("problem"):
            self._stopping.end(
                Cause.REFUSED,
                f"host {peer.host} cannot keep the call of {self._job.watchers.program} for "
                f"instance {peer.index} ({problem}): make room there, or set TMPDIR to another "
                "folder",
            )
            return
        self._files.given(peer.index, answer["path"])
        if not self._ungiven and self._stopping.asked_at is None:
            self._start_programs()

    def _start_programs(self) -> None:
        port = str(self._peers[0].port)
        sample = self._watch.sample_seconds if self._watch is not None else None
        for index, each in self._peers.items():
            variables = {"MASTER_PORT": port, **self._job.command.variables[index]}
            if self._job.hosts.listen is None and self._job.hosts.network is not None:
                variables[MPI_NETWORK] = self._job.hosts.network
            variables.update(self._files.variables(index))
            start: dict[str, Any] = {"variables": variables, "sample_seconds": sample}
            if self._watch is not None:
                start["look_seconds"] = self._watch.life.look_seconds
            start["steps"] = bool(self._job.watchers.recorders)  # whether to tell each of them
            start["grace_seconds"] = self._job.limits.grace
            if self._mpirun_files != self._open_files and each.host == socket.gethostname():
                # Programs get the user's own limit: mpirun's was raised for itself.
                start["open_files"] = self._open_files
            start.update(self._keyboard.start_of(index))
            start.update(self._files.start_of(index))
            self._control.send(each, control_protocol.GO, start)
            self._clocks.ask(index)
        self._keyboard.begin(self._selector)
        num_peers = len(self._peers)
        self._log(f"{counted(num_peers, 'instance')} {'starts' if num_peers == 1 else 'start'}")

    def received(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Do what a frame of an instance asks for."""
        if kind == control_protocol.STDOUT:
            self._output.feed_stdout(peer, value)
        elif kind == control_protocol.STDERR:
            peer.tail = keep_end(peer.tail, value)
            self._output.feed_stderr(peer, value)
        elif kind == control_protocol.FILE:
            self._files.take(peer.index, value)
        elif kind == control_protocol.LEASED:
            self._on_lease(peer, value)
        elif kind == control_protocol.INPUT_FILE:
            self._on_given(peer, value)
        elif kind == control_protocol.CLOCK:
            self._clocks.take(peer.index, *value)
        else:
            self._on_message(peer, kind, value)

    def _on_message(self, peer: Peer, kind: bytes, value: Any) -> None:
        now = time.monotonic()
        if kind == control_protocol.STARTED:
            self._on_start(peer, value, now)
        elif kind in (control_protocol.PROGRESS, control_protocol.ACTIVITY):
            self._on_sign(peer, kind, value, now)
        elif kind == control_protocol.OBSERVED and self._observer is not None:
            self._observer.observed(peer.index, value, now)
        elif kind == control_protocol.POLLED:
            self._stopping.on_answer(peer.index, value["proposal"], value["polls"])
        elif kind in (
            control_protocol.KEYS_READ,
            control_protocol.UNREAD,
            control_protocol.TERMINAL_MODES,
            control_protocol.DEBUGGER,
        ):
            self._keyboard.received(peer.index, kind, value)
        elif kind == control_protocol.PAUSED:
            self._suspension.stopped(peer.index)
        elif kind == control_protocol.STACKS:
            self._stack_requests.take(peer.index, value["processes"])
        else:
            self._on_ending(peer, kind, value)

    def _on_ending(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Handle a frame about a program's end: a request for it, how it ended, or what it left."""
        if kind == control_protocol.STOP_SIGNAL and peer.died is None:
            self._stopping.end(Cause.MPIRUN_ENDED, "mpirun ended the instances")
        elif kind == control_protocol.LEFTOVERS:
            self._output.say(outcome.left_sentence(peer.index, value))
        elif kind == control_protocol.PROGRAM_ENDED:
            self._on_death(peer, value)
        elif kind == control_protocol.INSTANCE_ENDED:
            self._on_exit(peer, value)

    def _on_sign(self, peer: Peer, kind: bytes, value: Any, now: float) -> None:
        """An instance has made steps, or tells what moves in it."""
        if self._watch is not None and kind == control_protocol.PROGRESS:
            self._watch.beat(peer.index, Progress(*value), now)
        elif self._watch is not None:
            self._watch.life.look(peer.index, Look.of(value), now)

    def _on_start(self, peer: Peer, report: dict[str, Any], now: float) -> None:
        """A program runs; once all do, tell how they are bound."""
        peer.started = report
        for line in lines_of_daemon(peer.host, report):
            self._log(line)
        if self._watch is not None:
            self._watch.life.started(peer.index, now)
        if self._observer is not None:
            self._observer.started(peer.index, peer.host, report["pid"], now)
        if self._on_started is not None and all(p.started for p in self._peers.values()):
            self._on_started({p.index: p.started for p in self._peers.values()})

    def lost(self, peer: Peer) -> None:
        """The connection to a wrapper ended: normal after its report, else the wrapper died."""
        if peer.outcome is not None:
            return
        program = peer.started.get("pid", 0)
        if program and self._job.hosts.listen is None:
            process_control.signal_group(program, signal.SIGKILL)
        gone = {
            "code": -signal.SIGKILL,
            "time_ns": time.time_ns() - peer.clock_offset_ns,
            "stopped": self._stopping.asked_at is not None,
            "lost": True,
        }
        self._on_exit(peer, peer.died or gone)
        self._stack_requests.take(peer.index, None)

    def closed(self, error: OSError) -> None:
        """No further instance can connect: a job that is not complete cannot start."""
        connected = (
            f"{len(self._peers)} of {counted(self._job.num_instances, 'instance')} connected"
        )
        problem = explain_os_error(error, f"{connected}, no more can be")
        if self._control.is_complete:
            self._log(problem)
        else:
            self._stopping.end(Cause.REFUSED, problem)

    def refused(self, sentence: str) -> None:
        """Tell who has connected and is not of this job."""
        self._output.say(sentence)

    def inspected(self, want: str, answer: Callable[[str], None]) -> None:
        """A process of this host asks what the instances do, or what they hold."""
        if want == "stacks":
            self._ask_for_stacks(lambda groups: answer(stacks.render_groups(groups)))
        elif want == "status" and self._observer is not None:
            self._observer.request(lambda view: answer(view.json_text()), time.monotonic())
        elif want == "holdings":
            answer(json.dumps(holdings(self._job, self._peers)))
        else:
            answer("")

    def _on_death(self, peer: Peer, end: dict[str, Any]) -> None:
        """A program ended; the first failure ends all the others."""
        if peer.died is not None:
            return
        peer.died = end
        now, code = time.monotonic(), end["code"]
        if self._watch is not None:
            self._watch.ended(peer.index, now)
        if self._observer is not None:
            self._observer.ended(peer.index, end, now)
        self._stopping.on_death(peer.index)
        self._suspension.stopped(peer.index)
        self._keyboard.ended(peer.index)
        if peer.is_open:
            self._clocks.ask(peer.index)
        if code == RESUME_EXIT_CODE:
            self._limits.saved(peer.index, now)
        elif code != 0:
            if self._stopping.asked_at is None and peer.host == socket.gethostname():
                self._had_no_room = is_full(self._folder.parent)
                self._had_no_shm = code == -signal.SIGBUS and is_full(_SHARED_MEMORY)
            self._stopping.end(Cause.FAILED, f"instance {peer.index} ended with {describe(code)}")

    def _on_exit(self, peer: Peer, end: dict[str, Any]) -> None:
        """No process of a program is left, and its output is here."""
        self._on_death(peer, end)
        peer.outcome = end
        self._output.finish(peer)

    def _on_signals(self, _: Any, __: int) -> None:
        for number, reason in self._signals.take():
            if number == signal.SIGTSTP:
                self._suspend()
            elif number == signal.SIGQUIT:
                self._keyboard.let_go()
                take_signal(number)
            elif number == signal.SIGWINCH:
                self._keyboard.resized()
                self._show_again()
            else:
                if number == signal.SIGINT:
                    self._output.shorten_interrupts()
                self._stopping.on_signal(number, reason)

    def _show_again(self) -> None:
        """Draw the view of --live again, in the present size of the terminal."""
        if self._observer is not None:
            self._observer.show_again(time.monotonic())

    # --- the keyboard, and Ctrl-Z ---------------------------------------------------------

    def _on_debugger(self, instance: int | None) -> None:
        """An instance is in the debugger: nothing is late meanwhile; None: no more."""
        if instance is None:
            self._go_on()
        else:
            self._limits.pause(time.monotonic())
            self._output.say(
                f"instance {instance} is in the debugger; hang timeout and time limit pause"
            )

    def _suspend(self) -> None:
        """Ctrl-Z: stop the programs, then this process; a job that ends is not kept from it."""
        if self._suspension.is_asked:
            return
        running = [peer.index for peer in self._peers.values() if peer.died is None]
        if not self._control.is_complete or self._stopping.asked_at is not None:
            running = []
        for index in running:
            self._control.send_to(index, control_protocol.PAUSE, True)
        self._suspension.begin(running, time.monotonic())

    def _stop_here(self) -> None:
        """Stop this process until the shell lets the job go on."""
        self._limits.pause(time.monotonic())
        self._output.on_time(time.monotonic(), None, patience=0.1)
        self._output.erase_panel()
        self._keyboard.let_go()
        take_signal(signal.SIGTSTP)
        self._go_on()
        self._keyboard.on_time(time.monotonic())
        self._output.redraw()
        self._show_again()
        self._control.broadcast(control_protocol.PAUSE, False)

    def _go_on(self) -> None:
        """Time counts again, unless an instance is in the debugger."""
        now = time.monotonic()
        if self._watch is not None:
            self._watch.excuse(now)
        if not self._keyboard.is_debugging:
            self._paused_seconds += self._limits.resume(now)

    # --- ending ---------------------------------------------------------------------------

    def _ask_for_stacks(self, reply: Callable[[Groups], None]) -> None:
        """Ask every instance for its stacks."""
        members = [p.index for p in self._peers.values() if p.outcome is None and p.started]
        self._stack_requests.begin(members, time.monotonic(), reply)
        for index in sorted(members):
            self._control.send(self._peers[index], control_protocol.DUMP_STACKS, None)

    def _end_with_stacks(self, groups: Groups) -> None:
        """End a job that is over its time limit, with the stacks of its instances."""
        if self._stopping.stop is not None:
            self._stopping.end_with_stacks(self._stopping.stop.hung, groups)

    def _look_for_hang(self, now: float) -> None:
        """If the job seems to hang, ask its instances for their stacks."""
        if self._watch is None:
            return
        is_mpirun_stopped = self._mpirun is not None and self._mpirun.is_stopped
        hung = self._watch.on_time(
            now,
            is_held_up=self._output.is_full or self._keyboard.is_debugging,
            is_mpirun_stopped=is_mpirun_stopped,
        )
        if hung and self._stopping.may_hang and not self._is_judging:
            self._is_judging = True
            self._ask_for_stacks(self._judge)

    def _judge(self, groups: Groups) -> None:
        """End the job if its stacks confirm the hang and nothing has moved meanwhile."""
        self._is_judging = False
        now = time.monotonic()
        if self._watch is None or not self._stopping.may_hang:
            return
        busy = self._watch.busy(now)
        waiting = {index for group in groups if group.waits for index in group.instances}
        ending = {i for group in groups if stacks.is_ending(group) for i in group.instances}
        hung = self._watch.judged(waiting, ending, now)
        if not hung:
            return
        if self._watch.counts_steps:
            missing = stacks.missing_instances(hung, self._watch.done(), groups)
            reason = f"no step for {max(self._watch.silence(i, now) for i in hung):.1f} s"
            if self._mpirun is not None and self._mpirun.is_stopped:
                reason += f" while mpirun ({self._mpirun.pid}) is stopped"
        else:
            missing = stacks.odd_instances(hung, self._watch.done(), groups)
            silence = max(self._watch.silence(index, now) for index in missing)
            cpu = "CPU time for waiting only" if set(missing) & set(busy) else "no CPU time"
            reason = f"silent for {silence:.1f} s (no output, {cpu})"
        self._stopping.decide(Cause.HANG, reason, hung=missing)
        self._stopping.end_with_stacks(missing, groups)

    def _is_over(self, mpirun: Mpirun) -> bool:
        """Tell whether all instances have reported and mpirun has ended."""
        if self._control.is_complete and not self._is_any_connected():
            if not mpirun.is_awaited:
                self._control.broadcast(control_protocol.BYE, None)
                # A daemon on a host that is gone never answers mpirun, which waits for it.
                is_host_lost = any((p.outcome or {}).get("lost") for p in self._peers.values())
                mpirun.await_end(
                    _MPIRUN_SECONDS_OF_LOST_HOST if is_host_lost else _MPIRUN_SECONDS,
                    time.monotonic(),
                )
            return mpirun.ended_at is not None
        return mpirun.ended_at is not None and (
            not self._is_any_connected() or time.monotonic() > mpirun.ended_at + _SILENCE_SECONDS
        )

    def _is_any_connected(self) -> bool:
        return any(peer.outcome is None for peer in self._peers.values())

    # --- time -----------------------------------------------------------------------------

    def _on_time(self, mpirun: Mpirun, now: float) -> None:
        """Do what is due without any event."""
        if finding := self._startup.on_time(now):
            sentence = finding.sentence(len(self._peers), self._job.num_instances, mpirun.words)
            if finding.is_reason:
                self._stopping.end(Cause.REFUSED, sentence)
            else:
                self._output.say(f"warning: {sentence}")
        self._check_limits(now)
        if number := mpirun.signal_kept(now):
            self._stopping.on_signal_of_mpirun(number)
        self._control.on_time(now)
        self._suspension.on_time(now)
        self._keyboard.on_time(now)
        for request in self._stack_requests.on_time(now):
            request.reply(stacks.group_stacks(request.answers))
        self._look_for_hang(now)
        if self._observer is not None:
            self._observer.on_time(now)
        self._stopping.on_time(now)
        if self._stopping.asked_at is not None and not self._control.is_complete:
            # It may wait for a host that is gone. No program has started: there is nothing to save.
            self._startup.end()
            mpirun.stop(now)
        mpirun.on_time(now)
        self._output.on_time(now, self._stopping.asked_at)
        self._control.pause(self._output.is_full)

    def _check_limits(self, now: float) -> None:
        match self._limits.on_time(now):
            case (Cause.TIME_LIMIT, reason):
                self._stopping.decide(Cause.TIME_LIMIT, reason)
                self._ask_for_stacks(self._end_with_stacks)
            case (cause, reason):
                self._stopping.end(cause, reason)

    def _patience(self, mpirun: Mpirun) -> float:
        """Return how long to wait for an event."""
        timed: list[Timed] = [
            self._startup,
            self._limits,
            self._suspension,
            self._keyboard,
            self._stack_requests,
            self._stopping,
            mpirun,
            self._output,
        ]
        if self._watch is not None:
            timed.append(self._watch)
        if self._observer is not None:
            timed.append(self._observer)
        is_ending = self._stopping.asked_at is not None or mpirun.is_awaited
        longest = _ENDING_WAIT_SECONDS if is_ending else _WAIT_SECONDS
        left = min(each.next_deadline() for each in timed) - time.monotonic()
        return min(longest, max(0.0, left))

    # --- the result -----------------------------------------------------------------------

    def _drain(self) -> None:
        """Write the last of the output; after a stop the reader has limited time to take it."""
        began = time.monotonic()
        while not self._output.is_written:
            for key, events in self._selector.select(0):
                if key.fileobj is self._signals:
                    key.data(key.fileobj, events)
            now = time.monotonic()
            self._check_limits(now)
            # A stop that nobody had to be asked for gives the reader its time from here.
            asked_at = self._stopping.asked_at or began
            is_stopped = self._stopping.stop is not None
            self._output.on_time(now, asked_at if is_stopped else None, patience=0.1)

    def _result(self, mpirun: Mpirun, seconds: float, view: JobView) -> LaunchResult:
        for line in mpirun.words.splitlines():
            self._log(f"mpirun: {line}")
        is_failed = mpirun.code != 0 or self._stopping.stop is not None
        now = process_state() if is_failed else {}
        # An mpirun that could not start says nothing of the folder.
        had_no_room = self._had_no_room or (mpirun.code != 0 and is_full(self._folder.parent))
        result = outcome.judge(
            outcome.Ending(
                job=self._job,
                files=self._folder.parent,
                had_no_room=had_no_room,
                had_no_shared_memory=self._had_no_shm,
                processes_refused=now.get("refused", 0) > self._refused,
                most_processes=now.get("limit", 0),
                peers=self._peers,
                last_words=self._output.last_words,
                seconds=seconds,
                mpirun_code=mpirun.code,
                mpirun_text=mpirun.words,
                stop=self._stopping.stop,
            )
        )
        if result.exit_code != 0 or self._job.watchers.live:
            self._output.begin_report()
        return replace(result, paused_seconds=self._paused_seconds, view=view)
