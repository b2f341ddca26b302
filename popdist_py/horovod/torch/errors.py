"""Errors of Horovod's calls. Each class is both a PopdistError and a HorovodInternalError.

Programs for Horovod catch HorovodInternalError or its base class RuntimeError. A call with invalid
arguments raises ValueError or TypeError on the rank with these arguments.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from popdist_py.errors import CollectiveMismatchError, InstanceLostError, PopdistError
from popdist_py.horovod.common.exceptions import HorovodInternalError

__all__ = ["CallError", "MismatchError", "RankLostError", "horovod_errors"]


class MismatchError(CollectiveMismatchError, HorovodInternalError):
    """The ranks made different calls, or the same call with different arguments."""


class RankLostError(InstanceLostError, HorovodInternalError):
    """Another rank ended, or did not make the call in time."""


class CallError(PopdistError, HorovodInternalError):
    """A collective failed for a reason other than a mismatch or a lost rank."""


@contextmanager
def horovod_errors() -> Iterator[None]:
    """Convert errors of collectives in the ``with`` block to errors of this module."""
    try:
        yield
    except HorovodInternalError:
        raise
    except CollectiveMismatchError as error:
        raise MismatchError(*error.args) from None
    except InstanceLostError as error:
        raise RankLostError(*error.args) from None
    except PopdistError as error:
        raise CallError(*error.args) from None
