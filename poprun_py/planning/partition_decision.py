"""The decision whether a launch uses, resets, creates, replaces or inherits its partition.

The functions here only compute values. launching/job_ipus.py queries the pod, and carries the
decision out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from popdist_py.environment import RUN_ID, InstanceEnvironment
from popdist_py.errors import WireError, are, counted
from popdist_py.pods.ipu_choice import place_partition
from popdist_py.pods.model import (
    LINK_DOMAIN_IPUS,
    Attachment,
    Partition,
    PartitionRequest,
    PartitionState,
    Pod,
    SyncType,
)
from popdist_py.pods.partition_rules import free_ipus
from popdist_py.pods.pod_errors import NotEnoughIpusError, PodError
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.partition_variables import GCD, PARTITION, known_variables
from poprun_py.planning.temporary_partitions import is_temporary

# An error message about the partitions of a pod names at most this many of them.
_MOST_NAMED = 4
_ADVICE = "wait with --wait-for-resources, or use another partition"
# The sync types that --sync-type accepts in the spelling of V-IPU's command line.
_SYNC_TYPES = {
    "c2-compatible": SyncType.C2_COMPATIBLE,
    "pod-native-default": SyncType.POD_NATIVE_DEFAULT,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PodState:
    """A snapshot of a pod with its partitions and its attachments (the IPUs that jobs hold).

    ``where`` is the pod as ``POPRUN_POD`` names it. ``user`` is the user who launches the job.
    """

    where: str
    user: str
    pod: Pod
    partitions: tuple[Partition, ...]
    attachments: tuple[Attachment, ...]


class Action(StrEnum):
    """The launcher's action on the partition before the job starts.

    ``UPDATE`` removes the partition and creates it again with another shape. ``INHERIT`` is
    for a launcher that runs in an instance of another job. The job then uses IPUs of that instance.
    """

    USE = "use"
    RESET = "reset"
    CREATE = "create"
    UPDATE = "update"
    INHERIT = "inherit"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionDecision:
    """The partition of a launch, and the action that prepares it.

    Attributes:
        action: The launcher's action on the partition before the job starts.
        where: The pod, as ``POPRUN_POD`` names it.
        name: The name of the partition; empty if the launch is refused without a partition.
        reason: A text that explains the action and, for ``REFUSE``, tells the user what to do.
        busy: A text that names the jobs that hold the IPUs, if the launch is refused only because
            of these jobs and may therefore wait for them; empty in all other cases.
        num_ipus: The number of IPUs that the job attaches.
        partition: The partition as it is before the action; None if it does not exist yet.
        request: The partition to create; None if the launch does not create one.
        removes: Whether the launcher removes the partition after the job.
        is_temporary: Whether the launch creates a partition whose name is made from the host and
            the process of the launch.
        inherited: For ``INHERIT``, the IPUs of the instance in which the launcher runs.
        inherited_gcd: The graph compilation domain of the ``inherited`` IPUs.
    """

    action: Action
    where: str
    name: str = ""
    reason: str = ""
    num_ipus: int = 0
    partition: Partition | None = None
    request: PartitionRequest | None = None
    removes: bool = False
    is_temporary: bool = False
    busy: str = ""
    inherited: Attachment | None = None
    inherited_gcd: str | None = None

    @property
    def is_refused(self) -> bool:
        """Whether the launch is refused, because the job cannot get its IPUs."""
        return self.action is Action.REFUSE

    @property
    def num_ilds(self) -> int | None:
        """The number of IPU-Link domains of the partition; None if it is not known."""
        if self.request is not None:
            return self.request.num_ilds
        return None if self.partition is None else self.partition.num_ilds

    def gcd(self, instance: int) -> str | None:
        """Return an instance's graph compilation domain; None if all instances share one."""
        if self.inherited is not None:
            return self.inherited_gcd
        made = self.request or self.partition
        return str(instance) if made is not None and made.num_gcds > 1 else None

    def variables(self, instance: int) -> dict[str, str | None]:
        """Return the environment variables that describe the partition to an instance.

        The value None unsets a variable. The name of a temporary partition is not known when
        the plan is made, because the process that later launches the plan chooses the name.
        """
        if not self.name:
            return {}
        made = self.request or self.partition
        return known_variables(
            self.where,
            None if self.is_temporary else self.name,
            is_reconfigurable=made is not None and made.reconfigurable,
            gcd=self.gcd(instance),
        )

    @property
    def sentence(self) -> str:
        """The decision as a line for the log."""
        if self.is_refused:
            return f"partition: refused: {self.reason}"
        first = {
            Action.USE: "is used as it is",
            Action.RESET: "is reset and used",
            Action.CREATE: "is created",
            Action.UPDATE: "is removed and created again",
            Action.INHERIT: "is that of the job whose instance started this launch",
        }[self.action]
        end = "is removed at the end" if self.removes else "stays"
        return f"partition {self.name} of {self.where} {first} ({self.reason}), and {end}"


