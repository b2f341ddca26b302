"""PopART's ``DeviceManager``, which lists devices of emulated IPUs and attaches to them.

If the launcher started the program, the program gets the devices of its instance. The launcher
already holds the IPUs of these devices. A program that was started without the launcher uses the
partition of the configured pod. Only one process at a time can hold a device of a partition. If no
pod is configured, each program without the launcher has 64 IPUs of its own. The classes of this
module do not run programs on a device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

from popdist_py.device_numbers import next_power_of_two
from popdist_py.errors import counted
from popdist_py.pods.model.pod_errors import InUseError, PodError
from popdist_py.popart.enumerations import (
    DeviceConnectionType,
    DeviceSelectionCriterion,
    DeviceType,
    SyncPattern,
)

# Most programs use only PopART's enumerations and no devices. The modules for devices are therefore
# imported only when needed.
if TYPE_CHECKING:
    from popdist_py.pods.model.pod_parts import Device
    from popdist_py.pods.program_devices import HeldDevice, ProgramPod

# The number of emulated IPUs that each process has for itself if no pod is configured.
_NUM_IPUS: Final = 64
_WAY_OUT: Final = "call detach() on a device of this program, or wait for another program to end"


class popart_exception(Exception):
    """PopART's exception.

    This exception is raised if no device is available, if another process holds the device, or if
    the pod reports an error.
    """


@dataclass(eq=False, slots=True)
class DeviceInfo:
    """A device that a program may attach to.

    Attributes:
        id: Poplar's number of the device; -1 for an IPU model, the CPU and an offline device.
        numIpus: The number of IPUs of the device.
        type: The kind of the device.
        connectionType: Whether and when the program attaches to the device.
    """

    id: int
    numIpus: int
    type: DeviceType = DeviceType.Ipu
    connectionType: DeviceConnectionType = DeviceConnectionType.Always
    _pod: ProgramPod | None = field(default=None, repr=False)
    _timeout: float = field(default=0.0, repr=False)
    _held: HeldDevice | None = field(default=None, repr=False)
    _attached: bool = field(default=False, repr=False)

    @property
    def isAttached(self) -> bool:
        """Whether this program is attached to the device."""
        return self._attached

    @property
    def tilesPerIPU(self) -> int:
        """The number of tiles of one IPU. Emulated IPUs have as many tiles as an Mk2 IPU."""
        from popdist_py.ipu.specification import MK2

        return MK2.tiles

    def getOnDemandAttachTimeout(self) -> float:
        """Return the longest time that ``attach`` waits for a held device, in seconds."""
        return self._timeout

    def setOnDemandAttachTimeout(self, attachTimeout: float) -> None:
        """Set the longest time that ``attach`` waits for a held device, in seconds.

        Raises:
            ValueError: The argument is not a finite number of 0 or more.
        """
        self._timeout = _seconds("setOnDemandAttachTimeout", attachTimeout)

    def attach(self) -> bool:
        """Attach to the device. If another process holds the device, wait until the time-out.

        Returns:
            True if the program is attached; False if another process still holds the device.

        Raises:
            popart_exception: The connection type is Never, or the pod does not answer.
        """
        if self.connectionType is DeviceConnectionType.Never:
            raise popart_exception(
                f"this program cannot attach to device {self.id}, because the device's "
                "connection type is Never"
            )
        if self._attached:
            return True
        try:
            if self._pod is not None:
                self._held = self._pod.attach(self.numIpus, self.id, wait=self._timeout)
        except InUseError:
            return False
        except PodError as error:
            raise popart_exception(f"Failed to attach to device {self.id}: {error}") from error
        self._attached = True
        return True

    def detach(self) -> None:
        """Release the device. A second call does nothing.

        Raises:
            popart_exception: The pod does not answer. The device is then released later, for
                example when its lease ends.
        """
        held, self._held, self._attached = self._held, None, False
        try:
            if held is not None:
                held.detach()
        except PodError as error:
            raise popart_exception(f"Failed to detach from device {self.id}: {error}") from error


class DeviceManager:
    """Finds devices, and attaches to them."""

    def __init__(self) -> None:
        self._timeout = 0.0

    def setOnDemandAttachTimeout(self, attachTimeout: float) -> None:
        """Set the longest time that ``attach`` waits for a held device, in seconds.

        The time applies only to devices that this manager returns after this call.

        Raises:
            ValueError: The argument is not a finite number of 0 or more.
        """
        self._timeout = _seconds("setOnDemandAttachTimeout", attachTimeout)

    def enumerateDevices(
        self,
        pattern: SyncPattern = SyncPattern.Full,
        numIpus: int = 1,
        deviceType: DeviceType = DeviceType.Ipu,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        tilesPerIPU: int = 0,
    ) -> list[DeviceInfo]:
        """Return all devices with ``numIpus`` IPUs, including devices that another process holds.

        The arguments ``pattern`` and ``tilesPerIPU`` are ignored.

        Raises:
            popart_exception: The pod does not answer.
        """
        if deviceType is not DeviceType.Ipu:
            return []
        pod, offered = self._offered()
        return [
            self._info(pod, each, connectionType) for each in offered if len(each.ipus) == numIpus
        ]

    def tryAcquireAvailableDevice(
        self,
        numIpus: int = 1,
        tilesPerIPU: int = 0,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        selectionCriterion: DeviceSelectionCriterion = DeviceSelectionCriterion.First,
    ) -> DeviceInfo | None:
        """Do the same as ``acquireAvailableDevice``, but return None if no device is available."""
        found = self.enumerateDevices(numIpus=numIpus, connectionType=connectionType)
        if selectionCriterion is DeviceSelectionCriterion.Random:
            random.shuffle(found)
        if connectionType is DeviceConnectionType.Always:
            return next((each for each in found if each.attach()), None)
        if connectionType is DeviceConnectionType.OnDemand:
            # Free devices come first. If all devices are held, the first one is returned, and
            # ``attach`` waits until it is free.
            held = self._held_ids(found)
            found.sort(key=lambda each: each.id in held)
        return next(iter(found), None)

    def acquireAvailableDevice(
        self,
        numIpus: int = 1,
        tilesPerIPU: int = 0,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
        selectionCriterion: DeviceSelectionCriterion = DeviceSelectionCriterion.First,
    ) -> DeviceInfo:
        """Return a device with ``numIpus`` IPUs.

        If the connection type is Always, the program is also attached to the device. The arguments
        ``pattern`` and ``tilesPerIPU`` are ignored.

        Raises:
            popart_exception: No device of this size is available, or the pod does not answer.
        """
        found = self.tryAcquireAvailableDevice(
            numIpus, tilesPerIPU, pattern, connectionType, selectionCriterion
        )
        if found is not None:
            return found
        count = len(self.enumerateDevices(numIpus=numIpus))
        raise popart_exception(
            f"Failed to acquire device with {numIpus} IPU(s): "
            + (
                f"processes hold all {counted(count, 'device')} of this size, and gc-monitor shows "
                f"these processes: {_WAY_OUT}"
                if count
                else "no device has this size; gc-info -l lists the devices"
            )
        )

    def tryAcquireDeviceById(
        self,
        id: int,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
    ) -> DeviceInfo | None:
        """Do the same as ``acquireDeviceById``, but return None if the device is held.

        Raises:
            popart_exception: The id is unknown, or the pod does not answer.
        """
        pod, offered = self._offered()
        device = next((each for each in offered if each.id == id), None)
        if device is None:
            raise popart_exception(
                f"Failed to acquire device with id {id}: no device has this id; existing ids: "
                f"{_ids(offered)}"
            )
        found = self._info(pod, device, connectionType)
        if connectionType is DeviceConnectionType.Always and not found.attach():
            return None
        return found

    def acquireDeviceById(
        self,
        id: int,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
    ) -> DeviceInfo:
        """Return the device with the given id.

        If the connection type is Always, the program is also attached to the device.

        Raises:
            popart_exception: The id is unknown, another process holds the device, or the pod does
                not answer.
        """
        found = self.tryAcquireDeviceById(id, pattern, connectionType)
        if found is None:
            raise popart_exception(
                f"Failed to acquire device with id {id}: a process holds the device, and "
                f"gc-monitor shows this process: {_WAY_OUT}"
            )
        return found

    def createCpuDevice(self) -> DeviceInfo:
        """Return the host's CPU as a device."""
        return DeviceInfo(-1, 0, DeviceType.Cpu)

    def createIpuModelDevice(self, options: object = None) -> DeviceInfo:
        """Return a device for PopART's software model of one IPU; ``options`` is ignored."""
        return DeviceInfo(-1, 1, DeviceType.IpuModel)

    def createOfflineIPUDevice(self, options: object = None) -> DeviceInfo:
        """Return a device for compilation only; ``options`` is ignored.

        Programs cannot attach to this device.
        """
        return DeviceInfo(-1, 1, DeviceType.OfflineIpu, DeviceConnectionType.Never)

    def _info(
        self, pod: ProgramPod | None, device: Device, connection: DeviceConnectionType
    ) -> DeviceInfo:
        on_demand = connection is DeviceConnectionType.OnDemand
        return DeviceInfo(
            device.id,
            len(device.ipus),
            connectionType=connection,
            _pod=pod,
            _timeout=self._timeout if on_demand else 0.0,
        )

    @staticmethod
    def _offered() -> tuple[ProgramPod | None, Sequence[Device]]:
        """Return the devices that this program may use, and their pod.

        The pod is None if no pod is configured, or if the launcher started the program.
        """
        from popdist_py import context
        from popdist_py.pods.model.pod_parts import devices_of
        from popdist_py.pods.program_devices import pod_of_process

        if context.is_launched():
            return None, tuple(_devices_of_instance())
        try:
            pod = pod_of_process()
            if pod is None:
                return None, tuple(devices_of(_NUM_IPUS, num_ilds=1))
            return pod, tuple(pod.devices(pod.partition()))
        except PodError as error:
            raise popart_exception(f"No device is available: {error}") from error

    @staticmethod
    def _held_ids(found: Sequence[DeviceInfo]) -> frozenset[int]:
        """Return the ids of all devices that contain an IPU held by a process."""
        pod = found[0]._pod if found else None
        if pod is None:
            return frozenset()
        try:
            return pod.held_ids()
        except PodError as error:
            raise popart_exception(f"No device is available: {error}") from error


