"""Functions that run one at a time and meet: none goes on before all have come to the same point.

Each has a thread of its own, because autograd's backward cannot be left and entered again in one.
At every time one of them runs, or the caller does. Nothing here knows what they compute.
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
    """Some functions ended where others met.

    Attributes:
        ended: index of the first that ended.
        waiting: index of the first that met.
        value: what that one met with.
    """

    def __init__(self, ended: int, waiting: int, value: Any) -> None:
        super().__init__(ended, waiting)
        self.ended, self.waiting, self.value = ended, waiting, value


class _Closed(BaseException):
    """Raised where a function waits that is not to go on."""


class _Ended:
    """What a function that ended returned."""

    def __init__(self, result: Any) -> None:
        self.result = result


class _Failed:
    """What a function raised."""

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
    """Run functions in turns: each up to its next ``meet()``, in order, again and again.

    Args:
        functions: what runs; each finds torch's modes and contexts as the caller has them.
        answers: what every ``meet()`` returns, from what all were called with; runs in the caller's
            thread.
        name: of the threads, before the index of each.
        resumed: told the index of the function that begins or goes on.
        paused: told the index of the function that met or ended.

    Raises:
        OneEnded: not all functions met equally often.
        BaseException: what one of them raised; the others are ended where they wait.
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
    """Wait for the others of ``in_turns``; return the answer to ``value``.

    Raises:
        RuntimeError: nothing runs in turns here.
    """
    thread = _current.get()
    if thread is None:
        raise RuntimeError("there are other replicas, which do not run in turns with this one")
    return thread.meet(value)


class _Thread:
    """One function, as a coroutine."""

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function = function
        self._name = name
        self._told: SimpleQueue[Any] = SimpleQueue()
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # -- the caller's side --------------------------------------------------------------------

    def resume(self, reply: Any) -> Any:
        """Let the function go on; return what it meets with, or that it ended.

        Raises:
            BaseException: what it raised.
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
        """End the function where it waits, or where it waits next."""
        if self._thread is None:
            return
        # One that met is told to end; of any other nobody reads the reply.
        self._replies.put(_Closed())
        # One whose start was interrupted ends by itself, if it begins at all.
        if self._thread.is_alive():
            self._thread.join()

    # -- the function's side ------------------------------------------------------------------

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
        """Hand over to the caller; return its answer when it is this function's turn again."""
        self._told.put(value)
        reply = self._replies.get()
        if isinstance(reply, _Closed):
            raise reply
        return reply


_current: Final[ContextVar[_Thread | None]] = ContextVar("current", default=None)


class _Surroundings:
    """What torch keeps for each thread, as the thread has it that makes this."""

    def __init__(self) -> None:
        self._threads = torch.get_num_threads()
        self._has_gradients = torch.is_grad_enabled()
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = dispatch._get_current_dispatch_mode_stack()
        self._autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Have the same in this thread."""
        torch.set_num_threads(self._threads)
        is_cast, dtype = self._autocast
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            if is_cast:
                stack.enter_context(torch.autocast("cpu", dtype))
            # Not entered, which they are: a mode may do more than to be found there.
            for mode in self._function_modes:
                _push_function_mode(mode)
                stack.callback(_pop_function_mode)
            for mode in self._dispatch_modes:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode)
            yield
