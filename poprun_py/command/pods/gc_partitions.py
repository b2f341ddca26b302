"""The partitions that ``gc-info`` and ``gc-monitor`` show, with the processes that hold their IPUs.

If no pod is configured, the partition ``emulated`` shows the IPUs for programs without a launcher,
and each running job is another partition. If a pod is configured, its partitions are shown,
followed by the jobs of this machine that do not use the pod.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from popdist_py.pods.machine_pod import MACHINE_PARTITION
from popdist_py.pods.model import IPUS_PER_MACHINE, Attachment, Device, Ipu, Partition, devices_of
from popdist_py.pods.pod_errors import PodError
from popdist_py.pods.pod_file import MACHINE_IPUS
from poprun_py import process_info
from poprun_py.display.formatting import printable
from poprun_py.errors import StartError
from poprun_py.machines.leases import user_name
from poprun_py.running.supervise.inspection import running_jobs

_REQUEST_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcProcess:
    """A process that holds IPUs. It is an instance of a job, or a program without a launcher.

    Attributes:
        pid: The process id.
        instance: The index of the instance in its job; None for a program without a launcher.
        host: The host that runs the process.
        ipus: The numbers, within the partition, of the IPUs that the process holds.
        command: The start of the command line; empty for an instance on another host.
        user: The user who runs the process; empty for an instance on another host.
        seconds: The seconds since an instance started or a program took its IPUs; None for an
            instance on another host.
    """

    pid: int
    instance: int | None
    host: str
    ipus: tuple[int, ...] = ()
    command: str = ""
    user: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class GcPartition:
    """A partition as ``gc-info`` and ``gc-monitor`` show it.

    Attributes:
        name: The name of the partition; ``job-PID`` for a job without a named partition.
        num_ipus: The number of IPUs, a power of two.
        host: The host that is shown for free IPUs if ``ipus`` is empty.
        processes: The processes that hold IPUs of the partition.
        launcher: The process id of a job's launcher; None if the partition does not show a job.
        ipus: The IPUs of a pod's partition; empty for partitions outside a pod.
        num_ilds: The number of IPU-Link domains. A device never spans two of them.
        state: The state of the partition, in lower case.
        is_reconfigurable: Whether programs choose the number of IPUs of their devices.
        owner: The user who made the partition; empty for partitions outside a pod.
    """

    name: str
    num_ipus: int
    host: str
    processes: tuple[GcProcess, ...] = ()
    launcher: int | None = None
    ipus: tuple[Ipu, ...] = ()
    num_ilds: int = 1
    state: str = "active"
    is_reconfigurable: bool = True
    owner: str = ""

    def devices(self) -> Iterator[Device]:
        """Return all devices of the partition in the order of their ids."""
        return devices_of(self.num_ipus, self.num_ilds)

    def processes_by_ipu(self) -> Mapping[int, GcProcess]:
        """Return a dictionary from each IPU in use to the process that holds the IPU."""
        return {ipu: process for process in self.processes for ipu in process.ipus}

    def host_of(self, ipu: int) -> str:
        """Return the host of an IPU. Outside a pod, it is the host of the process that holds it."""
        if self.ipus:
            return self.ipus[ipu].host
        process = self.processes_by_ipu().get(ipu)
        return process.host if process is not None else self.host

    def number_of(self, ipu: int) -> int:
        """Return an IPU's number in the column IPU#: 3, 2, 1, 0 for the IPUs of an IPU-Machine."""
        if self.ipus:
            return self.ipus[ipu].number
        return IPUS_PER_MACHINE - 1 - ipu % IPUS_PER_MACHINE


def free_partition(host: str) -> GcPartition:
    """Return the partition ``emulated``. Programs without a launcher can take its IPUs.

    The number of emulated IPUs is unlimited. The partition shows 16 IPUs, like a Pod16 system.
    """
    return GcPartition(MACHINE_PARTITION, MACHINE_IPUS, host)


def find_partition(partitions: Sequence[GcPartition], name: str | None) -> GcPartition:
    """Return the partition with this name, or else the first partition."""
    return next((each for each in partitions if each.name == name), partitions[0])


# --- partitions of this machine, outside a pod --------------------------------------------------


def machine_partitions() -> tuple[list[GcPartition], list[int]]:
    """Return the partitions of this machine, and the process ids of unresponsive launchers.

    The first partition is ``emulated``. Each running job that uses IPUs is another partition.

    Raises:
        StartError: The list of this machine's IPUs in use cannot be read.
    """
    host = os.uname().nodename
    partitions = [replace(free_partition(host), processes=_programs_of_machine())]
    silent = []
    for launcher, holdings in running_jobs().items():
        try:
            if holdings is None or holdings["num_ipus"]:
                partitions.append(_job_partition(launcher, holdings, host))
        except (LookupError, TypeError, ValueError):
            # The launcher did not answer, or its answer has the form of another version.
            silent.append(launcher)
    return partitions, silent


def _programs_of_machine() -> tuple[GcProcess, ...]:
    """Return the processes that hold IPUs of this machine and that no launcher has started."""
    from popdist_py.pods.machine_pod import existing_machine

    try:
        store = existing_machine(os.environ)
        if store is None:
            return ()
        with contextlib.closing(store):
            return tuple(_attached_process(each) for each in store.attachments())
    except PodError as error:
        raise StartError(str(error)) from None


