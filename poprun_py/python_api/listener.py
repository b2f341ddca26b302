"""The listener of a job: a thread that takes what the launcher's process says, until it has ended.

Nothing here starts a job, asks for its end, or reads what came of it.
"""

from __future__ import annotations

import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping

from poprun_py.console import Log
from poprun_py.errors import JobFailedError, LaunchError, StartError
from poprun_py.python_api.child import Child
from poprun_py.python_api.job_screen import Echo
from poprun_py.python_api.order import Attempt
from poprun_py.running.supervise.job import Cause, LaunchResult, describe


class Listener:
    """What a launcher has said so far, and in the end the outcome of its job.

    Args:
        name: of the job, as people call it.
        child: the launcher's process.
        echoes: what shows its output.
        listeners: take the lines of the kinds by which they are called.

    Attributes:
        ended: set when the launcher's process has ended and ``outcome`` is there.
        ended_at: when that was, on the monotonic clock.
        outcome: how the job ended, or why it could not run; None until it has ended.
        attempts: that have begun.
        waits_for: for whom the job waits, in words; empty if it does not.
    """

    def __init__(
        self,
        name: str,
        child: Child,
        echoes: tuple[Echo, ...] = (),
        listeners: Mapping[str, Log] | None = None,
    ) -> None:
        self.ended = threading.Event()
        self.ended_at = 0.0
        self.outcome: LaunchResult | BaseException | None = None
        self.attempts: list[Attempt] = []
        self.waits_for = ""
        self._name = name
        self._child = child
        self._echoes = echoes
        self._listeners = dict(listeners or {})
        self._lock = threading.Lock()
        self._when_ended: list[Callable[[], None]] = []

    def start(self) -> None:
        """Start the thread; if there can be none, the launcher is ended.

        Raises:
            StartError: there can be none.
        """
        thread = threading.Thread(
            target=self._follow, name=f"poprun_py job {self._name}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # there are too many, or this Python is ending
            self.leave()
            self._finish()
            raise StartError(f"{self._name} cannot be watched: {error}") from None

    def call_when_ended(self, call: Callable[[], None]) -> None:
        """Have something called when the job has ended, from any thread; now if it has."""
        with self._lock:
            if not self.ended.is_set():
                self._when_ended.append(call)
                return
        call()

    def leave(self) -> None:
        """Close what tells the launcher that somebody listens: it ends when nobody does.

        In a forked process that leaves the channel to the one that started the job.
        """
        self._child.channel.close()
        for echo in self._echoes:
            echo.close()

    def _follow(self) -> None:
        """Listen to the end of the launcher's process, which comes if that fails as well."""
        try:
            self._listen()
        finally:
            self.leave()
            self._finish()

    def _listen(self) -> None:
        # What the result holds, while there is time: an import when the program ends of a Ctrl-C
        # would have Python forget that it is to end by that signal.
        import poprun_py.running.watch.job_view  # noqa: F401

        with selectors.DefaultSelector() as selector:
            selector.register(self._child.channel, selectors.EVENT_READ)
            for echo in self._echoes:
                selector.register(echo, selectors.EVENT_READ)
            is_open = True
            while is_open:
                for key, _ in selector.select():
                    if not isinstance(key.fileobj, Echo):
                        is_open = self._take_message()
                    elif not key.fileobj.pass_on():
                        selector.unregister(key.fileobj)
        self._child.wait()
        for echo in self._echoes:
            echo.drain()

    def _take_message(self) -> bool:
        """Take one message of the launcher; returns whether more can come."""
        message = self._child.channel.receive()
        if message is None:
            return False
        kind, value = message
        if kind in ("result", "error"):
            self.outcome = value
        elif kind == "waiting":
            self.waits_for = value
        elif kind == "attempt":
            self.attempts.append(value)
        elif kind in self._listeners:
            try:
                self._listeners[kind](value)
            except Exception:
                # Whose fault it is; nobody else is to miss what comes.
                thread = threading.current_thread()
                threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), thread)))
        return True

    def _finish(self) -> None:
        code = self._child.wait()
        if self.outcome is None:
            self.outcome = self._lost(code)
        self.ended_at = time.monotonic()
        with self._lock:
            self.ended.set()
            waiting, self._when_ended = self._when_ended, []
        for tell in waiting:
            tell()

    def _lost(self, code: int) -> LaunchError:
        """Return why a launcher ended that did not say how its job did."""
        reason = f"the launcher ended with {describe(code)}"
        if not self.attempts:
            return StartError(f"{reason} before the programs ran")
        exit_code = 128 - code if code < 0 else code or 1
        return JobFailedError(
            f"{reason}: its instances were ended",
            LaunchResult(
                exit_code=exit_code,
                reason=reason,
                cause=Cause.MPIRUN_ENDED,
                run_id=self.attempts[-1].run_id,
            ),
        )
