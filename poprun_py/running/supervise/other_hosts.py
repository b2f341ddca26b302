"""Files, clock readings and answers from other hosts.

A program on the launcher's host writes its files directly to the job's folders. A program on
another host writes its files to a private folder on that host. After the program has ended, its
wrapper sends the files to the launcher. In a job with a timeline, the launcher asks each other host
for the time on that host's clock, at the start and at the end of the program there. Hosts that the
job has lost or is to get are asked in child processes.

In an attempt, all instances wait for the slowest start. A wrapper on another host needs seconds to
start and to import packages. With states in memory, the launcher therefore starts the wrappers on
hosts that come back while the programs run, and ends the attempt when the wrappers are ready.
"""

from __future__ import annotations

import json
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from popdist_py.atomic_file import open_private
from poprun_py.errors import StartError
from poprun_py.instance import control_protocol
from poprun_py.running.supervise.connection import Peer
from poprun_py.running.supervise.control_channel import WrapperEvents
from poprun_py.running.supervise.job_description import FilePlace, HostChanges, Job
from poprun_py.running.supervise.job_start import Finding, Question

if TYPE_CHECKING:
    from popdist_py.timeline.clocks import ClockSample
    from poprun_py.running.supervise.control_channel import ControlChannel
    from poprun_py.running.supervise.mpirun_process import Mpirun
    from poprun_py.running.supervise.shutdown import JobShutdown

# The maximum uncompressed size, in bytes, of one part of a file that a wrapper sends.
_MAX_PART_BYTES: Final = 1 << 20
# How many times the launcher asks another host for the time when a program starts there. The
# launcher asks equally often when the program has ended.
_NUM_QUESTIONS: Final = 8
# The seconds between an answer about the lost hosts and the next question.
_ASK_SECONDS = 3.0
# The launcher checks at this interval, in seconds, whether a child process has answered.
_ANSWER_SECONDS = 0.1
# After this time, the job does not wait for the wrappers any longer.
_READY_SECONDS = 30.0

Answer = Callable[[str], None]
# Starts the missing wrappers of a job; returns mpirun and the instances of the wrappers, or None.
Start = Callable[[Job, WrapperEvents], "tuple[Mpirun, tuple[int, ...]] | None"]


class ReceivedFiles:
    """Writes the files that the instances on other hosts (``others``) send to the launcher."""

    def __init__(self, places: Sequence[FilePlace], others: frozenset[int]) -> None:
        self._places = places
        self._others = others
        self._received: dict[tuple[int, str], int] = defaultdict(int)

    def take(self, instance: int, payload: bytes) -> None:
        """Append the data of a ``FILE`` frame to the file that it names, if that is expected."""
        import zlib  # imported here, because only jobs on several hosts need it

        encoded, _, packed = payload.partition(b"\0")
        name = encoded.decode(errors="replace")
        place = next((each for each in self._places if each.names.fullmatch(name)), None)
        if place is None or instance not in self._others:
            return
        with suppress(zlib.error, OSError):
            part = zlib.decompressobj().decompress(packed, _MAX_PART_BYTES)
            self._received[instance, place.variable] += len(part)
            if self._received[instance, place.variable] <= place.most_bytes:
                prefix = place.prefix(instance)
                path = prefix.with_name(f"{prefix.name}.{name}")
                with open_private(path, "ab") as file:
                    file.write(part)


class HostClocks:
    """Compares the clocks of the other hosts with the clock of the launcher's host.

    ``folder`` is the folder of the timeline's spans. Without a timeline, ``folder`` is None and no
    clocks are compared. ``others`` are the instances on other hosts.
    """

    def __init__(
        self,
        folder: Path | None,
        others: frozenset[int],
        send: Callable[[int, bytes, Any], None],
    ) -> None:
        self._folder = folder
        self._others = others if folder is not None else frozenset()
        self._send = send
        self._samples: dict[int, list[ClockSample]] = defaultdict(list)
        self._questions: dict[int, int] = defaultdict(int)

    def ask(self, instance: int) -> None:
        """If an instance is on another host, ask that host for the time on its clock."""
        if instance in self._others:
            self._questions[instance] = _NUM_QUESTIONS
            self._ask(instance)

    def take(self, instance: int, sent: int, answer: int) -> None:
        """Record the time in a host's answer; ask the host again if more answers are needed."""
        received = time.monotonic_ns()
        if self._folder is None or instance not in self._others:
            return
        # These modules are imported only by jobs with a timeline, so that other jobs start faster.
        from popdist_py.timeline.clocks import ClockSample
        from popdist_py.timeline.folder import clock_path, instance_prefix, save_clock

        samples = self._samples[instance]
        samples.append(ClockSample(sent, answer, received))
        self._questions[instance] -= 1
        if self._questions[instance] > 0:
            self._ask(instance)
        else:
            # The clock readings are saved at once, because the launcher may be killed later.
            with suppress(OSError):
                save_clock(clock_path(instance_prefix(self._folder, instance)), samples)

    def _ask(self, instance: int) -> None:
        self._send(instance, control_protocol.ASK_CLOCK, time.monotonic_ns())


