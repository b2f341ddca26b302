"""The errors of Horovod that programs catch, ``horovod.common.exceptions``."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """A collective call has failed: every error of a call in ``horovod.torch`` is one."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job have changed; never raised, as there are no elastic jobs here."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of a framework; never raised, as nothing is built."""
