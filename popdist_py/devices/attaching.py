"""What a program attaches to that no launcher started: which pod, partition and device, how long.

The pod is looked for once in a process, when it is first needed. A forked child has none of its
parent's devices: it neither gives them back nor keeps them. Nothing here knows of launchers, and
what a device is held for is not looked at.
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

from popdist_py.errors import are, counted, plural
from popdist_py.pods.model.pod_errors import (
    InUseError,
    InvalidRequestError,
    PodError,
    UnknownNameError,
)

# A program without a pod does not wait for them.
if TYPE_CHECKING:
    from popdist_py.pods.model.pod_parts import (
        Attachment,
        Device,
        Holder,
        Partition,
    )
    from popdist_py.pods.model.pod_store import PodStore

__all__ = [
    "HeldDevice",
    "ProgramPod",
    "device_by_id",
    "machine_of_process",
    "pod_of_process",
    "request_timeout",
]

_PARTITION: Final = "IPUOF_VIPU_API_PARTITION_ID"
_GCD: Final = "IPUOF_VIPU_API_GCD_ID"
_TIMEOUT: Final = "IPUOF_VIPU_API_TIMEOUT"
# What PopRun passes on where nobody says.
_TIMEOUT_SECONDS: Final = 120.0
# How long a program that waits for a device lets the pod alone. PopTorch polls every 15 seconds.
_POLL_SECONDS: Final = 0.5


class HeldDevice:
    """A device of a partition that this process has to itself until ``detach``."""

    def __init__(
        self, store: PodStore, partition: Partition, device: Device, attachment: Attachment
    ) -> None:
        self.partition, self.device = partition, device
        self._store, self._attachment = store, attachment
        self._pid = os.getpid()

    def detach(self) -> None:
        """Give the device back; once more, or in a forked child, does nothing.

        Raises:
            PodError: the pod cannot be asked; it frees the device by itself.
        """
        if self._pid == os.getpid():
            self._store.detach(self._attachment)


class ProgramPod:
    """A pod and, of its partitions, the one that this program's environment means.

    Args:
        store: what keeps the pod.
        environ: the variables of this process, read at every call.
    """

    def __init__(self, store: PodStore, environ: Mapping[str, str]) -> None:
        self.store = store
        self._environ = environ

    def partition(self) -> Partition:
        """Return the partition of IPUOF_VIPU_API_PARTITION_ID, else the only one of the pod.

        Raises:
            UnknownNameError: there is none of this name, or none at all.
            InvalidRequestError: there are several, and none is named.
        """
        name = self._environ.get(_PARTITION)
        partitions = self.store.partitions()
        if name:
            found = [each for each in partitions if each.name == name]
            if not found:
                raise UnknownNameError(
                    f"{_PARTITION}={name}: pod {self.store.where} has no such partition, only "
                    f"{_names(partitions)}"
                )
        elif len(partitions) > 1:
            raise InvalidRequestError(
                f"pod {self.store.where} has several partitions ({_names(partitions)}): set "
                f"{_PARTITION} to the name of one"
            )
        else:
            found = list(partitions)
        if not found:
            raise UnknownNameError(
                f"pod {self.store.where} has no partition: make one with poprun-py-pod create "
                "partition NAME --size IPUS --reconfigurable"
            )
        return found[0]

    def devices(self, partition: Partition) -> Iterator[Device]:
        """Return the devices that this program may have, in the order of their ids.

        Those of one GCD where IPUOF_VIPU_API_GCD_ID names it and the partition has several.

        Raises:
            InvalidRequestError: no such GCD.
        """
        ipus = range(partition.size)
        gcd = self._environ.get(_GCD)
        if gcd and partition.num_gcds > 1:
            if not gcd.isdecimal() or int(gcd) >= partition.num_gcds:
                raise InvalidRequestError(
                    f"{_GCD}={gcd}: partition {partition.name} has the GCDs 0 to "
                    f"{partition.num_gcds - 1}"
                )
            size = partition.size // partition.num_gcds
            ipus = ipus[int(gcd) * size : (int(gcd) + 1) * size]
        return (
            each for each in partition.devices() if each.ipus[0] in ipus and each.ipus[-1] in ipus
        )

    def has_device(self, num_ipus: int) -> bool:
        """Tell whether the partition has a device of so many IPUs, be it held or not.

        Raises:
            PodError: the pod cannot be asked, or it is not clear which partition is meant.
        """
        from popdist_py.pods.model.pod_parts import PartitionState

        partition = self.partition()
        usable = partition.state is not PartitionState.ERROR
        return usable and any(len(each.ipus) == num_ipus for each in self.devices(partition))

    def check_device(self, num_ipus: int, device: int) -> None:
        """Check that the device of this id exists and has the size for ``num_ipus``, held or free.

        Raises:
            InvalidRequestError: the id is unknown, or the device has another number of IPUs.
            PodError: the pod does not answer, or it is not clear which partition is meant.
        """
        partition = self.partition()
        device_by_id(partition, tuple(self.devices(partition)), device, _size_for(num_ipus))

    def held_ids(self) -> frozenset[int]:
        """Return the ids of the partition's devices of which somebody holds an IPU.

        Raises:
            PodError: the pod cannot be asked, or it is not clear which partition is meant.
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
        """Attach to a device; who holds it is this process.

        Args:
            num_ipus: how many IPUs are needed; rounded up to a power of two.
            device: the id of just this device; None for the first that is free.
            wait: how long to wait for a device that is held, in seconds.
            waiting: told once who holds it, if there is to be waited.

        Raises:
            InUseError: it is held, or all devices of this size are.
            InvalidRequestError, NotEnoughIpusError: the partition has no such device.
            PodError: the pod cannot be asked, or it is not clear which partition is meant.
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
        size = _size_for(num_ipus)
        offered = tuple(self.devices(partition))
        if device_id is not None:
            return self._attach_one(partition, device_by_id(partition, offered, device_id, size))
        fitting = [each for each in offered if len(each.ipus) == size]
        if not fitting:
            raise InvalidRequestError(
                f"{counted(size, 'IPU')} {are(size)} needed; partition {partition.name} has "
                "devices of "
                f"{_sizes(offered)}: use fewer replicas or IPUs, or a partition that is larger"
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


def _size_for(num_ipus: int) -> int:
    """Return the number of IPUs of the smallest device that has ``num_ipus`` IPUs or more."""
    return 1 << (num_ipus - 1).bit_length()


def device_by_id(
    partition: Partition, offered: tuple[Device, ...], device_id: int, size: int
) -> Device:
    """Return the device of an id.

    Args:
        partition: whose devices they are.
        offered: the devices that there are.
        device_id: Poplar's number of one of them.
        size: how many IPUs it has to have.

    Raises:
        InvalidRequestError: there is none of this id, or it has another number of IPUs.
    """
    device = next((each for each in offered if each.id == device_id), None)
    if device is not None and len(device.ipus) == size:
        return device
    ids = [each.id for each in offered if len(each.ipus) == size]
    fault = (
        f"partition {partition.name} has no device {device_id}"
        if device is None
        else f"device {device_id} of partition {partition.name} has "
        f"{counted(len(device.ipus), 'IPU')}, "
        f"and {size} {are(size)} needed"
    )
    raise InvalidRequestError(
        f"{fault}: its devices of {counted(size, 'IPU')} have the ids {ids[0]} to {ids[-1]}"
        if ids
        else f"{fault}: it has devices of {_sizes(offered)}"
    )


def request_timeout(environ: Mapping[str, str]) -> float:
    """Return the limit of every request to a server that IPUOF_VIPU_API_TIMEOUT sets, in seconds.

    Raises:
        InvalidRequestError: it is no number above 0.
    """
    text = environ.get(_TIMEOUT)
    if not text:
        return _TIMEOUT_SECONDS
    with suppress(ValueError):
        seconds = float(text)
        if 0 < seconds < math.inf:
            return seconds
    raise InvalidRequestError(f"{_TIMEOUT}={text}: expected a number of seconds above 0, as in 120")


def _names(partitions: tuple[Partition, ...]) -> str:
    return ", ".join(each.name for each in partitions) or "none"


def _sizes(devices: tuple[Device, ...]) -> str:
    sizes = sorted({len(each.ipus) for each in devices})
    return f"{', '.join(map(str, sizes))} {plural('IPU', sizes[-1] if sizes else 0)}"


def _program() -> str:
    """Return what others may read of this program: its name, without its arguments."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    return name if name and not name.startswith("-") else "python"


