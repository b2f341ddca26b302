"""Horovod's exceptions, under the names in ``horovod.common.exceptions``."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """A collective call failed. The errors of ``horovod.torch`` derive from this class."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed.

    This library never raises this exception, because its jobs are not elastic.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another framework version. This library never raises this exception."""
