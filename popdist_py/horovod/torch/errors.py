"""The errors of Horovod's calls; each is both a PopdistError and a HorovodInternalError.

MismatchError   a CollectiveMismatchError: the ranks make different calls
RankLostError   an InstanceLostError: another rank ended, or did not come in time
CallError       a PopdistError: any other failure of a call

Programs for Horovod catch HorovodInternalError or its base class RuntimeError. A call with wrong
arguments raises ValueError or TypeError on the rank that makes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from popdist_py.errors import CollectiveMismatchError, InstanceLostError, PopdistError
from popdist_py.horovod.common.exceptions import HorovodInternalError

__all__ = ["CallError", "MismatchError", "RankLostError", "as_horovod_error", "horovod_errors"]


class MismatchError(CollectiveMismatchError, HorovodInternalError):
    """The ranks made different calls, or the same call with different arguments."""


class RankLostError(InstanceLostError, HorovodInternalError):
    """Another rank ended, or did not come in time."""


class CallError(PopdistError, HorovodInternalError):
    """A call failed for any other reason."""


def as_horovod_error(error: PopdistError) -> PopdistError:
    """Convert an error that a collective raised into an error of this module."""
    if isinstance(error, HorovodInternalError):
        return error
    if isinstance(error, CollectiveMismatchError):
        return MismatchError(*error.args)
    if isinstance(error, InstanceLostError):
        return RankLostError(*error.args)
    return CallError(*error.args)


@contextmanager
def horovod_errors() -> Iterator[None]:
    """Convert errors of collectives in the block into errors of this module."""
    try:
        yield
    except PopdistError as error:
        raise as_horovod_error(error) from None
