"""Emulated IPU devices: which exist, and which model holds one.

Where a pod is configured, a model of a program that no launcher started attaches to a device of the
pod, and no other process can use that device. Without a pod, emulated IPUs do not run out. A model
attaches only if its options name an id: to the device of that id that ``gc-info -l`` lists.
"""

from __future__ import annotations

import gc
import math
import os
import weakref
from typing import Any, Final

from popdist_py import context
from popdist_py.errors import counted
from popdist_py.pods.model.pod_errors import InUseError, PodError
from popdist_py.pods.program_devices import (
    HeldDevice,
    ProgramPod,
    machine_of_process,
    pod_of_process,
)
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.options import Options

__all__ = ["acquire", "ipuHardwareIsAvailable", "ipuHardwareVersion", "release"]

_NUM_IPUS: Final = 64
_VERSION: Final = 2
# PopTorch's own variable: a model waits for a device that is held in place of an error.
_WAIT: Final = "POPTORCH_WAIT_FOR_IPU"

# The model that holds each id that options name: under the launcher, and with useIpuModel.
_holders: dict[int, weakref.ref[Any]] = {}
# In all other programs: a finalizer for each model, which gives its device back.
_given: weakref.WeakKeyDictionary[Any, weakref.finalize[[HeldDevice], Any]] = (
    weakref.WeakKeyDictionary()
)


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Tell whether a process can have ``num_ipus`` emulated IPUs.

    Where a pod is configured: whether this program's partition, or under the launcher what the
    instance has, contains a device of just so many, be it free or held.
    """
    if context.is_launched():
        most = context.ipus_of_pod()
        if most is not None:
            return num_ipus in (1 << power for power in range(most.bit_length()))
        return 0 < num_ipus <= _NUM_IPUS
    try:
        pod = pod_of_process()
        return 0 < num_ipus <= _NUM_IPUS if pod is None else pod.has_device(num_ipus)
    except PodError as error:
        logger.warning("No IPU is available: %s", error)
        return False


def ipuHardwareVersion() -> int:
    """Return the generation of the emulated IPUs: 2.

    Raises:
        AssertionError: a pod is configured, and there is no IPU for this program.
    """
    assert ipuHardwareIsAvailable(), (
        "No IPU is available: ipuHardwareIsAvailable() tells, and its log says why"
    )
    return _VERSION


def acquire(holder: Any, options: Options, num_ipus: int, *, patient: bool = True) -> bool:
    """Attach a model to a device for its options.

    Args:
        holder: the model.
        options: its options.
        num_ipus: the IPUs of all its replicas.
        patient: whether this may be the time to wait for a device that is held.

    Returns:
        Whether it is attached: it is not where POPTORCH_WAIT_FOR_IPU says to wait, and this is not
        the time.

    Raises:
        Error: somebody else has the device, there is none like it, or the pod cannot be asked.
    """
    ipu_id = options.ipu_id if options.exists("ipu_id") else None
    try:
        if not context.is_launched() and not options.Emulator.is_ipu_model:
            pod = pod_of_process()
            if pod is None and ipu_id is not None:
                pod = machine_of_process()
            if pod is not None:
                return _acquire_of(pod, holder, num_ipus, ipu_id, patient=patient)
    except PodError as error:
        which = "a device" if ipu_id is None else f"device with id {ipu_id}"
        raise Error(f"Failed to acquire {which}: {error}") from error
    # The launcher gives every instance an id of its own, so only models of this process can compete
    # for an id. The same holds for useIpuModel, which attaches to no device.
    if ipu_id is not None and not options.shares_devices:
        _acquire_id(ipu_id, holder)
    return True


def _acquire_of(
    pod: ProgramPod, holder: Any, num_ipus: int, ipu_id: int | None, *, patient: bool
) -> bool:
    waits = os.environ.get(_WAIT, "") not in ("", "0")

    def say(error: InUseError) -> None:
        logger.warning("Waiting for an IPU device, as %s says: %s", _WAIT, error)

    try:
        try:
            held = pod.attach(num_ipus, ipu_id)
        except InUseError:
            # Models that the program has dropped may still be there: they refer to themselves.
            gc.collect()
            wait = math.inf if waits and patient else 0.0
            held = pod.attach(num_ipus, ipu_id, wait=wait, waiting=say)
    except InUseError as error:
        if waits:
            return False
        raise InUseError(
            f"{error}; a model gives its device back by detachFromDevice() or destroy(), and "
            f"{_WAIT}=1 waits for one"
        ) from error
    logger.info(
        "Attached to device %d of partition %s (%s)",
        held.device.id,
        held.partition.name,
        counted(len(held.device.ipus), "IPU"),
    )
    _given[holder] = weakref.finalize(holder, _give_back, held)
    # At the end of the process the pod takes back everything at once.
    _given[holder].atexit = False
    return True


def _give_back(held: HeldDevice) -> None:
    try:
        held.detach()
    except PodError as error:
        logger.warning(
            "Device %d of partition %s was not given back, the pod frees it by itself: %s",
            held.device.id,
            held.partition.name,
            error,
        )


def _acquire_id(ipu_id: int, holder: Any) -> None:
    """Take an id for a model; no other model of this process may have it."""
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
    give_back = _given.pop(holder, None)
    if give_back is not None:
        give_back()
    for ipu_id, held in list(_holders.items()):
        if held() in (holder, None):
            del _holders[ipu_id]
