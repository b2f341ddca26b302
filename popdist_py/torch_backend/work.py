"""What a call of torch.distributed returns, and the thread that does what is asynchronous.

A group's calls run in the order in which they were made: those of other ranks meet them in it.
Whoever waits for a call that nobody has begun makes it, with those before it: handing it to the
thread and back would take longer than a small call itself.

Nothing here knows what a call does.
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
    """A call did not complete within the time that its ``wait`` was given."""


class NestedCallError(PopdistError, RuntimeError):
    """A signal handler has called a group from within a call of that group."""


@never_compiled
class PopdistWork(dist.Work):
    """A call that runs, or has run.

    Args:
        name: of the call, for messages and views.
        function: what it does; it keeps the tensors that the call needs until it has run.
        tensors: what it returns.

    Attributes:
        name: of the call.
        source: rank from which the call received a message; -1 if it received none.
        may_call_back: whether a program has its future, and perhaps a callback that waits.
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
        # Held until the call is complete; takes a tenth of the time of a threading.Event.
        self._pending = threading.Lock()
        self._pending.acquire()
        self._error: BaseException | None = None
        # The first is complete with the call, and makes the second so, which others see.
        self._futures: tuple[torch.futures.Future[Any], torch.futures.Future[Any]] | None = None
        self._are_futures_done = False

    def run(self) -> None:
        """Do what the call does; ``wait`` raises its error, and ``tell`` tells of its end."""
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
        """Complete the call with an error, without making it."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self._function = None
        self._is_done = True
        self._pending.release()

    def tell(self) -> None:
        """Complete the future, if anybody has asked for one; its callbacks run here."""
        if self._futures is not None:
            with _futures_lock:
                is_told, self._are_futures_done = self._are_futures_done, True
            if not is_told:
                self._futures[0].set_result(None)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the call is complete.

        Args:
            timeout: None, or 0, for that of the group.

        Raises:
            PopdistError: the error of the call.
            WaitTimeoutError: it is not complete after ``timeout``.
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
                "wait(timeout) was called; the call goes on"
            )
        self._pending.release()

    def synchronize(self) -> None:
        """Return once the call is complete."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether ``wait`` would return at once."""
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
        """Return the rank from which the call received a message, -1 if none."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return what is complete with the call, and holds its tensors.

        An error is one of C++ there, so that DistributedDataParallel's reducer raises it.
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


# What Python runs while the reducer, in C++, runs backward; its callbacks wait for nothing.
_BACKWARD = "_engine_run_backward"
# One for all: it is held for as long as making a future takes, which most calls do not.
_futures_lock = threading.Lock()


class CallQueue:
    """Runs the calls of one group in their order, the asynchronous ones in one thread.

    After a call in which another rank was lost, all later ones fail with its error.

    Args:
        group_name: returns the name of the group, for messages.
    """

    def __init__(self, group_name: Callable[[], str] = str) -> None:
        self.group_name = group_name
        self._calls: deque[PopdistWork] = deque()
        # Held by the thread that runs calls.
        self._turn = threading.Lock()
        # The thread that is in a call, 0 for none.
        self._inside = 0
        # A True for each call of the thread's, False as the last.
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Held while the thread is started or replaced: nobody joins one that has not begun.
        self._changing = threading.Lock()
        self._lost: InstanceLostError | None = None

    def submit(self, work: PopdistWork) -> None:
        """Run a call after all that were submitted before."""
        if self._thread is None:
            self._replace_thread(None)
        work._queue = self
        self._calls.append(work)
        self._wake.put(True)

    def run(self, work: PopdistWork) -> None:
        """Run a call after all that were submitted before, and return once it is complete.

        Raises:
            PopdistError: the error of the call.
            NestedCallError: this thread is in another call.
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
        """Run the calls up to this one, for as long as nobody else runs any.

        Raises:
            NestedCallError: this thread is in another call.
        """
        self._check_outside(work)
        while not work.is_completed() and self._turn.acquire(blocking=False):
            if work.is_completed():
                self._turn.release()
            else:
                self._run_next()

    @property
    def is_inside(self) -> bool:
        """Whether this thread is in a call: a signal handler may ask."""
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
            last: runs while no call does, if that comes to be in time.
            seconds: to wait at most; -1: as long as it takes.
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
                if self._thread is thread:  # no callback has had it replaced
                    self._thread = None

    def _started_thread(self) -> threading.Thread | None:
        with self._changing:
            return self._thread

    def _replace_thread(self, old: threading.Thread | None) -> None:
        """Start the thread in place of ``old``, unless another is in its place already."""
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
        """Run the first call, if there is one, and give the turn back."""
        work = None
        try:
            if self._calls:
                # A KeyboardInterrupt right after popleft() would lose the work that it returned.
                work = self._calls[0]
                del self._calls[0]
                self._run(work)
        finally:
            if work is not None and not work.is_completed():  # interrupted before it began
                self._calls.appendleft(work)
                self._wake.put(True)
            self._turn.release()
            if work is not None and work.is_completed():
                self._tell(work)
        error = work.exception() if work is not None else None
        if error is not None and not isinstance(error, Exception):
            raise error  # a KeyboardInterrupt belongs to the thread that got it

    def _tell(self, work: PopdistWork) -> None:
        this = threading.current_thread()
        if work.may_call_back and self._thread is this:
            self._replace_thread(this)  # a callback may wait for another call
        work.tell()

    def _run(self, work: PopdistWork) -> None:
        if self._lost is not None:
            work.fail(self._lost)
            return
        self._inside = threading.get_ident()
        try:
            work.run()
        finally:  # a KeyboardInterrupt may come after run() has returned
            self._inside = 0
        error = work.exception()
        if isinstance(error, InstanceLostError):
            self._lost = error
