"""Who has newer weights: the host's copy, a training model's device, an inference model's device.

Only the bookkeeping: the copying itself is ``device_state.py``'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

__all__ = ["Party", "fetch_stale"]

_stale: weakref.WeakSet[Party] = weakref.WeakSet()
_parties: weakref.WeakSet[Party] = weakref.WeakSet()


class Party:
    """A model on a device, as far as its weights are concerned.

    Args:
        tensors: the host's tensors of the model.
        download: copies the device's tensors to the host.

    Attributes:
        needs_upload: whether the host got newer weights from another model.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], download: Callable[[], None]) -> None:
        self.tensors = frozenset(id(tensor) for tensor in tensors)
        self._download = download
        self.needs_upload = False
        _parties.add(self)

    @property
    def is_stale(self) -> bool:
        """Whether the device has newer weights than the host."""
        return self in _stale

    def mark_stale(self) -> None:
        """Note that the device has newer weights than the host."""
        _stale.add(self)

    def mark_fresh(self) -> None:
        """Note that device and host agree."""
        _stale.discard(self)
        self.needs_upload = False

    def fetch(self) -> bool:
        """Bring the host up to date; returns whether anything was copied."""
        if self not in _stale:
            return False
        # First, so that what the download itself reads does not start another one.
        _stale.discard(self)
        self.download()
        return True

    def download(self) -> None:
        """Copy the device's tensors to the host and tell the models that share them."""
        _stale.discard(self)
        self._download()
        for party in _parties:
            if party is not self and party.tensors & self.tensors:
                party.needs_upload = True


def fetch_stale(asking: Party) -> None:
    """Bring the host up to date with every other model that shares tensors with ``asking``."""
    for party in list(_stale):
        if party is not asking and party.tensors & asking.tensors:
            party.fetch()
