"""The decision whether a launch uses, resets, creates, replaces or inherits its IPU partition.

launching/job_ipus.py queries the pod and carries out the decision.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from popdist_py.device_numbers import LINK_DOMAIN_IPUS, next_power_of_two
from popdist_py.environment import RUN_ID, InstanceEnvironment
from popdist_py.errors import WireError, are, counted
from popdist_py.pods.model.ipu_choice import place_partition
from popdist_py.pods.model.partition_rules import free_ipus
from popdist_py.pods.model.pod_errors import NotEnoughIpusError, PodError
from popdist_py.pods.model.pod_parts import (
    Attachment,
    Partition,
    PartitionRequest,
    PartitionState,
    SyncType,
)
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.job_partition import GCD, PARTITION, is_temporary, known_variables
from poprun_py.planning.pod_state import PodState, first_of, in_use_text, owner_text, shape_text


class Action(StrEnum):
    """The launcher's action on the IPU partition before the job starts.

    ``UPDATE`` removes the partition and creates it again with another shape. With ``INHERIT``, an
    instance of another job started the launcher, and the new job uses IPUs of this instance.
    """

    USE = "use"
    RESET = "reset"
    CREATE = "create"
    UPDATE = "update"
    INHERIT = "inherit"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionDecision:
    """The IPU partition of a launch, and the action that prepares the partition.

    Attributes:
        action: The launcher's action on the IPU partition before the job starts.
        where: The name of the pod, as in ``POPRUN_POD``.
        name: The name of the partition; may be empty if the launch is refused.
        reason: A text that explains the action and, for ``REFUSE``, tells the user what to do.
        busy: If the launch is refused only because IPUs are in use, a text that says who uses the
            IPUs; else empty. A launch with a ``busy`` text may wait for the IPUs.
        num_ipus: The number of IPUs that the job attaches.
        partition: The partition before the action; None if the partition does not exist yet.
        request: The partition to create; None if the launch does not create a partition.
        removes: Whether the launcher removes the partition after the job.
        is_temporary: Whether the launch creates a partition with a temporary name.
        inherited: For ``INHERIT``, the IPUs that the job takes over from the instance of another
            job.
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
        """Whether the launch is refused because the job cannot get its IPUs."""
        return self.action is Action.REFUSE

    @property
    def num_ilds(self) -> int | None:
        """The number of IPU-Link domains of the partition; None if the number is not known."""
        made = self.request or self.partition
        return None if made is None else made.num_ilds

    def variables(self, instance: int) -> dict[str, str | None]:
        """Return the environment variables that describe the partition to an instance.

        Variables with the value None are unset in the instance. For a temporary partition, the name
        of the partition is None, because a later launch of the plan chooses the name.
        """
        made = self.request or self.partition
        if made is None:
            return {}
        name = None if self.is_temporary else self.name
        return known_variables(self.where, name, made, instance, self.inherited_gcd)

    @property
    def sentence(self) -> str:
        """A line for the log that describes the decision about the partition."""
        if self.is_refused:
            return f"the job gets no partition: {self.reason}"
        first = {
            Action.USE: "is used without a reset",
            Action.RESET: "is reset and used",
            Action.CREATE: "is created",
            Action.UPDATE: "is removed and created again",
            Action.INHERIT: "is shared with the job that started this launch",
        }[self.action]
        end = "is removed at the end of the job" if self.removes else "stays"
        return f"partition {self.name} of {self.where} {first} ({self.reason}), and {end}"


def refusal(where: str, reason: str) -> PartitionDecision:
    """Return a decision that refuses a launch on the pod ``where`` for the reason ``reason``."""
    return PartitionDecision(action=Action.REFUSE, where=where, reason=reason)


