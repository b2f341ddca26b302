"""A snapshot of a pod with its partitions, and the texts about it in messages to users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from popdist_py.errors import counted
from popdist_py.pods.model.pod_parts import (
    Attachment,
    Partition,
    PartitionRequest,
    Pod,
    SyncType,
)

# The maximum number of partitions that an error message about a pod names.
_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class PodState:
    """A snapshot of a pod with its partitions and its attachments (the IPUs that jobs hold).

    ``where`` is the name of the pod, as in ``POPRUN_POD``. ``user`` is the name of the user who
    launches the job.
    """

    where: str
    user: str
    pod: Pod
    partitions: tuple[Partition, ...]
    attachments: tuple[Attachment, ...]

    def held(self, partition: Partition) -> list[Attachment]:
        """Return the attachments of jobs to a partition."""
        return [each for each in self.attachments if each.partition == partition.name]


def first_of(texts: Sequence[str]) -> str:
    """Return the first of ``texts``, separated by commas."""
    return ", ".join([*texts[:_MOST_NAMED], *(["..."] if len(texts) > _MOST_NAMED else [])])


def owner_text(partition: Partition, now: PodState) -> str:
    """Return a text about the owner, the size and the jobs of a partition."""
    text = f"partition {partition.name} of {partition.owner} has {counted(partition.size, 'IPU')}"
    held = now.held(partition)
    return f"{text}, used by {_holders(held)}" if held else text


def in_use_text(existing: Partition, held: Sequence[Attachment]) -> str:
    """Return a text that names the first of the jobs that hold IPUs of a partition."""
    return f"partition {existing.name} is in use by {_holders(held)}"


def _holders(held: Sequence[Attachment]) -> str:
    who = held[0].holder
    more = f" and {counted(len(held) - 1, 'more job')}" if len(held) > 1 else ""
    return f"{who.program} of {who.user} (process {who.pid} on {who.host}){more}"


def shape_text(of: Partition | PartitionRequest) -> str:
    """Return a text about a partition, such as ``16 IPUs in 4 GCDs with 16 replicas``."""
    size = counted(of.size, "IPU")
    sync = "" if of.sync_type in (None, SyncType.C2_COMPATIBLE) else f", {of.sync_type}"
    many = of.num_ilds is not None and of.num_ilds > 1
    domains = f" over {of.num_ilds} IPU-Link domains" if many else ""
    if of.reconfigurable:
        return f"{size}{domains} (reconfigurable){sync}"
    gcds, replicas = of.num_gcds, of.num_replicas or of.num_gcds
    return f"{size}{domains} in {counted(gcds, 'GCD')} with {counted(replicas, 'replica')}{sync}"
