"""Collectives beside the program: one thread makes the calls in the order of submission.

All instances must communicate in the same order, so a direct call waits for those submitted before.
Nothing here knows what a call does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from popdist_py import activities
from popdist_py.timeline import spans

__all__ = ["Background", "Handle"]


T = TypeVar("T")


class Handle(Generic[T]):
    """A collective that runs while the program continues."""

    def __init__(self, function: Callable[[], T], call: str = "") -> None:
        self._function = function
        self._call = call
        self._name = spans.call_name("beside the program")
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call and store its result or error for ``wait``."""
        try:
            # Of another thread: the program's own time goes elsewhere meanwhile.
            with activities.doing(activities.REDUCING, self._name, self._call):
                self._result = self._function()
        except BaseException as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Tell whether ``wait`` would return at once."""
        return self._done.is_set()

    def wait(self) -> T:
        """Return the result of the collective once it is complete.

        Raises:
            PopdistError: the error that the collective raised.
        """
        if not self._done.is_set():
            with activities.awaiting_background():
                self._done.wait()
        if self._error is not None:
            raise self._error
        return cast("T", self._result)


class Background:
    """Runs functions one after the other in one thread, which starts on first use."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Handle[Any]] = SimpleQueue()
        # The last function submitted, until somebody has waited for it.
        self.last: Handle[Any] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], T], call: str = "") -> Handle[T]:
        """Call ``function``, one collective if it has a name, after all submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_queue, name="popdist-collectives", daemon=True
            )
            self._thread.start()
        self.last = handle = Handle(function, call)
        self._queue.put(handle)
        return handle

    def drain(self) -> None:
        """Wait until all submitted functions have run."""
        last = self.last
        if last is None or threading.current_thread() is self._thread:
            return
        if not last._done.is_set():
            with activities.awaiting_background():
                last._done.wait()
        self.last = None

    def _run_queue(self) -> None:
        while True:
            self._queue.get().run()
