"""What a launch does with a partition: use, make, reset, change or refuse it. Pure.

Nothing is asked or changed here: partition_lifetime.py acts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from popdist_py.errors import are, counted
from popdist_py.pods.choice import place_partition
from popdist_py.pods.errors import NotEnoughIpusError, PodError
from popdist_py.pods.rules import free_ipus
from popdist_py.pods.values import (
    LINK_DOMAIN_IPUS,
    Attachment,
    Partition,
    PartitionRequest,
    PartitionState,
    Pod,
    SyncType,
)
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.held_partition import GCD
from poprun_py.planning.job_around import held_around
from poprun_py.planning.own_partitions import is_own
from poprun_py.planning.partition_texts import in_use_text, shape_text, taken_text

PARTITION_VARIABLE = "IPUOF_VIPU_API_PARTITION_ID"
_MOST_NAMED = 4
# The names of V-IPU's command line.
_SYNC_TYPES = {
    "c2-compatible": SyncType.C2_COMPATIBLE,
    "pod-native-default": SyncType.POD_NATIVE_DEFAULT,
}


class Action(StrEnum):
    """What is done before the job.

    ``UPDATE`` is to remove and create; ``INHERIT`` to run within an instance, on its IPUs.
    """

    USE = "use"
    RESET = "reset"
    CREATE = "create"
    UPDATE = "update"
    INHERIT = "inherit"
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
        busy: who has now what it needs, if it is refused only for that: it may wait.
        num_ipus: what the job attaches.
        partition: as it is before; None if it is absent.
        request: the one to be made; None if none is.
        removes: whether the partition is removed at the end.
        is_own: whether the launch makes it for itself, under a name of its process.
        inherited: of ``INHERIT`` the IPUs, as the job around it holds them.
        inherited_gcd: the graph compilation domain that they are.
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
    busy: str = ""
    inherited: Attachment | None = None
    inherited_gcd: str | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the job cannot have its IPUs."""
        return self.action is Action.REFUSE

    @property
    def num_ilds(self) -> int | None:
        """The IPU-Link domains of the partition; None where that is not known."""
        if self.request is not None:
            return self.request.num_ilds
        return None if self.partition is None else self.partition.num_ilds

    @property
    def is_reconfigurable(self) -> bool:
        """Whether the job attaches a device of the partition, not its GCDs."""
        made = self.request or self.partition
        return made is not None and made.reconfigurable

    def gcd(self, instance: int) -> str | None:
        """Return the graph compilation domain of an instance; None of a partition that has one."""
        if self.inherited is not None:
            return self.inherited_gcd
        made = self.request or self.partition
        return str(instance) if made is not None and made.num_gcds > 1 else None

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
            Action.INHERIT: "is that of the job around this one",
        }[self.action]
        end = "is removed at the end" if self.removes else "stays"
        return f"partition {self.name} of {self.where} {first} ({self.reason}), and {end}"


