"""The orders that samplers of the program's own have drawn, compared between the instances.

Each instance reads its share of one order. Where a sampler draws another order on each of them, the
shares overlap, and other elements are never read. The orders are compared when a model that trains
is compiled, since all instances do that together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from popdist_py.collectives import Communicator
from popdist_py.poptorch.logger import logger

__all__ = ["DrawnOrder", "check", "note"]

# Two orders that differ do so here already.
_COMPARED_ELEMENTS: Final = 10_000


class DrawnOrder(NamedTuple):
    """The first order of a sampler.

    Attributes:
        number: which of the shared-out samplers of this process it is.
        sampler: the name of its class.
        length: of the order.
        digest: of its first elements.
    """

    number: int
    sampler: str
    length: int
    digest: str

    @classmethod
    def of(cls, number: int, sampler: Any, order: Sequence[Any]) -> DrawnOrder:
        """Return what is compared of an order."""
        text = repr(list(order[:_COMPARED_ELEMENTS])).encode()
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        return cls(number, type(sampler).__name__, len(order), digest)


# Those that have not been compared.
_drawn: list[DrawnOrder] = []


def note(order: DrawnOrder) -> None:
    """Have an order compared at the next ``check``."""
    _drawn.append(order)


def check(communicator: Communicator) -> None:
    """Warn of samplers that have drawn different orders on the instances; collective."""
    if communicator.num_instances == 1:
        return
    everyone = communicator.all_gather_object(tuple(_drawn), "orders of samplers")
    _drawn.clear()
    if communicator.instance_index:
        return
    for own in everyone[0]:
        for index, others in enumerate(everyone):
            # The same loader of another instance, as far as can be told.
            same = [each for each in others if each[:3] == own[:3]]
            if same and same[0].digest != own.digest:
                first, other = communicator.instances[0], communicator.instances[index]
                logger.warning(
                    "The sampler %s draws one order on instance %d and another one on instance %d: "
                    "what they read overlaps, and other elements are never read. Give it the same "
                    "seed on every instance, or use a sampler of torch without a generator",
                    own.sampler,
                    first,
                    other,
                )
                break
