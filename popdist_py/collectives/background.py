"""Collectives beside the program: one thread that makes the calls in the order they were given.

All instances must communicate in one order, so a call made directly waits for those before it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

__all__ = ["Background", "Handle"]


class Handle:
    """A collective that goes on while the program does something else."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call and keep its result or error for ``wait``."""
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Tell whether ``wait`` would return at once."""
        return self._done.is_set()

    def wait(self) -> Any:
        """Return the result of the collective once it is there.

        Raises:
            PopdistError: what the collective raised.
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result


class Background:
    """Runs functions one after the other in a thread of its own, which starts on first use."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Handle] = SimpleQueue()
        self._last: Handle | None = None
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], Any]) -> Handle:
        """Call ``function`` after everything that was submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name="popdist-collectives", daemon=True
            )
            self._thread.start()
        self._last = handle = Handle(function)
        self._queue.put(handle)
        return handle

    def settle(self) -> None:
        """Wait until everything that was submitted has run."""
        last = self._last
        if last is None or threading.current_thread() is self._thread:
            return
        last._done.wait()
        self._last = None

    def _serve(self) -> None:
        while True:
            self._queue.get().run()
