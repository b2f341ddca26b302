"""Access to the devices of a pod for programs that run without a launcher.

The process opens the pod when the program first needs a device. Environment variables select the
pod and the partition. A forked child neither holds nor releases the devices of its parent.
"""

from __future__ import annotations

import atexit
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from popdist_py.device_numbers import next_power_of_two
from popdist_py.errors import are, counted, plural
from popdist_py.pods.model.pod_errors import (
    InUseError,
    InvalidRequestError,
    PodError,
    UnknownNameError,
    check_known,
)

# The modules for pods are imported only when needed, because most programs do not use a pod.
if TYPE_CHECKING:
    from popdist_py.pods.model.pod_parts import (
        Attachment,
        Device,
        Holder,
        Partition,
    )
    from popdist_py.pods.model.pod_store import PodStore

_PARTITION: Final = "IPUOF_VIPU_API_PARTITION_ID"
_GCD: Final = "IPUOF_VIPU_API_GCD_ID"
_TIMEOUT: Final = "IPUOF_VIPU_API_TIMEOUT"
# The default of IPUOF_VIPU_API_TIMEOUT, which is the same as in PopRun.
_TIMEOUT_SECONDS: Final = 120.0
# The pause between two attempts to attach. Graphcore's PopTorch makes an attempt every 15 seconds.
_POLL_SECONDS: Final = 0.5


class HeldDevice:
    """A device that only this process may use until the process calls ``detach``."""

    def __init__(
        self, store: PodStore, partition: Partition, device: Device, attachment: Attachment
    ) -> None:
        self.partition, self.device = partition, device
        self._store, self._attachment = store, attachment
        self._pid = os.getpid()

    def detach(self) -> None:
        """Release the device. A second call, or a call in a forked child, does nothing.

        Raises:
            PodError: The pod does not answer. The pod will release the device at the latest after
                this process has ended.
        """
        if self._pid == os.getpid():
            self._store.detach(self._attachment)


