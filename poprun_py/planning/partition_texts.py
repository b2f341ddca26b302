"""Partitions in words: what they are, who has and who holds them. Only text is made here."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from popdist_py.pods.values import Attachment, Partition, PartitionRequest, SyncType


def taken_text(partition: Partition, attachments: Collection[Attachment]) -> str:
    """Return who has a partition, and how much of the pod that is."""
    text = f"{partition.name} of {partition.owner} has {partition.size}"
    held = [each for each in attachments if each.partition == partition.name]
    return f"{text}, held by {_holders(held)}" if held else text


def _holders(held: Sequence[Attachment]) -> str:
    who = held[0].holder
    more = f" and {len(held) - 1} more" if len(held) > 1 else ""
    return f"{who.program} of {who.user} (process {who.pid} on {who.host}){more}"


def in_use_text(present: Partition, held: Sequence[Attachment]) -> str:
    """Return who holds IPUs of a partition."""
    return f"partition {present.name} is in use by {_holders(held)}"


def shape_text(of: Partition | PartitionRequest) -> str:
    """Return the size and division of a partition: ``16 IPUs in 4 GCDs with 16 replicas``."""
    size = f"{of.size} IPU{'s' * (of.size != 1)}"
    sync = "" if of.sync_type in (None, SyncType.C2_COMPATIBLE) else f", {of.sync_type}"
    many = of.num_ilds is not None and of.num_ilds > 1
    domains = f" over {of.num_ilds} IPU-Link domains" if many else ""
    if of.reconfigurable:
        return f"{size}{domains} (reconfigurable){sync}"
    replicas = of.num_replicas or of.num_gcds
    return (
        f"{size}{domains} in {of.num_gcds} GCD{'s' * (of.num_gcds != 1)} with {replicas} "
        f"replica{'s' * (replicas != 1)}{sync}"
    )
