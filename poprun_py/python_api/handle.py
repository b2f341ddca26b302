"""The handle that ``poprun_py.start`` returns for a background job.

When the calling program ends, its running jobs are stopped, and their folders are removed.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from poprun_py.errors import LaunchError, StartError, UsageError
from poprun_py.instance.job_folders import JobFolder
from poprun_py.options.option_types import plain
from poprun_py.python_api.launcher_child import LauncherChild
from poprun_py.python_api.shown_output import MOST_READ_BYTES
from poprun_py.python_api.status import JobState, JobStatus
from poprun_py.running.output_files import output_parts, output_path
from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.running.supervise.signal_pipe import INTERRUPT_ONCE

if TYPE_CHECKING:
    from poprun_py.running.watch.job_view import JobView

T = TypeVar("T")
StreamName = Literal["stdout", "stderr"]
# The file in a job's folder with the output of all instances, as ``poprun-py`` shows it.
SHOWN = "shown"
_STREAMS: tuple[StreamName, ...] = ("stdout", "stderr")


class JobHandle(Generic[T]):
    """The handle of a job that ``poprun_py.start`` has started. Any thread may use the handle.

    The job continues when its handle is dropped, and is stopped when the calling program ends.
    At the end of a ``with`` or ``async with`` block, the job is stopped and its files are removed.
    ``await job`` returns ``job.result()``. The job continues when an ``await`` is cancelled, and
    when ``wait`` raises TimeoutError.

    Attributes:
        name: The name of the program or function.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[LaunchResult], T],
        launcher: LauncherChild,
        folder: JobFolder | None,
    ) -> None:
        self.name = name
        self._read = read
        self._launcher = launcher
        self._folder = None if folder is None else Path(folder.path)
        self._began = launcher.began_at
        self._owner = os.getpid()
        self._stopping_lock = threading.Lock()
        self._is_stopping = False
        self._reading_lock = threading.Lock()
        self._value: tuple[T] | None = None
        # The finalizer removes the job's folder when `close` is called, the handle is freed, or
        # Python exits.
        self._remove_folder = weakref.finalize(self, _remove, folder, self._owner)
        _stop_jobs_at_exit()
        with _running_lock:
            _running[launcher.outcome] = self
        launcher.outcome.add_done_callback(_forget)

    # --- state and output of the job ------------------------------------------------------

    def status(self) -> JobStatus:
        """Return the state of the job, with the progress of its instances while it runs."""
        self._require_owner()
        launcher = self._launcher
        attempt = launcher.attempts[-1] if launcher.attempts else None
        waits_for, exit_code, view = launcher.waits_for, None, None
        seconds = time.monotonic() - self._began
        state: JobState = "preparing" if attempt is None else "running"
        if self.done():
            state, seconds = "ended", launcher.ended_at - self._began
            ended = launcher.outcome.exception() or launcher.outcome.result()
            exit_code = getattr(ended, "exit_code", 1)
        elif self._is_stopping:
            state = "stopping"
        elif waits_for:
            state = "waiting"
        if attempt is not None and state != "ended":
            view = self._view()
        return JobStatus(
            state=state,
            seconds=seconds,
            pid=launcher.pid,
            run_id=attempt.run_id if attempt is not None else "",
            num_instances=attempt.num_instances if attempt is not None else None,
            waits_for=waits_for if state == "waiting" else "",
            view=view,
            exit_code=exit_code,
        )

    def _view(self) -> JobView | None:
        from poprun_py.running.supervise.launcher_queries import launcher_status
        from poprun_py.running.watch.job_view import JobView

        found = launcher_status(self._launcher.pid)
        return JobView.from_json(found) if found is not None else None

    def done(self) -> bool:
        """Return whether the job and all its processes have ended."""
        return self._launcher.outcome.done()

    @property
    def report(self) -> Path | None:
        """The page of the run, or its report.json; None before the end or without output_dir."""
        outcome = self._launcher.outcome
        if not outcome.done() or outcome.exception() is not None:
            return None
        return outcome.result().report

    def output(self, instance: int | None = None, stream: StreamName | None = None) -> str:
        """Return the output of the instances so far, at most the last 8 MiB of each stream.

        Args:
            instance: The index of an instance; None for the output of all instances with tags, as
                ``poprun-py`` shows it.
            stream: ``"stdout"`` or ``"stderr"``; None for an instance's stdout followed by its
                stderr. If only ``stream`` is given, this stream of every instance is returned.

        Raises:
            UsageError: The instance or stream does not exist, or the end of the ``with`` block has
                removed the job's files.
        """
        if stream is not None and not (isinstance(stream, str) and stream in _STREAMS):
            raise UsageError(f"stream {stream!r}: expected 'stdout', 'stderr' or None")
        folder = self._folder
        if folder is None or not folder.exists():
            raise UsageError(
                "the files of the job have been removed: read the output before the `with` "
                "block of the job ends"
            )
        if instance is None and stream is None:
            return _read_end([folder / SHOWN])
        attempts = list(self._launcher.attempts)
        if not attempts:
            return ""
        paths = dict.fromkeys(
            output_path(attempt.folder, index, name, attempt.num_instances)
            for index in _instance_indices(instance, attempts[-1].num_instances)
            for name in (_STREAMS if stream is None else (stream,))
            for attempt in attempts
            if attempt.folder is not None
        )
        return "".join(_read_end(output_parts(path)) for path in paths)

    def __repr__(self) -> str:
        try:
            return f"<JobHandle {self.name}: {self.status()}>"
        except StartError:  # a forked process must not query the launcher
            return f"<JobHandle {self.name}: started by another process>"

    def _repr_html_(self) -> str:
        from poprun_py.python_api.value_views import job_html

        return job_html(self.name, self.status(), self._launcher.outcome)

    def _ipython_display_(self) -> None:
        from poprun_py.python_api.value_views import show_cell

        show_cell(self.name, self.status, self._launcher.outcome)

    # --- waiting for the end of the job ---------------------------------------------------

    def wait(self, timeout: float | None = None) -> LaunchResult:
        """Wait for the end of the job and return the job's LaunchResult, even if the job failed.

        Args:
            timeout: The most seconds to wait; None for no limit.

        Raises:
            TimeoutError: The job still runs after ``timeout`` seconds. The job is not stopped.
            UsageError: The options do not fit the hosts and machines.
            StartError: The job could not start.
            TimeLimitError: The job ran into its time limit, or hung; ``result`` has the details.
            JobFailedError: The launcher process was killed.
        """
        self._require_owner()
        try:
            return self._launcher.outcome.result(_checked_seconds("timeout", timeout))
        except TimeoutError:
            raise TimeoutError(
                f"the job {self.name} is still running after {timeout:g} s"
            ) from None
        except LaunchError as error:
            raise error.with_traceback(None) from error.__cause__

    def result(self, timeout: float | None = None) -> T:
        """Wait for the end of the job; return the function's values or the program's LaunchResult.

        Args:
            timeout: The most seconds to wait; None for no limit.

        Returns:
            The list of the function's return values, ordered by the index of the instance, or the
            LaunchResult of the program.

        Raises:
            JobFailedError: The job failed without an exception of the function.
            Exception: The exception that the function raised in an instance, or an exception that
                ``wait`` raises.
        """
        try:
            ended = self.wait(timeout)
            # Reading has a separate lock, because reading may take long and must not block `stop`.
            with self._reading_lock:
                if self._value is None:
                    self._value = (self._read(ended),)
                return self._value[0]
        except Exception as error:  # omit this module's frames from the traceback
            raise error.with_traceback(None) from error.__cause__

    def __await__(self) -> Generator[Any, None, T]:
        return self._async_result().__await__()

    async def _async_result(self) -> T:
        import asyncio

        await self._async_wait()
        try:
            return await asyncio.to_thread(self._result_for_future)
        except Exception as error:  # omit the thread's frames from the traceback
            raise error.with_traceback(None) from error.__cause__

    def _result_for_future(self) -> T:
        try:
            return self.result()
        except StopIteration as error:
            # Raise RuntimeError, because an asyncio future rejects StopIteration, and `await` would
            # never return.
            raise RuntimeError(f"{self.name} raised StopIteration") from error

    async def _async_wait(self) -> None:
        """Wait for the end of the job without blocking the event loop."""
        import asyncio

        self._require_owner()
        with contextlib.suppress(LaunchError):  # `result` raises the job's error
            await asyncio.wrap_future(self._launcher.outcome)

    # --- stopping the job -----------------------------------------------------------------

    def stop(self, grace: float | None = None) -> None:
        """Ask the job to end by sending SIGTERM to its launcher, at most once.

        Args:
            grace: The seconds from this call until the remaining processes are killed, by default
                the job's option ``grace`` after the programs have saved their state.
        """
        self._require_owner()
        grace = _checked_seconds("grace", grace, least=0)
        self._ask_to_end(signal.SIGTERM)
        if grace is not None:
            threading.Thread(
                target=self._kill_after,
                args=(grace,),
                name=f"poprun_py stop {self.name}",
                daemon=True,
            ).start()

    def close(self) -> None:
        """Stop the job if it still runs, wait for its end, and remove its files."""
        self._end(signal.SIGTERM)

    def __enter__(self) -> JobHandle[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        # The launcher may have received the same Ctrl-C as this process. The launcher counts Ctrl-C
        # and INTERRUPT_ONCE as one interrupt, because a second interrupt would kill the job.
        is_interrupt = kind is not None and issubclass(kind, KeyboardInterrupt)
        self._end(INTERRUPT_ONCE if is_interrupt else signal.SIGTERM)

    async def __aenter__(self) -> JobHandle[T]:
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        self._ask_to_end(signal.SIGTERM)
        cancelled = None
        while not self.done():
            try:
                await self._async_wait()
            except asyncio.CancelledError as error:
                cancelled = error
                self._ask_to_end(signal.SIGINT)
        self._remove_folder()
        if cancelled is not None:
            raise cancelled

    def _end(self, number: int) -> None:
        """Ask the job to end, wait for its end, and remove its files.

        Ctrl-C during the wait makes the launcher kill the job's remaining processes.
        """
        self._require_owner()
        interrupt: KeyboardInterrupt | None = None
        self._ask_to_end(number)
        while not self.done():
            try:
                futures.wait([self._launcher.outcome])
            except KeyboardInterrupt as error:
                interrupt = error
                self._ask_to_end(signal.SIGINT)
        self._remove_folder()
        if interrupt is not None:
            raise interrupt

    def _ask_to_end(self, number: int) -> None:
        """Send the launcher the signal ``number``; the launcher kills the job at a second one."""
        with self._stopping_lock:
            was_asked, self._is_stopping = self._is_stopping, True
        if not self.done() and (number == signal.SIGINT or not was_asked):
            self._launcher.signal(number)

    def _kill_after(self, seconds: float) -> None:
        """Make the launcher kill the job's remaining processes after ``seconds``."""
        futures.wait([self._launcher.outcome], seconds)
        self._ask_to_end(signal.SIGINT)

    def _require_owner(self) -> None:
        if os.getpid() != self._owner:
            raise StartError(
                f"the job {self.name} was started by process {self._owner}: use its JobHandle "
                "in that process, or launch a job in this process"
            )


def _instance_indices(instance: object, total: int) -> range | tuple[int, ...]:
    """Return the indices of the requested instances; None requests every instance."""
    index = plain(instance)
    if index is None:
        return range(total)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < total:
        raise UsageError(
            f"instance {instance!r}: expected an index from 0 to {total - 1}, or None for all "
            "instances"
        )
    return (index,)


def _read_end(parts: Sequence[Path]) -> str:
    """Return the last 8 MiB of the files ``parts``, as one text in whole lines.

    The result is empty if no file exists yet.
    """
    data, is_whole = b"", True
    for path in reversed(parts):
        space = MOST_READ_BYTES - len(data)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - space))
                data = file.read(space) + data
        except FileNotFoundError:
            continue
        if size > space:
            is_whole = False
            break
    return (data if is_whole else data.partition(b"\n")[2]).decode(errors="replace")


