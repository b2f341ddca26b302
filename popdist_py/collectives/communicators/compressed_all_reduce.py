"""All-reduce that compresses the sums sent between hosts, but not the data within a host.

Every part of an array has one owner on each host, the instance that reduces the part there. The
owner adds up the copies of the part that the instances of its host have. The owners on all hosts
exchange their compressed sums. Each owner then writes the sum over all hosts to the arrays of its
host's instances.

This module does not compress data, map memory or open connections itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from popdist_py.collectives.arithmetic import Array, Reduction
from popdist_py.collectives.between_hosts.mesh_group import MeshGroup, Started
from popdist_py.collectives.compression_rounds import Compression, Round
from popdist_py.collectives.within_host.host_group import CallPlan, HostGroup

__all__ = ["CompressedAllReduce"]

# An owner exchanges up to this number of parts at the same time. This number of parts keeps a
# network link busy while an owner waits for other instances of its host or for a core.
_PARTS_IN_FLIGHT = 16


@dataclass(frozen=True, slots=True)
class _Running:
    """A part of an array that the hosts are exchanging.

    Attributes:
        number: Number of the all-reduce call to which the part belongs.
        plan: Plan of the call to which the part belongs.
        total: The sum of this part over the instances of this host, and later over all instances.
        targets: The arrays that receive the sum when it is complete.
        rounds: The exchanges between the hosts that have not started yet.
        request: The exchange between the hosts that is in progress.
    """

    number: int
    plan: CallPlan
    total: Array
    targets: Sequence[Array]
    rounds: Iterator[Round]
    request: Started


class CompressedAllReduce:
    """Sums arrays in shared memory over the instances of all hosts.

    Args:
        host: The instances of this host.
        owners: The instances, one on each host, that reduce the same parts of the arrays as this
            instance. ``owners`` is None if this instance does not reduce a part.
        num_owners: The number of instances on each host that reduce parts.
    """

    def __init__(self, host: HostGroup, owners: MeshGroup | None, num_owners: int) -> None:
        self._host = host
        self._owners = owners
        self._num_owners = num_owners
        self._num_calls = 0
        self._started: deque[tuple[int, CallPlan]] = deque()
        self._in_flight: deque[_Running] = deque()

    def start(self, plan: CallPlan, views: Sequence[Array], compression: Compression) -> None:
        """Start to sum the arrays of all instances.

        ``views`` contains the array of each instance of this host.
        """
        self._num_calls += 1
        self._started.append((self._num_calls, plan))
        if self._owners is not None:
            self._start_own_parts(plan, views, compression, self._owners)

    def finish(self) -> None:
        """Wait until the oldest unfinished all-reduce is complete."""
        number, plan = self._started.popleft()
        while self._in_flight and self._in_flight[0].number == number:
            self._complete_first()
        self._host.barrier.wait_for_all(plan.signature)

    def _start_own_parts(
        self,
        plan: CallPlan,
        views: Sequence[Array],
        compression: Compression,
        owners: MeshGroup,
    ) -> None:
        reduction = plan.reduction
        assert reduction is not None
        # The sums are computed in the first view, so they are copied only to the other views. Sums
        # of 16-bit floats are computed in new memory, so they are copied to all views.
        targets = views if reduction.is_half else views[1:]
        for part in compression.parts(self._host.position, self._num_owners):
            if len(self._in_flight) == _PARTS_IN_FLIGHT:
                self._complete_first()
            total = _sum_on_host(reduction, views, part)
            rounds = compression.rounds(part, total, owners.rank, owners.size)
            request = owners.start_round(next(rounds))
            views_of_part = [view[part] for view in targets]
            self._in_flight.append(
                _Running(self._num_calls, plan, total, views_of_part, rounds, request)
            )

    def _complete_first(self) -> None:
        running = self._in_flight.popleft()
        owners, reduction, call = self._owners, running.plan.reduction, running.plan.signature
        assert owners is not None
        assert reduction is not None
        owners.wait(running.request, call)
        for following in running.rounds:
            owners.wait(owners.start_round(following), call)
        for target in running.targets:
            reduction.narrow(running.total, target)


def _sum_on_host(reduction: Reduction, views: Sequence[Array], part: slice) -> Array:
    """Return the sum of one part of the arrays over this host's instances.

    The arrays are added in the same order as in a reduction without compression.

    The sum overwrites this part of the first instance's array. 16-bit floats are added up in
    float32, so their sum is in new memory instead.
    """
    if reduction.is_half:
        total = np.empty(part.stop - part.start, reduction.accumulate_dtype)
    else:
        total = views[0][part]
    for start in range(0, total.size, reduction.chunk_size):
        stop = min(start + reduction.chunk_size, total.size)
        chunk = slice(part.start + start, part.start + stop)
        reduction.accumulate([view[chunk] for view in views], total[start:stop])
    return total
