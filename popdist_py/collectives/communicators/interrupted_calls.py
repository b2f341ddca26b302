"""The decorator that ends a communicator after an interrupted call, for example by Ctrl-C.

The other instances may be at any step of the call. If the interrupted instance made another call,
they would mistake its data for data of the interrupted call. So the instance leaves the
communicator. Its own later calls raise an error at once, and the other instances learn that it has
left.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

from popdist_py.collectives.within_host.shared_window import WindowError
from popdist_py.errors import PopdistError

__all__ = ["ends_if_interrupted", "is_interrupt"]

# These errors are raised before any data are exchanged, after all data were exchanged, or on every
# instance. NumPy raises an ArithmeticError or a Warning for values, if the program asks for that.
_STAYS = (PopdistError, WindowError, TypeError, ValueError, ArithmeticError, Warning)

Call = TypeVar("Call", bound=Callable[..., Any])


class _Endable(Protocol):
    def end_if_interrupted(self, call: str, error: BaseException) -> None: ...


def is_interrupt(error: BaseException) -> bool:
    """Tell whether an error came in the middle of a call, as from a signal handler."""
    return not isinstance(error, _STAYS)


def ends_if_interrupted(call: Call) -> Call:
    """Return a method that ends its communicator if the call is interrupted.

    The shortest methods have the same lines in their bodies: a wrapper takes a tenth of their time.
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
