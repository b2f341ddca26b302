"""The partition that a running job holds, and the environment variables that describe it.

The functions here only compute values. Every launch imports this module, but only a launch with a
pod needs the package popdist_py.pods, so this module does not import that package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from popdist_py.device_numbers import device_id
from popdist_py.environment import NODE_DEVICE_ID

if TYPE_CHECKING:
    from popdist_py.pods.model import Attachment, Partition

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
        """Convert indices of IPUs in the job to indices in the partition.

        Args:
            of_job: The indices, in the job, of neighbouring IPUs of one IPU-Link domain.
            domain: The index of the IPU-Link domain of these IPUs.
            domain_ipus: The number of IPUs that the job has in each IPU-Link domain. The partition
                may have more IPUs in each domain.
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
        of = self.partition
        gcd = self.inherited_gcd or (str(instance) if of.num_gcds > 1 else None)
        known = known_variables(self.where, of.name, is_reconfigurable=of.reconfigurable, gcd=gcd)
        if not of.reconfigurable:
            return known
        ipus = self.attachment.ipus
        parent = device_id(of.size, len(ipus), self.first_ipu // len(ipus))
        return {**known, NODE_DEVICE_ID: str(parent)}


def known_variables(
    where: str, name: str | None, *, is_reconfigurable: bool, gcd: str | None
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
        GCD: gcd,
        **({} if is_reconfigurable else {NODE_DEVICE_ID: None}),
        **({HOST: server.hostname, PORT: str(server.port)} if server is not None else {}),
    }
