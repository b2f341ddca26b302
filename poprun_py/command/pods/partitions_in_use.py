"""The partitions that ``gc-info`` and ``gc-monitor`` show, with the processes that hold their IPUs.

If no pod is configured, the partition ``emulated`` shows the IPUs for programs without a launcher,
and each running job is shown as another partition. If a pod is configured, its partitions are
shown, followed by the jobs of this machine that do not use the pod.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from popdist_py.device_numbers import IPUS_PER_MACHINE, next_power_of_two
from popdist_py.pods.machine_pod import MACHINE_PARTITION
from popdist_py.pods.model.graphcore_systems import MACHINE_IPUS
from popdist_py.pods.model.pod_errors import PodError
from popdist_py.pods.model.pod_parts import (
    Attachment,
    Ipu,
    Partition,
    SyncType,
)
from poprun_py import process_info
from poprun_py.display.formatting import printable
from poprun_py.errors import StartError
from poprun_py.machines.leases import user_name
from poprun_py.running.supervise.launcher_queries import running_jobs

_REQUEST_SECONDS = 10.0
# Exceptions that are raised if a launcher's answer does not have the expected form.
_INVALID = (LookupError, TypeError, ValueError, OverflowError)


@dataclass(frozen=True, slots=True, kw_only=True)
class IpuProcess:
    """A process that holds IPUs: an instance of a job, or a program without a launcher.

    ``command`` (the start of the command line), ``user`` and ``seconds`` are None for an instance
    on another host.

    Attributes:
        instance: The index of the instance in its job; None for a program without a launcher.
        seconds: The seconds since an instance started or a program took its IPUs.
        ipus: The numbers, within the partition, of the IPUs that the process holds.
    """

    pid: int
    instance: int | None
    host: str
    command: str | None = None
    user: str | None = None
    seconds: float | None = None
    ipus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionInUse(Partition):
    """A partition with the processes that hold its IPUs.

    Outside a pod, the partition has no owner, and its name is ``emulated``, ``job-PID``, or the
    name that a job gives to its partition.

    Attributes:
        processes: The processes that hold IPUs of the partition.
        launcher: The process id of the launcher of the job that the partition stands for; None for
            other partitions.
    """

    processes: tuple[IpuProcess, ...] = ()
    launcher: int | None = None

    def processes_by_ipu(self) -> Mapping[int, IpuProcess]:
        """Return a dictionary from each IPU in use to the process that holds the IPU."""
        return {ipu: process for process in self.processes for ipu in process.ipus}


@dataclass(frozen=True, slots=True)
class FoundPartitions:
    """The partitions of the configured pod and of this machine.

    Attributes:
        partitions: The partitions of the configured pod sorted by name, or without a pod the
            partition ``emulated``, and then one partition for each job outside the pod.
        silent: The process ids of the launchers that do not answer.
        where: The folder or URL of the pod; None if no pod is configured.
        user: The user who runs the command.
    """

    partitions: list[PartitionInUse]
    silent: list[int]
    where: str | None = None
    user: str = ""


def find_partitions(environ: Mapping[str, str]) -> FoundPartitions:
    """Return the partitions of the configured pod, if any, and of this machine.

    Raises:
        StartError: The pod, or the list of this machine's IPUs in use, cannot be read.
    """
    from popdist_py.pods.find_pod import find_pod

    try:
        store = find_pod(None, environ, timeout=_REQUEST_SECONDS)
        if store is None:
            return machine_partitions(running_jobs())
        with contextlib.closing(store):
            found, attachments = store.partitions(), store.attachments()
        # Ask each launcher only once, because waiting for a launcher without an answer is slow.
        jobs = running_jobs()
        machine = machine_partitions(jobs)
    except PodError as error:
        raise StartError(str(error)) from None
    launchers = {each.holder.pid for each in attachments if _is_here(each)}
    partitions = [
        *(_pod_partition(each, attachments, jobs) for each in found),
        # Skip the first partition, ``emulated``: it does not exist while a pod is configured.
        *(each for each in machine.partitions[1:] if each.launcher not in launchers),
    ]
    return FoundPartitions(partitions, machine.silent, store.where, store.user)


# --- partitions of this machine, outside a pod --------------------------------------------------


def machine_partitions(jobs: Mapping[int, Any]) -> FoundPartitions:
    """Return the partition ``emulated``, and a partition for each running job in ``jobs``.

    Raises:
        PodError: The list of this machine's IPUs in use cannot be read.
    """
    host = os.uname().nodename
    # Programs can emulate any number of IPUs. The partition "emulated" shows 16 IPUs.
    emulated = partition_of_machine(MACHINE_PARTITION, MACHINE_IPUS, host, _programs_of_machine())
    partitions, silent = [emulated], []
    for launcher, holdings in jobs.items():
        try:
            if holdings is None or holdings["num_ipus"]:
                partitions.append(_job_partition(launcher, holdings, host))
        except _INVALID:
            # The launcher did not answer, or is another version that answers in another form.
            silent.append(launcher)
    return FoundPartitions(partitions, silent)


def partition_of_machine(
    name: str, num_ipus: int, host: str, processes: tuple[IpuProcess, ...] = ()
) -> PartitionInUse:
    """Return a partition outside a pod. IPUs that no process holds get the host ``host``."""
    hosts = {ipu: process.host for process in processes for ipu in process.ipus}
    ipus = tuple(
        Ipu(
            index=index,
            agent="",
            host=hosts.get(index, host),
            cluster="",
            domain=0,
            # The IPUs of an IPU-Machine have the numbers 3, 2, 1, 0.
            number=IPUS_PER_MACHINE - 1 - index % IPUS_PER_MACHINE,
        )
        for index in range(num_ipus)
    )
    return PartitionInUse(
        name=name,
        cluster="",
        allocation="",
        ipus=ipus,
        num_gcds=1,
        num_ilds=1,
        num_replicas=1,
        reconfigurable=True,
        sync_type=SyncType.C2_COMPATIBLE,
        owner="",
        created=0.0,
        processes=processes,
    )


def _programs_of_machine() -> tuple[IpuProcess, ...]:
    """Return the processes that hold IPUs of this machine and that no launcher has started."""
    from popdist_py.pods.machine_pod import existing_machine

    store = existing_machine(os.environ)
    if store is None:
        return ()
    with contextlib.closing(store):
        return tuple(_attached_process(each) for each in store.attachments())


def _attached_process(attachment: Attachment) -> IpuProcess:
    holder = attachment.holder
    return IpuProcess(
        pid=holder.pid,
        instance=None,
        host=holder.host,
        command=holder.program or None,
        user=holder.user or None,
        seconds=max(0.0, time.time() - attachment.since),
        ipus=attachment.ipus,
    )


def _job_partition(launcher: int, holdings: Any, host: str) -> PartitionInUse:
    from poprun_py.options.declared_options import MAX_IPUS

    # If root runs the command, a process of another user could report a huge number of IPUs.
    if not 0 < int(holdings["num_ipus"]) <= MAX_IPUS:
        raise ValueError("no launcher accepts such a job")
    name = printable(str(holdings["partition"] or f"job-{launcher}"))
    # The number of IPUs of a partition is a power of two.
    num_ipus = next_power_of_two(int(holdings["num_ipus"]))
    partition = partition_of_machine(name, num_ipus, host, _instances(holdings, host))
    return replace(partition, launcher=launcher)


def _instances(holdings: Any, host: str) -> tuple[IpuProcess, ...]:
    """Return the instances of a job with their IPUs. ``host`` is the name of this machine."""
    processes = (
        IpuProcess(
            pid=int(each["pid"]),
            instance=int(each["index"]),
            host=printable(str(each["host"])),
            ipus=tuple(map(int, each["ipus"])),
        )
        for each in holdings["instances"]
    )
    return tuple(_with_details(each) if each.host == host else each for each in processes)


def _with_details(process: IpuProcess) -> IpuProcess:
    """Return a process of this host with its command, user and age; unchanged if it has ended."""
    words = process_info.read_file(process.pid, "cmdline")
    stat, uid = process_info.read_stat(process.pid), process_info.owner(process.pid)
    if words is None or stat is None or uid is None:
        return process
    start_seconds = stat.start_ticks / os.sysconf("SC_CLK_TCK")
    return replace(
        process,
        command=_short_command(words.decode(errors="replace").split("\0")) or None,
        user=user_name(str(uid)),
        seconds=max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - start_seconds),
    )


def _short_command(words: Sequence[str]) -> str:
    """Return the first two words of a command line, with paths cut to file names."""
    first = [word for word in words if word][:2]
    return printable(" ".join(Path(word).name if "/" in word else word for word in first))


# --- partitions of the configured pod -----------------------------------------------------------


def _is_here(attachment: Attachment) -> bool:
    return attachment.holder.host == os.uname().nodename


def _pod_partition(
    partition: Partition, attachments: Iterable[Attachment], jobs: Mapping[int, Any]
) -> PartitionInUse:
    own = [each for each in attachments if each.partition == partition.name]
    return PartitionInUse(
        **{field.name: getattr(partition, field.name) for field in fields(partition)},
        processes=tuple(process for each in own for process in _processes(each, jobs)),
    )


def _processes(attachment: Attachment, jobs: Mapping[int, Any]) -> Iterable[IpuProcess]:
    """Return the processes that hold the IPUs of an attachment.

    If a launcher attached the IPUs, and ``jobs`` contains the launcher's answer, the processes are
    the job's instances. Otherwise, the only process is the process that attached the IPUs.
    """
    if _is_here(attachment) and (holdings := jobs.get(attachment.holder.pid)) is not None:
        # A launcher of another version may give an answer in another form.
        with contextlib.suppress(*_INVALID):
            instances = _instances(holdings, os.uname().nodename)
            # A launcher numbers its job's IPUs from 0. ``attachment.ipus`` lists the numbers of the
            # same IPUs within the partition.
            return [
                replace(each, ipus=tuple(attachment.ipus[ipu] for ipu in each.ipus))
                for each in instances
            ]
    return [_attached_process(attachment)]
