"""The order in which the instances read a data set in each epoch.

The seed and the number of the epoch determine the order and the augmentation of the pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler

from datasets.images import PADDING, Sample, mixed

__all__ = ["InOrder", "Shuffled", "Split"]

_AT_ONCE = 4096  # samples at a time, since a list of all would need much memory


@dataclass(frozen=True)
class Split:
    """The division of a step's images into rows, and of each row into the parts of the instances.

    A row has one micro-batch of every replica. A replica therefore gets the same images for any
    number of instances.

    Attributes:
        instance: The index of this instance.
        instances: The number of instances.
        width: The number of images in a row for one instance: micro-batch x local replicas.
        rows: The number of rows in a step. This is the gradient accumulation in a training, and the
            device iterations in a validation.
    """

    instance: int
    instances: int
    width: int
    rows: int

    @property
    def step(self) -> int:
        """The images of all instances for one weight update, or for one call of a validation."""
        return self.instances * self.width * self.rows

    def own(self, order: np.ndarray) -> np.ndarray:
        """Return this instance's part of an order. The order must consist of whole steps."""
        return order.reshape(-1, self.instances, self.width)[:, self.instance].reshape(-1)


class InOrder(Sampler[Sample]):
    """A sampler that gives every image to one instance once. Padding fills the last step."""

    def __init__(self, num_images: int, split: Split) -> None:
        padding = [PADDING] * (-num_images % split.step)
        self._indices = split.own(np.concatenate([np.arange(num_images), padding]).astype(int))

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Sample]:
        return ((index, None) for index in self._indices.tolist())


class Shuffled(Sampler[Sample]):
    """A sampler with a new order of the images in each epoch, and with keys for their augmentation.

    An epoch consists of whole steps.

    Args:
        num_images: The number of images of the data set.
        split: The division of a step's images among the instances.
        seed: The seed of all orders and keys. It is the same on every instance.
        part: The images that only this instance reads; None to split one order of all images.
    """

    def __init__(self, num_images: int, split: Split, seed: int, part: range | None = None) -> None:
        self._num_images = num_images
        self._split = split
        self._seed = seed
        self._part = part
        self._epoch = 0

    def __len__(self) -> int:
        return self._num_images // self._split.step * self._split.width * self._split.rows

    def __iter__(self) -> Iterator[Sample]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        indices = self._indices(epoch)
        for begin in range(0, len(indices), _AT_ONCE):
            some = indices[begin : begin + _AT_ONCE]
            yield from zip(some.tolist(), self._keys(some, epoch).tolist(), strict=True)

    def _indices(self, epoch: int) -> np.ndarray:
        if self._part is not None:
            random = np.random.default_rng((self._seed, epoch, self._split.instance))
            return random.permutation(np.array(self._part))[: len(self)]
        order = np.random.default_rng((self._seed, epoch)).permutation(self._num_images)
        return self._split.own(order[: len(self) * self._split.instances])

    def _keys(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        of_epoch = mixed(mixed(np.array([self._seed % 2**64], np.uint64)) + np.uint64(epoch))
        return mixed(of_epoch + indices.astype(np.uint64))

    def state_dict(self) -> dict[str, int]:
        """Return the seed and the number of the next epoch, for a checkpoint."""
        return {"seed": self._seed, "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
        self._seed, self._epoch = state["seed"], state["epoch"]
