"""CIFAR-10 and CIFAR-100 in their binary version, loaded into memory as a whole.

A record of CIFAR-10 is a label and 3,072 bytes of pixels. All red pixels come first, then the green
and the blue pixels. A record of CIFAR-100 has two labels, the coarse class and the fine class. The
files do not have checksums, so damaged pixels are not detected. Source:
https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from datasets.images import DataError, Pictures, Transfer, are_digits, uniform

__all__ = ["FORMATS", "Cifar", "Format", "find"]

_SIDE = 32
_PIXELS = 3 * _SIDE * _SIDE
_BORDER = 4  # black pixels around an image for random crops


@dataclass(frozen=True)
class Format:
    """The files of a data set and the labels in its records.

    Attributes:
        folder: The folder that the archive unpacks to.
        training: The files of the training data.
        test: The files of the test data.
        names: The file with the names of the classes, one per line. It may be missing.
        classes: The number of classes of each label byte. The last label is used.
    """

    folder: str
    training: tuple[str, ...]
    test: tuple[str, ...]
    names: str
    classes: tuple[int, ...]


FORMATS = {
    "cifar-10": Format(
        "cifar-10-batches-bin",
        tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        ("test_batch.bin",),
        "batches.meta.txt",
        (10,),
    ),
    "cifar-100": Format(
        "cifar-100-binary", ("train.bin",), ("test.bin",), "fine_label_names.txt", (20, 100)
    ),
}


def find(name: str, folder: Path) -> Path | None:
    """Return the folder with the files, ``folder`` or a subfolder; None if there are no files."""
    found = FORMATS[name]
    for place in (folder, folder / found.folder):
        if any((place / file).is_file() for file in (*found.training, *found.test)):
            return place
    return None


class Cifar(Pictures):
    """The pictures of CIFAR-10 or CIFAR-100.

    A training picture is shifted by up to four pixels in each direction, and mirrored half of
    the time. Digits (classes named digit...) are not mirrored, because some would become other
    digits.

    Args:
        name: Cifar-10 or cifar-100.
        folder: The result of :func:`find`.
        training: Whether to read the training data.
        transfer: The function that converts pixels to images.

    Raises:
        DataError: A file is missing or not from this data set.
    """

    def __init__(self, name: str, folder: Path, training: bool, transfer: Transfer) -> None:
        super().__init__(transfer)
        form = FORMATS[name]
        self.num_classes = form.classes[-1]
        files = form.training if training else form.test
        if missing := [file for file in files if not (folder / file).is_file()]:
            raise DataError(
                f"{folder} has no {', '.join(missing)}: {name} has {len(files)} files of "
                f"{'training' if training else 'test'} data; unpack its binary version again"
            )
        records = np.concatenate([_records(folder / file, form) for file in files])
        self._labels = records[:, len(form.classes) - 1].astype(np.int64)
        self._pixels = records[:, len(form.classes) :].reshape(-1, 3, _SIDE, _SIDE)
        names = folder / form.names
        known = names.read_text(errors="replace").split() if names.is_file() else []
        self._mirrors = not are_digits(known)

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, indices: np.ndarray, keys: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return pixels and labels. With keys, the pictures are shifted and mirrored."""
        pixels = self._pixels[indices]
        if keys is not None:
            pixels = self._augmented(pixels, keys)
        return pixels, self._labels[indices]

    def _augmented(self, pixels: np.ndarray, keys: np.ndarray) -> np.ndarray:
        down, right, mirror = uniform(keys, 3).T
        inside = slice(_BORDER, _BORDER + _SIDE)
        bordered = np.zeros((len(pixels), 3, _SIDE + 2 * _BORDER, _SIDE + 2 * _BORDER), np.uint8)
        bordered[:, :, inside, inside] = pixels
        crops = np.lib.stride_tricks.sliding_window_view(bordered, (_SIDE, _SIDE), axis=(2, 3))
        shifts = 2 * _BORDER + 1
        rows, columns = ((shifts * share).astype(int) for share in (down, right))
        pixels = crops[np.arange(len(pixels)), :, rows, columns]
        if self._mirrors:
            pixels[mirror < 0.5] = pixels[mirror < 0.5][..., ::-1]
        return pixels


def _records(file: Path, form: Format) -> np.ndarray:
    """Return the records of a file, uint8 [N, labels + pixels]."""
    size = len(form.classes) + _PIXELS
    try:
        data = np.fromfile(file, np.uint8)
    except OSError as error:
        raise DataError(f"{file}: {error.strerror}; give a --data-dir that can be read") from None
    if not len(data) or len(data) % size:
        raise DataError(
            f"{file} has {len(data):,} bytes, expected whole records of {size:,}: it is cut off or "
            "of another data set; unpack the binary version again"
        )
    records = data.reshape(-1, size)
    for column, classes in enumerate(form.classes):
        labels = records[:, column]
        if (labels >= classes).any():
            record = int(np.argmax(labels >= classes))
            raise DataError(
                f"{file}: record {record} has the label {labels[record]}, 0 to {classes - 1} are "
                "accepted; the file is damaged or of another data set, unpack the binary version "
                "again"
            )
    return records
