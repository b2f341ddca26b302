"""The exceptions of Horovod that programs catch: ``horovod.common.exceptions``."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """A collective call failed; base class of all errors of calls in ``horovod.torch``."""


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed; never raised, as jobs are not elastic here."""

    def __init__(self, skip_sync: bool) -> None:
        super().__init__()
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another framework version; never raised, as nothing is built here."""
