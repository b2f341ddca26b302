"""The indices of the batches of one epoch, which may begin at a later batch of the epoch.

A worker process of torch's DataLoader draws random numbers for every batch that it loads. Without
further measures, its random numbers for a batch therefore depend on all batches that it loaded
before. The class ``EpochBatches`` gives each batch a random seed. The seed depends only on the
instance, the epoch and the number of the batch. To continue in the middle of an epoch, workers need
not load the batches before.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from popdist_py.poptorch.data.samplers import GroupedBatchSampler

__all__ = ["EpochBatches"]


class EpochBatches:
    """The index sampler of a torch DataLoader, which can begin an epoch at a later batch.

    Args:
        loader: The DataLoader of a map-style data set, whose arguments are complete.
        batches: The index sampler that torch's DataLoader would use. The sampler yields the indices
            of each batch as a list, or single indices.
        has_own_order: Whether the program gives neither a sampler nor a batch sampler.

    Attributes:
        can_skip: Whether the random numbers for a batch do not depend on the batches before.
    """

    def __init__(
        self, loader: torch.utils.data.DataLoader[Any], batches: Any, *, has_own_order: bool
    ) -> None:
        self._batches = batches
        self._has_workers = loader.num_workers > 0
        if self._has_workers:
            # The function ``worker_init_fn`` of a program may seed the generators itself.
            is_known = isinstance(batches, (torch.utils.data.BatchSampler, GroupedBatchSampler))
            self.can_skip = is_known and loader.worker_init_fn is None
        else:
            # Without workers, a sampler or generator of the program may also give random numbers to
            # the data set.
            self.can_skip = has_own_order and loader.generator is None
        self._key = b""
        self._first = 0

    def begin(self, key: bytes, first: int) -> None:
        """Set the values for the next ``iter()``.

        Args:
            key: Bytes that determine the seeds of the epoch, such as the state of a generator.
            first: The number of batches to leave out at the beginning of the epoch.
        """
        self._key, self._first = hashlib.blake2b(key).digest(), first

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        batches = islice(self._batches, self._first, None)
        if not (self._has_workers and self.can_skip):
            return batches
        key = self._key
        return (_SeededBatch(batch, key, i) for i, batch in enumerate(batches, self._first))


class _SeededBatch(list[Any]):
    """The indices of a batch, which seed the random generators of the worker that receives them.

    Torch's DataLoader sends the indices of a batch to a worker process as a pickled object. The
    worker unpickles the object just before it loads the batch. Torch offers no other function that
    workers call before each batch and that leaves the program's data set as it is.
    """

    def __init__(self, indices: list[Any], key: bytes, number: int) -> None:
        super().__init__(indices)
        self._seed = hashlib.blake2b(b"%s %d" % (key, number), digest_size=8).digest()

    def __reduce__(self) -> tuple[Callable[..., list[Any]], tuple[Any, ...]]:
        return _seeded, (list(self), int.from_bytes(self._seed, "big"))


def _seeded(indices: list[Any], seed: int) -> list[Any]:
    """Seed the random generators of this worker process, and return the indices of a batch."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    return indices