# -- the pod of this process -----------------------------------------------------------------

_lock = threading.Lock()
_was_sought = False
_pod: ProgramPod | None = None
_machine: ProgramPod | None = None
# A forked child must not end what belongs to its parent, and the end of a store gives back.
_of_parents: list[ProgramPod] = []


def pod_of_process() -> ProgramPod | None:
    """Return the pod that this process's environment means; None where none is configured.

    Raises:
        PodError: it cannot be opened, or several are there and none is named.
    """
    global _pod, _was_sought
    with _lock:
        if not _was_sought:
            _pod, _was_sought = _open(), True
    return _pod


def machine_of_process() -> ProgramPod:
    """Return the pod of this machine, for a program without a pod that names a device's id.

    Raises:
        PodError: the pod cannot be made or used.
    """
    global _machine
    with _lock:
        if _machine is None:
            from popdist_py.pods.machine_pod import open_machine

            # This pod has one partition, so no environment variable has to choose one.
            _machine = _kept(ProgramPod(open_machine(os.environ), {}))
    return _machine


def _open() -> ProgramPod | None:
    # Where no device is needed, neither databases nor servers are imported.
    from popdist_py.pods.find_pod import find_pod

    store = find_pod(None, os.environ, timeout=request_timeout(os.environ))
    return None if store is None else _kept(ProgramPod(store, os.environ))


def _kept(pod: ProgramPod) -> ProgramPod:
    """Return ``pod``, whose devices are given back when the process ends."""
    atexit.register(_close, pod.store, os.getpid())
    return pod


def _close(store: PodStore, pid: int) -> None:
    """Give everything back at the end of the process; what cannot be asked frees it anyway."""
    if pid == os.getpid():
        with suppress(PodError):
            store.close()


def _begin_child() -> None:
    global _lock, _pod, _machine, _was_sought
    _of_parents.extend(each for each in (_pod, _machine) if each is not None)
    _lock, _pod, _machine, _was_sought = threading.Lock(), None, None, False


os.register_at_fork(after_in_child=_begin_child)