def _attached_process(attachment: Attachment) -> GcProcess:
    holder = attachment.holder
    return GcProcess(
        pid=holder.pid,
        instance=None,
        host=holder.host,
        ipus=attachment.ipus,
        command=holder.program,
        user=holder.user,
        seconds=max(0.0, time.time() - attachment.since),
    )


def _job_partition(launcher: int, holdings: Any, host: str) -> GcPartition:
    """Return a partition that represents a job; ``host`` is this machine's host name.

    Raises:
        LookupError, TypeError, ValueError: ``holdings`` is not a valid answer of a launcher.
    """
    return GcPartition(
        name=printable(str(holdings["partition"] or f"job-{launcher}")),
        # The number of IPUs of a partition is a power of two.
        num_ipus=1 << (int(holdings["num_ipus"]) - 1).bit_length(),
        host=host,
        processes=_instances(holdings, host),
        launcher=launcher,
    )


def _instances(holdings: Any, host: str) -> tuple[GcProcess, ...]:
    """Return the instances of a job with their IPUs; ``host`` is this machine's host name.

    Raises:
        LookupError, TypeError, ValueError: ``holdings`` is not a valid answer of a launcher.
    """
    processes = (
        GcProcess(
            pid=int(each["pid"]),
            instance=int(each["index"]),
            host=printable(str(each["host"])),
            ipus=tuple(each["ipus"]),
        )
        for each in holdings["instances"]
    )
    return tuple(_with_details(each) if each.host == host else each for each in processes)


def _with_details(process: GcProcess) -> GcProcess:
    """Add the command, user and age to a process of this host, unless it has ended."""
    words = process_info.read_file(process.pid, "cmdline")
    stat, uid = process_info.read_stat(process.pid), process_info.owner(process.pid)
    if words is None or stat is None or uid is None:
        return process
    start_seconds = stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return replace(
        process,
        command=_short_command(words.decode(errors="replace").split("\0")),
        user=user_name(str(uid)),
        seconds=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds),
    )


def _short_command(words: Sequence[str]) -> str:
    """Return the first two words of a command line, with paths cut to file names."""
    first = [word for word in words if word][:2]
    return printable(" ".join(Path(word).name if "/" in word else word for word in first))


# --- partitions of the configured pod -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PodPartitions:
    """The partitions of a pod, and the jobs of this machine that do not use the pod.

    Attributes:
        where: The folder or URL of the pod, for messages.
        user: The user who runs the command.
        partitions: The partitions of the pod, sorted by name, and then one partition for each job.
        silent: The process ids of the launchers that do not answer.
    """

    where: str
    user: str
    partitions: list[GcPartition]
    silent: list[int]

    def own(self) -> list[GcPartition]:
        """Return the user's own partitions in the pod, and the partitions that show jobs."""
        return [each for each in self.partitions if each.owner in ("", self.user)]


def pod_partitions(environ: Mapping[str, str]) -> PodPartitions | None:
    """Return the partitions of the configured pod; None if no pod is configured.

    Raises:
        StartError: The pod cannot be reached or read.
    """
    from popdist_py.pods.find_pod import find_pod

    try:
        store = find_pod(None, environ, timeout=_REQUEST_SECONDS)
        if store is None:
            return None
        with contextlib.closing(store):
            found, attachments = store.partitions(), store.attachments()
    except PodError as error:
        raise StartError(str(error)) from None
    jobs = running_jobs()
    partitions = [_pod_partition(each, attachments, jobs) for each in found]
    others, silent = machine_partitions()
    launchers = {each.holder.pid for each in attachments if _is_here(each)}
    # The first partition is ``emulated``, which does not exist while a pod is configured.
    partitions += [each for each in others[1:] if each.launcher not in launchers]
    return PodPartitions(store.where, store.user, partitions, silent)


def _is_here(attachment: Attachment) -> bool:
    return attachment.holder.host == os.uname().nodename


def _pod_partition(
    partition: Partition, attachments: Iterable[Attachment], jobs: Mapping[int, Any]
) -> GcPartition:
    own = [each for each in attachments if each.partition == partition.name]
    return GcPartition(
        name=partition.name,
        num_ipus=partition.size,
        host=partition.hosts[0],
        processes=tuple(process for each in own for process in _processes(each, jobs)),
        ipus=partition.ipus,
        num_ilds=partition.num_ilds,
        state=partition.state.value.lower(),
        is_reconfigurable=partition.reconfigurable,
        owner=partition.owner,
    )


def _processes(attachment: Attachment, jobs: Mapping[int, Any]) -> Iterable[GcProcess]:
    """Return the processes that hold the IPUs of an attachment.

    For a job, the pod knows only the launcher. If ``jobs`` contains that launcher's answer, the
    job's instances are returned. If not, the process that attached the IPUs is returned.
    """
    if _is_here(attachment) and (holdings := jobs.get(attachment.holder.pid)) is not None:
        # A launcher of another version may give an answer in another form.
        with contextlib.suppress(LookupError, TypeError, ValueError):
            instances = _instances(holdings, os.uname().nodename)
            # A launcher numbers its job's IPUs from 0. The attachment lists, in the same order,
            # their numbers in the partition.
            return [
                replace(each, ipus=tuple(attachment.ipus[ipu] for ipu in each.ipus))
                for each in instances
            ]
    return [_attached_process(attachment)]
