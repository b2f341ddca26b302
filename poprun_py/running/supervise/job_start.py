"""The start of a job, with a diagnosis if some wrappers do not connect.

When every wrapper has connected, the hosts take the leases of the job and store the file that their
programs read. Then every wrapper gets the frame that starts its program. If a host is lost while
mpirun starts its daemons, or cannot connect to this machine, mpirun waits for ever. So if some
wrappers have not connected after some seconds, the launcher asks the hosts for the reason.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from popdist_py.environment import CALL, CHECKPOINT_MEMORY, MEETING_PORT, MPI_NETWORK
from popdist_py.errors import counted
from poprun_py.errors import StartError
from poprun_py.instance import control_protocol, process_control
from poprun_py.running.supervise.connection import Peer
from poprun_py.running.supervise.control_channel import ControlChannel
from poprun_py.running.supervise.job_description import Job
from poprun_py.running.supervise.launch_result import Cause
from poprun_py.running.supervise.shutdown import JobShutdown

# A function that returns possible problems of the hosts, or raises StartError with the reason why
# the job cannot start.
Explain = Callable[[], str]

_FIRST_WAIT_SECONDS = 10.0
# The first wait for all instances to connect is longer by this time for each instance, because many
# wrappers take longer to start.
_SECONDS_PER_INSTANCE = 0.02
# The launcher checks at this interval, in seconds, whether the hosts have answered.
_ANSWER_SECONDS = 0.2
_MAX_MPIRUN_LENGTH = 500
# The size of the parts of a file that is sent to another host.
_CALL_PART_BYTES = 1 << 19
_REASON, _DOUBT = b"!", b"?"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of the hosts about a job whose instances have not all connected."""

    text: str  # empty if the hosts found no problem
    is_reason: bool = False  # whether ``text`` is a reason or a possible problem
    seconds: float = 0.0  # since the start of the job

    def sentence(self, connected: int, total: int, mpirun_output: str) -> str:
        """Return a message with the number of connected instances and the output of mpirun."""
        output = " ".join(mpirun_output.split())[-_MAX_MPIRUN_LENGTH:]
        have = "has" if total == 1 else "have"
        started = f"{connected} of {counted(total, 'instance')} {have} started"
        after = f"{started} after {self.seconds:.0f} s"
        parts = [self.text] if self.is_reason else [after, self.text]
        return ". ".join(filter(None, [*parts, f"mpirun said: {output}" if output else ""]))


