"""Make a small data set of handwritten digits in the file format of a well-known data set.

python examples/cnns/datasets/sample.py cifar-10 data
python examples/cnns/datasets/sample.py imagenet-tfrecords data --training 400

The digits are scikit-learn's, shifted, and white on a coloured background. A class of CIFAR-100 is
two digits beside each other, and a coarse class is five of these classes. ImageNet is made as
folders of JPEG files or as TFRecords, with pictures of different sizes. All classes are named
digit..., so that the programs do not mirror the pictures.
"""

from __future__ import annotations

import io
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from common.arguments import HelpFormat, Parser
from common.running import make_once, run
from common.sample_data import coloured_digits
from PIL import Image

from datasets import cifar

_FEWEST = 100  # images, so that every class has one
_SHORTEST, _LONGEST = 96, 160  # sides of ImageNet's pictures in pixels
_TEST_SEED = 5


def make_cifar10(folder: Path, training: int = 50_000, test: int = 10_000) -> None:
    """Write the files of CIFAR-10's binary version into a new folder in ``folder``."""
    form = cifar.FORMATS["cifar-10"]
    base = folder / form.folder
    base.mkdir()
    for number, file in enumerate(form.training):
        count = training * (number + 1) // 5 - training * number // 5
        pixels, labels = coloured_digits(count, test=False, seed=number)
        _write_records(base / file, pixels, labels)
    pixels, labels = coloured_digits(test, test=True, seed=_TEST_SEED)
    _write_records(base / form.test[0], pixels, labels)
    _write_lines(base / form.names, (f"digit-{digit}" for digit in range(10)))


def make_cifar100(folder: Path, training: int = 50_000, test: int = 10_000) -> None:
    """Write the files of CIFAR-100's binary version into a new folder in ``folder``."""
    form = cifar.FORMATS["cifar-100"]
    base = folder / form.folder
    base.mkdir()
    for file, count, is_test in ((form.training[0], training, False), (form.test[0], test, True)):
        pixels, labels = _pairs(count, is_test)
        _write_records(base / file, pixels, labels // 5, labels)
    _write_lines(base / form.names, (f"digits-{number:02}" for number in range(100)))
    _write_lines(
        base / "coarse_label_names.txt",
        (f"digits-{number:02}-to-{number + 4:02}" for number in range(0, 100, 5)),
    )


def make_folders(folder: Path, training: int = 2000, test: int = 400) -> None:
    """Write imagenet/train and imagenet/validation, with a folder of JPEG files for each class."""
    for name, count, is_test in (("train", training, False), ("validation", test, True)):
        for number, (encoded, label) in enumerate(_photographs(count, is_test)):
            file = folder / "imagenet" / name / f"digit-{label}" / f"{number:06}.JPEG"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(encoded)


def make_tfrecords(folder: Path, training: int = 2000, test: int = 400) -> None:
    """Write TFRecords, four training files and two validation files, and labels.txt."""
    from tfrecord.writer import TFRecordWriter

    base = folder / "imagenet-tfrecords"
    base.mkdir()
    for name, count, files in (("train", training, 4), ("validation", test, 2)):
        writers = [
            TFRecordWriter(str(base / f"{name}-{number:05}-of-{files:05}"))
            for number in range(files)
        ]
        for number, (encoded, label) in enumerate(_photographs(count, name == "validation")):
            features = {"image/encoded": (encoded, "byte"), "image/class/label": (label + 1, "int")}
            writers[number * files // count].write(features)
        for writer in writers:
            writer.close()
    _write_lines(base / "labels.txt", (f"{digit + 1}:digit-{digit}" for digit in range(10)))


def _pairs(count: int, is_test: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return images of two digits, uint8 [count, 3, 32, 32], and labels from 0 to 99."""
    random = np.random.default_rng(is_test)
    pixels, labels = coloured_digits(count, test=is_test, seed=0)
    other = random.permutation(count)
    # Each digit is halved: 24 of the 32 pixels become 12 of 16.
    small = pixels.reshape(count, 3, 16, 2, 16, 2).mean((3, 5)).astype(np.uint8)
    made = np.empty_like(pixels)
    made[:] = pixels[:, :, :1, :1]
    for index, top in enumerate(random.integers(0, 17, count)):
        made[index, :, top : top + 16, :16] = small[index]
        made[index, :, top : top + 16, 16:] = small[other[index]]
    return made, labels * 10 + labels[other]


def _photographs(count: int, is_test: bool) -> Iterator[tuple[bytes, int]]:
    """Yield digits as JPEG of different sizes, with their labels from 0."""
    pixels, labels = coloured_digits(count, test=is_test, seed=0)
    sizes = np.random.default_rng(is_test).integers(_SHORTEST, _LONGEST + 1, (count, 2)).tolist()
    order = np.random.default_rng(0).permutation(count)
    for index, size in zip(order.tolist(), sizes, strict=True):
        file = io.BytesIO()
        picture = Image.fromarray(pixels[index].transpose(1, 2, 0)).resize(size)
        picture.save(file, "JPEG", quality=90)
        yield file.getvalue(), int(labels[index])


def _write_records(file: Path, pixels: np.ndarray, *labels: np.ndarray) -> None:
    columns = [column[:, None] for column in labels]
    np.concatenate([*columns, pixels.reshape(len(pixels), -1)], axis=1).tofile(file)


def _write_lines(file: Path, lines: Iterator[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines))


_MAKERS = {
    "cifar-10": (make_cifar10, cifar.FORMATS["cifar-10"].folder),
    "cifar-100": (make_cifar100, cifar.FORMATS["cifar-100"].folder),
    "imagenet": (make_folders, "imagenet"),
    "imagenet-tfrecords": (make_tfrecords, "imagenet-tfrecords"),
}


def _count(text: str) -> int:
    """Read a number of images."""
    if not text.isdecimal() or int(text) < _FEWEST:
        raise ArgumentTypeError(f"{text!r} is given, an integer from {_FEWEST} on is accepted")
    return int(text)


def main(argv: list[str] | None = None) -> None:
    """Write a data set. An existing data set, perhaps the real one, is not changed."""
    parser = Parser(
        description=__doc__,
        epilog="Example: python examples/cnns/datasets/sample.py cifar-10 data",
        formatter_class=HelpFormat,
    )
    parser.add_argument("name", choices=_MAKERS, help="the data set whose files are made")
    parser.add_argument("folder", type=Path, help="where a folder with them is made")
    parser.add_argument("--training", type=_count, help="images to train on")
    parser.add_argument("--test", type=_count, help="images to validate with")
    args = parser.parse_args(argv)
    given = {name: count for name in ("training", "test") if (count := getattr(args, name))}
    make, name = _MAKERS[args.name]
    place = args.folder / name
    try:
        made = make_once(place, partial(make, **given))
    except OSError as error:
        parser.error(f"{args.folder}: {error.strerror}; give a folder that can be written")
    except ImportError as error:
        parser.error(f"{args.name} needs {error.name}: python -m pip install tfrecord crc32c")
    if not made:
        parser.error(f"{place} is there already; remove it, or give another folder")
    print(f"{args.name} is in {place}")


if __name__ == "__main__":
    run(main)
