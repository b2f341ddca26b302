"""What a call of torch.distributed returns, and the thread that does what is asynchronous.

A group's calls run in the order in which they were made: those of other ranks meet them in it.
Nothing here knows what a call does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from popdist_py import activities

__all__ = ["CallQueue", "PopdistWork"]


class PopdistWork(dist.Work):
    """A call that runs, or has run.

    Args:
        name: of the call, for messages and views.
        function: what it does.
        tensors: what it returns.
    """

    def __init__(self, name: str, function: Callable[[], Any], tensors: Sequence[Any] = ()) -> None:
        super().__init__()
        self._name = name
        self._function: Callable[[], Any] | None = function
        self._tensors = list(tensors)
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def run(self) -> None:
        """Do what the call does; ``wait`` raises its error."""
        assert self._function is not None
        try:
            with activities.doing(activities.REDUCING, self._name):
                self._function()
        except BaseException as error:
            self._error = error
        self._function = None
        with self._lock:
            self._done.set()
            future = self._future
        if future is not None:
            self._complete(future)

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is not None:
            future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            future.set_result(self._tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return once the call is complete.

        Raises:
            PopdistError: the error of the call.
        """
        if not self._done.is_set():
            with activities.awaiting_background():
                self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Tell whether ``wait`` would return at once."""
        return self._done.is_set()

    def is_success(self) -> bool:
        """Tell whether the call is complete without an error."""
        return self._done.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error of the call, if it has failed."""
        return self._error

    def result(self) -> list[Any]:
        """Return the tensors of the call."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[Any]:
        """Return what is complete with the call, and holds its tensors."""
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._done.is_set():
                    self._complete(self._future)
            return self._future


class CallQueue:
    """Runs the asynchronous calls of one group in their order, in one thread."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[PopdistWork | None] = SimpleQueue()
        self._last: PopdistWork | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a call made before is not complete."""
        return self._last is not None and not self._last.is_completed()

    def submit(self, work: PopdistWork) -> None:
        """Run a call after all that were submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_calls, name="popdist-process-group", daemon=True
            )
            self._thread.start()
        self._last = work
        self._queue.put(work)

    def close(self) -> None:
        """Return once all calls have run and the thread has ended."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            if thread is not threading.current_thread():
                thread.join()

    def _run_calls(self) -> None:
        while (work := self._queue.get()) is not None:
            work.run()
