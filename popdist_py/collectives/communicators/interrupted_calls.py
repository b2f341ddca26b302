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

from popdist_py.errors import InstanceLostError, PopdistError

__all__ = ["ends_if_interrupted"]

# These errors are raised before any data are exchanged, after all data were exchanged, or on every
# instance.
_STAYS = (PopdistError, TypeError, ValueError)

Call = TypeVar("Call", bound=Callable[..., Any])


class _Endable(Protocol):
    ended: str

    def end(self, reason: str) -> None: ...


def ends_if_interrupted(call: Call) -> Call:
    """Return a method that ends its communicator if the call is interrupted."""
    name = call.__name__.strip("_")

    @functools.wraps(call)
    def guarded(self: _Endable, *args: Any, **kwargs: Any) -> Any:
        if self.ended:
            raise InstanceLostError(f"{name}: {self.ended}")
        try:
            return call(self, *args, **kwargs)
        except _STAYS:
            raise
        except BaseException as error:
            self.end(
                f"this instance left the group when its call {name} was interrupted by "
                f"{type(error).__name__}"
            )
            raise

    return cast("Call", guarded)
