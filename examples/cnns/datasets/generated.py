"""Random images, for measuring the speed of training without a data set.

The host makes these images once per process. With --synthetic-data, the device makes its own images
and no image is transferred, but the program still reads batches from this data set.
"""

from __future__ import annotations

import numpy as np
import torch

from datasets.images import Pictures, Transfer

__all__ = ["Generated"]

_MOST_BYTES = 64 * 2**20  # bytes of different images, which are then repeated


class Generated(Pictures):
    """Random images that are already in the format of the transfer, so that loading is a copy.

    Args:
        count: The number of images in an epoch. After 64 MiB of different images, the same images
            are repeated.
        side: The height and width of an image in pixels.
        num_classes: The number of classes. Labels are 0 to ``num_classes`` - 1.
        seed: The seed of the random images.
        transfer: The function that converts pixels to images.
    """

    def __init__(
        self, count: int, side: int, num_classes: int, seed: int, transfer: Transfer
    ) -> None:
        super().__init__(transfer)
        self.num_classes = num_classes
        self._count = count
        nbytes = 3 * side**2 * (1 if transfer.eight_bits else 4)
        differ = min(count, max(1, _MOST_BYTES // nbytes))
        random = np.random.default_rng(seed)
        pixels = random.integers(0, 256, (differ, 3, side, side), np.uint8)
        self._images = transfer(pixels)
        self._labels = torch.from_numpy(random.integers(0, num_classes, differ))

    def __len__(self) -> int:
        return self._count

    def __getitems__(self, samples) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch. Padding has the label -1."""
        indices = torch.tensor([index for index, _ in samples])
        chosen = indices.clamp(min=0) % len(self._images)
        labels = torch.where(indices < 0, indices, self._labels[chosen])
        return self._images[chosen], labels
