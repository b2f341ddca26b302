"""ImageNet in TFRecords, read in any order, with a check of every checksum.

The files are those of TensorFlow's scripts: train-00000-of-01024 and so on, and
validation-00000-of-00128 and so on. A record is an Example with a JPEG (image/encoded) and a label
(image/class/label). Labels begin with 1, because 0 is the background. The file NAME.tfindex beside
each file has the position of every record, as "offset size" lines of the ``tfrecord`` package. This
module makes a missing index. The ``tfrecord`` package decodes the Examples.
Source of the format: https://www.tensorflow.org/tutorials/load_data/tfrecord
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from file_writing import replaced_at_end

from datasets.images import DataError

__all__ = ["Records", "find", "index_of"]

_HEADER = 12  # bytes: the data's length (8) and its checksum
_FRAME = 16  # bytes of a record without the data: header and the data's checksum
_FEATURES = {"image/encoded": "byte", "image/class/label": "int"}
_TYPES = {"byte": "bytes_list", "float": "float_list", "int": "int64_list"}
_IMAGENET_CLASSES = 1000
_REPAIR = "copy it again from where it is whole"


def find(folder: Path, training: bool) -> list[Path]:
    """Return the training or validation files in ``folder``, or in its subfolder."""
    name = "train" if training else "validation"
    for place in (folder, folder / name):
        if files := sorted(place.glob(f"{name}-?????-of-?????")):
            return files
    return []


class Records:
    """The encoded images and labels of TFRecord files.

    Args:
        folder: The folder of the data. If the classes are not ImageNet's 1,000, it holds labels.txt
            with one class per line.
        files: The result of :func:`find`.

    Raises:
        DataError: The packages that read records are missing, or a file is damaged.
    """

    def __init__(self, folder: Path, files: list[Path]) -> None:
        _needs_package()
        _check_complete(files)
        names = folder / "labels.txt"
        lines = names.read_text().split("\n") if names.is_file() else []
        self.names = [line.rpartition(":")[2] for line in lines if line.strip()]
        self.num_classes = len(self.names) or _IMAGENET_CLASSES
        self._files = files
        self._places = [index_of(file) for file in files]
        self._ends = np.cumsum([len(places) for places in self._places])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def part(self, process: int, num_processes: int) -> range:
        """Return the records for one process.

        The records are consecutive, so that a process shares at most two files with others.
        """
        begin, end = (len(self) * number // num_processes for number in (process, process + 1))
        return range(begin, end)

    def read(self, index: int) -> tuple[bytes, int, str]:
        """Return an encoded image, its label from 0, and its name for messages.

        Raises:
            DataError: The record is damaged.
        """
        number = int(np.searchsorted(self._ends, index, side="right"))
        file, places = self._files[number], self._places[number]
        record = index - int(self._ends[number]) + len(places)
        where = f"{file}: record {record}"
        data = _data(file, *places[record].tolist(), where)
        encoded, label = _features(data, where)
        if not 1 <= label <= self.num_classes:
            raise DataError(
                f"{where} has the label {label}, 1 to {self.num_classes} are accepted; where the "
                f"classes are not ImageNet's, labels.txt beside the files names them, one a line"
            )
        return encoded, label - 1, where


def index_of(file: Path) -> np.ndarray:
    """Return the offset and size of each record [N, 2]; write the index file if it is missing.

    Raises:
        DataError: The file is cut off, or a record's length is damaged.
    """
    kept = file.with_name(f"{file.name}.tfindex")
    try:
        numbers = [int(word) for word in kept.read_text().split()]
        places = np.array(numbers, np.int64).reshape(-1, 2)
        if _fits(places, file.stat().st_size):
            return places
    except (OSError, ValueError, OverflowError):
        pass  # a missing or damaged index is made again
    places = _scanned(file)
    try:
        with replaced_at_end(kept) as partial:  # other instances may be reading
            np.savetxt(partial, places, "%d")
    except OSError:
        pass  # the folder cannot be written, so each run makes the index
    return places


def _fits(places: np.ndarray, size: int) -> bool:
    """Tell whether the records of an index cover a file of ``size`` bytes without gaps."""
    if not len(places):
        return False
    ends = places.sum(1)
    return places[0, 0] == 0 and ends[-1] == size and bool((places[1:, 0] == ends[:-1]).all())


def _scanned(file: Path) -> np.ndarray:
    places, offset, size = [], 0, file.stat().st_size
    with file.open("rb") as records:
        while offset < size:
            where = f"{file}: record {len(places)}"
            records.seek(offset)
            length = _length(records.read(_HEADER), where)
            if offset + _FRAME + length > size:
                raise DataError(f"{where} is cut off; {_REPAIR}")
            places.append((offset, _FRAME + length))
            offset += _FRAME + length
    if not places:
        raise DataError(f"{file} is empty, expected records; {_REPAIR}")
    return np.array(places, np.int64)


def _length(header: bytes, where: str) -> int:
    if len(header) < _HEADER:
        raise DataError(f"{where} is cut off; {_REPAIR}")
    if _checksum(header[:8]) != header[8:]:
        raise DataError(f"{where} has a damaged length; {_REPAIR}")
    return struct.unpack("<Q", header[:8])[0]


def _data(file: Path, offset: int, size: int, where: str) -> bytes:
    """Return the data of a record, after checking its checksums."""
    try:
        with file.open("rb") as records:
            records.seek(offset)
            record = records.read(size)
    except OSError as error:
        raise DataError(f"{where} cannot be read: {error.strerror}; {_REPAIR}") from None
    if _length(record[:_HEADER], where) != size - _FRAME or len(record) != size:
        raise DataError(f"{where} is not where {file.name}.tfindex says; remove that index")
    data = record[_HEADER:-4]
    if _checksum(data) != record[-4:]:
        raise DataError(f"{where} is damaged: its checksum differs; {_REPAIR}")
    return data


def _checksum(data: bytes) -> bytes:
    from tfrecord.writer import TFRecordWriter

    return TFRecordWriter.masked_crc(data)


def _features(data: bytes, where: str) -> tuple[bytes, int]:
    from google.protobuf.message import DecodeError
    from tfrecord import example_pb2
    from tfrecord.reader import extract_feature_dict

    try:
        example = example_pb2.Example.FromString(data)
        found = extract_feature_dict(example.features, _FEATURES, _TYPES)
        return found["image/encoded"], int(found["image/class/label"][0])
    except (DecodeError, KeyError, TypeError, IndexError):
        raise DataError(
            f"{where} is not an image of ImageNet: expected an Example with the bytes "
            "image/encoded and the integer image/class/label"
        ) from None


def _check_complete(files: list[Path]) -> None:
    name, _, total = files[0].name.rpartition("-of-")
    expected = {f"{name[:-5]}{number:05}-of-{total}" for number in range(int(total))}
    if missing := sorted(expected - {file.name for file in files}):
        raise DataError(
            f"{files[0].parent} has no {missing[0]}, of {len(expected)} files {len(missing)} are "
            "missing; copy all of them"
        )


def _needs_package() -> None:
    try:
        import tfrecord  # noqa: F401
    except ImportError:
        raise DataError(
            "TFRecords need the packages tfrecord and crc32c: python -m pip install tfrecord crc32c"
        ) from None