# --- questions to lost and new hosts ------------------------------------------------------------


class HostWatch:
    """Asks the lost hosts of a job every few seconds, and the hosts that users add at once.

    ``changed`` is called with the reason when the job can use more hosts.
    """

    def __init__(self, changes: HostChanges, changed: Callable[[str], None]) -> None:
        self._changes = changes
        self._changed = changed
        self._new: deque[tuple[Callable[[], str], Answer]] = deque()
        self._question: Question | None = None
        self._has_ended = False
        self._take: Callable[[Finding], None] = self._take_lost
        self._check_at = 0.0 if changes.is_waiting else float("inf")

    def add(self, name: str, answer: Answer, now: float, *, has_model: bool) -> None:
        """Ask the host ``name``, which a user adds to the job, and ``answer`` the user."""
        self._new.append((partial(self._changes.ask_new, name, has_model=has_model), answer))
        if self._question is None:
            self._check_at = now

    def end(self) -> None:
        """Stop asking, because the job ends."""
        self._has_ended, self._check_at = True, float("inf")
        if self._question is not None:
            self._question.close()
            self._question = None

    def next_deadline(self) -> float:
        """Return the time at which ``on_time`` next has work to do; inf for never."""
        return self._check_at

    def on_time(self, now: float) -> None:
        """Ask the next host or the lost hosts, or take an answer that has arrived."""
        is_idle = math.isinf(self._check_at) and not self._has_ended
        if is_idle and self._changes.is_waiting:  # for a host that was back for a moment
            self._check_at = now + _ASK_SECONDS
        if now < self._check_at:
            return
        self._check_at = now + _ANSWER_SECONDS
        if self._question is None:
            self._ask()
        elif (finding := self._question.answer()) is not None:
            self._question, self._check_at = None, float("inf")
            self._take(finding)
            if self._has_ended:
                return
            if self._new:
                self._check_at = now
            elif self._changes.is_waiting:
                self._check_at = now + _ASK_SECONDS

    def _ask(self) -> None:
        with suppress(OSError):  # it is asked again later
            if self._new:
                ask, answer = self._new[0]
                self._question = Question(ask)
                self._new.popleft()
                self._take = partial(self._take_new, answer)
            else:
                self._question = Question(self._changes.ask_lost)
                self._take = self._take_lost

    def _take_lost(self, finding: Finding) -> None:
        if not finding.is_reason and (reason := self._changes.take_lost(finding.text)):
            self._changed(reason)

    def _take_new(self, answer: Answer, finding: Finding) -> None:
        reason, reply = self._changes.take_new(finding.text, is_problem=finding.is_reason)
        answer(reply)
        if reason:
            self._changed(reason)


class NewHosts:
    """Serves users who add hosts to a running job.

    ``request`` gets a new report of every running program, and then calls a function.
    """

    def __init__(
        self,
        watch: HostWatch,
        control: ControlChannel,
        shutdown: JobShutdown,
        request: Callable[[Callable[[Any], None], float], None],
    ) -> None:
        self._watch = watch
        self._control = control
        self._shutdown = shutdown
        self._request = request

    def end(self) -> None:
        """Stop asking hosts, because the job ends."""
        self._watch.end()

    def add(self, want: dict[str, Any], answer: Answer, now: float) -> None:
        """Let a host be asked; the answer is JSON with the name of the host, or with a problem."""
        name, peers = want.get("add_host"), self._control.peers.values()
        if not isinstance(name, str):
            answer("")
        elif self._shutdown.stop is not None:
            answer(json.dumps({"problem": "the programs of the job are ending: try again"}))
        elif not self._control.is_complete or not all(peer.started for peer in peers):
            answer(json.dumps({"problem": "the programs of the job are starting: try again"}))
        else:
            # The reports tell whether the program has a PopTorch model.
            self._request(lambda _: self._ask(name, answer), now)

    def _ask(self, name: str, answer: Answer) -> None:
        has_model = any(peer.has_model for peer in self._control.peers.values())
        self._watch.add(name, answer, time.monotonic(), has_model=has_model)


