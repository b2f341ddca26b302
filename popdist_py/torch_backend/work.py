"""The work object that a call of torch.distributed returns, and the queue that runs the calls.

The calls of a group run in the order in which the program makes them, because the other ranks
expect this order. A thread that waits for a queued call runs the earlier calls and then that call
itself. For a small call, this is faster than waiting until the queue's background thread runs the
call.
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
    """A signal handler interrupted a call of a group and made another call of the same group."""


@never_compiled
class PopdistWork(dist.Work):
    """A collective call that waits in the queue, is running, or is complete.

    Args:
        name: The name of the call, for error messages and for displays of the job's state.
        function: A function that makes the call. The work keeps a reference to this function until
            the call is complete, so that the tensors that the function uses are not freed.
        tensors: The tensors that ``result`` returns.

    Attributes:
        name: The name of the call.
        source: For a receive, the rank that sent the message; -1 for other calls.
        may_call_back: Whether the program may have added a callback to the future. Such a callback
            may wait for other calls.
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
        # This lock stays locked until the call is complete. A threading.Event would be ten times
        # slower than a lock.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._error: BaseException | None = None
        # ``get_future`` makes two futures and returns the second future. ``tell`` completes the
        # first future, which then completes the second future with the result or the error.
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None
        self._are_futures_done = False

    def run(self) -> None:
        """Make the call. If it fails, store the error, which ``wait`` then raises."""
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
            timeout: The longest time to wait; None or 0 means the time-out of the group.

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
                f"{self.name}{f' of {where}' if where else ''} was not complete {seconds:g} s "
                "after wait(timeout) was called; the call continues"
            )
        self._pending.release()

    def synchronize(self) -> None:
        """Return once the call is complete."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether the call is complete, so that ``wait`` would not block."""
        return self._is_done

    def is_success(self) -> bool:
        """Tell whether the call is complete without an error."""
        return self._is_done and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error with which the call failed; None if it has not failed."""
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors that the call fills."""
        return self._tensors

    def source_rank(self) -> int:
        """For a receive, return the rank that sent the message; for other calls, return -1."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future for the tensors of the call.

        ``Future.then`` makes the returned future, because ``then`` converts an error of the call to
        a C++ error. The reducer of DistributedDataParallel can raise only C++ errors.
        """
        caller = sys._getframe().f_back  # the caller is None in a thread that C++ started
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


# The name of torch's Python function that waits while C++ code runs the backward pass. If
# _engine_run_backward is the caller of ``get_future``, the future goes to the reducer of
# DistributedDataParallel. The callbacks of the reducer do not wait for other calls.
_BACKWARD = "_engine_run_backward"
# One lock protects the futures of all PopdistWork objects. Sharing the lock does not slow down
# calls, because it is held only briefly and most calls have no future.
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
        # Messages to the queue's thread: True for each submitted call, False to end the thread.
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # This lock is held while the queue's thread is started or replaced. Otherwise another
        # thread might try to join a thread that has not started, and joining it would fail.
        self._changing = threading.Lock()
        self._lost: InstanceLostError | None = None

    def submit(self, work: PopdistWork) -> None:
        """Let the queue's thread run a call, after all calls that were submitted earlier."""
        if self._thread is None:
            self._replace_thread(None)
        work._queue = self
        self._calls.append(work)
        self._wake.put(True)

    def run(self, work: PopdistWork) -> None:
        """Run a call after all calls that were submitted earlier; return once it is complete.

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
        """Whether the current thread is running a call.

        If it is, the code that reads this property belongs to a signal handler, which has
        interrupted the call.
        """
        return self._inside == threading.get_ident()

    def _check_outside(self, work: PopdistWork) -> None:
        if self._inside and self.is_inside:
            raise NestedCallError(
                f"{work.name} was called by a signal handler that has interrupted another call of "
                f"the group: set a flag in the signal handler, and call {work.name} afterwards"
            )

    def close(self, last: Callable[[], None] = lambda: None, seconds: float = -1) -> None:
        """Return once all calls have run and the queue's thread has ended.

        Args:
            last: A function to run once no call is running. ``last`` does not run if a call is
                still running after the time limit.
            seconds: The time limit for the end of each thread of the queue, and again for the end
                of the last call; -1 for no limit.
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
                if self._thread is thread:  # a callback may have replaced the thread
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
        """Run the first call of the queue, if there is one, and release the lock ``_turn``."""
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
            # A callback in this thread may wait for another call, which a new thread must run.
            self._replace_thread(this)
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
