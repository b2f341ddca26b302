"""Random images, for runs that measure how fast training is without a data set.

On the host they are made here, once for a process. With --synthetic-data the device makes its own
and nothing is transferred; a program still asks for batches, and gets these.
"""

from __future__ import annotations

import numpy as np
import torch

from datasets.images import Pictures, Transfer

__all__ = ["Generated"]

_MOST_BYTES = 64 * 2**20  # of images that differ; then they come again


class Generated(Pictures):
    """Random images in the form in which they are transferred, so that loading costs a copy.

    Args:
        count: images of an epoch; as many as 64 MiB hold differ.
        side: of an image, in pixels.
        num_classes: labels are 0 to ``num_classes`` - 1.
        seed: the same images for the same seed.
        transfer: makes images of pixels.
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
        """Return a batch; padding has the label -1 as everywhere."""
        indices = torch.tensor([index for index, _ in samples])
        chosen = indices.clamp(min=0) % len(self._images)
        labels = torch.where(indices < 0, indices, self._labels[chosen])
        return self._images[chosen], labels
