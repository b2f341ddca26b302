"""JobHandle: a job that runs in the background, as the program that started it sees it.

What the launcher says is taken by the job's listener. Nothing here starts a job.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from poprun_py.console import Log
from poprun_py.errors import StartError, UsageError
from poprun_py.instance.job_folders import JobFolder
from poprun_py.python_api import registry
from poprun_py.python_api.checks import require_instance, require_seconds, require_stream
from poprun_py.python_api.child import Child
from poprun_py.python_api.job_output import StreamName, read_instance, read_shown
from poprun_py.python_api.job_screen import Echo
from poprun_py.python_api.listener import Listener
from poprun_py.python_api.shown_job import ShownJob
from poprun_py.python_api.status import JobState, JobStatus
from poprun_py.running.supervise.caught_signals import INTERRUPT_ONCE
from poprun_py.running.supervise.job import LaunchResult

if TYPE_CHECKING:
    from poprun_py.python_api.work import Work

T = TypeVar("T")


class JobHandle(ShownJob, Generic[T]):
    """A job that ``poprun_py.start`` has started; any thread may use it.

    A job goes on when its handle is dropped, and is stopped when the program ends. ``with`` and
    ``async with`` stop what still runs at their end, and remove the job's files. ``await job`` is
    ``job.result()``; a cancelled ``await`` leaves the job running, as a ``wait`` that runs into
    its timeout does.

    Attributes:
        name: the program or function, as people call it.
    """

    def __init__(
        self,
        work: Work,
        child: Child,
        *,
        folder: JobFolder | None,
        echoes: tuple[Echo, ...] = (),
        listeners: Mapping[str, Log] | None = None,
    ) -> None:
        self.name = work.name
        self._read = work.read
        self._child = child
        self._folder = None if folder is None else Path(folder.path)
        self._began = time.monotonic()
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._is_stopping = False
        self._value: tuple[T] | None = None
        self._remove_folder = registry.remove_with(self, folder)
        self._listener = Listener(self.name, child, echoes, listeners)
        self._listener.call_when_ended(partial(registry.discard, self))
        registry.add(self)
        try:
            self._listener.start()
        except StartError:
            self._remove_folder()
            raise

    # --- asking ---------------------------------------------------------------------------

    def status(self) -> JobStatus:
        """Return how far the job is; a running launcher is asked what its instances do."""
        self._require_owner()
        heard = self._listener
        state, waits_for = self._state()
        attempt = heard.attempts[-1] if heard.attempts else None
        end = heard.ended_at if state == "ended" else time.monotonic()
        return JobStatus(
            state=state,
            seconds=end - self._began,
            pid=self._child.pid,
            run_id=attempt.run_id if attempt is not None else "",
            num_instances=attempt.num_instances if attempt is not None else None,
            waits_for=waits_for,
            view=self._view() if attempt is not None and state != "ended" else None,
            exit_code=getattr(heard.outcome, "exit_code", 1) if state == "ended" else None,
        )

    def done(self) -> bool:
        """Whether the job has ended and nothing of it is left running."""
        return self._listener.ended.is_set()

    def output(self, instance: int | None = None, stream: StreamName | None = None) -> str:
        """Return what was written so far, of long outputs the last 8 MiB.

        Args:
            instance: whose; None for what the command would show of all, with tags.
            stream: ``"stdout"`` or ``"stderr"``; None for an instance's stdout and then its stderr.
                Without an instance: of each instance in turn.

        Raises:
            UsageError: there is no such instance or stream, or the files were removed with the end
                of ``with``.
        """
        require_stream(stream)
        folder = self._folder
        if folder is None or not folder.exists():
            raise UsageError("the job's files are gone: read its output before `with` ends")
        if instance is None and stream is None:
            return read_shown(folder)
        attempts = list(self._listener.attempts)
        if not attempts:
            return ""
        total = attempts[-1].num_instances
        require_instance(instance, total)
        folders = list(dict.fromkeys(a.folder for a in attempts if a.folder is not None))
        indices = range(total) if instance is None else (instance,)
        return "".join(read_instance(folders, index, stream) for index in indices)

    # --- waiting --------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> LaunchResult:
        """Wait for the end of the job and return how it ended, well or not.

        Args:
            timeout: seconds; None for no limit.

        Raises:
            TimeoutError: it still runs, and goes on.
            UsageError: it does not fit the hosts and machines.
            StartError: it could not start.
            TimeLimitError: it ran into its own time limit, or hung; ``result`` tells the rest.
            JobFailedError: its launcher was killed.
        """
        self._require_owner()
        if not self._listener.ended.wait(require_seconds("timeout", timeout)):
            raise TimeoutError(f"{self.name} still runs after {timeout:g} s")
        outcome = self._listener.outcome
        if isinstance(outcome, BaseException):
            raise outcome.with_traceback(None)
        assert outcome is not None
        return outcome

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the job and return what came of it.

        Args:
            timeout: seconds; None for no limit.

        Returns:
            What the function returned in every instance, in their order; of a program how it ended.

        Raises:
            JobFailedError: it did not end well, and no exception tells why.
            Exception: what a function raised in an instance; else as ``wait``.
        """
        try:
            ended = self.wait(timeout)
            with self._reading:  # takes long for large results: not the lock that others need
                if self._value is None:
                    self._value = (cast("T", self._read(ended)),)
                return self._value[0]
        except Exception as error:  # frames of ours would tell the caller nothing
            raise error.with_traceback(None) from error.__cause__

    def __await__(self) -> Generator[Any, None, T]:
        return self._awaited().__await__()

    async def _awaited(self) -> T:
        import asyncio

        await self._async_end()
        try:
            return await asyncio.to_thread(self._result_for_future)
        except Exception as error:  # neither would those of the thread
            raise error.with_traceback(None) from error.__cause__

    def _result_for_future(self) -> T:
        try:
            return self.result()
        except StopIteration as error:  # no future takes it: who awaits would wait for ever
            raise RuntimeError(f"{self.name} raised StopIteration") from error

    async def _async_end(self) -> None:
        """Wait for the end without holding up the loop."""
        import asyncio

        self._require_owner()
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            # A loop that is closed waits for nothing any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        self._listener.call_when_ended(tell)
        await ended.wait()

    # --- ending ---------------------------------------------------------------------------

    def stop(self, grace: float | None = None) -> None:
        """Ask the job to end, as SIGTERM does its launcher; again is harmless.

        Args:
            grace: seconds after which what is left is killed; by default as the job's ``grace``
                says, counted from when its programs have saved.
        """
        self._require_owner()
        grace = require_seconds("grace", grace, least=0)
        with self._lock:
            was_asked, self._is_stopping = self._is_stopping, True
        if not was_asked:
            self._child.signal(signal.SIGTERM)
        if grace is not None:
            self._kill_after(grace)

    def close(self) -> None:
        """Stop the job if it still runs, wait for its end, and remove its files."""
        self._end(signal.SIGTERM)

    def __enter__(self) -> JobHandle[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        # Ctrl-C may have reached the launcher as well.
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._end(INTERRUPT_ONCE if is_interrupt else signal.SIGTERM)

    async def __aenter__(self) -> JobHandle[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        self._ask(signal.SIGTERM)
        cancelled = None
        while not self.done():
            try:
                await self._async_end()
            except asyncio.CancelledError as error:
                cancelled = error
                self._ask(signal.SIGINT)
        self._remove_folder()
        if cancelled is not None:
            raise cancelled

    def _end(self, number: int) -> None:
        """Ask for the end, wait for it, and clean up; an impatient Ctrl-C kills what is left."""
        self._require_owner()
        interrupt: KeyboardInterrupt | None = None
        self._ask(number)
        while not self.done():
            try:
                self._listener.ended.wait()
            except KeyboardInterrupt as error:
                interrupt = error
                self._ask(signal.SIGINT)
        self._remove_folder()
        if interrupt is not None:
            raise interrupt

    def _ask(self, number: int) -> None:
        """Send a signal that asks for the end; the second one kills what is left."""
        with self._lock:
            was_asked, self._is_stopping = self._is_stopping, True
        if not self.done() and (number == signal.SIGINT or not was_asked):
            self._child.signal(number)

    def _kill_after(self, seconds: float) -> None:
        """Have the launcher kill what is left after some seconds."""

        def kill() -> None:
            if not self._listener.ended.wait(seconds):
                self._child.signal(signal.SIGINT)  # the second signal: nothing is waited for

        threading.Thread(target=kill, name=f"poprun_py stop {self.name}", daemon=True).start()

    # --- small things ---------------------------------------------------------------------

    def _state(self) -> tuple[JobState, str]:
        """Return the state, and for whom the job waits if it does."""
        if self.done():
            return "ended", ""
        if self._is_stopping:
            return "stopping", ""
        if waits_for := self._listener.waits_for:
            return "waiting", waits_for
        return ("running" if self._listener.attempts else "preparing"), ""

    def _view(self) -> Any:
        from poprun_py.running.supervise.inspection import launcher_status
        from poprun_py.running.watch.job_view import JobView

        found = launcher_status(self._child.pid)
        return JobView.from_json(found) if found is not None else None

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise StartError(
                f"{self.name} was started by process {self._owner}: ask there, or start a job here"
            )

    def forget(self) -> None:
        """In a forked process: close what would keep the launcher from seeing its starter's end."""
        self._listener.leave()
