"""Rules for partition requests, for the use of partitions by jobs, and for attached IPUs.

The rules are from V-IPU's user guide and protocol.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from popdist_py.device_numbers import LINK_DOMAIN_IPUS
from popdist_py.errors import counted
from popdist_py.pods.model.pod_errors import InvalidRequestError, NotEnoughIpusError
from popdist_py.pods.model.pod_parts import Partition, PartitionRequest, SyncType

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


def is_power_of_two(number: int) -> bool:
    """Return whether a whole number is 1, 2, 4, 8, ..."""
    return number > 0 and number & (number - 1) == 0


def check_name(what: str, name: str) -> None:
    """Check the name of a partition, agent, cluster, allocation or pod.

    Raises:
        InvalidRequestError: The name is empty, too long, or contains characters that are not
            allowed.
    """
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"the {what} name {name!r} is invalid: expected 1 to 64 letters, digits, '-', '_' and "
            "'.', beginning with a letter or digit"
        )


def check_request(request: PartitionRequest) -> None:
    """Check a partition request against the rules that do not depend on the pod.

    The numbers of IPUs, GCDs and IPU-Link domains must be powers of two. The number of IPUs must be
    divisible by the numbers of GCDs, IPU-Link domains and replicas. The number of replicas must be
    divisible by the number of GCDs. An IPU-Link domain has at most 64 IPUs. A reconfigurable
    partition has one GCD, one IPU-Link domain and the sync type c2-compatible.

    Raises:
        InvalidRequestError: The request breaks a rule.
    """
    check_name("partition", request.name)
    size, gcds, ilds, replicas = (
        request.size,
        request.num_gcds,
        request.num_ilds,
        request.num_replicas,
    )
    _check_power("size", size)
    _check_power("number of GCDs", gcds)
    if gcds > size:
        raise InvalidRequestError(
            f"a partition of {counted(size, 'IPU')} cannot have {gcds} GCDs: ask for at most {size}"
        )
    if ilds is not None:
        _check_power("number of IPU-Link domains", ilds)
        if ilds > size:
            raise InvalidRequestError(
                f"a partition of {counted(size, 'IPU')} cannot have {ilds} IPU-Link domains: ask "
                f"for at most {size}"
            )
        if size // ilds > LINK_DOMAIN_IPUS:
            raise InvalidRequestError(
                f"{size} IPUs do not fit into {counted(ilds, 'IPU-Link domain')}: a domain has at "
                f"most {LINK_DOMAIN_IPUS} IPUs; ask for {size // LINK_DOMAIN_IPUS} or more domains"
            )
    if replicas is not None and (replicas < 1 or replicas % gcds or size % replicas):
        raise InvalidRequestError(
            f"{counted(replicas, 'replica')} cannot be combined with {counted(gcds, 'GCD')} and "
            f"{counted(size, 'IPU')}: the number of replicas must be a multiple of the number of "
            "GCDs, and must divide the number of IPUs"
        )
    if request.reconfigurable:
        _check_reconfigurable(request)


def _check_reconfigurable(request: PartitionRequest) -> None:
    if request.num_gcds != 1:
        raise InvalidRequestError(
            f"a reconfigurable partition has 1 GCD, not {request.num_gcds}: omit the number of GCDs"
        )
    if request.size > LINK_DOMAIN_IPUS or request.num_ilds not in (None, 1):
        raise InvalidRequestError(
            f"a reconfigurable partition has at most {LINK_DOMAIN_IPUS} IPUs in 1 IPU-Link domain, "
            f"not {request.size} IPUs in {request.num_ilds or 'several'} domains: reduce the "
            "request, or make a partition that is not reconfigurable"
        )
    if request.sync_type not in (None, SyncType.C2_COMPATIBLE):
        raise InvalidRequestError(
            f"a reconfigurable partition has the sync type {SyncType.C2_COMPATIBLE} "
            f"(c2-compatible), not {request.sync_type}: omit the sync type"
        )


def _check_power(what: str, number: int) -> None:
    if not is_power_of_two(number):
        lower = 1 << max(number.bit_length() - 1, 0)
        near = "1" if number < 1 else f"{lower} or {2 * lower}"
        raise InvalidRequestError(
            f"the {what} is {number}, which is not a power of two: give a power of two, such as "
            f"{near}"
        )


def num_domains_of(request: PartitionRequest, domain_ipus: int) -> int:
    """Return the requested number of IPU-Link domains, or else the smallest number that suffices.

    Args:
        request: The requirements for the partition. The requested size is a power of two.
        domain_ipus: The largest number of IPUs that the partition can get in one domain.
    """
    if request.num_ilds is not None:
        return request.num_ilds
    usable = 1 << (min(domain_ipus, LINK_DOMAIN_IPUS).bit_length() - 1)
    return max(1, request.size // usable)


def misfit(partition: Partition, request: PartitionRequest) -> str:
    """Return why a partition does not fit a job's request, or an empty text if it fits.

    A reconfigurable partition must have at least the requested number of IPUs. A partition that is
    not reconfigurable must have exactly the requested numbers of IPUs, GCDs and replicas. If the
    request names a number of IPU-Link domains, a sync type, an allocation or a cluster, the
    partition must match it.
    """
    wanted: list[tuple[str, object, object]] = []
    if partition.reconfigurable:
        if partition.size < request.size:
            return f"has {counted(partition.size, 'IPU')}, not {request.size}"
    else:
        if request.reconfigurable:
            return "is not reconfigurable"
        wanted += [
            ("IPUs", partition.size, request.size),
            ("GCDs", partition.num_gcds, request.num_gcds),
            ("replicas", partition.num_replicas, request.num_replicas or request.num_gcds),
        ]
    wanted += [
        ("IPU-Link domains", partition.num_ilds, request.num_ilds),
        ("sync type", partition.sync_type, request.sync_type),
        ("allocation", partition.allocation, request.allocation),
        ("cluster", partition.cluster, request.cluster),
    ]
    for what, has, asked in wanted:
        if asked is not None and has != asked:
            plain = isinstance(has, int)
            return f"has {has} {what}, not {asked}" if plain else f"has {what} {has}, not {asked}"
    return ""


def free_ipus(
    partition: Partition,
    num_ipus: int,
    taken: Collection[int],
    ipus: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Choose free IPUs of a partition; return an empty tuple if too few IPUs are free.

    If ``ipus`` is None, the first free group of ``num_ipus`` adjacent IPUs is chosen. The number of
    its first IPU is a multiple of ``num_ipus``.

    Raises:
        InvalidRequestError: ``num_ipus`` or ``ipus`` is invalid.
        NotEnoughIpusError: The partition has fewer than ``num_ipus`` IPUs.
    """
    if ipus is not None:
        chosen = tuple(ipus)
        _check_named(partition, num_ipus, chosen)
        return () if set(chosen) & set(taken) else chosen
    _check_power("number of IPUs", num_ipus)
    if num_ipus > partition.size:
        raise NotEnoughIpusError(
            "ask for fewer IPUs, or make a larger partition: "
            f"partition {partition.name} has {counted(partition.size, 'IPU')}, but {num_ipus} IPUs "
            "were requested"
        )
    for start in range(0, partition.size, num_ipus):
        group = range(start, start + num_ipus)
        if not any(ipu in taken for ipu in group):
            return tuple(group)
    return ()


def _check_named(partition: Partition, num_ipus: int, ipus: tuple[int, ...]) -> None:
    if not ipus or len(set(ipus)) != len(ipus) or len(ipus) != num_ipus:
        raise InvalidRequestError(
            f"the number of requested IPUs is {num_ipus}, but the given IPU numbers are "
            f"[{ipu_list(ipus)}]: give the number of each requested IPU once"
        )
    if not all(0 <= ipu < partition.size for ipu in ipus):
        raise InvalidRequestError(
            f"the requested IPUs {ipu_list(ipus)} do not all exist: partition {partition.name} has "
            f"the IPUs 0 to {partition.size - 1}"
        )


def ipu_list(ipus: Sequence[int]) -> str:
    """Return the first eight IPU numbers as a text, for a message."""
    return ", ".join(map(str, ipus[:8])) + (", ..." if len(ipus) > 8 else "")
