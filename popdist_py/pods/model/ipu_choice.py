"""Choice of free IPUs for a new partition, with the buddy system.

In each of its IPU-Link domains, a partition gets a group of 2^k adjacent IPUs that begins at a
multiple of 2^k. If several groups are free, the group in the smallest free block is chosen, so that
large blocks remain free (Knuth, The Art of Computer Programming 1, 2.5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from popdist_py.errors import are, counted
from popdist_py.pods.model.partition_rules import check_request, num_domains_of
from popdist_py.pods.model.pod_errors import (
    InvalidRequestError,
    NotEnoughIpusError,
    UnknownNameError,
    check_known,
)
from popdist_py.pods.model.pod_parts import (
    Allocation,
    Ipu,
    Partition,
    PartitionRequest,
    Pod,
    SyncType,
)


@dataclass(frozen=True, slots=True)
class _Fit:
    """A possible choice of IPUs for a partition, with one group in each of its IPU-Link domains.

    ``blocks`` contains the size of the free block around each group.
    """

    blocks: tuple[int, ...]
    allocation: Allocation
    ipus: tuple[Ipu, ...]
    num_ilds: int


def place_partition(
    pod: Pod,
    partitions: Sequence[Partition],
    request: PartitionRequest,
    *,
    owner: str,
    created: float,
) -> Partition:
    """Return the partition for a request, given the existing partitions.

    This function does not check whether another partition already has the name.

    Raises:
        InvalidRequestError: The request breaks a rule.
        UnknownNameError: The requested allocation or cluster does not exist.
        NotEnoughIpusError: Too few IPUs are free. The error message names the request, the free
            IPUs, and the users who own the other IPUs.
    """
    check_request(request)
    allocations = _asked_allocations(pod, request)
    all_ipus = pod.ipus()
    taken = {(ipu.agent, ipu.number) for partition in partitions for ipu in partition.ipus}
    fits = [
        fit
        for allocation in allocations
        if (fit := _fit(request, allocation, all_ipus, taken)) is not None
    ]
    if not fits:
        raise _refusal(pod, partitions, request, allocations, all_ipus, taken)
    best = min(fits, key=lambda fit: fit.blocks)
    return Partition(
        name=request.name,
        cluster=best.allocation.cluster,
        allocation=best.allocation.name,
        ipus=best.ipus,
        num_gcds=request.num_gcds,
        num_ilds=best.num_ilds,
        num_replicas=request.num_replicas or request.num_gcds,
        reconfigurable=request.reconfigurable,
        sync_type=request.sync_type or SyncType.C2_COMPATIBLE,
        owner=owner,
        created=created,
    )


def _asked_allocations(pod: Pod, request: PartitionRequest) -> list[Allocation]:
    """Return the allocations whose IPUs may be used for the request."""
    known = {each.name: each for each in pod.allocations}
    place = f"in pod {pod.name}"
    if request.cluster is not None:
        check_known("cluster", request.cluster, [each.name for each in pod.clusters], place)
    if request.allocation is None:
        return [
            each
            for each in known.values()
            if request.cluster is None or each.cluster == request.cluster
        ]
    check_known("allocation", request.allocation, known, place)
    allocation = known[request.allocation]
    if request.cluster not in (None, allocation.cluster):
        raise InvalidRequestError(
            f"allocation {allocation.name} belongs to cluster {allocation.cluster}, not to cluster "
            f"{request.cluster}: name only the allocation"
        )
    return [allocation]


def _domains(allocation: Allocation, ipus: Iterable[Ipu]) -> dict[int, list[Ipu]]:
    """Return the IPUs of the allocation's cluster, grouped by IPU-Link domain."""
    domains: dict[int, list[Ipu]] = {}
    for ipu in ipus:
        if ipu.cluster == allocation.cluster:
            domains.setdefault(ipu.domain, []).append(ipu)
    return domains


def _usable(
    allocation: Allocation, domain: Sequence[Ipu], taken: Collection[tuple[str, int]]
) -> list[bool]:
    agents = frozenset(allocation.agents)
    return [ipu.agent in agents and (ipu.agent, ipu.number) not in taken for ipu in domain]


