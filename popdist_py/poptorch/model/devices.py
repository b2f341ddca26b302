"""Functions that attach models to emulated IPU devices, and that release the devices.

A pod is a set of emulated IPUs that processes share. If a pod is configured and the program runs
without the launcher, a model attaches to a device of the pod. While a model is attached to a
device, no other process can use the device. If no pod is configured, the number of emulated IPUs is
not limited. Without a configured pod, a model attaches to a device only if the model's options
contain a device id. The command ``gc-info -l`` lists the device ids.
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
# If the environment variable POPTORCH_WAIT_FOR_IPU is set, a model waits until a device is free. If
# POPTORCH_WAIT_FOR_IPU is not set, a model that finds no free device raises an error.
_WAIT: Final = "POPTORCH_WAIT_FOR_IPU"

# For each device id, the model that is attached to the device. The dictionary ``_holders`` is used
# under the launcher and with useIpuModel().
_holders: dict[int, weakref.ref[Any]] = {}
# A finalizer for each attached model, which releases the model's device. The dictionary ``_given``
# is used in programs that run without the launcher and without useIpuModel().
_given: weakref.WeakKeyDictionary[Any, weakref.finalize[[HeldDevice], Any]] = (
    weakref.WeakKeyDictionary()
)


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether this process can use ``num_ipus`` emulated IPUs.

    If a pod is configured, the pod must have a device with exactly ``num_ipus`` IPUs. The device of
    the pod may be free or in use. Without the launcher, the device must belong to the partition of
    the pod that the program uses. Under the launcher, the device must consist of IPUs that belong
    to this instance.
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
    """Return the hardware generation of the emulated IPUs, which is always 2.

    Raises:
        AssertionError: A pod is configured, and this program cannot use any IPU of the pod.
    """
    assert ipuHardwareIsAvailable(), (
        "No IPU is available: poptorch.ipuHardwareIsAvailable() returned False, and the log "
        "says why"
    )
    return _VERSION


def acquire(holder: Any, options: Options, num_ipus: int, *, patient: bool = True) -> bool:
    """Attach a model to a device that fits the model's options.

    Args:
        holder: The wrapped model to attach.
        options: The options of the model.
        num_ipus: The number of IPUs of all replicas of the model.
        patient: Whether ``acquire`` may wait for a device that is in use. Whether ``patient`` is
            True or False, ``acquire`` waits only if POPTORCH_WAIT_FOR_IPU is set.

    Returns:
        Whether the model was attached to a device. The result of ``acquire`` is False only if the
        device is in use, POPTORCH_WAIT_FOR_IPU is set, and ``patient`` is False.

    Raises:
        Error: The device is in use or does not exist, or the pod does not answer.
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
    # The launcher gives each instance a different device id, so only models of this process can use
    # the same device id. With useIpuModel(), a model does not use a device of a pod, so models of
    # other processes cannot be attached to the device id.
    if ipu_id is not None and not options.shares_devices:
        _acquire_id(ipu_id, holder)
    return True


def _acquire_of(
    pod: ProgramPod, holder: Any, num_ipus: int, ipu_id: int | None, *, patient: bool
) -> bool:
    waits = os.environ.get(_WAIT, "") not in ("", "0")

    def say(error: InUseError) -> None:
        logger.warning(
            "Waiting for an IPU device, because the variable %s is set: %s", _WAIT, error
        )

    try:
        try:
            held = pod.attach(num_ipus, ipu_id)
        except InUseError:
            # A model that the program no longer uses keeps its device until the garbage collector
            # frees the model, because models contain reference cycles.
            gc.collect()
            wait = math.inf if waits and patient else 0.0
            held = pod.attach(num_ipus, ipu_id, wait=wait, waiting=say)
    except InUseError as error:
        if waits:
            return False
        raise InUseError(
            f"{error}. To release the device of a model, call its detachFromDevice() or destroy(). "
            f"To wait for a free device, set {_WAIT}=1"
        ) from error
    logger.info(
        "The model is attached to device %d of partition %s (%s)",
        held.device.id,
        held.partition.name,
        counted(len(held.device.ipus), "IPU"),
    )
    _given[holder] = weakref.finalize(holder, _give_back, held)
    # The finalizer of an attached model need not run when the process ends, because the pod then
    # releases all devices of the process at once.
    _given[holder].atexit = False
    return True


def _give_back(held: HeldDevice) -> None:
    try:
        held.detach()
    except PodError as error:
        logger.warning(
            "Device %d of partition %s was not released, and the pod will free the device "
            "later: %s",
            held.device.id,
            held.partition.name,
            error,
        )


def _acquire_id(ipu_id: int, holder: Any) -> None:
    """Reserve a device id for a model.

    Raises:
        Error: Another model of this process is attached to the device id.
    """
    held = _holders.get(ipu_id)
    current = held() if held is not None else None
    if current is not None and current is not holder:
        raise Error(
            f"Failed to acquire device with id {ipu_id}: another model is attached to the device. "
            "Call detachFromDevice() or destroy() of that model first"
        )
    _holders[ipu_id] = weakref.ref(holder)


def release(holder: Any) -> None:
    """Release all devices that the model ``holder`` is attached to."""
    give_back = _given.pop(holder, None)
    if give_back is not None:
        give_back()
    for ipu_id, held in list(_holders.items()):
        if held() in (holder, None):
            del _holders[ipu_id]
