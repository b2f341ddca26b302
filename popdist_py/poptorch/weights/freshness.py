"""Who has newer weights: the host, a training model's device or an inference model's device.

This module keeps the books. ``device_state.py`` copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

import torch

from popdist_py.poptorch.logger import logger

__all__ = ["WeightCopy", "pull_newer"]

_copies: weakref.WeakSet[WeightCopy] = weakref.WeakSet()
_newer_than_host: weakref.WeakSet[WeightCopy] = weakref.WeakSet()


class WeightCopy:
    """The weights of one model on its device, as a copy of the host's.

    Args:
        tensors: the host's tensors of the model.
        download: copies what the device changes to the host. What it only reads stays as the host
            has it, because another model may train that.
        download_all: copies all of the device's tensors to the host.
        check: raises if what the device has is of no use.

    Attributes:
        needs_upload: whether the host got newer weights from another model.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        download: Callable[[], None],
        download_all: Callable[[], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._host_ids = _ids(tensors)
        self._download = download
        self._download_all = download_all
        self._check = check
        self._all_newer = False
        self.needs_upload = False
        _copies.add(self)

    @property
    def device_is_newer(self) -> bool:
        """Whether the device has newer weights than the host."""
        return self in _newer_than_host

    def mark_device_newer(self) -> None:
        """Note that the device has newer values of what it changes than the host."""
        _newer_than_host.add(self)

    def mark_all_newer(self) -> None:
        """Note that the device has newer values of everything than the host."""
        self._all_newer = True
        _newer_than_host.add(self)

    def change_download(self, download: Callable[[], None]) -> None:
        """Take another ``download``: from now on, the device changes something else."""
        self.pull_if_newer()
        self._download = download

    def mark_equal(self) -> None:
        """Note that device and host agree."""
        _newer_than_host.discard(self)
        self._all_newer = self.needs_upload = False

    def pull_if_newer(self) -> bool:
        """Copy what the device has newer to the host; return whether there was anything."""
        if not self.device_is_newer:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self._pull(self._download_all if self._all_newer else self._download)
        return True

    def pull(self) -> None:
        """Copy all of the device's tensors to the host, and tell the models that share them."""
        self._pull(self._download_all)

    def _pull(self, download: Callable[[], None]) -> None:
        self._check()
        # First, so that what the download itself reads does not start another one.
        _newer_than_host.discard(self)
        self._all_newer = False
        download()
        for other in _copies:
            if other is not self and other.shares(self._host_ids):
                other.needs_upload = True

    def pull_newer_of_others(self) -> None:
        """Bring the host up to date with every other model that shares tensors with this one."""
        _pull_newer(self._host_ids, besides=self)

    def shares(self, host_ids: frozenset[int]) -> bool:
        """Tell whether one of the host's tensors with these ids is one of this model's."""
        return not self._host_ids.isdisjoint(host_ids)


def pull_newer(tensors: Iterable[torch.Tensor]) -> None:
    """Bring these tensors of the host up to date with every device that has newer values."""
    _pull_newer(_ids(tensors), besides=None)


def _pull_newer(host_ids: frozenset[int], *, besides: WeightCopy | None) -> None:
    for copy in list(_newer_than_host):
        if copy is not besides and copy.shares(host_ids):
            copy.pull_if_newer()


def _ids(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset(id(tensor) for tensor in tensors)
