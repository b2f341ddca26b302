"""The start of a job: until every instance is there, and each on the host that it is planned for.

If a host is lost while mpirun starts its daemons, or cannot connect to this machine, mpirun waits
for ever. So if a job is not complete after a while, its hosts are asked for the reason. This module
stops nothing: it returns what is wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from popdist_py.errors import counted
from poprun_py.errors import StartError
from poprun_py.instance import process_control
from poprun_py.running.supervise.control_channel import Peer

# Returns possible problems of the hosts, or raises StartError with the reason.
Explain = Callable[[], str]

_FIRST_LOOK_SECONDS = 10.0
# Added for each instance: the more wrappers there are, the longer their start takes.
_SECONDS_OF_INSTANCE = 0.02
# How often to check whether the hosts have answered.
_ANSWER_SECONDS = 0.2
_MOST_WORDS = 500
_REASON, _DOUBT = b"!", b"?"


@dataclass(frozen=True, slots=True)
class Finding:
    """The answer of the hosts about a job that is not complete ``seconds`` after its start.

    ``is_reason`` is true for a reason why the job cannot start, and false for possible problems.
    """

    text: str
    is_reason: bool = False
    seconds: float = 0.0

    def sentence(self, connected: int, total: int, mpirun_text: str) -> str:
        """Return a message with the number of connected instances and the words of mpirun."""
        said = " ".join(mpirun_text.split())[-_MOST_WORDS:]
        have = "has" if total == 1 else "have"
        started = f"{connected} of {counted(total, 'instance')} {have} started"
        after = f"{started} after {self.seconds:.0f} s"
        parts = [self.text] if self.is_reason else [after, self.text]
        return ". ".join(filter(None, [*parts, f"mpirun said: {said}" if said else ""]))


class Question:
    """A call of ``explain`` in a child process, so that the caller's loop goes on meanwhile.

    It is a process and not a thread, because hosts that do not answer must not delay the end of the
    launcher: a process can be killed, with the ssh processes that it started.

    Raises:
        OSError: The system has no process or descriptor left.
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
            # The child keeps its copy, to answer through it.
            if os.getpid() == parent:
                os.close(write)
        if not self._pid:
            _answer(explain, write, parent)
        os.set_blocking(self._descriptor, False)
        with contextlib.suppress(OSError):  # the child has done so already
            os.setpgid(self._pid, self._pid)

    def answer(self) -> Finding | None:
        """Return the answer; None before it has come."""
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
    """Write the answer and end the process; the child process calls this."""
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
        # Any other failure gives no answer, because it says nothing about the start.
        os._exit(0)


class Startup:
    """What may keep a job from starting; the clock is an argument.

    Args:
        hosts: The name that each instance's host gives itself; empty where that is not known.
        explain: Looks for the reason why the job does not start; None for a job on this host only.
        ask: Begins a call of ``explain`` and returns the running question.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        explain: Explain | None,
        ask: Callable[[Explain], Question] = Question,
    ) -> None:
        self._hosts = hosts
        self._explain = explain
        self._ask = ask
        self._question: Question | None = None
        self._patience_seconds = _FIRST_LOOK_SECONDS + _SECONDS_OF_INSTANCE * len(hosts)
        self._begun = 0.0
        self._look_at = float("inf")

    def begin(self, now: float) -> None:
        """Look into the job if it is not complete after a while, and again after twice the time."""
        self._begun = now
        self._wait(now)

    def _wait(self, now: float) -> None:
        if self._explain is not None:
            self._look_at = now + self._patience_seconds

    def end(self) -> None:
        """Look no more: every instance is there, or the job is stopped."""
        self._look_at = float("inf")
        if self._question is not None:
            self._question.close()
            self._question = None

    def misplaced(self, peers: Mapping[int, Peer]) -> str | None:
        """Return what is wrong if an instance is on another host than planned."""
        for index, planned in enumerate(self._hosts):
            actual = peers[index].host
            if planned and actual != planned:
                return (
                    f"instance {index} is on host {actual}, planned on {planned}: leave the "
                    "placement to poprun-py (no --host or --map-by in --mpi-global-args); if the "
                    "host has another name now, launch without --no-check or plan again"
                )
        return None

    def next_deadline(self) -> float:
        """Return when the job is looked into; inf for never."""
        return self._look_at

    def on_time(self, now: float) -> Finding | None:
        """Ask the hosts when it is due; return their answer once it has come."""
        if now < self._look_at or self._explain is None:
            return None
        if self._question is None:
            with contextlib.suppress(OSError):
                self._question = self._ask(self._explain)
        finding = Finding("") if self._question is None else self._question.answer()
        if finding is None:
            self._look_at = now + _ANSWER_SECONDS
            return None
        self._question = None
        self._patience_seconds *= 2
        self._wait(now)
        if finding.is_reason:
            self.end()
        return Finding(finding.text, finding.is_reason, now - self._begun)
