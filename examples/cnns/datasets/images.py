"""The base of all data sets: reading batches of pictures, and converting them to tensors.

The sampler identifies a sample by ``(index, key)``. The key determines the augmentation of the
picture; with the key None, the picture is unchanged. The index -1 stands for padding, a picture
with the label -1 that losses and accuracies ignore. A data set does not have state, so it returns
the same pictures in every process and in a resumed training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

__all__ = [
    "PADDING",
    "DataError",
    "Pictures",
    "Sample",
    "Statistics",
    "Transfer",
    "are_digits",
    "mixed",
    "uniform",
]

#: Index and label of a sample that pads a batch.
PADDING = -1
Sample = tuple[int, int | None]
_KEEPS_53_BITS = np.uint64(11)


class DataError(ValueError):
    """An error in the data, described in one line.

    torch raises the error of a worker process again in the main process, with the worker's
    traceback as its text. This class keeps only the last line of that text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text.rstrip().rpartition(f"{type(self).__name__}: ")[2])


@dataclass(frozen=True)
class Statistics:
    """Mean and standard deviation of each colour, for pixels from 0 to 1."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


@dataclass(frozen=True)
class Transfer:
    """The format of images for the transfer to the device.

    With 8 bits, images are uint8 and take a quarter of the bytes. Otherwise they are float32,
    either normalised or with pixels from 0 to 255. If the host does not normalise images, the
    device computes (pixels / 255 - mean) / std.
    """

    statistics: Statistics
    eight_bits: bool
    normalised: bool

    def __call__(self, pixels: np.ndarray) -> torch.Tensor:
        """Convert uint8 pixels [N, 3, S, S] to images."""
        images = torch.from_numpy(pixels)
        if self.eight_bits:
            return images
        images = images.float()
        if self.normalised:
            mean, std = (
                torch.tensor(values).view(3, 1, 1)
                for values in (self.statistics.mean, self.statistics.std)
            )
            images.mul_(1 / (255 * std)).sub_(mean / std)
        return images


class Pictures(Dataset):
    """A data set that loads whole batches. Subclasses implement ``read``.

    Args:
        transfer: The function that converts pixels to images.
    """

    num_classes: int

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer

    def __len__(self) -> int:
        raise NotImplementedError

    def read(self, indices: np.ndarray, keys: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels, uint8 [N, 3, S, S], and the labels [N] of some pictures.

        If keys are given, they determine the augmentation of the pictures.
        """
        raise NotImplementedError

    def part(self, process: int, num_processes: int) -> range:
        """Return the indices for one process, if each process reads its own part of the images."""
        return range(process, len(self), num_processes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} is asked for, 0 to {len(self) - 1} exist")
        images, labels = self.__getitems__([(index, None)])
        return images[0], labels[0]

    def __getitems__(self, samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch. torch's loader calls this method once per batch."""
        indices = np.array([index for index, _ in samples])
        is_augmented = samples[0][1] is not None
        keys = np.array([key for _, key in samples], np.uint64) if is_augmented else None
        pixels, labels = self.read(np.maximum(indices, 0), keys)
        labels = np.where(indices == PADDING, PADDING, labels).astype(np.int64)
        return self.transfer(pixels), torch.from_numpy(labels)


def are_digits(names: Sequence[str]) -> bool:
    """Tell whether the classes are digits, like those of ``sample.py``, which are not mirrored."""
    return bool(names) and all(name.startswith("digit") for name in names)


def mixed(numbers: np.ndarray) -> np.ndarray:
    """Return hashes of uint64 numbers, by the last step of SplitMix64 (Steele, 2014)."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def uniform(keys: np.ndarray, count: int) -> np.ndarray:
    """Return [N, count] numbers from 0 to below 1 that depend on the keys [N] only."""
    with np.errstate(over="ignore"):
        numbers = mixed(keys[:, None] + np.arange(1, count + 1, dtype=np.uint64))
    return (numbers >> _KEEPS_53_BITS) * 2.0**-53
