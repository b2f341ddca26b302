"""The errors of Horovod's calls: each is an error of this library and a HorovodInternalError.

MismatchError   CollectiveMismatchError: the ranks make different calls
RankLostError   InstanceLostError: another rank ended, or did not come
CallError       PopdistError: any other failure of a call

HorovodInternalError is a RuntimeError, which programs for Horovod catch. A call with wrong
arguments raises ValueError or TypeError on the rank that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from popdist_py.errors import CollectiveMismatchError, InstanceLostError, PopdistError
from popdist_py.horovod.common.exceptions import HorovodInternalError

__all__ = ["CallError", "MismatchError", "RankLostError", "as_horovod_error", "horovod_errors"]


class MismatchError(CollectiveMismatchError, HorovodInternalError):
    """The ranks made different calls, or one with different arguments."""


class RankLostError(InstanceLostError, HorovodInternalError):
    """Another rank ended, or did not come in time."""


class CallError(PopdistError, HorovodInternalError):
    """A call has failed for another reason."""


def as_horovod_error(error: PopdistError) -> PopdistError:
    """Return the error of this module for one that a collective raised."""
    if isinstance(error, HorovodInternalError):
        return error
    if isinstance(error, CollectiveMismatchError):
        return MismatchError(*error.args)
    if isinstance(error, InstanceLostError):
        return RankLostError(*error.args)
    return CallError(*error.args)


@contextmanager
def horovod_errors() -> Iterator[None]:
    """Raise the errors of collectives in the block as those of this module."""
    try:
        yield
    except PopdistError as error:
        raise as_horovod_error(error) from None
