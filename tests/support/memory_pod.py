"""A pod of one process that is kept nowhere, for tests of those who attach to its devices."""

from __future__ import annotations

import itertools
import time

from popdist_py.pods.errors import InUseError
from popdist_py.pods.values import Attachment, Ipu, Partition, SyncType


def partition(name="p16", size=16, **values) -> Partition:
    ipus = tuple(
        Ipu(index=i, agent=f"m{i // 4}", host="here", cluster="c", domain=0, number=3 - i % 4)
        for i in range(size)
    )
    given = {"num_gcds": 1, "num_ilds": 1, "num_replicas": 1, "reconfigurable": True} | values
    return Partition(
        name=name, cluster="c", allocation="a", ipus=ipus, owner="me", created=0.0,
        sync_type=SyncType.C2_COMPATIBLE, **given,
    )  # fmt: skip


class MemoryPod:
    """What a program asks of a ``PodStore``."""

    where, user = "/pods/test", "me"

    def __init__(self, *partitions: Partition) -> None:
        self._partitions = partitions
        self._held: dict[str, Attachment] = {}
        self._ids = map(str, itertools.count())
        self.fault: Exception | None = None

    def partitions(self):
        if self.fault is not None:
            raise self.fault
        return self._partitions

    def attach(self, name, num_ipus, holder, *, ipus=None):
        taken = {ipu: each.holder for each in self._held.values() for ipu in each.ipus}
        size = self._partitions[0].size
        wanted = [tuple(ipus)] if ipus else zip(*[iter(range(size))] * num_ipus, strict=True)
        free = next((each for each in wanted if not taken.keys() & set(each)), None)
        if free is None:
            raise InUseError(
                f"{num_ipus} IPUs of {name} are held by {next(iter(taken.values())).program}"
            )
        new = Attachment(
            id=next(self._ids), partition=name, ipus=free, holder=holder, since=time.time()
        )
        self._held[new.id] = new
        return new

    def detach(self, attachment):
        if self.fault is not None:
            raise self.fault
        self._held.pop(attachment.id, None)

    def attachments(self):
        return tuple(self._held.values())

    def close(self):
        self._held.clear()
