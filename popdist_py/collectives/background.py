"""The background thread that makes collective calls in the order of submission.

A direct call is a collective call that runs in the program's own thread. A direct call first waits
until the background thread has made all submitted calls. Otherwise, the instances might communicate
in different orders.

Every collective call first calls this module. So this module can also refuse the calls of a forked
child process. A forked child shares its parent's memory and connections, so the other instances
would mistake a call of the child for the parent's next call.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

from popdist_py import activities
from popdist_py.errors import ForkedProcessError
from popdist_py.timeline import spans

__all__ = ["Background", "Handle"]


T = TypeVar("T")


class Handle(Generic[T]):
    """A collective call that runs in the background while the program continues."""

    def __init__(self, function: Callable[[], T], call: str = "") -> None:
        self._function = function
        self._call = call
        self._name = spans.call_name("beside the program")
        self._pid = os.getpid()
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call and store its result or error for ``wait``."""
        try:
            # The background thread measures its activity separately from the activity of the
            # program's thread.
            with activities.doing(activities.REDUCING, self._name, self._call):
                self._result = self._function()
        except BaseException as error:
            self._error = error
        self._done.set()

    def is_completed(self) -> bool:
        """Tell whether the call is complete; if it is, ``wait`` returns at once."""
        return self._done.is_set()

    def wait(self) -> T:
        """Wait until the collective call is complete, and return its result.

        Raises:
            PopdistError: The collective call failed with this error.
            ForkedProcessError: This process was forked after the call was submitted. The call is
                made only in the parent process.
        """
        if not self._done.is_set():
            if os.getpid() != self._pid:
                raise _forked_error(self._pid)
            with activities.awaiting_background():
                self._done.wait()
        if self._error is not None:
            raise self._error
        return cast("T", self._result)


class Background:
    """Runs functions one after the other in one thread, which starts on first use.

    Args:
        is_alone: Whether the communicator has only this instance. If a communicator has only one
            instance, forked children may make calls too.
    """

    def __init__(self, *, is_alone: bool = False) -> None:
        self._is_alone = is_alone
        self._pid = os.getpid()
        self._is_forked = False
        self._begin()
        _of_this_process.add(self)

    def _begin(self) -> None:
        self._refusal: Exception | None = None
        self._queue: SimpleQueue[Handle[Any] | None] = SimpleQueue()
        # The handle of the last submitted function; ``drain()`` sets this attribute to None.
        self.last: Handle[Any] | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the instance and may not make collective calls."""
        return self._is_forked

    @property
    def is_refusing(self) -> bool:
        """Whether ``refuse`` was called, so that later calls raise an error."""
        return self._refusal is not None

    def check_process(self) -> None:
        """Raise an error in a process that was forked from the instance.

        Raises:
            ForkedProcessError: This process was forked from the instance.
        """
        if self._is_forked:
            raise _forked_error(self._pid)

    def submit(self, function: Callable[[], T], call: str = "") -> Handle[T]:
        """Let the background thread call ``function`` after all functions submitted before.

        ``call`` is the name of the collective call that the function makes, or empty.

        Raises:
            ForkedProcessError: This process was forked from the instance.
        """
        self.check_process()
        if self._refusal is not None:
            raise self._refusal
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run_queue, name="popdist-collectives", daemon=True
            )
            self._thread.start()
        self.last = handle = Handle(function, call)
        self._queue.put(handle)
        return handle

    def drain(self) -> None:
        """Wait until all submitted functions have run.

        Raises:
            ForkedProcessError: This process was forked from the instance.
        """
        last = self.last
        if last is None:
            return
        if threading.current_thread() is not self._thread:
            self.check_process()
            if self._refusal is None and not last._done.is_set():
                with activities.awaiting_background():
                    last._done.wait()
        if self._refusal is not None:
            raise self._refusal
        if threading.current_thread() is not self._thread:
            self.last = None

    def refuse(self, error: Exception) -> None:
        """Make all later collective calls raise ``error``, in every thread."""
        self._refusal = error
        # Direct calls call ``drain()`` only if ``last`` is not None. This unused handle makes
        # direct calls run ``drain()``, which raises the error.
        self.last = Handle(lambda: None)

    def end(self) -> None:
        """Let the background thread end after all submitted functions have run."""
        thread, self._thread = self._thread, None
        if thread is not None and not self._is_forked:
            self._queue.put(None)

    def begin_in_child(self) -> None:
        """Reset the state in a forked child, where the parent's threads do not run."""
        self._begin()
        if not self._is_alone:
            self._is_forked = True
            # Direct calls call ``drain()`` only if ``last`` is not None. This unused handle makes
            # direct calls run ``drain()``, which raises an error in a forked process.
            self.last = Handle(lambda: None)

    def _run_queue(self) -> None:
        queue = self._queue
        while (handle := queue.get()) is not None:
            handle.run()


_of_this_process: weakref.WeakSet[Background] = weakref.WeakSet()


def _begin_child() -> None:
    for background in list(_of_this_process):
        background.begin_in_child()


os.register_at_fork(after_in_child=_begin_child)


def _forked_error(parent: int) -> ForkedProcessError:
    return ForkedProcessError(
        f"process {os.getpid()} cannot make collective calls, because it was forked from process "
        f"{parent}, an instance of the job. Return the data to process {parent}, and make the "
        "collective call there"
    )
