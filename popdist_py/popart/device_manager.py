"""DeviceManager: the emulated IPUs as PopART's programs look at them and attach to them.

Where a pod is configured they are those of this program's partition, which processes exclude one
another from. Under the launcher, which holds them, they are the instance's; elsewhere the 64 that
every process has. Nothing here runs anything on a device.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Final

from popdist_py.pods.model.pod_errors import InUseError, PodError
from popdist_py.popart.enumerations import (
    DeviceConnectionType,
    DeviceSelectionCriterion,
    DeviceType,
    SyncPattern,
)

# Programs name enumerations, and seldom a device.
if TYPE_CHECKING:
    from popdist_py.devices.attaching import HeldDevice, ProgramPod
    from popdist_py.pods.model.pod_parts import Device

__all__ = ["DeviceInfo", "DeviceManager", "popart_exception"]

# What every process has where no pod is configured.
_NUM_IPUS: Final = 64


class popart_exception(Exception):
    """What PopART raises: here, that there is no such device, or that it is held."""


@dataclass(eq=False, slots=True)
class DeviceInfo:
    """A device that a program may attach to.

    Attributes:
        id: Poplar's number; -1 of a model, the CPU and an offline device.
        numIpus: how many IPUs it has.
        type: its kind.
        connectionType: when it is attached to.
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
        """Whether this program has the device."""
        return self._attached

    @property
    def tilesPerIPU(self) -> int:
        """The tiles of one of its IPUs, an Mk2's."""
        from popdist_py.ipu.specification import MK2

        return MK2.tiles

    def getOnDemandAttachTimeout(self) -> float:
        """Return how long ``attach`` waits for a device that is held, in seconds."""
        return self._timeout

    def setOnDemandAttachTimeout(self, attachTimeout: float) -> None:
        """Set how long ``attach`` waits for a device that is held, in seconds.

        Raises:
            ValueError: no number of seconds, or a negative one.
        """
        self._timeout = _seconds("setOnDemandAttachTimeout", attachTimeout)

    def attach(self) -> bool:
        """Attach to the device; wait for it as long as the time-out says.

        Returns:
            Whether it is attached: it is not where somebody else holds it all the time.

        Raises:
            popart_exception: the connection type is Never, or the pod cannot be asked.
        """
        if self.connectionType is DeviceConnectionType.Never:
            raise popart_exception(
                f"device {self.id} cannot be attached to: its connection type is Never"
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
        """Give the device back; once more does nothing.

        Raises:
            popart_exception: the pod cannot be asked; it frees the device by itself.
        """
        held, self._held, self._attached = self._held, None, False
        try:
            if held is not None:
                held.detach()
        except PodError as error:
            raise popart_exception(f"Failed to detach from device {self.id}: {error}") from error


class DeviceManager:
    """What finds devices, and attaches to them."""

    def __init__(self) -> None:
        self._timeout = 0.0

    def setOnDemandAttachTimeout(self, attachTimeout: float) -> None:
        """Set how long ``attach`` of devices found later waits for one that is held, in seconds.

        Raises:
            ValueError: no number of seconds, or a negative one.
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
        """Return all devices of ``numIpus`` IPUs, be they free or held.

        ``pattern`` and ``tilesPerIPU`` change nothing.

        Raises:
            popart_exception: the pod cannot be asked.
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
        """Do acquireAvailableDevice(), with None where no device is free."""
        found = self.enumerateDevices(numIpus=numIpus, connectionType=connectionType)
        if selectionCriterion is DeviceSelectionCriterion.Random:
            random.shuffle(found)
        if connectionType is DeviceConnectionType.Always:
            return next((each for each in found if each.attach()), None)
        if connectionType is DeviceConnectionType.OnDemand:
            # One that is free now, or else one to wait for.
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
        """Return a device of ``numIpus`` IPUs: attached to, where the connection is Always.

        ``pattern`` and ``tilesPerIPU`` change nothing.

        Raises:
            popart_exception: no such device is free, or the pod cannot be asked.
        """
        found = self.tryAcquireAvailableDevice(
            numIpus, tilesPerIPU, pattern, connectionType, selectionCriterion
        )
        if found is not None:
            return found
        count = len(self.enumerateDevices(numIpus=numIpus))
        raise popart_exception(
            f"Failed to acquire device with {numIpus} IPU(s): "
            + (f"all {count} are held; gc-monitor shows by whom" if count else "there is none")
        )

    def tryAcquireDeviceById(
        self,
        id: int,
        pattern: SyncPattern = SyncPattern.Full,
        connectionType: DeviceConnectionType = DeviceConnectionType.Always,
    ) -> DeviceInfo | None:
        """Do acquireDeviceById(), with None where somebody else holds the device."""
        pod, offered = self._offered()
        device = next((each for each in offered if each.id == id), None)
        if device is None:
            raise popart_exception(
                f"Failed to acquire device with id {id}: the ids are {_ids(offered)}"
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
        """Return the device of an id: attached to, where the connection is Always.

        Raises:
            popart_exception: there is none, somebody else holds it, or the pod cannot be asked.
        """
        found = self.tryAcquireDeviceById(id, pattern, connectionType)
        if found is None:
            raise popart_exception(
                f"Failed to acquire device with id {id}: it is held; gc-monitor shows by whom"
            )
        return found

    def createCpuDevice(self) -> DeviceInfo:
        """Return the host's CPU as a device."""
        return DeviceInfo(-1, 0, DeviceType.Cpu)

    def createIpuModelDevice(self, options: object = None) -> DeviceInfo:
        """Return the software model of one IPU, which needs no device; options change nothing."""
        return DeviceInfo(-1, 1, DeviceType.IpuModel)

    def createOfflineIPUDevice(self, options: object = None) -> DeviceInfo:
        """Return a device to compile for, which cannot be attached to; options change nothing."""
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
        """Return the devices of this program, and the pod that they are of."""
        from popdist_py import context
        from popdist_py.devices.attaching import pod_of_process

        if context.is_launched():
            return None, tuple(_devices_of_instance())
        try:
            pod = pod_of_process()
            if pod is None:
                return None, tuple(_devices(_NUM_IPUS))
            return pod, tuple(pod.devices(pod.partition()))
        except PodError as error:
            raise popart_exception(f"No device can be had: {error}") from error

    @staticmethod
    def _held_ids(found: Sequence[DeviceInfo]) -> frozenset[int]:
        """Return the ids of those of which somebody holds an IPU."""
        pod = found[0]._pod if found else None
        if pod is None:
            return frozenset()
        try:
            return pod.held_ids()
        except PodError as error:
            raise popart_exception(f"No device can be had: {error}") from error


def _devices(num_ipus: int) -> Iterator[Device]:
    """Return the devices of a system of so many IPUs, a power of two, by their ids."""
    from popdist_py.device_numbers import device_id
    from popdist_py.pods.model.pod_parts import Device

    size = 1
    while size <= num_ipus:
        for position in range(num_ipus // size):
            ipus = range(position * size, (position + 1) * size)
            yield Device(device_id(num_ipus, size, position), ipus)
        size *= 2


def _devices_of_instance() -> Iterator[Device]:
    """Return those of the job's devices that this instance has, by ids as popdist.getDeviceId()."""
    from popdist_py import context

    instance = context.environment()
    width = instance.num_ipus_per_replica
    system = _power_of_two(instance.num_total_replicas * width)
    size = _power_of_two(instance.num_local_replicas * width)
    own = range(size * instance.instance_index, size * (instance.instance_index + 1))
    return (each for each in _devices(system) if each.ipus[0] in own and each.ipus[-1] in own)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _ids(devices: Sequence[Device]) -> str:
    """Say which ids there are: 0 to 3 with 1 IPU, 4 to 5 with 2, 6 to 6 with 4."""
    by_size = [
        (size, [each.id for each in found])
        for size, found in groupby(devices, key=lambda each: len(each.ipus))
    ]
    return ", ".join(
        f"{ids[0]} to {ids[-1]} with {size}{' IPU' if size == 1 else ''}" for size, ids in by_size
    )


def _seconds(call: str, given: float) -> float:
    if not isinstance(given, int | float) or not 0 <= given < math.inf:
        raise ValueError(f"{call}({given!r}): expected a number of seconds, 0 or more")
    return float(given)
