"""A pod in memory, as much of one as its server needs: what is sent to it, it keeps and gives back.

It decides nothing; what a pod allows is tested with the real stores.
"""

from __future__ import annotations

import threading
from dataclasses import replace

from popdist_py.pods.model.pod_errors import NameTakenError, UnknownNameError
from popdist_py.pods.model.pod_parts import (
    Agent,
    Allocation,
    Attachment,
    Cluster,
    Partition,
    Pod,
    SyncType,
)

AGENTS = tuple(Agent(name=f"m{i}", host=f"h{i // 2}") for i in range(4))
NAMES = tuple(agent.name for agent in AGENTS)
POD = Pod(
    name="p16",
    agents=AGENTS,
    clusters=(Cluster(name="c16", agents=NAMES),),
    allocations=(Allocation(name="a16", cluster="c16", agents=NAMES),),
)


class MemoryPod:
    """A ``ServedStore``; ``calls`` are those that changed something, by name."""

    where = "memory"

    def __init__(self):
        self.user = "nobody"
        self.calls = []
        self.kept = {}
        self.held = {}
        self.gate = threading.Event()  # what is created waits for it
        self.gate.set()
        self.closed = False

    def with_user(self, user):
        view = object.__new__(MemoryPod)
        view.__dict__.update(self.__dict__, user=user)
        return view

    def pod(self):
        return POD

    def partitions(self):
        return tuple(self.kept[name] for name in sorted(self.kept))

    def partition(self, name):
        if name not in self.kept:
            raise UnknownNameError(f"there is no partition {name!r}")
        return self.kept[name]

    def create_partition(self, request):
        self.calls.append(("create_partition", self.user, request))
        assert self.gate.wait(20)
        if request.name in self.kept:
            raise NameTakenError(f"there is a partition {request.name!r} already")
        made = Partition(
            name=request.name, cluster="c16", allocation="a16", ipus=POD.ipus()[: request.size],
            num_gcds=request.num_gcds, num_ilds=1, num_replicas=1, owner=self.user, created=1.5,
            reconfigurable=request.reconfigurable, sync_type=SyncType.C2_COMPATIBLE,
        )  # fmt: skip
        return self.kept.setdefault(request.name, made)

    def reset_partition(self, name):
        self.calls.append(("reset_partition", self.user, name))
        self.kept[name] = replace(self.kept[name], generation=self.kept[name].generation + 1)
        return self.kept[name]

    def fail_partition(self, name, reason):
        raise RuntimeError("a defect of the store")

    def remove_partition(self, name, *, force=False):
        self.calls.append(("remove_partition", self.user, name, force))
        self.partition(name)
        del self.kept[name]

    def attach_renewed(self, partition, num_ipus, holder, *, ipus=None, seconds):
        self.calls.append(("attach", self.user, partition))
        chosen = tuple(range(num_ipus)) if ipus is None else tuple(ipus)
        identity = f"secret-{len(self.calls)}"
        self.held[identity] = Attachment(
            id=identity, partition=partition, ipus=chosen, holder=holder, since=2.0
        )
        return self.held[identity]

    def renew_all(self, seconds):
        self.calls.append(("renew_all", self.user, seconds))

    def renew(self, attachment_id, seconds):
        if attachment_id not in self.held:
            raise UnknownNameError("gone")

    def detach(self, attachment):
        self.held.pop(attachment.id, None)

    def attachments(self):
        return tuple(self.held.values())
