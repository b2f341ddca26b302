"""The treatment of errors during a collective call: interrupts and NumPy's numeric errors.

``ends_if_interrupted`` ends a communicator if a call is interrupted, for example by Ctrl-C.

When one instance's call is interrupted, the other instances may be at any step of this call. If the
interrupted instance then made another call, the other instances would mistake the new call's data
for data of the interrupted call. So the interrupted instance leaves the communicator. Later calls
of the interrupted instance raise an error at once. Calls of the other instances raise an error that
names the interrupted instance.

``numeric_errors_last`` lets a call exchange all its data before it raises a numeric error. So the
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

# These errors do not end the communicator. A collective call raises these errors before it
# exchanges any data, after it has exchanged all data, or on every instance. If the program asks for
# it, NumPy raises an ArithmeticError or a Warning for overflows and invalid values.
# ``numeric_errors_last`` delays NumPy's numeric errors until all data are exchanged.
_STAYS = (PopdistError, WindowError, TypeError, ValueError, ArithmeticError, Warning)

# Maps NumPy's description of a numeric error to the np.errstate argument that controls the error.
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
    """Tell whether an error may have interrupted a call midway, such as KeyboardInterrupt."""
    return not isinstance(error, _STAYS)


def ends_if_interrupted(call: Call) -> Call:
    """Decorate a collective method: if a call is interrupted, the communicator ends.

    The fastest methods of a communicator contain the same lines themselves. The decorator's wrapper
    would make these methods 10 % slower.
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
    instance raised a numeric error between two steps, the other instances would wait for it in
    vain.

    Raises:
        FloatingPointError: In the block, a value overflowed or became invalid, and the program asks
            NumPy to raise errors.
        RuntimeWarning: In the block, a value overflowed or became invalid, and the program turns
            warnings into errors.
    """
    modes = np.geterr()
    # Most programs turn neither numeric problems nor warnings into errors. Such programs get a
    # context manager that does nothing, so their calls do not take longer.
    if "raise" in modes.values() or any(action == "error" for action, *_ in warnings.filters):
        return _delayed(cast("dict[str, str]", modes))
    return _AT_ONCE


@contextmanager
def _delayed(modes: dict[str, str]) -> Iterator[None]:
    """Delay NumPy's errors and warnings to the block's end; ``modes`` is from ``np.geterr()``."""
    if not {"call", "log"}.isdisjoint(modes.values()):  # the program handles numeric errors
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