def refusal(where: str, reason: str) -> PartitionUse:
    """Return that the job cannot have IPUs, and why."""
    return PartitionUse(action=Action.REFUSE, where=where, reason=reason)


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
    around = held_around(environ, now.attachments, name)
    if present is not None and around is not None:
        return _inherit(config, environ, now, present, around)
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
    IPU-Link domain holds it, and the sync type is that of such ones.
    """
    assert config.num_replicas is not None
    needed = config.num_replicas * config.ipus_per_replica
    size = _rounded_up(needed)
    sync_type = _sync_type(config)
    is_even = size == needed and _rounded_up(config.num_instances) == config.num_instances
    return PartitionRequest(
        name=name,
        size=size,
        allocation=config.vipu_allocation,
        cluster=config.vipu_cluster,
        num_gcds=config.num_instances if is_even else 1,
        num_ilds=config.num_ilds,
        num_replicas=config.num_replicas if is_even else None,
        reconfigurable=not is_even
        and size <= LINK_DOMAIN_IPUS
        and config.num_ilds in (None, 1)
        and sync_type in (None, SyncType.C2_COMPATIBLE),
        sync_type=sync_type,
    )


def _sync_type(config: LaunchConfig) -> SyncType | None:
    text = config.sync_type
    return None if text is None else _SYNC_TYPES.get(text) or SyncType(text)


def _num_ipus(config: LaunchConfig) -> int:
    """Return how many IPUs a job attaches: as many as a device has that holds it."""
    assert config.num_replicas is not None
    return _rounded_up(config.num_replicas * config.ipus_per_replica)


def _rounded_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _fits(partition: Partition, wanted: PartitionRequest, config: LaunchConfig) -> bool:
    """Tell whether a partition is what the job needs.

    A reconfigurable one has room for it; another one equals what would be asked for.
    """
    if wanted.sync_type not in (None, partition.sync_type):
        return False
    if wanted.num_ilds not in (None, partition.num_ilds):
        return False
    if partition.reconfigurable:
        return partition.size >= _num_ipus(config)
    if wanted.reconfigurable or wanted.size != partition.size:
        return False
    replicas = wanted.num_replicas or wanted.num_gcds
    return (partition.num_gcds, partition.num_replicas) == (wanted.num_gcds, replicas)


def _inherit(
    config: LaunchConfig,
    environ: Mapping[str, str],
    now: PodNow,
    present: Partition,
    around: Attachment,
) -> PartitionUse:
    """Use the IPUs of the instance in which this launch is: they are its own, as its cores are."""
    num_ipus = _num_ipus(config)
    if num_ipus > len(around.ipus):
        return refusal(
            now.where,
            f"{counted(num_ipus, 'IPU')} {are(num_ipus)} needed, and the instance of "
            f"{around.holder.program} (process "
            f"{around.holder.pid}) in which this launch is has {len(around.ipus)} of partition "
            f"{present.name}: name another one with --vipu-partition, or say --pod none",
        )
    return PartitionUse(
        action=Action.INHERIT,
        where=now.where,
        name=present.name,
        reason="its instance started this launch",
        num_ipus=num_ipus,
        partition=present,
        inherited=replace(around, ipus=around.ipus[:num_ipus]),
        inherited_gcd=environ.get(GCD),
    )


def _create(
    config: LaunchConfig, now: PodNow, request: PartitionRequest, *, is_own: bool
) -> PartitionUse:
    why = "there is none that could be used" if is_own else "there is none of this name"
    use = PartitionUse(
        action=Action.CREATE,
        where=now.where,
        name=request.name,
        reason=f"{why}; {shape_text(request)}",
        num_ipus=request.size,
        request=request,
        removes=config.remove_partition,
        is_own=is_own,
    )
    return _with_room(use, now, now.partitions)


def _use(config: LaunchConfig, now: PodNow, present: Partition, why: str) -> PartitionUse:
    """Use a partition that fits, reset first where that is asked for or the rule."""
    resets = config.reset_partition
    if resets is None:
        resets = not present.reconfigurable
    if present.state is PartitionState.ERROR and not resets:
        return refusal(
            now.where,
            f"partition {present.name} is in the state ERROR"
            f"{f' ({present.error})' if present.error else ''}: add --reset-partition yes",
        )
    num_ipus = _num_ipus(config)
    held = [each for each in now.attachments if each.partition == present.name]
    taken = frozenset(ipu for each in held for ipu in each.ipus)
    waits = "; it is still PENDING" if present.state is PartitionState.PENDING else ""
    use = PartitionUse(
        action=Action.RESET if resets else Action.USE,
        where=now.where,
        name=present.name,
        reason=why + waits,
        num_ipus=num_ipus,
        partition=present,
    )
    if resets and held:
        return _busy(use, f"{in_use_text(present, held)}, and cannot be reset", _WAYS_OUT)
    if not free_ipus(present, num_ipus, taken):
        free = present.size - len(taken)
        together = " together" if free >= num_ipus else ""
        return _busy(
            use,
            f"{in_use_text(present, held)}: {counted(num_ipus, 'IPU')}{together} {are(num_ipus)} "
            f"needed, {free} of {present.size} {are(free)} free",
            _WAYS_OUT,
        )
    return use


_WAYS_OUT = "wait with --wait-for-resources, or use another partition"


def _update(
    config: LaunchConfig, now: PodNow, present: Partition, request: PartitionRequest
) -> PartitionUse:
    """Change a partition that does not fit, if that is asked for and possible."""
    contrast = f"partition {present.name} does not fit: it has {shape_text(present)}; "
    needs = f"{shape_text(request)} {are(request.size)} needed"
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
    use = PartitionUse(
        action=Action.UPDATE,
        where=now.where,
        name=present.name,
        reason=f"it had {shape_text(present)}; now {shape_text(request)}",
        num_ipus=request.size,
        partition=present,
        request=request,
        removes=config.remove_partition,
    )
    held = [each for each in now.attachments if each.partition == present.name]
    if held:
        return _busy(use, f"{in_use_text(present, held)}, and cannot be changed", _WAYS_OUT)
    return _with_room(use, now, [each for each in now.partitions if each is not present])


def _busy(use: PartitionUse, busy: str, ways_out: str) -> PartitionUse:
    """Refuse what is possible as soon as others have ended."""
    return replace(use, action=Action.REFUSE, reason=f"{busy}: {ways_out}", busy=busy)


def _with_room(use: PartitionUse, now: PodNow, others: Sequence[Partition]) -> PartitionUse:
    """Refuse a partition that the pod cannot make beside others, or has too few IPUs for."""
    assert use.request is not None
    request, ipus = use.request, now.pod.ipus()
    try:
        made = place_partition(now.pod, others, request, owner=now.user, created=0.0)
        return replace(use, request=replace(request, num_ilds=made.num_ilds))
    except NotEnoughIpusError:
        pass
    except PodError as error:
        return refusal(now.where, str(error))
    try:
        made = place_partition(now.pod, (), request, owner=now.user, created=0.0)
    except PodError as error:
        return refusal(now.where, f"{error} ({now.where} has {len(ipus)})")
    free = len(ipus) - sum(each.size for each in others)
    apart = ", but not together where it may lie" if free >= request.size else ""
    names = ", ".join(taken_text(each, now.attachments) for each in others[:_MOST_NAMED])
    more = ", ..." if len(others) > _MOST_NAMED else ""
    needed = f"{request.size} IPU{'s' * (request.size != 1)}"
    return _busy(
        replace(use, request=replace(request, num_ilds=made.num_ilds)),
        f"{'the job' if use.is_own else f'partition {use.name}'} needs {needed}; {now.where} has "
        f"{len(ipus)}, {free} of them free{apart} ({names}{more})",
        "wait with --wait-for-resources, remove a partition, or use fewer IPUs",
    )
