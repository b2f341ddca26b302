"""ImageNet, and other photographs in the same folders: decoded when they are asked for.

Folders are train/CLASS/*.JPEG and validation/CLASS/*.JPEG (or val/); TFRecords are read by
``tfrecords.py``. Every picture is first reduced, or enlarged, so that its shorter side is 8/7 of
the model's: 256 for 224. That is what validation takes the middle of, and what is cached; a crop to
train on is cut from the same, so that a picture is the same with and without the cache.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from datasets import tfrecords
from datasets.cache import Cache
from datasets.images import DataError, Pictures, Transfer, are_digits, uniform

__all__ = ["Folders", "ImageNet", "find_folders"]

_ENDINGS = (".jpeg", ".jpg", ".png")
_FORMATS = ("JPEG", "PNG")  # some files of ImageNet are called JPEG and are PNG
_SMALLEST, _MOST_OBLONG = 0.08, 4 / 3  # of a crop: share of the area, and width by height
_TRIES = 10


class Folders:
    """The files below a folder, which has a folder for each class; classes count in their order.

    Raises:
        DataError: there is no class, or one without images.
    """

    def __init__(self, folder: Path) -> None:
        classes = sorted(place for place in folder.iterdir() if place.is_dir())
        self.names = [place.name for place in classes]
        self.num_classes = len(classes)
        if not classes:
            raise DataError(f"{folder} has no folders, expected one for each class, with images")
        self._files: list[tuple[Path, int]] = []
        for label, place in enumerate(classes):
            files = sorted(file for file in place.iterdir() if file.suffix.lower() in _ENDINGS)
            if not files:
                raise DataError(
                    f"{place} has no images (.JPEG, .jpg, .png): put some in, or remove the folder"
                )
            self._files += [(file, label) for file in files]

    def __len__(self) -> int:
        return len(self._files)

    def part(self, process: int, num_processes: int) -> range:
        """Return every so many-th file, so that each process has images of all classes."""
        return range(process, len(self), num_processes)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """Return an encoded image, its label, and what to call it.

        Raises:
            DataError: the file cannot be read.
        """
        file, label = self._files[index]
        try:
            return file.read_bytes(), label, str(file)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; copy it again, or remove it") from None


def find_folders(folder: Path, training: bool) -> Path | None:
    """Return the folder of the training or validation data in ``folder``, if there is one."""
    names = ("train",) if training else ("validation", "val")
    places = (folder / name for name in names)
    return next((place for place in places if place.is_dir()), None)


class ImageNet(Pictures):
    """Photographs of any size as squares.

    To train on, a crop of 8 to 100 % of the area, three by four to four by three, and mirrored half
    of the time (written digits, classes that are called digit..., are not); else the middle.

    Args:
        folder: what --data-dir names.
        training: whether to read the training data.
        side: of an image, in pixels.
        transfer: makes images of pixels.
        instances: how many instances of this host keep images; 0 keeps none.
        speaks: whether this process says that the cache is full.

    Raises:
        DataError: there is no such data, or it is incomplete.
    """

    def __init__(
        self,
        folder: Path,
        training: bool,
        side: int,
        transfer: Transfer,
        instances: int = 0,
        speaks: bool = True,
    ) -> None:
        super().__init__(transfer)
        self._source = _source(folder, training)
        self.num_classes = self._source.num_classes
        self._mirrors = not are_digits(self._source.names)
        self._side = side
        self._shorter = round(side * 8 / 7)
        self._cache = Cache(len(self), instances, speaks=speaks) if instances else None

    def __len__(self) -> int:
        return len(self._source)

    def part(self, process: int, num_processes: int) -> range:
        """Return what a process reads that shares no files, or few, with others."""
        return self._source.part(process, num_processes)

    def read(self, indices: np.ndarray, keys: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return pixels and labels: random crops if there are keys, else the middle."""
        pixels = np.empty((len(indices), 3, self._side, self._side), np.uint8)
        labels = np.empty(len(indices), np.int64)
        draws = None if keys is None else uniform(keys, 3 + 2 * _TRIES)
        for number, index in enumerate(indices.tolist()):
            picture, labels[number] = self._picture(index)
            square = self._middle(picture) if draws is None else self._crop(picture, draws[number])
            pixels[number] = square.transpose(2, 0, 1)
        return pixels, labels

    def _picture(self, index: int) -> tuple[np.ndarray, int]:
        """Return a picture [height, width, 3] with the shorter side of all, and its label."""
        if self._cache is not None and (kept := self._cache.get(index)) is not None:
            return kept
        encoded, label, name = self._source.read(index)
        picture = _decoded(encoded, name, self._shorter)
        if self._cache is not None:
            self._cache.put(index, picture, label)
        return picture, label

    def _middle(self, picture: np.ndarray) -> np.ndarray:
        top, left = ((length - self._side) // 2 for length in picture.shape[:2])
        return picture[top : top + self._side, left : left + self._side]

    def _crop(self, picture: np.ndarray, draws: np.ndarray) -> np.ndarray:
        left, top, width, height = _box(*picture.shape[:2], draws)
        size = (self._side, self._side)
        box = (left, top, left + width, top + height)
        crop = np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BILINEAR, box))
        return crop[:, ::-1] if self._mirrors and draws[2] < 0.5 else crop


def _box(height: int, width: int, draws: np.ndarray) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random crop.

    Source of the rule: torchvision's RandomResizedCrop, but for pictures that are too oblong for
    any crop: here the largest square in a random place.
    """
    for try_ in range(_TRIES):
        area, shape = draws[3 + 2 * try_ : 5 + 2 * try_]
        area = (_SMALLEST + (1 - _SMALLEST) * area) * height * width
        ratio = _MOST_OBLONG ** (2 * shape - 1)
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if 0 < w <= width and 0 < h <= height:
            break
    else:
        w = h = min(width, height)
    return int(draws[0] * (width - w + 1)), int(draws[1] * (height - h + 1)), w, h


def _decoded(encoded: bytes, name: str, shorter: int) -> np.ndarray:
    """Return an image [height, width, 3] whose shorter side is ``shorter``."""
    try:
        with Image.open(io.BytesIO(encoded), formats=_FORMATS) as image:
            image.draft("RGB", (shorter, shorter))  # JPEG decodes at 1/2, 1/4 or 1/8 much faster
            scale = shorter / min(image.size)
            size = [max(shorter, round(length * scale)) for length in image.size]
            picture = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).partition(" <")[0]  # without Python's address of the bytes
        raise DataError(
            f"{name} cannot be decoded ({reason}); copy it again, or remove it"
        ) from None
    return np.asarray(picture)


def _source(folder: Path, training: bool) -> Folders | tfrecords.Records:
    if files := tfrecords.find(folder, training):
        return tfrecords.Records(folder, files)
    place = find_folders(folder, training)
    if place is None:
        kind = "train" if training else "validation"
        raise DataError(
            f"{folder} has no {kind} data: expected {kind}/CLASS/*.JPEG, or TFRecords "
            f"{kind}-00000-of-... there or in {kind}/"
        )
    if not training and (trained := find_folders(folder, training=True)):
        _check_same_classes(trained, place)
    return Folders(place)


def _check_same_classes(training: Path, validation: Path) -> None:
    """Labels count the folders: one that is missing would shift all that follow."""
    found = [{place.name for place in folder.iterdir() if place.is_dir()}
             for folder in (training, validation)]  # fmt: skip
    if differ := sorted(found[0] ^ found[1]):
        raise DataError(
            f"{training} and {validation} have not the same classes: {differ[0]} is in one of "
            "them only; each class needs a folder in both"
        )