def _checked_seconds(name: str, value: object, least: float = -math.inf) -> float | None:
    """Return a checked time in seconds, at most ``threading.TIMEOUT_MAX``; None for no limit.

    Raises:
        UsageError: The value is not a number, or is below ``least``.
    """
    if value is None:
        return None
    if not isinstance(value, bool) and isinstance(value, Real) and float(value) >= least:
        return min(float(value), threading.TIMEOUT_MAX)
    expected = "seconds" if least < 0 else f"a number of seconds, {least:g} or more"
    raise UsageError(f"{name} {value!r}: expected {expected}")


# --- the end of the calling program -------------------------------------------------------

# The running jobs, keyed by the futures of their outcomes. This dictionary keeps a handle alive
# after the calling program has dropped the handle.
_running: dict[futures.Future[LaunchResult], JobHandle[Any]] = {}
_running_lock = threading.Lock()


def _forget(outcome: futures.Future[LaunchResult]) -> None:
    with _running_lock:
        _running.pop(outcome, None)


def _remove(folder: JobFolder | None, owner: int) -> None:
    if folder is not None and os.getpid() == owner:
        folder.remove()


@functools.cache
def _stop_jobs_at_exit() -> None:
    # Exit functions run in reverse order. weakref.finalize has already registered the removal of
    # job folders, so the jobs are stopped before their folders are removed.
    atexit.register(_stop_all)
    os.register_at_fork(after_in_child=_disconnect_all)


def _stop_all() -> None:
    with _running_lock:
        jobs = list(_running.values())
    for job in jobs:  # Ask all jobs to end before waiting, so that the jobs end in parallel.
        job.stop()
    for job in jobs:
        job.close()


def _disconnect_all() -> None:
    """Close the channels to the launchers in a forked process.

    If a forked process kept a channel open, the launcher would not notice the end of the process
    that started the job.
    """
    global _running_lock
    for job in _running.values():
        job._launcher.disconnect()
    _running.clear()
    _running_lock = threading.Lock()
