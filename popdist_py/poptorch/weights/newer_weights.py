"""The class WeightCopy, which records whether the host or a device has newer weights.

Several wrapped models may share the tensors of one module on the host. Each wrapped model has a
separate copy of the shared tensors on its device, so the devices can have different weights. The
module ``device_state.py`` copies tensors between host and device.
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
    """Records for a wrapped model whether the weights on its device or on the host are newer.

    Args:
        tensors: The model's parameters and buffers on the host.
        download: A function that copies the tensors that this model changes from the device to the
            host. ``download`` does not copy tensors that the model only reads, because another
            wrapped model may train those tensors.
        download_all: A function that copies all of the device's tensors to the host.
        check: A function that raises an error if the device's tensors must not be copied to the
            host, for example after an incomplete weight update.

    Attributes:
        needs_upload: Whether the host has newer weights than this model's device, because another
            model's weights were copied to the host.
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

    @property
    def only_changed_are_newer(self) -> bool:
        """Whether the device has newer weights, and only where this model's calls change them."""
        return self.device_is_newer and not self._all_newer

    def mark_device_newer(self) -> None:
        """Record that the model has changed the tensors on its device that ``download`` copies."""
        _newer_than_host.add(self)

    def mark_all_newer(self) -> None:
        """Record that all tensors on the device are newer than the tensors on the host."""
        self._all_newer = True
        _newer_than_host.add(self)

    def change_download(self, download: Callable[[], None]) -> None:
        """Replace the function ``download``, because later calls of the model change other tensors.

        Before ``download`` is replaced, the old ``download`` function copies newer weights to the
        host.
        """
        self.pull_if_newer()
        self._download = download

    def mark_equal(self) -> None:
        """Record that the device and the host have the same weights."""
        _newer_than_host.discard(self)
        self._all_newer = self.needs_upload = False

    def pull_if_newer(self) -> bool:
        """Copy the device's weights to the host, if the device has newer weights.

        Returns:
            Whether weights were copied to the host.
        """
        if not self.device_is_newer:
            return False
        logger.debug("Implicit copyWeightsToHost()")
        self._pull(self._download_all if self._all_newer else self._download)
        return True

    def pull(self) -> None:
        """Copy all of the device's tensors to the host.

        After the call, ``needs_upload`` is True for all other models that share a tensor with this
        model.
        """
        self._pull(self._download_all)

    def _pull(self, download: Callable[[], None]) -> None:
        self._check()
        # The function ``download`` may read the host's tensors, and every read of these tensors
        # calls ``download`` if the device has newer weights. To prevent a second call of
        # ``download``, the WeightCopy is removed from the set of copies with newer weights before
        # ``download`` is called.
        _newer_than_host.discard(self)
        self._all_newer = False
        download()
        for other in _copies:
            if other is not self and other.shares(self._host_ids):
                other.needs_upload = True

    def pull_newer_of_others(self) -> None:
        """Copy newer weights to the host from other models' devices.

        Only the devices of models that share tensors with this model are read.
        """
        _pull_newer(self._host_ids, besides=self)

    def shares(self, host_ids: frozenset[int]) -> bool:
        """Tell whether the model uses a host tensor whose ``id`` is one of ``host_ids``."""
        return not self._host_ids.isdisjoint(host_ids)


def pull_newer(tensors: Iterable[torch.Tensor]) -> None:
    """Copy newer weights to the host from the devices of all models that use the given tensors."""
    _pull_newer(_ids(tensors), besides=None)


def _pull_newer(host_ids: frozenset[int], *, besides: WeightCopy | None) -> None:
    for copy in list(_newer_than_host):
        if copy is not besides and copy.shares(host_ids):
            copy.pull_if_newer()


def _ids(tensors: Iterable[torch.Tensor]) -> frozenset[int]:
    return frozenset(id(tensor) for tensor in tensors)
