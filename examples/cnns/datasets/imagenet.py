"""ImageNet and other photographs in the same folders, decoded when they are read.

The folders are train/CLASS/*.JPEG and validation/CLASS/*.JPEG (or val/); ``tfrecords.py`` reads
TFRecords. Every picture is first resized, so that its shorter side is 8/7 of the model's image: 256
for 224. The cache holds these resized pictures. Validation takes their middle, and training takes a
random crop, so the images are the same with and without the cache.
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
_FORMATS = ("JPEG", "PNG")  # some files of ImageNet are named JPEG but are PNG
_SMALLEST, _MOST_OBLONG = 0.08, 4 / 3  # a crop's share of the area, and width by height
_TRIES = 10


class Folders:
    """The image files in a folder with one subfolder per class.

    The label of a class is the position of its name in the sorted names.

    Raises:
        DataError: The folder does not have classes, or a class does not have images.
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
        """Return every ``num_processes``-th file, so that a process reads images of all classes."""
        return range(process, len(self), num_processes)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """Return an encoded image, its label, and its name for messages.

        Raises:
            DataError: The file cannot be read.
        """
        file, label = self._files[index]
        try:
            return file.read_bytes(), label, str(file)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; copy it again, or remove it") from None


def find_folders(folder: Path, training: bool) -> Path | None:
    """Return the folder of the training or validation data in ``folder``; None if it is missing."""
    names = ("train",) if training else ("validation", "val")
    places = (folder / name for name in names)
    return next((place for place in places if place.is_dir()), None)


class ImageNet(Pictures):
    """Photographs of any size, read as square images.

    A training image is a random crop of 8 to 100 % of the area, with a shape between three by four
    and four by three. Half of these images are mirrored, but digits (classes named digit...) are
    not. A validation image is the middle of the picture.

    Args:
        folder: The folder of --data-dir.
        training: Whether to read the training data.
        side: The height and width of an image in pixels.
        transfer: The function that converts pixels to images.
        instances: The number of instances of this host that have a cache; 0 without a cache.
        speaks: Whether this process prints a line when the cache is full.

    Raises:
        DataError: The data is missing or incomplete.
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
        """Return the indices of the images for one process.

        Few other processes read the same files.
        """
        return self._source.part(process, num_processes)

    def read(self, indices: np.ndarray, keys: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the pixels and labels of some images.

        The keys select random crops. Without keys, the pixels are the middle of each picture.
        """
        pixels = np.empty((len(indices), 3, self._side, self._side), np.uint8)
        labels = np.empty(len(indices), np.int64)
        draws = None if keys is None else uniform(keys, 3 + 2 * _TRIES)
        for number, index in enumerate(indices.tolist()):
            picture, labels[number] = self._picture(index)
            square = self._middle(picture) if draws is None else self._crop(picture, draws[number])
            pixels[number] = square.transpose(2, 0, 1)
        return pixels, labels

    def _picture(self, index: int) -> tuple[np.ndarray, int]:
        """Return a resized picture [height, width, 3] and its label."""
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

    The crop is chosen as in torchvision's RandomResizedCrop. If a picture is too oblong for all
    tried crops, this function returns the largest square in a random place.
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
            image.draft("RGB", (shorter, shorter))  # JPEG decodes faster at 1/2, 1/4 or 1/8
            scale = shorter / min(image.size)
            size = [max(shorter, round(length * scale)) for length in image.size]
            picture = image.convert("RGB").resize(size, Image.Resampling.BILINEAR)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).partition(" <")[0]  # without the address of the Python object
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
    """Check that both folders have the same classes, because labels are positions of folders."""
    found = [{place.name for place in folder.iterdir() if place.is_dir()}
             for folder in (training, validation)]  # fmt: skip
    if differ := sorted(found[0] ^ found[1]):
        raise DataError(
            f"{training} and {validation} have not the same classes: {differ[0]} is in one of "
            "them only; each class needs a folder in both"
        )