def refusal(where: str, reason: str) -> PartitionDecision:
    """Return a decision that refuses the launch on the pod ``where``, with the reason."""
    return PartitionDecision(action=Action.REFUSE, where=where, reason=reason)


def decide_partition(
    config: LaunchConfig, environ: Mapping[str, str], now: PodState, *, new_name: str
) -> PartitionDecision:
    """Decide which partition a launch uses, and how the launcher prepares it.

    ``environ`` may name a partition, and tells whether the launcher runs in an instance of another
    job. ``new_name`` is the name of the partition that is created if neither the options nor
    ``environ`` name a partition, and the pod has only temporary partitions.
    """
    named = config.vipu_partition or environ.get(PARTITION)
    permanent = [each for each in now.partitions if not is_temporary(each.name)]
    if not named and len(permanent) > 1:
        names = _first_of([each.name for each in permanent])
        return refusal(
            now.where,
            f"{now.where} has {len(permanent)} partitions ({names}): name one with "
            f"--vipu-partition or {PARTITION}",
        )
    name = named or (permanent[0].name if permanent else new_name)
    existing = next((each for each in now.partitions if each.name == name), None)
    outer = _outer_ipus(environ, now.attachments, name)
    if existing is not None and outer is not None:
        return _inherit(config, environ, now, existing, outer)
    request = wanted_request(config, name)
    if existing is None:
        return _create_partition(config, now, request, is_temporary=not named)
    if _fits(existing, request, config):
        why = "it fits" if named else "it is the only one, and fits"
        return _use_partition(config, now, existing, why)
    return _update_partition(config, now, existing, request)


def wanted_request(config: LaunchConfig, name: str) -> PartitionRequest:
    """Return the partition that fits the job exactly.

    R replicas of P IPUs in I instances need R x P IPUs in I graph compilation domains (GCDs). V-IPU
    accepts only powers of two for the numbers of IPUs and GCDs. If one of the numbers is not a
    power of two, the partition has one GCD, and its number of IPUs is rounded up to a power of two.
    Such a partition is reconfigurable if it fits into one IPU-Link domain and its sync type allows
    reconfiguration.
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
    """Return the number of IPUs that a job attaches, rounded up to a power of two."""
    assert config.num_replicas is not None
    return _rounded_up(config.num_replicas * config.ipus_per_replica)


def _rounded_up(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _fits(partition: Partition, wanted: PartitionRequest, config: LaunchConfig) -> bool:
    """Tell whether a partition fits the job.

    A reconfigurable partition fits if it is large enough. A partition that is not reconfigurable
    fits only if it has the shape of ``wanted``.
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


