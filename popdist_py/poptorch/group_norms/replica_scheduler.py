"""A scheduler that runs several functions one at a time and synchronises them at given points.

A function that the scheduler runs pauses in ``meet()`` until the other functions have also called
``meet()``. Each function has its own thread, because one thread cannot pause in an autograd
backward pass and resume the pass later. At any time, either one function or the caller of the
scheduler runs. The functions that the scheduler runs may compute anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from queue import SimpleQueue
from typing import Any, Final, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _python_dispatch as dispatch

__all__ = ["OneEnded", "in_turns", "meet"]

Result = TypeVar("Result")


class OneEnded(Exception):
    """The error that some functions of ``in_turns`` ended while others wait in ``meet()``.

    Attributes:
        ended: The index of the first function that ended.
        waiting: The index of the first function that waits in ``meet()``.
        value: The argument that the waiting function passed to ``meet()``.
    """

    def __init__(self, ended: int, waiting: int, value: Any) -> None:
        super().__init__(ended, waiting)
        self.ended, self.waiting, self.value = ended, waiting, value


class _Closed(BaseException):
    """The exception that ``meet()`` raises to stop a function that ``in_turns`` runs."""


class _Ended:
    """The return value of a function that ``in_turns`` has run to its end."""

    def __init__(self, result: Any) -> None:
        self.result = result


class _Failed:
    """The exception that a function of ``in_turns`` raised."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def in_turns(
    functions: Sequence[Callable[[], Result]],
    answers: Callable[[list[Any]], Sequence[Any]],
    *,
    name: str = "turn",
    resumed: Callable[[int], None] = lambda _: None,
    paused: Callable[[int], None] = lambda _: None,
) -> list[Result]:
    """Run functions that synchronise with each other by ``meet()``, and return their results.

    In each round of ``meet()`` calls, the functions run one after the other. Each function runs
    until its next call of ``meet()``.

    Args:
        functions: The functions to run. Each function runs in a separate thread, with the torch
            modes and the context variables of the caller.
        answers: A function that gets the arguments of one round of ``meet()`` calls, and returns
            the calls' results. The function ``answers`` runs in the caller's thread.
        name: The prefix of the threads' names, which end with the index of the function.
        resumed: A callback that gets the index of a function before the function starts or
            continues.
        paused: A callback that gets the index of a function after the function has called
            ``meet()`` or ended.

    Raises:
        OneEnded: One of the functions calls ``meet()`` more often than another function.
        BaseException: The exception that one of the functions raised. If a function raises an
            exception, the other functions, which wait in ``meet()``, are stopped.
    """
    threads = [_Thread(function, f"{name} {index}") for index, function in enumerate(functions)]
    replies: Sequence[Any] = [None] * len(threads)
    try:
        while True:
            values = []
            for index, (thread, reply) in enumerate(zip(threads, replies, strict=True)):
                resumed(index)
                values.append(thread.resume(reply))
                paused(index)
            ended = [isinstance(value, _Ended) for value in values]
            if all(ended):
                return [value.result for value in values]
            if any(ended):
                waiting = ended.index(False)
                raise OneEnded(ended.index(True), waiting, values[waiting])
            replies = answers(values)
            del values
    finally:
        for thread in threads:
            thread.close()


def meet(value: Any) -> Any:
    """Pause until all functions of ``in_turns`` have called ``meet()``.

    Args:
        value: The value to pass to the function ``answers`` of ``in_turns``, which computes the
            result of ``meet()``.

    Raises:
        RuntimeError: The caller is not a function that ``in_turns`` runs.
    """
    thread = _current.get()
    if thread is None:
        raise RuntimeError(
            "a batch norm with statistics of a group of replicas was called outside of the turns "
            "in which the replicas run"
        )
    return thread.meet(value)


class _Thread:
    """A thread that runs one function like a coroutine.

    In the method ``meet()``, the thread pauses until the caller of ``in_turns`` resumes it.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        self._name = name
        self._told: SimpleQueue[Any] = SimpleQueue()
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # -- methods for the caller of in_turns ---------------------------------------------------

    def resume(self, reply: Any) -> Any:
        """Start or continue the function, and wait until its next ``meet()`` or its end.

        Args:
            reply: The return value for the function's pending ``meet()`` call.

        Returns:
            The argument of the function's next ``meet()`` call, or an ``_Ended`` object.

        Raises:
            BaseException: The exception that the function raised.
        """
        if self._thread is None:
            surroundings = _Surroundings()
            self._thread = threading.Thread(
                target=copy_context().run,
                args=(self._run, surroundings),
                name=self._name,
                daemon=True,
            )
            self._thread.start()
        else:
            self._replies.put(reply)
        value = self._told.get()
        if isinstance(value, _Failed):
            raise value.error
        return value

    def close(self) -> None:
        """Stop the thread's function at its present or next ``meet()``, and join the thread."""
        if self._thread is None:
            return
        # The _Closed object stops a function that waits in ``meet()``. A function that has already
        # ended does not read the _Closed object.
        self._replies.put(_Closed())
        # A thread whose start was interrupted may not be alive, and a thread that is not alive
        # cannot be joined. If a thread whose start was interrupted begins to run later, its
        # function ends at the first call of meet().
        if self._thread.is_alive():
            self._thread.join()

    # -- methods for the thread of the function -----------------------------------------------

    def _run(self, surroundings: _Surroundings) -> None:
        _current.set(self)
        value: Any
        try:
            with surroundings.entered():
                value = _Ended(self._function())
        except BaseException as error:
            value = _Failed(error)
        self._told.put(value)

    def meet(self, value: Any) -> Any:
        """Send ``value`` to the caller of ``in_turns``, and return the caller's reply."""
        self._told.put(value)
        reply = self._replies.get()
        if isinstance(reply, _Closed):
            raise reply
        return reply


_current: Final[ContextVar[_Thread | None]] = ContextVar("current", default=None)


class _Surroundings:
    """Torch's per-thread settings, copied from the thread that creates the ``_Surroundings``."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._has_gradients = torch.is_grad_enabled()
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = dispatch._get_current_dispatch_mode_stack()
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the copied settings to the current thread."""
        torch.set_num_threads(self._threads)
        is_cast, dtype = self._autocast
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            if is_cast:
                stack.enter_context(torch.autocast("cpu", dtype))
            # The torch modes are pushed without calling their method __enter__, because the caller
            # has entered the modes already. A second call of a mode's method __enter__ could have
            # further effects.
            for mode in self._function_modes:
                _push_function_mode(mode)
                stack.callback(_pop_function_mode)
            for mode in self._dispatch_modes:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode)
            yield
