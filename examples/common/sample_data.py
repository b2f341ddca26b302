"""Handwritten digits in the file formats of well-known data sets, for machines without network.

python examples/common/sample_data.py cifar10 data
python examples/common/sample_data.py mnist data --training 60000 --test 10000

The digits are scikit-learn's, 8 by 8 points. Shifted copies fill a larger data set. torchvision
reads MNIST and FashionMNIST (outlines of digits instead of clothes) unchanged. torchvision compares
MD5 sums of CIFAR-10, so ``SampleCIFAR10`` reads these files without that check.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
from torchvision.datasets import CIFAR10

__all__ = ["SampleCIFAR10", "coloured_digits", "make_cifar10", "make_fashion_mnist", "make_mnist"]

_TRAINING = 1440  # of scikit-learn's 1,797 digits; the rest is for tests
_NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
_AT_ONCE = 1000  # pictures that are in memory at a time


class SampleCIFAR10(CIFAR10):
    """A variant of torchvision's CIFAR10 class that accepts files with other pictures."""

    def _check_integrity(self) -> bool:
        folder = Path(self.root, self.base_folder)
        return all((folder / name).is_file() for name, _ in (*self.train_list, *self.test_list))

    def _load_meta(self) -> None:
        self.classes = list(_NAMES)
        self.class_to_idx = {name: index for index, name in enumerate(_NAMES)}


def make_mnist(folder: Path, training: int = 8000, test: int = 1600) -> None:
    """Write MNIST's four files with 8-bit pictures [28, 28] and labels to ``folder``/MNIST/raw."""
    _write_idx(folder / "MNIST" / "raw", training, test, lambda images: images)


def make_fashion_mnist(folder: Path, training: int = 8000, test: int = 1600) -> None:
    """Write FashionMNIST's four files below ``folder``; each class is the outline of a digit."""
    _write_idx(folder / "FashionMNIST" / "raw", training, test, _outline)


def make_cifar10(folder: Path, training: int = 50_000, test: int = 10_000) -> None:
    """Write CIFAR-10's files below ``folder``. The pictures are white digits on coloured ground."""
    base = folder / "cifar-10-batches-py"
    base.mkdir(parents=True, exist_ok=True)
    parts = {f"data_batch_{i + 1}": (training // 5, i) for i in range(5)}
    for name, (count, seed) in {**parts, "test_batch": (test, 5)}.items():
        pictures, labels = coloured_digits(count, test=name == "test_batch", seed=seed)
        batch = {"data": pictures.reshape(count, -1), "labels": labels.tolist()}
        (base / name).write_bytes(pickle.dumps(batch))
    meta = {"label_names": _NAMES, "num_vis": 3072, "num_cases_per_batch": training // 5}
    (base / "batches.meta").write_bytes(pickle.dumps(meta))


def coloured_digits(count: int, *, test: bool, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return white digits on coloured ground, uint8 [count, 3, 32, 32], and labels [count]."""
    labels = np.empty(count, np.uint8)
    pictures = np.zeros((count, 3, 32, 32), np.uint8)
    pictures[:] = np.random.default_rng(seed).integers(0, 128, (count, 3, 1, 1))
    at = 0
    for images, some in _digits(count, test=test, seed=seed):
        inner = pictures[at : at + len(images), :, 2:30, 2:30]
        np.maximum(inner, images[:, None], out=inner)
        labels[at : at + len(images)] = some
        at += len(images)
    return pictures, labels


def _digits(count: int, *, test: bool, seed: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """Yield ``count`` pictures of 28 by 28 points with their labels, in parts."""
    from sklearn.datasets import load_digits

    part = slice(_TRAINING, None) if test else slice(0, _TRAINING)
    images, labels = (x[part] for x in load_digits(return_X_y=True))
    images = (np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))) * 15.9).astype(np.uint8)
    random = np.random.default_rng(seed)
    first = seed * count  # files of a data set have different digits if there are enough
    for begin in range(0, count, _AT_ONCE):
        chosen = np.arange(first + begin, first + min(begin + _AT_ONCE, count)) % len(images)
        made = np.zeros((len(chosen), 28, 28), np.uint8)
        for index, (down, right) in enumerate(random.integers(0, 5, (len(chosen), 2))):
            made[index, down : down + 24, right : right + 24] = images[chosen[index]]
        yield made, labels[chosen].astype(np.uint8)


def _outline(images: np.ndarray) -> np.ndarray:
    inside = images > 100
    edge = inside ^ np.roll(inside, 1, 1) | inside ^ np.roll(inside, 1, 2)
    return (edge * 255).astype(np.uint8)


def _write_idx(folder: Path, training: int, test: int, change) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, count, is_test in (("train", training, False), ("t10k", test, True)):
        parts = list(_digits(count, test=is_test, seed=0))
        images = np.concatenate([change(images) for images, _ in parts])
        labels = np.concatenate([labels for _, labels in parts])
        header = struct.pack(">IIII", 2051, *images.shape)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 2049, len(labels))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


_MAKERS = {
    "mnist": (make_mnist, "MNIST"),
    "fashion-mnist": (make_fashion_mnist, "FashionMNIST"),
    "cifar10": (make_cifar10, CIFAR10.base_folder),
}


def main(argv: list[str] | None = None) -> None:
    """Write a data set. An existing data set, perhaps the real one, is not changed."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from common.arguments import Parser, positive
    from common.running import make_once

    parser = Parser(
        description=__doc__.splitlines()[0],
        epilog="Example: python examples/common/sample_data.py cifar10 data",
    )
    parser.add_argument("name", choices=_MAKERS, help="the data set whose files are made")
    parser.add_argument("folder", type=Path, help="what programs call root or --data-dir")
    parser.add_argument("--training", type=positive, help="pictures to train on")
    parser.add_argument("--test", type=positive, help="pictures to test on")
    args = parser.parse_args(argv)
    given = {name: count for name in ("training", "test") if (count := getattr(args, name))}
    make, name = _MAKERS[args.name]
    try:
        made = make_once(args.folder / name, partial(make, **given))
    except OSError as error:
        parser.error(f"{args.folder}: {error.strerror}; give a folder that can be written")
    if not made:
        parser.error(f"{args.folder / name} is there already; remove it, or give another folder")
    print(f"{args.name} is in {args.folder}")


if __name__ == "__main__":
    main()