def _outer_ipus(
    environ: Mapping[str, str], attachments: Collection[Attachment], partition: str
) -> Attachment | None:
    """Return the IPUs of ``partition`` that the instance in which the launcher runs uses.

    The result is None if the launcher does not run in an instance of a job that holds IPUs of the
    partition. The returned IPUs are neighbours. The number of returned IPUs is a power of two, and
    the position of the first returned IPU among the outer job's IPUs is a multiple of this number.
    """
    run_id = environ.get(RUN_ID)
    found = (
        each
        for each in attachments
        if run_id and each.partition == partition and each.holder.run_id == run_id
    )
    outer = next(found, None)
    if outer is None:
        return None
    try:
        job = InstanceEnvironment.from_environ(environ)
    except WireError:
        return outer
    width = job.num_ipus_per_replica
    size = _rounded_up(job.num_local_replicas * width)
    start = job.replica_index_offset * width // size * size
    return replace(outer, ipus=outer.ipus[start : start + size])


def _inherit(
    config: LaunchConfig,
    environ: Mapping[str, str],
    now: PodState,
    existing: Partition,
    outer: Attachment,
) -> PartitionDecision:
    num_ipus = _num_ipus(config)
    if num_ipus > len(outer.ipus):
        return refusal(
            now.where,
            f"{counted(num_ipus, 'IPU')} {are(num_ipus)} needed, and this launch runs in an "
            f"instance of {outer.holder.program} (process {outer.holder.pid}), which has "
            f"{len(outer.ipus)} of partition {existing.name}: name another one with "
            "--vipu-partition, or use --pod none",
        )
    return PartitionDecision(
        action=Action.INHERIT,
        where=now.where,
        name=existing.name,
        reason="its instance started this launch",
        num_ipus=num_ipus,
        partition=existing,
        inherited=replace(outer, ipus=outer.ipus[:num_ipus]),
        inherited_gcd=environ.get(GCD),
    )


def _create_partition(
    config: LaunchConfig, now: PodState, request: PartitionRequest, *, is_temporary: bool
) -> PartitionDecision:
    why = "the pod has no other" if is_temporary else "there is none of this name"
    decision = PartitionDecision(
        action=Action.CREATE,
        where=now.where,
        name=request.name,
        reason=f"{why}; {shape_text(request)}",
        num_ipus=request.size,
        request=request,
        removes=config.remove_partition,
        is_temporary=is_temporary,
    )
    return _refused_without_room(decision, now, now.partitions)


def _use_partition(
    config: LaunchConfig, now: PodState, existing: Partition, why: str
) -> PartitionDecision:
    """Use a partition that fits the job.

    By default, the partition is reset unless it is reconfigurable.
    """
    resets = config.reset_partition
    if resets is None:
        resets = not existing.reconfigurable
    if existing.state is PartitionState.ERROR and not resets:
        return refusal(
            now.where,
            f"partition {existing.name} is in the state ERROR"
            f"{f' ({existing.error})' if existing.error else ''}: add --reset-partition yes",
        )
    num_ipus = _num_ipus(config)
    held = [each for each in now.attachments if each.partition == existing.name]
    taken = frozenset(ipu for each in held for ipu in each.ipus)
    waits = "; it is still PENDING" if existing.state is PartitionState.PENDING else ""
    decision = PartitionDecision(
        action=Action.RESET if resets else Action.USE,
        where=now.where,
        name=existing.name,
        reason=why + waits,
        num_ipus=num_ipus,
        partition=existing,
    )
    if resets and held:
        return _busy(decision, f"{_in_use_text(existing, held)}, and cannot be reset", _ADVICE)
    if not free_ipus(existing, num_ipus, taken):
        free = existing.size - len(taken)
        together = " together" if free >= num_ipus else ""
        return _busy(
            decision,
            f"{_in_use_text(existing, held)}: {counted(num_ipus, 'IPU')}{together} {are(num_ipus)} "
            f"needed, {free} of {existing.size} {are(free)} free",
            _ADVICE,
        )
    return decision