def _fit(
    request: PartitionRequest,
    allocation: Allocation,
    all_ipus: Iterable[Ipu],
    taken: Collection[tuple[str, int]],
) -> _Fit | None:
    """Return the best IPUs of an allocation for a request; None if too few IPUs are free."""
    domains = _domains(allocation, all_ipus)
    num_ilds = 1
    if not request.reconfigurable:
        num_ilds = num_domains_of(request, _largest_share(allocation, domains))
    share = request.size // num_ilds
    if share > LINK_DOMAIN_IPUS or share * num_ilds != request.size:
        return None
    candidates = []
    for index, domain in domains.items():
        found = _best_group(_usable(allocation, domain, taken), share)
        if found is not None:
            block, start = found
            candidates.append((block, index, domain[start : start + share]))
    if len(candidates) < num_ilds:
        return None
    chosen = sorted(candidates, key=lambda each: each[:2])[:num_ilds]
    chosen.sort(key=lambda each: each[1])
    return _Fit(
        blocks=tuple(sorted((block for block, _, _ in chosen), reverse=True)),
        allocation=allocation,
        ipus=tuple(ipu for _, _, group in chosen for ipu in group),
        num_ilds=num_ilds,
    )


def _largest_share(allocation: Allocation, domains: Mapping[int, Sequence[Ipu]]) -> int:
    """Return the size of the largest group of IPUs that one domain has when all IPUs are free."""
    return (
        max(
            (_largest_block(_usable(allocation, domain, ())) for domain in domains.values()),
            default=1,
        )
        or 1
    )


def _largest_block(usable: Sequence[bool]) -> int:
    """Return the size of the largest aligned group of usable IPUs; 0 if no IPU is usable."""
    size = 1 << max(len(usable).bit_length() - 1, 0)
    while size and _best_group(usable, size) is None:
        size //= 2
    return size


def _best_group(usable: Sequence[bool], size: int) -> tuple[int, int] | None:
    """Return the best aligned group of ``size`` usable IPUs; None if too few IPUs are usable.

    The result contains the size of the free block around the group, and the index of the first IPU
    of the group.
    """
    found = []
    for start in range(0, len(usable) - size + 1, size):
        if all(usable[start : start + size]):
            block = size
            while True:
                wider = start // (2 * block) * (2 * block)
                around = usable[wider : wider + 2 * block]
                if len(around) < 2 * block or not all(around):
                    break
                block *= 2
            found.append((block, start))
    return min(found, default=None)


def _refusal(
    pod: Pod,
    partitions: Sequence[Partition],
    request: PartitionRequest,
    allocations: Sequence[Allocation],
    all_ipus: Sequence[Ipu],
    taken: Collection[tuple[str, int]],
) -> Exception:
    """Return the error for a request that the allocations cannot fulfil."""
    if not allocations:
        where = f"cluster {request.cluster}" if request.cluster else f"pod {pod.name}"
        return UnknownNameError(
            f"{where} has no allocation: make an allocation with poprun-py-pod create allocation"
        )
    agents = {agent for allocation in allocations for agent in allocation.agents}
    domains = {(ipu.cluster, ipu.domain) for ipu in all_ipus if ipu.agent in agents}
    most = max(
        len({domain for cluster, domain in domains if cluster == allocation.cluster})
        for allocation in allocations
    )
    where = ", ".join(allocation.name for allocation in allocations)
    if request.num_ilds is not None and request.num_ilds > most:
        return InvalidRequestError(
            f"partition {request.name} needs {counted(request.num_ilds, 'IPU-Link domain')}, but "
            f"the largest number in allocation {where} is {most}: ask for {most} or fewer"
        )
    total = sum(ipu.agent in agents for ipu in all_ipus)
    free = sum(ipu.agent in agents and (ipu.agent, ipu.number) not in taken for ipu in all_ipus)
    largest = max(
        _largest_block(_usable(allocation, domain, taken))
        for allocation in allocations
        for domain in _domains(allocation, all_ipus).values()
    )
    holders = ", ".join(
        f"partition {each.name} of user {each.owner} has {counted(each.size, 'IPU')}"
        for each in partitions
        if any(ipu.agent in agents for ipu in each.ipus)
    )
    asked = f"partition {request.name} needs {counted(request.size, 'IPU')}"
    if request.num_ilds is not None:
        asked += f" in {counted(request.num_ilds, 'IPU-Link domain')}"
    if holders:
        return NotEnoughIpusError(
            f"ask for fewer IPUs, or remove a partition: {asked}, but in allocation {where} {free} "
            f"of {counted(total, 'IPU')} {are(free)} free, and the largest free group has "
            f"{counted(largest, 'IPU')}; {holders}"
        )
    return NotEnoughIpusError(
        f"ask for fewer IPUs, or use a larger pod: {asked}, but allocation {where} has "
        f"{counted(total, 'IPU')}, and its largest group has {counted(largest, 'IPU')}"
    )
