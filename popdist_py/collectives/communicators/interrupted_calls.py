"""The treatment of errors in the middle of a call: interrupts, and NumPy's numeric errors.

``ends_if_interrupted`` ends a communicator after an interrupted call, for example by Ctrl-C.

When a call is interrupted, the other instances may be at any step of this call. If the interrupted
instance then made another call, the other instances would mistake the data of this call for data of
the interrupted call. So the interrupted instance leaves the communicator. Later calls of the
interrupted instance raise an error at once, and calls of the other instances raise an error that
names the instance that left.

``numeric_errors_last`` lets a call move all its data before it raises a numeric error. So the
communicator stays usable after a numeric error.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar, cast

import numpy as np

from popdist_py.collectives.within_host.shared_window import WindowError
from popdist_py.errors import PopdistError

__all__ = ["ends_if_interrupted", "is_interrupt", "numeric_errors_last"]

# These errors do not end the communicator. They are raised before any data are exchanged, after all
# data were exchanged, or on every instance. NumPy raises an ArithmeticError or a Warning for values
# that overflow or are invalid, if the program asks for that.
# ``numeric_errors_last`` delays these errors.
_STAYS = (PopdistError, WindowError, TypeError, ValueError, ArithmeticError, Warning)

# The setting of np.errstate for each description that NumPy gives of an error.
_SETTINGS = {
    "divide by zero": "divide",
    "overflow": "over",
    "underflow": "under",
    "invalid value": "invalid",
}

_AT_ONCE = nullcontext()

Call = TypeVar("Call", bound=Callable[..., Any])


class _Endable(Protocol):
    def end_if_interrupted(self, call: str, error: BaseException) -> None: ...


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an error may have interrupted a call midway, as errors of signal handlers do."""
    return not isinstance(error, _STAYS)


def ends_if_interrupted(call: Call) -> Call:
    """Return a method that ends its communicator if the call is interrupted.

    The shortest methods do not use this decorator but contain the same lines themselves, because
    the wrapper would add a tenth to their time.
    """
    name = call.__name__.strip("_")

    @functools.wraps(call)
    def guarded(self: _Endable, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except BaseException as error:
            self.end_if_interrupted(name, error)
            raise

    return cast("Call", guarded)


def numeric_errors_last() -> AbstractContextManager[None]:
    """Return a context manager that delays the numeric errors of NumPy until its block ends.

    In a reduction with several steps, the instances wait for one another after each step. If one
    instance raised an error in the middle, the instances would be at different steps.

    Raises:
        FloatingPointError: The block has ended, the program asks NumPy for errors, and a value
            overflowed or is invalid.
        RuntimeWarning: The same happened, and the program turns warnings into errors.
    """
    modes = np.geterr()
    # Most programs ask neither for numeric errors nor for warnings as errors. In these programs,
    # calls must not take longer.
    if "raise" in modes.values() or any(action == "error" for action, *_ in warnings.filters):
        return _delayed(cast("dict[str, str]", modes))
    return _AT_ONCE


@contextmanager
def _delayed(modes: dict[str, str]) -> Iterator[None]:
    """Delay the errors and warnings that NumPy raises with these settings of ``np.errstate``."""
    if not {"call", "log"}.isdisjoint(modes.values()):  # the program has a function for errors
        yield
        return
    found: list[str] = []

    def note(problem: str, _: int) -> None:
        found.append(problem)

    delayed = {kind: "call" for kind, mode in modes.items() if mode in ("raise", "warn")}
    with np.errstate(call=note, **delayed):  # type: ignore[arg-type]
        yield
    for problem in dict.fromkeys(found):
        text = f"{problem} encountered in the reduction over the instances"
        if modes[_SETTINGS[problem]] == "raise":
            raise FloatingPointError(text)
        warnings.warn(text, RuntimeWarning, stacklevel=1)
