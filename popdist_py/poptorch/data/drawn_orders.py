"""A check that the program's own samplers draw the same order on every instance.

Each instance reads its share of one order. If a sampler draws a different order on each instance,
the shares overlap, and some elements are never read. The orders are compared when a training model
is compiled, because all instances do that together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from popdist_py.collectives import Communicator
from popdist_py.poptorch.logger import logger

__all__ = ["DrawnOrder", "check", "note"]

# Different orders almost certainly differ within their first elements.
_COMPARED_ELEMENTS: Final = 10_000


class DrawnOrder(NamedTuple):
    """The first order of a sampler.

    Attributes:
        number: index among the samplers of this process that are shared out.
        sampler: class name of the sampler.
        length: length of the order.
        digest: hash of the first elements of the order.
    """

    number: int
    sampler: str
    length: int
    digest: str

    @classmethod
    def of(cls, number: int, sampler: Any, order: Sequence[Any]) -> DrawnOrder:
        """Return the record of an order that is compared."""
        text = repr(list(order[:_COMPARED_ELEMENTS])).encode()
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        return cls(number, type(sampler).__name__, len(order), digest)


# The orders that have not been compared yet.
_drawn: list[DrawnOrder] = []


def note(order: DrawnOrder) -> None:
    """Add an order to the next ``check``."""
    _drawn.append(order)


def check(communicator: Communicator) -> None:
    """Warn of samplers whose orders differ between instances; a collective call."""
    if communicator.num_instances == 1:
        return
    everyone = communicator.all_gather_object(tuple(_drawn), "orders of samplers")
    _drawn.clear()
    if communicator.instance_index:
        return
    for own in everyone[0]:
        for index, others in enumerate(everyone):
            # Equal number, class and length: most likely the same loader on another instance.
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
