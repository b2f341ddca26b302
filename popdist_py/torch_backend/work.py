"""The work object that a call of torch.distributed returns, and the queue that runs the calls.

The calls of a group run in the order in which the program makes them, because the other ranks
expect this order. If a thread waits for a call that has not started, it runs the earlier calls and
then this call itself. For a small call, this is faster than waiting for the thread of the queue.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from popdist_py import activities
from popdist_py.errors import InstanceLostError, PopdistError
from popdist_py.torch_backend.compilation import never_compiled

__all__ = ["CallQueue", "NestedCallError", "PopdistWork", "WaitTimeoutError"]


class WaitTimeoutError(PopdistError, RuntimeError):
    """A call did not complete within the time-out of ``wait``."""


class NestedCallError(PopdistError, RuntimeError):
    """A signal handler made a call of a group while it interrupted another call of the group."""


@never_compiled
class PopdistWork(dist.Work):
    """A call that waits in the queue, is running, or is complete.

    Args:
        name: The name of the call, for messages and displays.
        function: A function that makes the call. The work keeps this function, and so the tensors
            that the function uses, until the call is complete.
        tensors: The result of the work.

    Attributes:
        name: The name of the call.
        source: For a receive, the rank that sent the message; -1 for other calls.
        may_call_back: Whether the program may have added a callback, which may wait for calls.
    """

    def __init__(self, name: str, function: Callable[[], Any], tensors: Sequence[Any] = ()) -> None:
        super().__init__()
        self.name = name
        self.source = -1
        self.may_call_back = False
        self._function: Callable[[], Any] | None = function
        self._tensors = list(tensors)
        self._queue: CallQueue | None = None
        self._is_done = False
        # This lock is held until the call is complete. A lock is ten times as fast as a
        # threading.Event.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._error: BaseException | None = None
        # Two futures. ``tell`` completes the first future. The first future then completes the
        # second future with the result or the error. ``get_future`` returns the second future.
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None
        self._are_futures_done = False

    def run(self) -> None:
        """Make the call, and store its error for ``wait``."""
        assert self._function is not None
        try:
            try:
                with activities.doing(activities.REDUCING, self.name):
                    self._function()
            except BaseException as error:
                self._error = error
            self._end()
        except BaseException as error:  # also a KeyboardInterrupt
            self._error = error
            if not self._is_done:
                self._end()

    def fail(self, error: BaseException) -> None:
        """Complete the work with an error, without making the call."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._function = None
        self._is_done = True
        self._pending.release()

    def tell(self) -> None:
        """If ``get_future`` has returned a future, complete it, and run its callbacks."""
        if self._futures is not None:
            with _futures_lock:
                is_told, self._are_futures_done = self._are_futures_done, True
            if not is_told:
                self._futures[0].set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the call is complete.

        Args:
            timeout: The longest time to wait. None and 0 stand for the time-out of the group.

        Raises:
            PopdistError: The call failed with this error.
            WaitTimeoutError: The call is not complete after ``timeout``.
        """
        if not self._is_done:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            if seconds <= 0 and self._queue is not None:
                self._queue.help(self)
            with activities.awaiting_background():
                self._await_end(seconds)
        if self._error is not None:
            raise self._error
        return True

    def _await_end(self, seconds: float) -> None:
        limit = min(seconds, threading.TIMEOUT_MAX) if seconds > 0 else -1
        if not self._pending.acquire(timeout=limit):
            where = self._queue.group_name() if self._queue is not None else ""
            raise WaitTimeoutError(
                f"{self.name}{f' of {where}' if where else ''}: not complete {seconds:g} s after "
                "wait(timeout) was called; the call continues"
            )
        self._pending.release()

    def synchronize(self) -> None:
        """Return once the call is complete."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether the call is complete, so that ``wait`` returns at once."""
        return self._is_done

    def is_success(self) -> bool:
        """Tell whether the call is complete without an error."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, if it has failed."""
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors of the call."""
        return self._tensors

    def source_rank(self) -> int:
        """For a receive, return the rank that sent the message; for other calls, return -1."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future for the tensors of the call.

        The returned future was made by ``then``, which converts an error of the call to a C++
        error. The reducer of DistributedDataParallel can raise only C++ errors.
        """
        caller = sys._getframe().f_back  # None in a thread of C++
        self.may_call_back |= caller is None or caller.f_code.co_name != _BACKWARD
        with _futures_lock:
            if self._futures is None:
                first: torch.futures.Future[Any] = torch.futures.Future()
                self._futures = first, first.then(self._outcome)
        if self._is_done:
            self.tell()
        return self._futures[1]

    def _outcome(self, _: torch.futures.Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._tensors


# The Python function that is on the stack while C++ runs the backward pass. If this function is the
# caller of ``get_future``, the reducer gets the future, and its callbacks do not wait for calls.
_BACKWARD = "_engine_run_backward"
# All works share this lock for their futures. The lock is held only for short times, and most calls
# do not use it.
_futures_lock = threading.Lock()


class CallQueue:
    """Runs the calls of one group in order. Asynchronous calls run in a thread of the queue.

    After a call has failed with an InstanceLostError, all later calls fail with the same error.

    Args:
        group_name: A function that returns the name of the group, for messages.
    """

    def __init__(self, group_name: Callable[[], str] = str) -> None:
        self.group_name = group_name
        self._calls: deque[PopdistWork] = deque()
        # The thread that runs a call holds this lock.
        self._turn = threading.Lock()
        # The id of the thread that is running a call; 0 if no call is running.
        self._inside = 0
        # Messages to the thread: True for each submitted call, False to end the thread.
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # The lock for starting and replacing the thread. The lock is needed because a thread that
        # has not started cannot be joined.
        self._changing = threading.Lock()
        self._lost: InstanceLostError | None = None

    def submit(self, work: PopdistWork) -> None:
        """Let the queue's thread run a call, after all calls that were submitted before."""
        if self._thread is None:
            self._replace_thread(None)
        work._queue = self
        self._calls.append(work)
        self._wake.put(True)

    def run(self, work: PopdistWork) -> None:
        """Run a call after all calls that were submitted before, and wait for its end.

        Raises:
            PopdistError: The call failed with this error.
            NestedCallError: This thread is already running another call.
        """
        self._check_outside(work)
        if self._calls or not self._turn.acquire(blocking=False):
            self.submit(work)
        else:
            try:
                self._run(work)
            finally:
                self._turn.release()
            work.tell()
        work.wait()

    def help(self, work: PopdistWork) -> None:
        """Run the calls up to ``work`` in this thread, unless another thread is running a call.

        Raises:
            NestedCallError: This thread is already running another call.
        """
        self._check_outside(work)
        while not work.is_completed() and self._turn.acquire(blocking=False):
            if work.is_completed():
                self._turn.release()
            else:
                self._run_next()

    @property
    def is_inside(self) -> bool:
        """Whether this thread is running a call, so that its current code is a signal handler."""
        return self._inside == threading.get_ident()

    def _check_outside(self, work: PopdistWork) -> None:
        if self._inside and self.is_inside:
            raise NestedCallError(
                f"{work.name}: this thread is in another call of the group, which a signal handler "
                "has interrupted: let the handler set a flag, and make the call afterwards"
            )

    def close(self, last: Callable[[], None] = lambda: None, seconds: float = -1) -> None:
        """Return once all calls have run and the thread has ended.

        Args:
            last: A function to run once no call is running. ``last`` does not run if a call is
                still running after the time limit.
            seconds: The longest time to wait for the end of each thread, and then for the end of
                the last call; -1 for no limit.
        """
        if self._thread is not None:
            self._wake.put(False)
            self._join_threads(seconds)
        if self._turn.acquire(timeout=seconds):
            try:
                last()
            finally:
                self._turn.release()

    def _join_threads(self, seconds: float) -> None:
        while (thread := self._started_thread()) is not None:
            if thread is not threading.current_thread():
                thread.join(None if seconds < 0 else seconds)
            with self._changing:
                if self._thread is thread:  # a callback may have started another thread instead
                    self._thread = None

    def _started_thread(self) -> threading.Thread | None:
        with self._changing:
            return self._thread

    def _replace_thread(self, old: threading.Thread | None) -> None:
        """Start a new thread to replace ``old``, unless ``old`` has been replaced already."""
        with self._changing:
            if self._thread is old:
                self._thread = threading.Thread(
                    target=self._run_calls, name="popdist-process-group", daemon=True
                )
                self._thread.start()

    def _run_calls(self) -> None:
        while self._thread is threading.current_thread() and self._wake.get():
            self._turn.acquire()
            self._run_next()

    def _run_next(self) -> None:
        """Run the first call, if there is one, and release ``_turn``."""
        work = None
        try:
            if self._calls:
                # popleft() is not used, because a KeyboardInterrupt right after it would lose the
                # work that it returned.
                work = self._calls[0]
                del self._calls[0]
                self._run(work)
        finally:
            if work is not None and not work.is_completed():  # the call did not begin
                self._calls.appendleft(work)
                self._wake.put(True)
            self._turn.release()
            if work is not None and work.is_completed():
                self._tell(work)
        error = work.exception() if work is not None else None
        if error is not None and not isinstance(error, Exception):
            raise error  # a KeyboardInterrupt is raised in the thread in which it came

    def _tell(self, work: PopdistWork) -> None:
        this = threading.current_thread()
        if work.may_call_back and self._thread is this:
            self._replace_thread(this)  # this thread may wait in a callback for another call
        work.tell()

    def _run(self, work: PopdistWork) -> None:
        if self._lost is not None:
            work.fail(self._lost)
            return
        self._inside = threading.get_ident()
        try:
            work.run()
        finally:  # needed because a KeyboardInterrupt may come after run() has returned
            self._inside = 0
        error = work.exception()
        if isinstance(error, InstanceLostError):
            self._lost = error