class Question:
    """A call of ``explain`` in a child process, so that the caller's loop continues meanwhile.

    The call runs in a process and not in a thread, because hosts that do not answer must not delay
    the end of the launcher. A process can be killed, with the ssh processes that it started.

    Raises:
        OSError: The system has reached its limit of processes or descriptors.
    """

    def __init__(self, explain: Explain) -> None:
        parent = os.getpid()
        self._descriptor, write = os.pipe()
        self._text = bytearray()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(self._descriptor)
            raise
        finally:
            # The child process keeps its own copy of the pipe's write end, to write its answer.
            if os.getpid() == parent:
                os.close(write)
        if not self._pid:
            _answer(explain, write, parent)
        os.set_blocking(self._descriptor, False)
        with contextlib.suppress(OSError):  # the child process may already have set it
            os.setpgid(self._pid, self._pid)

    def answer(self) -> Finding | None:
        """Return the answer of the child process; None until the answer is complete."""
        try:
            while part := os.read(self._descriptor, 1 << 16):
                self._text += part
        except BlockingIOError:
            return None
        self.close()
        return Finding(self._text[1:].decode(errors="replace"), self._text[:1] == _REASON)

    def close(self) -> None:
        """End the child process, whether it has answered or not."""
        if self._pid:
            with contextlib.suppress(OSError):
                os.killpg(self._pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(self._pid, 0)
            os.close(self._descriptor)
            self._pid = 0


def _answer(explain: Explain, descriptor: int, parent: int) -> NoReturn:
    """Call ``explain`` in the child process, write its answer to the pipe, and exit."""
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        process_control.die_with_parent(parent)
        try:
            text = _DOUBT + (explain() or "").encode(errors="replace")
        except StartError as error:
            text = _REASON + str(error).encode(errors="replace")
        while text:
            text = text[os.write(descriptor, text) :]
    finally:
        # After any other exception, the answer is empty, because the exception does not tell why
        # the job does not start.
        os._exit(0)


class StartDiagnosis:
    """Asks the hosts why a job does not start, and calls ``found`` with each answer.

    The hosts are asked some time after the start at ``now``, and again after twice the time, until
    ``end`` is called. ``explain`` returns the answer of the hosts; ``explain`` is None for a job on
    this host only.
    """

    def __init__(
        self,
        num_instances: int,
        explain: Explain | None,
        found: Callable[[Finding], None],
        now: float,
    ) -> None:
        self._explain = explain
        self._found = found
        self._question: Question | None = None
        self._wait_seconds = _FIRST_WAIT_SECONDS + _SECONDS_PER_INSTANCE * num_instances
        self._begun = now
        self._check_at = now + self._wait_seconds if explain is not None else float("inf")

    def end(self) -> None:
        """Stop asking the hosts, because every instance has connected or the job is stopped."""
        self._check_at = float("inf")
        if self._question is not None:
            self._question.close()
            self._question = None

    def next_deadline(self) -> float:
        """Return the time at which ``on_time`` next has work to do; inf for never."""
        return self._check_at

    def on_time(self, now: float) -> None:
        """Ask the hosts when the wait is over, or report an answer of the hosts."""
        if now < self._check_at or self._explain is None:
            return
        if self._question is None:
            with contextlib.suppress(OSError):
                self._question = Question(self._explain)
        finding = Finding("") if self._question is None else self._question.answer()
        if finding is None:
            self._check_at = now + _ANSWER_SECONDS
            return
        self._question = None
        self._wait_seconds *= 2
        self._check_at = now + self._wait_seconds
        if finding.is_reason:
            self.end()
        self._found(Finding(finding.text, finding.is_reason, now - self._begun))


class ProgramStart:
    """Starts all programs of a job at once, or ends the job with the reason why it cannot start.

    ``settings_of`` returns further values for the frame that starts an instance's program, and
    ``started`` is called when every wrapper has got its frame.
    """

    def __init__(
        self,
        job: Job,
        control: ControlChannel,
        shutdown: JobShutdown,
        settings_of: Callable[[Peer], dict[str, Any]],
        started: Callable[[], None],
    ) -> None:
        self._job = job
        self._control = control
        self._shutdown = shutdown
        self._settings_of = settings_of
        self._started = started
        self._unleased: set[int] = set()  # instances that have no lease yet
        # The path of the file that all programs read, for instances on other hosts.
        self._call_paths: dict[int, str] = {}

    def begin(self) -> None:
        """Request the leases, send the files, and start the programs after both steps.

        Wrappers that are kept from an earlier attempt keep their leases of the same CPUs.
        """
        if problem := misplaced(self._job.hosts.names, self._control.peers):
            self._shutdown.end(Cause.REFUSED, problem)
            return
        for index, request in self._job.hosts.leases.items():
            if self._control.peers[index].leased != request["cpus"]:
                self._unleased.add(index)
                self._control.send_to(index, control_protocol.LEASE, request)
        if not self._unleased:
            self._send_files()

    def on_lease(self, peer: Peer, answer: dict[str, Any]) -> None:
        """Handle the answer of a host to the request for a lease."""
        self._unleased.discard(peer.index)
        peer.leased = self._job.hosts.leases[peer.index]["cpus"]
        if refusal := self._job.hosts.refusal_of(peer.index, answer):
            self._shutdown.end(Cause.REFUSED, refusal)
        elif not self._unleased and self._shutdown.asked_at is None:
            self._send_files()

    def on_file_stored(self, peer: Peer, answer: dict[str, str]) -> None:
        """Handle the answer of another host that has stored a file, or could not store it."""
        if problem := answer.get("problem"):
            self._shutdown.end(
                Cause.REFUSED,
                f"host {peer.host} cannot store the function call of {self._job.watchers.program} "
                f"for instance {peer.index} ({problem}): free some space on this host, or set "
                "TMPDIR to another folder",
            )
            return
        self._call_paths[peer.index] = answer["path"]
        if len(self._call_paths) == len(self._job.hosts.others) and self._shutdown.asked_at is None:
            self._start()

    def _send_files(self) -> None:
        call, others = self._job.files.call, self._job.hosts.others
        if call is None or not others:
            self._start()
            return
        for index in others:
            self._control.peers[index].connection.send_parts(_frames_of(call))

    def _start(self) -> None:
        peers, hosts, files = self._control.peers, self._job.hosts, self._job.files
        ports = {"MASTER_PORT": str(peers[0].port)}
        if peers[0].meeting_port:
            ports[MEETING_PORT] = str(peers[0].meeting_port)
        for index, peer in peers.items():
            variables = {**ports, **self._job.command.variables[index]}
            if hosts.listen is None and hosts.network is not None:
                variables[MPI_NETWORK] = hosts.network
            if files.checkpoint_memory is not None:
                variables[CHECKPOINT_MEMORY] = files.checkpoint_memory
            is_other = index in hosts.others
            if not is_other:
                variables.update(files.variables(index))
            elif index in self._call_paths:
                variables[CALL] = self._call_paths[index]
            settings = {**self._settings_of(peer), **files.settings(index, is_other=is_other)}
            self._control.send_to(index, control_protocol.GO, {"variables": variables, **settings})
        self._started()


def _frames_of(call: Path) -> Iterator[bytes]:
    """Yield the frames with the parts of a file; the last frame is empty.

    If the file cannot be read to its end, the program notices that its copy is incomplete.
    """
    with contextlib.suppress(OSError), call.open("rb") as file:
        while part := file.read(_CALL_PART_BYTES):
            yield control_protocol.pack(control_protocol.INPUT_FILE, part)
    yield control_protocol.pack(control_protocol.INPUT_FILE)


def misplaced(hosts: Sequence[str], peers: Mapping[int, Peer]) -> str:
    """Return a message about an instance on another host than planned, or an empty text.

    ``hosts`` has the planned host name of each instance, or an empty text if the name is unknown.
    """
    for index, planned in enumerate(hosts):
        actual = peers[index].host
        if planned and actual != planned:
            return (
                f"instance {index} runs on host {actual}, but the plan places it on host "
                f"{planned}: let poprun-py place the instances (no --host or --map-by in "
                "--mpi-global-args). If the host has a new name, launch without --no-check or make "
                "a new plan"
            )
    return ""