def decide_partition(
    config: LaunchConfig, environ: Mapping[str, str], now: PodState, *, new_name: str
) -> PartitionDecision:
    """Decide which IPU partition a launch uses, and how the launcher prepares the partition.

    ``environ`` may name a partition, and tells whether an instance of another job started the
    launcher. If neither the options nor ``environ`` name a partition, and the pod has only
    temporary partitions, the launcher creates a partition with the name ``new_name``.
    """
    named = config.vipu_partition or environ.get(PARTITION)
    permanent = [each for each in now.partitions if not is_temporary(each.name)]
    if not named and len(permanent) > 1:
        names = first_of([each.name for each in permanent])
        fitting = _fitting(config, wanted_request(config, ""), now)
        way = (
            f"use {fitting}"
            if fitting
            else f"name a partition with --vipu-partition or {PARTITION}"
        )
        return refusal(now.where, f"{way}: {now.where} has {len(permanent)} partitions ({names})")
    name = named or (permanent[0].name if permanent else new_name)
    existing = next((each for each in now.partitions if each.name == name), None)
    request = wanted_request(config, name)
    decision = PartitionDecision(
        action=Action.CREATE, where=now.where, name=name, num_ipus=request.size
    )
    if existing is None:
        why = "no partition has this name" if named else "the pod has no other partition"
        decision = replace(
            decision,
            reason=f"{why}; {shape_text(request)}",
            request=request,
            removes=config.remove_partition,
            is_temporary=not named,
        )
        return _refused_without_room(decision, config, request, now, now.partitions)
    decision = replace(decision, partition=existing)
    outer = _outer_ipus(environ, now.attachments, name)
    if outer is not None:
        return _inherit(decision, environ, outer)
    if _fits(existing, request):
        why = (
            "the partition fits the job" if named else "the only partition of the pod fits the job"
        )
        return _use(replace(decision, reason=why), config, request, now, existing)
    return _update(decision, config, request, now, existing)


def wanted_request(config: LaunchConfig, name: str) -> PartitionRequest:
    """Return a request for a partition that fits the job exactly.

    R replicas of P IPUs in I instances need R x P IPUs in I graph compilation domains (GCDs). V-IPU
    accepts only powers of two as numbers of IPUs and GCDs. If the number of IPUs or GCDs is not a
    power of two, the partition has one GCD, and the number of IPUs is rounded up to a power of two.
    If the rounded number of IPUs fits into one IPU-Link domain, and if the sync type allows
    reconfiguration, the partition is reconfigurable.
    """
    assert config.num_replicas is not None
    needed = config.num_replicas * config.ipus_per_replica
    size = next_power_of_two(needed)
    sync_type = _sync_type(config)
    is_even = size == needed and next_power_of_two(config.num_instances) == config.num_instances
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
    if text is None:
        return None
    # V-IPU's command line spells the names of sync types differently, such as ``c2-compatible``.
    return SyncType.__members__.get(text.upper().replace("-", "_")) or SyncType(text)


def _fits(partition: Partition, wanted: PartitionRequest) -> bool:
    """Tell whether ``partition`` fits the job that needs ``wanted``.

    A reconfigurable partition fits if it has enough IPUs. Any other partition fits if it has the
    numbers of IPUs, GCDs and replicas of ``wanted``.
    """
    if wanted.sync_type not in (None, partition.sync_type):
        return False
    if wanted.num_ilds not in (None, partition.num_ilds):
        return False
    if partition.reconfigurable:
        return partition.size >= wanted.size
    if wanted.reconfigurable or wanted.size != partition.size:
        return False
    replicas = wanted.num_replicas or wanted.num_gcds
    return (partition.num_gcds, partition.num_replicas) == (wanted.num_gcds, replicas)