def _update_partition(
    config: LaunchConfig, now: PodState, existing: Partition, request: PartitionRequest
) -> PartitionDecision:
    """Replace a partition that does not fit the job, or refuse the launch.

    The launch is refused if --update-partition is not given, if the partition belongs to another
    user, if other jobs use the partition, or if the new partition does not fit into the pod.
    """
    contrast = f"partition {existing.name} does not fit: it has {shape_text(existing)}; "
    needs = f"{shape_text(request)} {are(request.size)} needed"
    if not config.update_partition:
        return refusal(
            now.where,
            f"{contrast}{needs}: add --update-partition yes, or name another partition",
        )
    if existing.owner != now.user:
        return refusal(
            now.where,
            f"{contrast}{needs}, and it belongs to {existing.owner}: name another partition",
        )
    decision = PartitionDecision(
        action=Action.UPDATE,
        where=now.where,
        name=existing.name,
        reason=f"it had {shape_text(existing)}; now {shape_text(request)}",
        num_ipus=request.size,
        partition=existing,
        request=request,
        removes=config.remove_partition,
    )
    held = [each for each in now.attachments if each.partition == existing.name]
    if held:
        return _busy(decision, f"{_in_use_text(existing, held)}, and cannot be changed", _ADVICE)
    others = [each for each in now.partitions if each is not existing]
    return _refused_without_room(decision, now, others)


def _busy(decision: PartitionDecision, busy: str, advice: str) -> PartitionDecision:
    """Return a refusal of an action that becomes possible when other jobs have ended."""
    return replace(decision, action=Action.REFUSE, reason=f"{busy}: {advice}", busy=busy)


def _refused_without_room(
    decision: PartitionDecision, now: PodState, others: Sequence[Partition]
) -> PartitionDecision:
    """Return ``decision``, or a refusal if its new partition does not fit into the pod.

    ``others`` are the partitions that stay in the pod beside the new partition.
    """
    assert decision.request is not None
    request, ipus = decision.request, now.pod.ipus()
    try:
        made = place_partition(now.pod, others, request, owner=now.user, created=0.0)
        return replace(decision, request=replace(request, num_ilds=made.num_ilds))
    except NotEnoughIpusError:
        pass
    except PodError as error:
        return refusal(now.where, str(error))
    # If the partition would fit into an empty pod, the job may wait until users remove other
    # partitions.
    try:
        made = place_partition(now.pod, (), request, owner=now.user, created=0.0)
    except PodError as error:
        return refusal(now.where, f"{error} ({now.where} has {len(ipus)})")
    free = len(ipus) - sum(each.size for each in others)
    apart = ", but not as one suitable block" if free >= request.size else ""
    names = _first_of([_owner_text(each, now.attachments) for each in others])
    needed = counted(request.size, "IPU")
    subject = "the job" if decision.is_temporary else f"partition {decision.name}"
    return _busy(
        replace(decision, request=replace(request, num_ilds=made.num_ilds)),
        f"{subject} needs {needed}; {now.where} has {len(ipus)}, {free} of them free{apart} "
        f"({names})",
        "wait with --wait-for-resources, remove a partition, or use fewer IPUs",
    )


# --- texts for messages about partitions --------------------------------------------------------


def _first_of(texts: Sequence[str]) -> str:
    return ", ".join([*texts[:_MOST_NAMED], *(["..."] if len(texts) > _MOST_NAMED else [])])


def _owner_text(partition: Partition, attachments: Collection[Attachment]) -> str:
    text = f"{partition.name} of {partition.owner} has {partition.size}"
    held = [each for each in attachments if each.partition == partition.name]
    return f"{text}, held by {_holders(held)}" if held else text


def _in_use_text(existing: Partition, held: Sequence[Attachment]) -> str:
    return f"partition {existing.name} is in use by {_holders(held)}"


def _holders(held: Sequence[Attachment]) -> str:
    who = held[0].holder
    more = f" and {len(held) - 1} more" if len(held) > 1 else ""
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