class ProgramPod:
    """A pod, and the partition of this pod that the environment variables select.

    Args:
        store: The store of the pod.
        environ: The environment variables of this process. Each method reads their current values.
    """

    def __init__(self, store: PodStore, environ: Mapping[str, str]) -> None:
        self.store = store
        self._environ = environ

    def partition(self) -> Partition:
        """Return the partition that IPUOF_VIPU_API_PARTITION_ID names.

        If IPUOF_VIPU_API_PARTITION_ID is not set, the pod's only partition is returned.

        Raises:
            UnknownNameError: The pod has no partition, or no partition of this name.
            InvalidRequestError: The pod has several partitions, and IPUOF_VIPU_API_PARTITION_ID is
                not set.
        """
        name = self._environ.get(_PARTITION)
        partitions = self.store.partitions()
        names = [each.name for each in partitions]
        if name:
            check_known("partition", name, names, f"in pod {self.store.where} ({_PARTITION})")
            return partitions[names.index(name)]
        if len(partitions) > 1:
            raise InvalidRequestError(
                f"pod {self.store.where} has several partitions ({', '.join(names)}): set "
                f"{_PARTITION} to the name of one partition"
            )
        if not partitions:
            raise UnknownNameError(
                f"pod {self.store.where} has no partition: make a partition with poprun-py-pod "
                "create partition NAME --size IPUS --reconfigurable"
            )
        return partitions[0]

    def devices(self, partition: Partition) -> Iterator[Device]:
        """Return the devices that this program may use, in the order of their ids.

        By default, a program may use all devices of the partition. If the partition has several
        GCDs, IPUOF_VIPU_API_GCD_ID limits the program to the devices of one GCD.

        Raises:
            InvalidRequestError: The partition has no GCD with the number in IPUOF_VIPU_API_GCD_ID.
        """
        ipus = range(partition.size)
        gcd = self._environ.get(_GCD)
        if gcd and partition.num_gcds > 1:
            if not gcd.isdecimal() or int(gcd) >= partition.num_gcds:
                raise InvalidRequestError(
                    f"{_GCD}={gcd}: expected the number of a GCD of partition {partition.name}, "
                    f"0 to {partition.num_gcds - 1}"
                )
            size = partition.size // partition.num_gcds
            ipus = ipus[int(gcd) * size : (int(gcd) + 1) * size]
        return (
            each for each in partition.devices() if each.ipus[0] in ipus and each.ipus[-1] in ipus
        )

    def has_device(self, num_ipus: int) -> bool:
        """Return whether the partition has a device with ``num_ipus`` IPUs, even if it is in use.

        Raises:
            PodError: The pod does not answer, or no partition is selected.
        """
        from popdist_py.pods.model.pod_parts import PartitionState

        partition = self.partition()
        usable = partition.state is not PartitionState.ERROR
        return usable and any(len(each.ipus) == num_ipus for each in self.devices(partition))

    def check_device(self, num_ipus: int, device: int) -> None:
        """Check that the device with the id ``device`` exists and has ``num_ipus`` IPUs.

        ``num_ipus`` is rounded up to a power of two. The device may be free or in use.

        Raises:
            InvalidRequestError: The id is unknown, or the device has another number of IPUs.
            PodError: The pod does not answer, or no partition is selected.
        """
        partition = self.partition()
        device_by_id(partition, tuple(self.devices(partition)), device, next_power_of_two(num_ipus))

    def held_ids(self) -> frozenset[int]:
        """Return the ids of all devices with at least one IPU that a process holds.

        Raises:
            PodError: The pod does not answer, or no partition is selected.
        """
        partition = self.partition()
        held = {
            ipu
            for each in self.store.attachments()
            if each.partition == partition.name
            for ipu in each.ipus
        }
        return frozenset(each.id for each in partition.devices() if not held.isdisjoint(each.ipus))

    def attach(
        self,
        num_ipus: int,
        device: int | None = None,
        *,
        wait: float = 0.0,
        waiting: Callable[[InUseError], None] = lambda _: None,
    ) -> HeldDevice:
        """Attach this process to a device.

        Args:
            num_ipus: The number of IPUs, which is rounded up to a power of two.
            device: The id of the device; None for the first free device.
            wait: The longest time to wait for a free device, in seconds.
            waiting: A function that is called once if ``attach`` has to wait. Its argument is the
                error that names the processes that hold the IPUs.

        Raises:
            InUseError: The device is in use, or all devices of this size are in use.
            InvalidRequestError, NotEnoughIpusError: The partition has no device with this id or
                size.
            PodError: The pod does not answer, or no partition is selected.
        """
        until = time.monotonic() + wait
        told = False
        while True:
            try:
                return self._attach(num_ipus, device)
            except InUseError as error:
                left = until - time.monotonic()
                if left <= 0:
                    raise
                if not told:
                    waiting(error)
                    told = True
            time.sleep(min(_POLL_SECONDS, left))

    def _attach(self, num_ipus: int, device_id: int | None) -> HeldDevice:
        partition = self.partition()
        size = next_power_of_two(num_ipus)
        offered = tuple(self.devices(partition))
        if device_id is not None:
            return self._attach_one(partition, device_by_id(partition, offered, device_id, size))
        fitting = [each for each in offered if len(each.ipus) == size]
        if not fitting:
            raise InvalidRequestError(
                f"the program needs a device with {counted(size, 'IPU')}, but partition "
                f"{partition.name} only has devices with {_sizes(offered)}: use fewer replicas, "
                "fewer IPUs per replica, or a larger partition"
            )
        if len(fitting) == partition.size // size:
            found = self.store.attach(partition.name, size, self._holder())
            taken = next(each for each in fitting if each.ipus[0] == found.ipus[0])
            return HeldDevice(self.store, partition, taken, found)
        for each in fitting[:-1]:
            with suppress(InUseError):
                return self._attach_one(partition, each)
        return self._attach_one(partition, fitting[-1])

    def _attach_one(self, partition: Partition, device: Device) -> HeldDevice:
        found = self.store.attach(
            partition.name, len(device.ipus), self._holder(), ipus=tuple(device.ipus)
        )
        return HeldDevice(self.store, partition, device, found)

    def _holder(self) -> Holder:
        from popdist_py.pods.model.pod_parts import Holder

        return Holder(
            host=socket.gethostname(),
            pid=os.getpid(),
            user=self.store.user,
            program=_program(),
        )


