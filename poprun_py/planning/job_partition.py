"""The partition of a job: the name of a temporary one, and the variables that describe it.

The functions here only compute values. Every launch imports this module, but only a launch with a
pod needs the package popdist_py.pods, so this module does not import that package.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from popdist_py.device_numbers import device_id
from popdist_py.environment import NODE_DEVICE_ID
from poprun_py.process_info import start_ticks

if TYPE_CHECKING:
    from popdist_py.pods.model import Attachment, Partition, PartitionRequest

POD, PARTITION = "POPRUN_POD", "IPUOF_VIPU_API_PARTITION_ID"
GCD, HOST, PORT = "IPUOF_VIPU_API_GCD_ID", "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PORT"


class HeldPartition(NamedTuple):
    """The partition of a job while the job runs.

    Attributes:
        where: The pod; ``none`` if programs shall not use a pod, and empty if no pod is configured.
        partition: The partition; None if the job does not use a pod.
        attachment: The IPUs that the job holds; None if the job does not use a pod.
        inherited_gcd: The graph compilation domain of the job's IPUs, if the launcher runs in an
            instance of another job and uses IPUs of that instance; None in all other cases.
    """

    where: str = ""
    partition: Partition | None = None
    attachment: Attachment | None = None
    inherited_gcd: str | None = None

    @property
    def first_ipu(self) -> int:
        """The index of the job's first IPU, counted from the first IPU of the partition."""
        return min(self.attachment.ipus) if self.attachment is not None else 0

    def ipus(self, of_job: range, domain: int, domain_ipus: int) -> range:
        """Convert indices of neighbouring IPUs in the job to indices in the partition.

        The IPUs are in the IPU-Link domain ``domain``, in which the job has ``domain_ipus`` IPUs.
        The partition may have more IPUs in each domain.
        """
        first = self.first_ipu
        if self.partition is not None and self.partition.num_ilds > 1 and domain:
            first += domain * (self.partition.size // self.partition.num_ilds - domain_ipus)
        return range(of_job.start + first, of_job.stop + first)

    def variables(self, instance: int) -> dict[str, str | None]:
        """Return the environment variables that describe the partition to an instance.

        The value None unsets a variable.
        """
        if self.partition is None or self.attachment is None:
            return {POD: self.where} if self.where else {}
        of, ipus = self.partition, self.attachment.ipus
        known = known_variables(self.where, of.name, of, instance, self.inherited_gcd)
        if not of.reconfigurable:
            return known
        parent = device_id(of.size, len(ipus), self.first_ipu // len(ipus))
        return {**known, NODE_DEVICE_ID: str(parent)}


def known_variables(
    where: str,
    name: str | None,
    made: Partition | PartitionRequest,
    instance: int,
    inherited_gcd: str | None,
) -> dict[str, str | None]:
    """Return an instance's variables about the partition that are known before IPUs are attached.

    The value None unsets a variable. Like PopRun, the launcher attaches a parent device
    (POPDIST_NODE_DEVICE_ID) only in a reconfigurable partition. In a partition that is not
    reconfigurable, each instance opens its own graph compilation domain.
    """
    from urllib.parse import urlsplit

    server = urlsplit(where) if where.startswith(("http://", "https://")) else None
    return {
        POD: where,
        PARTITION: name,
        GCD: inherited_gcd or (str(instance) if made.num_gcds > 1 else None),
        **({} if made.reconfigurable else {NODE_DEVICE_ID: None}),
        **({HOST: server.hostname, PORT: str(server.port)} if server is not None else {}),
    }


# --- names of temporary partitions --------------------------------------------------------------

# A launch that finds no partition in the pod creates a temporary partition, and removes it after
# the job. A launch that is killed leaves its partition in the pod. The name of a temporary
# partition contains the host and the process of its launch. The next launch can therefore detect
# that the process has ended, and that the partition is abandoned.
_NAME = re.compile(r"poprun_(?P<host>[A-Za-z0-9-]+)_(?P<pid>[0-9]+)_(?P<started>[0-9]+)")
# The maximum number of characters of a host name in a partition's name, and the number of
# characters of the digest at the end of a shortened host name. A partition's name has at most 64
# characters, of which the prefix, the process ID and the start time need up to 32.
_MOST_HOST, _DIGEST = 32, 10
_HOST = re.compile(rf"[A-Za-z0-9-]{{1,{_MOST_HOST}}}")
# The longest time that a launch needs to attach the IPUs of its partition after the partition is
# ready, including a difference between the clocks of two hosts.
_GRACE_SECONDS = 600.0


def temporary_name(host: str) -> str:
    """Return the name of the temporary partition that a launch in this process creates."""
    return f"poprun_{_host(host)}_{os.getpid()}_{start_ticks(os.getpid()) or 0}"


def permanent_name(host: str) -> str:
    """Return the name of a partition that this process creates and that stays in the pod."""
    return temporary_name(host).replace("poprun_", "kept_", 1)


def is_temporary(name: str) -> bool:
    """Tell whether ``name`` is the name of a temporary partition."""
    return _NAME.fullmatch(name) is not None


def is_abandoned(
    partition: Partition,
    attachments: Collection[Attachment],
    host: str,
    *,
    now: float | None = None,
    create_seconds: float = 0.0,
) -> bool:
    """Tell whether ``partition`` is temporary and its launch ended without removing it.

    ``attachments`` are all attachments of the pod, and a partition with attached IPUs is not
    abandoned. If the launch ran on this host (``host``), the partition is abandoned if the process
    of the launch has ended. A partition whose name contains the ID of the calling process is
    abandoned, because the calling process has not created a partition yet. If the launch ran on
    another host, the partition is assumed to be abandoned once it has been ready for longer than a
    launch needs to attach the IPUs. The pod needs ``create_seconds`` to create a partition. ``now``
    is a time in seconds since 1970; None for the time of the system clock.
    """
    match = _NAME.fullmatch(partition.name)
    if match is None or any(each.partition == partition.name for each in attachments):
        return False
    if match["host"] == _host(host):
        pid = int(match["pid"])
        return pid == os.getpid() or start_ticks(pid) != int(match["started"])
    age = (time.time() if now is None else now) - partition.created
    return age > create_seconds + _GRACE_SECONDS


def _host(name: str) -> str:
    """Return the part of a partition's name that identifies a host.

    A host name that is too long, or has characters that partition names may not contain, is changed
    and ends with a digest of the whole name, so that the names of two hosts stay different.
    """
    if _HOST.fullmatch(name):
        return name
    import hashlib  # hashlib is imported only here, because the names of most hosts need no digest.

    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', name)[: _MOST_HOST - _DIGEST - 1]}-{digest}"
