"""The IPU partition of a job: names of temporary partitions, and variables about the partition.

The package popdist_py.pods is not imported here, because only launches with a pod need the package.
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
    from popdist_py.pods.model.pod_parts import Attachment, Partition, PartitionRequest

POD, PARTITION = "POPRUN_POD", "IPUOF_VIPU_API_PARTITION_ID"
GCD, HOST, PORT = "IPUOF_VIPU_API_GCD_ID", "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PORT"


class HeldPartition(NamedTuple):
    """The IPU partition of a running job.

    Attributes:
        where: The pod that the job uses; ``none`` if programs shall not use a pod, and empty if no
            pod is configured.
        partition: The partition that the job uses; None if the job does not use a pod.
        attachment: The IPUs that the job holds; None if the job does not use a pod.
        inherited_gcd: The graph compilation domain of the job's IPUs, if an instance of another job
            started the launcher and passed on its IPUs; else None.
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
        """Convert indices of neighbouring IPUs in the job to the IPUs' indices in the partition.

        The IPUs are in the IPU-Link domain with the index ``domain``. The job uses ``domain_ipus``
        IPUs of each IPU-Link domain, but the partition may have more.
        """
        first = self.first_ipu
        if self.partition is not None and self.partition.num_ilds > 1 and domain:
            first += domain * (self.partition.size // self.partition.num_ilds - domain_ipus)
        return range(of_job.start + first, of_job.stop + first)

    def variables(self, instance: int) -> dict[str, str | None]:
        """Return the environment variables that describe the partition to an instance.

        Variables with the value None are unset in the instance.
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
    """Return an instance's variables about its partition that do not depend on the attached IPUs.

    Variables with the value None are unset in the instance. As with PopRun, a parent device
    (POPDIST_NODE_DEVICE_ID) is attached only in a reconfigurable partition. In a partition that is
    not reconfigurable, each instance opens its own graph compilation domain.
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
# the job. If the launcher is killed, the temporary partition stays in the pod. The name of a
# temporary partition therefore contains the host and the process ID of the launcher. If the process
# has ended, a later launch treats the partition as abandoned.
_NAME = re.compile(r"poprun_(?P<host>[A-Za-z0-9-]+)_(?P<pid>[0-9]+)_(?P<started>[0-9]+)")
# The maximum length of the host name in a partition's name, and the length of the digest at the end
# of a shortened host name. The name of a partition has at most 64 characters. The prefix, the
# process ID and the start time in the name of a partition need up to 32 characters.
_MOST_HOST, _DIGEST = 32, 10
_HOST = re.compile(rf"[A-Za-z0-9-]{{1,{_MOST_HOST}}}")
# The maximum number of seconds that a launch needs to attach IPUs after its partition is ready,
# including a difference between the clocks of two hosts.
_GRACE_SECONDS = 600.0


def temporary_name(host: str) -> str:
    """Return a name for a temporary partition that this process creates on the host ``host``."""
    return f"poprun_{_host(host)}_{os.getpid()}_{start_ticks(os.getpid()) or 0}"


def permanent_name(host: str) -> str:
    """Return a name for a partition that this process creates and does not remove."""
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
    """Tell whether a launch created the temporary ``partition`` and ended without removing it.

    A partition with attached IPUs is not abandoned. ``attachments`` are all attachments of the pod.
    If the launch ran on this host (``host``), the partition is abandoned once the process of the
    launch has ended. If the name of a partition contains the ID of the calling process, the
    partition is abandoned, because the calling process has not created a partition yet. If the
    launch ran on another host, the partition is assumed to be abandoned after the maximum time that
    a launch needs to attach IPUs. ``create_seconds`` is the time that the pod needs to create a
    partition. ``now`` is a time in seconds since 1970; None for the time of the system clock.
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
    """Return the host name ``name`` in a form that the name of a partition may contain.

    If a host name is too long or contains other characters, the form ends with a digest of
    the host name. The forms of two host names are therefore different.
    """
    if _HOST.fullmatch(name):
        return name
    import hashlib  # Most launches do not need hashlib.

    digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:_DIGEST]
    return f"{re.sub(r'[^A-Za-z0-9-]', '-', name)[: _MOST_HOST - _DIGEST - 1]}-{digest}"
