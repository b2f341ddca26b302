"""Emulated IPU devices: which exist, and which model holds one that its options name by id."""

from __future__ import annotations

import weakref
from typing import Any, Final

from popdist_py.poptorch.errors import Error

__all__ = ["acquire", "ipuHardwareIsAvailable", "ipuHardwareVersion", "release"]

_NUM_IPUS: Final = 64
_VERSION: Final = 2

_holders: dict[int, weakref.ref[Any]] = {}


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Tell whether a process can have ``num_ipus`` emulated IPUs."""
    return 0 < num_ipus <= _NUM_IPUS


def ipuHardwareVersion() -> int:
    """Return the generation of the emulated IPUs: 2."""
    return _VERSION


def acquire(ipu_id: int, holder: Any) -> None:
    """Attach ``holder`` to the device ``ipu_id``.

    Raises:
        Error: another model is attached to it.
    """
    held = _holders.get(ipu_id)
    current = held() if held is not None else None
    if current is not None and current is not holder:
        raise Error(
            f"Failed to acquire device with id {ipu_id}: another model is attached to it; call "
            "its detachFromDevice() or destroy() first"
        )
    _holders[ipu_id] = weakref.ref(holder)


def release(holder: Any) -> None:
    """Give back every device that ``holder`` has."""
    for ipu_id, held in list(_holders.items()):
        if held() in (holder, None):
            del _holders[ipu_id]
