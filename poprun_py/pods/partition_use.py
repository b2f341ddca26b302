"""What a launch does with a partition: use, make, reset, change or refuse it. Pure.

Nothing is asked or changed here: partition_lifetime.py acts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from popdist_py.pods.values import (
    LINK_DOMAIN_IPUS,
    Attachment,
    Partition,
    PartitionRequest,
    PartitionState,
    Pod,
    SyncType,
)
from poprun_py.config.launch_config import LaunchConfig
from poprun_py.pods.own_partitions import is_own

__all__ = ["Action", "PartitionUse", "PodNow", "decide", "refusal", "wanted_request"]

PARTITION_VARIABLE = "IPUOF_VIPU_API_PARTITION_ID"
_MOST_NAMED = 4
# The names of V-IPU's command line.
_SYNC_TYPES = {
    "c2-compatible": SyncType.C2_COMPATIBLE,
    "pod-native-default": SyncType.POD_NATIVE_DEFAULT,
}


class Action(StrEnum):
    """What is done before the job; ``UPDATE`` is to remove and create."""

    USE = "use"
    RESET = "reset"
    CREATE = "create"
    UPDATE = "update"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class PodNow:
    """A pod as it is when a launch looks at it; ``user`` is who looks."""

    where: str
    user: str
    pod: Pod
    partitions: tuple[Partition, ...]
    attachments: tuple[Attachment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionUse:
    """What a launch does with a partition.

    Attributes:
        action: what is done first.
        where: the pod, as ``POPRUN_POD`` names it.
        name: the partition; empty where none is decided on.
        reason: why, in one line; of ``REFUSE`` what to do about it.
        num_ipus: what the job attaches.
        partition: as it is before; None if it is absent.
        request: the one to be made; None if none is.
        removes: whether the partition is removed at the end.
        is_own: whether the launch makes it for itself, under a name of its process.
        is_busy: whether what refuses it passes once others have given back what they have.
    """

    action: Action
    where: str
    name: str = ""
    reason: str = ""
    num_ipus: int = 0
    partition: Partition | None = None
    request: PartitionRequest | None = None
    removes: bool = False
    is_own: bool = False
    is_busy: bool = False

    @property
    def is_refused(self) -> bool:
        """Whether the job cannot have its IPUs."""
        return self.action is Action.REFUSE

    @property
    def num_ilds(self) -> int | None:
        """The IPU-Link domains of the partition; None where that is not known."""
        if self.request is not None:
            return self.request.num_ilds or -(-self.request.size // LINK_DOMAIN_IPUS)
        return None if self.partition is None else self.partition.num_ilds

    @property
    def is_reconfigurable(self) -> bool:
        """Whether the job attaches a device of the partition, not its GCDs."""
        made = self.request or self.partition
        return made is not None and made.reconfigurable

    @property
    def num_gcds(self) -> int:
        """The graph compilation domains of the partition."""
        made = self.request or self.partition
        return 1 if made is None else made.num_gcds

    @property
    def sentence(self) -> str:
        """What is decided, for the log."""
        if self.action is Action.REFUSE:
            return f"partition: refused: {self.reason}"
        first = {
            Action.USE: "is used as it is",
            Action.RESET: "is reset and used",
            Action.CREATE: "is made",
            Action.UPDATE: "is removed and made anew",
        }[self.action]
        end = "is removed at the end" if self.removes else "stays"
        return f"partition {self.name} of {self.where} {first} ({self.reason}), and {end}"


def refusal(where: str, reason: str) -> PartitionUse:
    """Return that the job cannot have IPUs, and why."""
    return PartitionUse(action=Action.REFUSE, where=where, reason=reason)


def _busy(now: PodNow, reason: str, wanted: Partition | PartitionRequest) -> PartitionUse:
    """Refuse because of what others have; a plan is made for what the job would get later."""
    return PartitionUse(
        action=Action.REFUSE,
        where=now.where,
        name=wanted.name,
        reason=reason,
        partition=wanted if isinstance(wanted, Partition) else None,
        request=wanted if isinstance(wanted, PartitionRequest) else None,
        is_busy=True,
    )


def decide(
    config: LaunchConfig, environ: Mapping[str, str], now: PodNow, *, own_name: str
) -> PartitionUse:
    """Decide what a launch does with which partition.

    Args:
        config: what is asked for; instances, replicas and IPUs are known.
        environ: the launcher's environment, for IPUOF_VIPU_API_PARTITION_ID.
        now: the pod.
        own_name: the name of a partition that the launch makes for itself.
    """
    named = config.vipu_partition or environ.get(PARTITION_VARIABLE)
    shared = [each for each in now.partitions if not is_own(each.name)]
    if not named and len(shared) > 1:
        names = ", ".join(each.name for each in shared[:_MOST_NAMED])
        more = ", ..." if len(shared) > _MOST_NAMED else ""
        return refusal(
            now.where,
            f"{now.where} has {len(shared)} partitions ({names}{more}): name one with "
            f"--vipu-partition or {PARTITION_VARIABLE}",
        )
    name = named or (shared[0].name if shared else own_name)
    present = next((each for each in now.partitions if each.name == name), None)
    request = wanted_request(config, name)
    if present is None:
        return _create(config, now, request, is_own=not named)
    if _fits(present, request, config):
        why = "it fits" if named else "it is the only one, and fits"
        return _use(config, now, present, why)
    return _update(config, now, present, request)


def wanted_request(config: LaunchConfig, name: str) -> PartitionRequest:
    """Return the partition that V-IPU would be asked for.

    R replicas of P IPUs in I instances: R x P IPUs in I GCDs. Counts that are no powers of two,
    which V-IPU refuses, get the next larger partition as one GCD; it is reconfigurable where one
    IPU-Link domain holds it.
    """
    assert config.num_replicas is not None
    needed = config.num_replicas * config.ipus_per_replica
    size = _rounded_up(needed)
    is_even = size == needed and _rounded_up(config.num_instances) == config.num_instances
    return PartitionRequest(
        name=name,
        size=size,
        allocation=config.vipu_allocation,
        cluster=config.vipu_cluster,
        num_gcds=config.num_instances if is_even else 1,
        num_ilds=config.num_ilds,
        num_replicas=config.num_replicas if is_even else None,
        reconfigurable=not is_even and size <= LINK_DOMAIN_IPUS and config.num_ilds in (None, 1),
        sync_type=_sync_type(config),
    )


def _sync_type(config: LaunchConfig) -> SyncType | None:
    text = config.sync_type
    return None if text is None else _SYNC_TYPES.get(text) or SyncType(text)


def _rounded_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _fits(partition: Partition, wanted: PartitionRequest, config: LaunchConfig) -> bool:
    """Tell whether a partition is what the job needs.

    A reconfigurable one has room for it; another one equals what would be asked for.
    """
    assert config.num_replicas is not None
    if wanted.sync_type not in (None, partition.sync_type):
        return False
    if wanted.num_ilds not in (None, partition.num_ilds):
        return False
    if partition.reconfigurable:
        return partition.size >= _rounded_up(config.num_replicas * config.ipus_per_replica)
    if wanted.reconfigurable or wanted.size != partition.size:
        return False
    replicas = wanted.num_replicas or wanted.num_gcds
    return (partition.num_gcds, partition.num_replicas) == (wanted.num_gcds, replicas)


def _create(
    config: LaunchConfig, now: PodNow, request: PartitionRequest, *, is_own: bool
) -> PartitionUse:
    lack = _lack(now, request, now.partitions)
    if lack is not None:
        return lack
    why = "there is none that could be used" if is_own else "there is none of this name"
    return PartitionUse(
        action=Action.CREATE,
        where=now.where,
        name=request.name,
        reason=f"{why}; {_shape(request)}",
        num_ipus=request.size,
        request=request,
        removes=config.remove_partition,
        is_own=is_own,
    )


def _use(config: LaunchConfig, now: PodNow, present: Partition, why: str) -> PartitionUse:
    """Use a partition that fits, reset first where that is asked for or the rule."""
    assert config.num_replicas is not None
    resets = config.reset_partition
    if resets is None:
        resets = not present.reconfigurable
    if present.state is PartitionState.ERROR and not resets:
        return refusal(
            now.where,
            f"partition {present.name} is in the state ERROR"
            f"{f' ({present.error})' if present.error else ''}: add --reset-partition yes",
        )
    num_ipus = _rounded_up(config.num_replicas * config.ipus_per_replica)
    held = [each for each in now.attachments if each.partition == present.name]
    free = present.size - sum(len(each.ipus) for each in held)
    if resets and held:
        return _busy(now, f"{_in_use(present, held)}, and cannot be reset: {_WAIT}", present)
    if free < num_ipus:
        return _busy(
            now,
            f"{_in_use(present, held)}: {num_ipus} IPUs are needed, {free} of {present.size} are "
            f"free: {_WAIT}",
            present,
        )
    waits = "; it is still PENDING" if present.state is PartitionState.PENDING else ""
    return PartitionUse(
        action=Action.RESET if resets else Action.USE,
        where=now.where,
        name=present.name,
        reason=why + waits,
        num_ipus=num_ipus,
        partition=present,
    )


_WAIT = "wait for it with --wait-for-resources, or use another partition"


def _update(
    config: LaunchConfig, now: PodNow, present: Partition, request: PartitionRequest
) -> PartitionUse:
    """Change a partition that does not fit, if that is asked for and possible."""
    contrast = f"partition {present.name} does not fit: it has {_shape(present)}; "
    needs = f"{_shape(request)} {'is' if request.size == 1 else 'are'} needed"
    if not config.update_partition:
        return refusal(
            now.where,
            f"{contrast}{needs}: add --update-partition yes, or name another partition",
        )
    if present.owner != now.user:
        return refusal(
            now.where,
            f"{contrast}{needs}, and it belongs to {present.owner}: name another partition",
        )
    held = [each for each in now.attachments if each.partition == present.name]
    if held:
        return _busy(now, f"{_in_use(present, held)}, and cannot be changed: {_WAIT}", request)
    others = tuple(each for each in now.partitions if each is not present)
    lack = _lack(now, request, others)
    if lack is not None:
        return lack
    return PartitionUse(
        action=Action.UPDATE,
        where=now.where,
        name=present.name,
        reason=f"it had {_shape(present)}; now {_shape(request)}",
        num_ipus=request.size,
        partition=present,
        request=request,
        removes=config.remove_partition,
    )


def _lack(
    now: PodNow, request: PartitionRequest, others: Iterable[Partition]
) -> PartitionUse | None:
    """Refuse where there are too few IPUs for a new partition; None if there are enough."""
    total = len(now.pod.ipus())
    taken = {each.name: each.size for each in others}
    free = total - sum(taken.values())
    if request.size <= free:
        return None
    names = ", ".join(f"{name} has {size}" for name, size in list(taken.items())[:_MOST_NAMED])
    more = ", ..." if len(taken) > _MOST_NAMED else ""
    lack = (
        f"partition {request.name} needs {request.size} IPUs; {now.where} has {total}, {free} of "
        f"them free{f' ({names}{more})' if taken else ''}: "
    )
    if request.size > total:
        return refusal(now.where, f"{lack}use fewer IPUs")
    return _busy(now, f"{lack}remove a partition, or use fewer IPUs", request)


def _in_use(present: Partition, held: list[Attachment]) -> str:
    who = held[0].holder
    more = f" and {len(held) - 1} more" if len(held) > 1 else ""
    return (
        f"partition {present.name} is in use by {who.program} of {who.user} (process {who.pid} on "
        f"{who.host}){more}"
    )


def _shape(of: Partition | PartitionRequest) -> str:
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
