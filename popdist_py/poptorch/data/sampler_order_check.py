"""A check that samplers of the program draw the same order on every instance (process).

Each instance reads its share of the data set in the order that a sampler yields. If a sampler draws
a different order on each instance, the shares overlap, and some elements are never read. The
instances compare the orders of their samplers when they compile a training model, because all
instances take part in the compilation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from popdist_py.collectives import Communicator
from popdist_py.poptorch.logger import logger

__all__ = ["DrawnOrder", "check", "note"]

# Only the first 10,000 indices of two orders are compared, because different orders almost
# certainly differ there.
_COMPARED_ELEMENTS: Final = 10_000


class DrawnOrder(NamedTuple):
    """A description of the first sequence of indices that a sampler drew.

    Attributes:
        number: The index of the sampler among this process's samplers. The index ``number`` counts
            only samplers whose sequences are divided among the instances.
        sampler: The class name of the sampler.
        length: The number of indices in the sequence.
        digest: A hash of the first indices in the sequence.
    """

    number: int
    sampler: str
    length: int
    digest: str

    @classmethod
    def of(cls, number: int, sampler: Any, order: Sequence[Any]) -> DrawnOrder:
        """Return the length and the hash of a sequence of indices that a sampler drew.

        Args:
            number: The index of the sampler among this process's samplers whose sequences are
                divided among the instances.
            sampler: The sampler that drew the sequence.
            order: All indices that the sampler yields in an epoch.
        """
        text = repr(list(order[:_COMPARED_ELEMENTS])).encode()
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        return cls(number, type(sampler).__name__, len(order), digest)


# The sequences of indices from this process's samplers that have not yet been compared with the
# sequences of other instances.
_drawn: list[DrawnOrder] = []


def note(order: DrawnOrder) -> None:
    """Record the sequence of indices that a sampler drew, for the next call of ``check``."""
    _drawn.append(order)


def check(communicator: Communicator) -> None:
    """Log a warning about samplers that draw different sequences of indices on different instances.

    All instances must call ``check``, because it exchanges descriptions of sequences between the
    instances.
    """
    if communicator.num_instances == 1:
        return
    everyone = communicator.all_gather_object(tuple(_drawn), "orders of samplers")
    _drawn.clear()
    if communicator.instance_index:
        return
    for own in everyone[0]:
        for index, others in enumerate(everyone):
            # Two samplers with the same index, class and length on two instances most likely belong
            # to the same DataLoader of the program.
            same = [each for each in others if each[:3] == own[:3]]
            if same and same[0].digest != own.digest:
                first, other = communicator.instances[0], communicator.instances[index]
                logger.warning(
                    "The sampler %s draws different orders on instance %d and on instance %d: some "
                    "elements are read more than once, and others are never read. Give the sampler "
                    "the same seed on every instance, or use a sampler of torch without the "
                    "argument generator",
                    own.sampler,
                    first,
                    other,
                )
                break