def device_by_id(
    partition: Partition, offered: tuple[Device, ...], device_id: int, size: int
) -> Device:
    """Return the device with the id ``device_id``.

    Args:
        partition: The partition of the devices. Error messages name it.
        offered: The devices that the program may use.
        device_id: The id of the device in Poplar's numbering.
        size: The number of IPUs that the device must have.

    Raises:
        InvalidRequestError: The id is unknown, or the device has another number of IPUs.
    """
    device = next((each for each in offered if each.id == device_id), None)
    if device is not None and len(device.ipus) == size:
        return device
    ids = [each.id for each in offered if len(each.ipus) == size]
    fault = (
        f"partition {partition.name} has no device with the id {device_id}"
        if device is None
        else f"device {device_id} of partition {partition.name} has "
        f"{counted(len(device.ipus), 'IPU')}, but {counted(size, 'IPU')} {are(size)} needed"
    )
    raise InvalidRequestError(
        f"{fault}: its devices with {counted(size, 'IPU')} have the ids {ids[0]} to {ids[-1]}"
        if ids
        else f"{fault}: the partition only has devices with {_sizes(offered)}"
    )


def request_timeout(environ: Mapping[str, str]) -> float:
    """Return the time-out of each request to a pod server, in seconds.

    The value is IPUOF_VIPU_API_TIMEOUT, or 120 if this variable is not set.

    Raises:
        InvalidRequestError: IPUOF_VIPU_API_TIMEOUT is not a number above 0.
    """
    text = environ.get(_TIMEOUT)
    if not text:
        return _TIMEOUT_SECONDS
    with suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < math.inf:
            return seconds
    raise InvalidRequestError(
        f"{_TIMEOUT}={text}: expected a number of seconds above 0, such as 120"
    )


def _sizes(devices: tuple[Device, ...]) -> str:
    sizes = sorted({len(each.ipus) for each in devices})
    return f"{', '.join(map(str, sizes))} {plural('IPU', sizes[-1] if sizes else 0)}"


def _program() -> str:
    """Return the name of this program.

    The arguments of the program are left out, because other users must not read them.
    """
    name = Path(sys.argv[0]).name if sys.argv else ""
    return name if name and not name.startswith("-") else "python"


# -- the pod of this process -----------------------------------------------------------------

_lock = threading.Lock()
_was_sought = False
_pod: ProgramPod | None = None
_machine: ProgramPod | None = None


def pod_of_process() -> ProgramPod | None:
    """Return the pod that the environment of this process selects; None if no pod is configured.

    Raises:
        PodError: The pod cannot be opened, or the user must select one of several pods.
    """
    global _pod, _was_sought
    with _lock:
        if not _was_sought:
            _pod, _was_sought = _open(), True
    return _pod


def machine_of_process() -> ProgramPod:
    """Return the default pod of this machine.

    A program uses the default pod if it asks for a device by its id and no pod is configured.

    Raises:
        PodError: The pod cannot be made or used.
    """
    global _machine
    with _lock:
        if _machine is None:
            from popdist_py.pods.machine_pod import open_machine

            # The default pod has only one partition. The empty environment prevents V-IPU's
            # variables from selecting another partition.
            _machine = _kept(ProgramPod(open_machine(os.environ), {}))
    return _machine


def _open() -> ProgramPod | None:
    from popdist_py.pods.find_pod import find_pod

    store = find_pod(None, os.environ, timeout=request_timeout(os.environ))
    return None if store is None else _kept(ProgramPod(store, os.environ))


def _kept(pod: ProgramPod) -> ProgramPod:
    """Make sure that the devices of ``pod`` are released when the process ends; return ``pod``."""
    atexit.register(_close, pod.store, os.getpid())
    return pod


def _close(store: PodStore, pid: int) -> None:
    """Release all devices of this process.

    Errors are ignored, because the pod releases the devices anyway after this process has ended.
    """
    if pid == os.getpid():
        with suppress(PodError):
            store.close()


def _begin_child() -> None:
    global _lock, _pod, _machine, _was_sought
    _lock, _pod, _machine, _was_sought = threading.Lock(), None, None, False


os.register_at_fork(after_in_child=_begin_child)