# --- wrappers on hosts that come back -------------------------------------------------------------


class NextWrappers:
    """The wrappers of the next attempt, as ``control_channel.WrapperEvents``.

    Args:
        job: The running attempt.
        start: Starts wrappers.
        log: Writes a line of the launcher's own log.
        use: Ends the attempt, for a reason, so that the next attempt uses the hosts.
    """

    def __init__(
        self,
        job: Job,
        start: Start,
        log: Callable[[str], None],
        use: Callable[[str], None],
    ) -> None:
        self._num_instances = job.num_instances
        # Only wrappers that keep states in memory stay over attempts.
        self._changes = job.hosts.changes if job.hosts.keeps_state else None
        self._start = start
        self._log = log
        self._use = use
        self._next: Job | None = None
        self._mpirun: Mpirun | None = None  # None except while wrappers become ready
        self._instances: tuple[int, ...] = ()
        # The indices of the wrappers that have connected, and that are ready.
        self._connected: set[int] = set()
        self._ready: set[int] = set()
        self._reason = ""
        self._began = 0.0

    def begin(self, reason: str) -> None:
        """Start wrappers on hosts that can be used, and use the hosts when the wrappers are ready.

        If wrappers are becoming ready for other hosts, the job also uses the new hosts then.
        """
        if self._mpirun is not None:
            return
        try:
            self._next = self._changes.next_job() if self._changes is not None else None
            started = self._start(self._next, self) if self._next is not None else None
        except StartError as error:
            self._log(f"no instance wrappers are started in advance: {error}")
            started = None
        if started is None:
            self._use(reason)
            return
        self._mpirun, self._instances = started
        self._reason, self._began = reason, time.monotonic()
        self._connected, self._ready = set(), set()
        self._log(
            f"{reason}: the instance wrappers of this host are started while the programs run"
        )

    def connected(self, peer: Peer) -> None:
        """Let a wrapper make a spare, which imports the packages of the program."""
        assert self._next is not None
        self._connected.add(peer.index)
        instance = self._instances[peer.index - self._num_instances]
        payload = json.dumps({"variables": self._next.command.variables[instance]}).encode()
        peer.connection.send(control_protocol.pack(control_protocol.PREPARE, payload))

    def received(self, peer: Peer, kind: bytes, value: Any) -> None:
        """Use the hosts when the last wrapper is ready."""
        if kind == control_protocol.PREPARED:
            self._log(
                f"the wrapper on {peer.host} {'has' if value else 'cannot have'} a spare process"
            )
            self._ready.add(peer.index)
            if len(self._ready) == len(self._instances):
                self._end()

    def disconnected(self, peer: Peer) -> None:
        """Wait for the hosts again, because one of them may be lost again."""
        self._give_up(f"the wrapper on {peer.host} has disconnected")

    def next_deadline(self) -> float:
        """Return the time at which ``on_time`` next has work to do; inf for never."""
        if self._mpirun is None:
            return math.inf
        return min(self._mpirun.next_deadline(), self._began + _READY_SECONDS)

    def on_time(self, now: float) -> None:
        """Use the hosts if their wrappers become ready too late; give up if these do not start."""
        if self._mpirun is None:
            return
        self._mpirun.on_time(now)
        is_late = now >= self._began + _READY_SECONDS
        has_ended = self._mpirun.has_just_ended()
        if len(self._connected) < len(self._instances) and (is_late or has_ended):
            self._give_up("mpirun did not start the wrappers")
        elif is_late:
            self._end()

    def _give_up(self, problem: str) -> None:
        if self._mpirun is None:
            return
        if self._changes is not None and self._changes.wait_again(problem):
            # Later wrappers would take the places of those that are started next.
            self._mpirun.stop(time.monotonic())
            self._mpirun = None
        else:
            self._end()

    def _end(self) -> None:
        if self._mpirun is not None:
            self._mpirun.all_connected()
            self._mpirun = None
            self._use(self._reason)