def _devices_of_instance() -> Iterator[Device]:
    """Return the devices of this instance.

    The ids of these devices follow the same rules as in ``popdist.getDeviceId``.
    """
    from popdist_py import context
    from popdist_py.pods.model.pod_parts import devices_of

    instance = context.environment()
    width = instance.num_ipus_per_replica
    system = next_power_of_two(instance.num_total_replicas * width)
    size = next_power_of_two(instance.num_local_replicas * width)
    own = range(size * instance.instance_index, size * (instance.instance_index + 1))
    all_devices = devices_of(system, num_ilds=1)
    return (each for each in all_devices if each.ipus[0] in own and each.ipus[-1] in own)


def _ids(devices: Sequence[Device]) -> str:
    """Return the device ids of each size: ``0 to 3 (1 IPU each), 4 to 5 (2 IPUs each)``."""
    by_size = [
        (size, [each.id for each in found])
        for size, found in groupby(devices, key=lambda each: len(each.ipus))
    ]
    return ", ".join(
        f"{ids[0]} to {ids[-1]} ({counted(size, 'IPU')} each)" for size, ids in by_size
    )


def _seconds(call: str, given: float) -> float:
    if not isinstance(given, int | float) or not 0 <= given < math.inf:
        raise ValueError(f"{call}({given!r}): expected a number of seconds of at least 0")
    return float(given)