def _outer_ipus(
    environ: Mapping[str, str], attachments: Collection[Attachment], partition: str
) -> Attachment | None:
    """Return the IPUs of the instance of another job in which the launcher runs.

    If the launcher does not run in an instance of another job, or if the other job holds no IPUs of
    ``partition``, None is returned. The number of returned IPUs, N, is a power of two. The position
    of the first returned IPU among the IPUs of the other job is a multiple of N.
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
    size = next_power_of_two(job.num_local_replicas * width)
    start = job.replica_index_offset * width // size * size
    return replace(outer, ipus=outer.ipus[start : start + size])


def _inherit(
    decision: PartitionDecision, environ: Mapping[str, str], outer: Attachment
) -> PartitionDecision:
    size = decision.num_ipus
    if size > len(outer.ipus):
        return refusal(
            decision.where,
            "name another partition with --vipu-partition, or use --pod none: this job needs "
            f"{counted(size, 'IPU')}, but the job runs in an instance of {outer.holder.program} "
            f"(process {outer.holder.pid}), which has only {len(outer.ipus)} of the IPUs of "
            f"partition {decision.name}",
        )
    return replace(
        decision,
        action=Action.INHERIT,
        reason="an instance of that job started this launch",
        inherited=replace(outer, ipus=outer.ipus[:size]),
        inherited_gcd=environ.get(GCD),
    )


def _use(
    decision: PartitionDecision,
    config: LaunchConfig,
    request: PartitionRequest,
    now: PodState,
    existing: Partition,
) -> PartitionDecision:
    """Use the partition ``existing``, and by default reset it unless it is reconfigurable."""
    resets = _resets(config, existing)
    if existing.state is PartitionState.ERROR and not resets:
        return refusal(
            now.where,
            f"add --reset-partition yes: partition {existing.name} is in the state ERROR"
            f"{f' ({existing.error})' if existing.error else ''}",
        )
    waits = "; the partition is still PENDING" if existing.state is PartitionState.PENDING else ""
    action = Action.RESET if resets else Action.USE
    decision = replace(decision, action=action, reason=decision.reason + waits)
    if obstacle := _obstacle(config, request, now, existing):
        without_reset = replace(config, reset_partition=False)
        if resets and not _obstacle(without_reset, request, now, existing):
            return _busy(decision, config, obstacle, ["use --reset-partition no"])
        return _busy(decision, config, obstacle, _ways_to_fit(config, request, now, existing))
    return decision


def _resets(config: LaunchConfig, partition: Partition) -> bool:
    given = config.reset_partition
    return not partition.reconfigurable if given is None else given


def _obstacle(
    config: LaunchConfig, request: PartitionRequest, now: PodState, existing: Partition
) -> str:
    """Return why a partition that fits a launch is not free; empty if it is free."""
    size, held = request.size, now.held(existing)
    taken = frozenset(ipu for each in held for ipu in each.ipus)
    if held and _resets(config, existing):
        return f"{in_use_text(existing, held)}, and cannot be reset"
    if free_ipus(existing, size, taken):
        return ""
    free = existing.size - len(taken)
    together = " together" if free >= size else ""
    return (
        f"{in_use_text(existing, held)}: this job needs {counted(size, 'IPU')}{together}, and "
        f"{free} of the {existing.size} IPUs {are(free)} free"
    )


def _fitting(config: LaunchConfig, request: PartitionRequest, now: PodState) -> str:
    """Return the option that names a partition that fits and is free; empty if there is none."""
    for each in now.partitions:
        is_broken = each.state is PartitionState.ERROR and not _resets(config, each)
        if is_broken or is_temporary(each.name) or not _fits(each, request):
            continue
        if not _obstacle(config, request, now, each):
            return f"--vipu-partition {each.name}"
    return ""


def _update(
    decision: PartitionDecision,
    config: LaunchConfig,
    request: PartitionRequest,
    now: PodState,
    existing: Partition,
) -> PartitionDecision:
    """Decide to replace a partition that does not fit the job, or to refuse the launch."""
    old, new = shape_text(existing), shape_text(request)
    misfit = (
        f"partition {existing.name} does not fit this job: the partition has {old}, but the job "
        f"needs {new}"
    )
    is_own = existing.owner == now.user
    others = [each for each in now.partitions if each is not existing]
    if request.size > len(now.pod.ipus()):
        return refusal(now.where, _why_impossible(request, now))
    if not config.update_partition or not is_own:
        ways = _ways_to_fit(config, request, now, existing)
        owner = (
            f", and the partition belongs to the user {existing.owner}"
            if config.update_partition
            else ""
        )
        if is_own and _has_room(request, now, others):
            ways.append("add --update-partition yes")
        return refusal(now.where, f"{_alternatives(ways)}: {misfit}{owner}")
    decision = replace(
        decision,
        action=Action.UPDATE,
        reason=f"the partition had {old}; the new partition has {new}",
        request=request,
        removes=config.remove_partition,
    )
    held = now.held(existing)
    if held:
        busy = f"{in_use_text(existing, held)}, and cannot be changed"
        return _busy(decision, config, busy, _ways_to_fit(config, request, now, existing))
    return _refused_without_room(decision, config, request, now, others)


def _ways_to_fit(
    config: LaunchConfig, request: PartitionRequest, now: PodState, existing: Partition
) -> list[str]:
    """Return the remedies for a launch that cannot use the partition ``existing``, the best first.

    The list has at least one remedy.
    """
    if fitting := _fitting(config, request, now):
        return [f"use {fitting}"]
    ways = []
    if _has_room(replace(request, name="new"), now, now.partitions):
        ways.append("name a new partition with --vipu-partition")
    may_be_reconfigurable = (
        request.size <= LINK_DOMAIN_IPUS
        and request.num_ilds in (None, 1)
        and request.sync_type in (None, SyncType.C2_COMPATIBLE)
    )
    if may_be_reconfigurable and not existing.reconfigurable:
        ways.append("use a partition made with --reconfigurable")
    return ways or ["name another partition with --vipu-partition"]


def _has_room(request: PartitionRequest, now: PodState, others: Sequence[Partition]) -> bool:
    """Tell whether the requested partition can be made beside the partitions ``others``."""
    with contextlib.suppress(PodError):
        place_partition(now.pod, others, request, owner=now.user, created=0.0)
        return True
    return False


def _why_impossible(request: PartitionRequest, now: PodState) -> str:
    """Return why even an empty pod has no room for the requested partition; empty if it has."""
    try:
        place_partition(now.pod, (), request, owner=now.user, created=0.0)
    except PodError as error:
        return f"{error} ({now.where} has {counted(len(now.pod.ipus()), 'IPU')})"
    return ""


def _busy(
    decision: PartitionDecision, config: LaunchConfig, busy: str, ways: Sequence[str]
) -> PartitionDecision:
    """Return the error for a launch that can succeed once other jobs have ended.

    The error begins with ``ways``, the other remedies than to wait.
    """
    wait = "wait" if config.wait_for_resources is None else "wait longer"
    text = _alternatives([*ways, f"{wait} with --wait-for-resources"])
    return replace(decision, action=Action.REFUSE, reason=f"{text}: {busy}", busy=busy)


def _alternatives(ways: Sequence[str]) -> str:
    *first, last = ways
    return ", or ".join([", ".join(first), last]) if first else last


def _refused_without_room(
    decision: PartitionDecision,
    config: LaunchConfig,
    request: PartitionRequest,
    now: PodState,
    others: Sequence[Partition],
) -> PartitionDecision:
    """Return ``decision``; if the pod has too few IPUs for the new partition, refuse the launch.

    ``others`` are all partitions of the pod that the new partition does not replace.
    """
    ipus = now.pod.ipus()
    try:
        made = place_partition(now.pod, others, request, owner=now.user, created=0.0)
        return replace(decision, request=replace(request, num_ilds=made.num_ilds))
    except NotEnoughIpusError:
        pass
    except PodError as error:
        return refusal(now.where, str(error))
    # If the new partition fits into an empty pod, the job may wait until users remove other
    # partitions.
    if impossible := _why_impossible(request, now):
        return refusal(now.where, impossible)
    made = place_partition(now.pod, (), request, owner=now.user, created=0.0)
    free = len(ipus) - sum(each.size for each in others)
    apart = ", but not in one suitable block" if free >= request.size else ""
    names = first_of([owner_text(each, now) for each in others])
    subject = "the job" if decision.is_temporary else f"partition {decision.name}"
    fitting = _fitting(config, request, now)
    # Waiting does not help against a partition of the user that no job holds.
    idle = next((each.name for each in others if each.owner == now.user and not now.held(each)), "")
    way = f"use {fitting}" if fitting else f"remove partition {idle}" if idle else "use fewer IPUs"
    return _busy(
        replace(decision, request=replace(request, num_ilds=made.num_ilds)),
        config,
        f"{subject} needs {counted(request.size, 'IPU')}; {now.where} has "
        f"{counted(len(ipus), 'IPU')}, of which {free} {are(free)} free{apart} ({names})",
        [way],
    )
