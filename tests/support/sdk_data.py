"""Small data sets in the files of well-known ones: torchvision reads them without a download.

The digits are scikit-learn's, real and handwritten, 8 by 8; what is missing to the size of a file
is shifted copies of them.
"""

from __future__ import annotations

import pickle
import struct
from pathlib import Path

import numpy as np

__all__ = ["make_data"]

_TRAINING = 1440  # of 1,797 digits
_NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def make_data(folder: Path) -> None:
    """Write MNIST, FashionMNIST, CIFAR-10 and a folder of pictures below ``folder``."""
    mnist = {"train": _digits(8000, test=False), "t10k": _digits(1600, test=True)}
    _write_idx(folder / "MNIST" / "raw", mnist)
    # Shapes instead of clothes: the digits' outlines.
    outlines = {name: (_outline(images), labels) for name, (images, labels) in mnist.items()}
    _write_idx(folder / "FashionMNIST" / "raw", outlines)
    _write_cifar(folder / "cifar-10-batches-py")
    _write_pictures(folder / "lfw")


def _digits(count: int, *, test: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return ``count`` pictures of 28 by 28 with their labels."""
    from sklearn.datasets import load_digits

    part = slice(_TRAINING, None) if test else slice(0, _TRAINING)
    images, labels = (x[part] for x in load_digits(return_X_y=True))
    images = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))) * 15.9  # 24 by 24
    random = np.random.default_rng(int(test))
    made = np.zeros((count, 28, 28), np.uint8)
    for index, (down, right) in enumerate(random.integers(0, 5, (count, 2))):
        made[index, down : down + 24, right : right + 24] = images[index % len(images)]
    return made, np.resize(labels, count).astype(np.uint8)


def _outline(images: np.ndarray) -> np.ndarray:
    inside = images > 100
    edge = inside ^ np.roll(inside, 1, 1) | inside ^ np.roll(inside, 1, 2)
    return (edge * 255).astype(np.uint8)


def _write_idx(folder: Path, parts: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    folder.mkdir(parents=True)
    for name, (images, labels) in parts.items():
        header = struct.pack(">IIII", 2051, *images.shape)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        header = struct.pack(">II", 2049, len(labels))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def _write_cifar(folder: Path, training: int = 65, test: int = 20) -> None:
    """Write white digits on coloured ground, in five files for training and one for tests."""
    folder.mkdir(parents=True)
    parts = {f"data_batch_{i + 1}": (training // 5, i) for i in range(5)}
    for name, (count, seed) in {**parts, "test_batch": (test, 5)}.items():
        images, labels = _digits(count, test=name == "test_batch")
        pictures = np.zeros((count, 3, 32, 32), np.uint8)
        ground = np.random.default_rng(seed).integers(0, 128, (count, 3, 1, 1))
        pictures[:] = ground
        inner = pictures[:, :, 2:30, 2:30]
        np.maximum(inner, images[:, None], out=inner)
        batch = {"data": pictures.reshape(count, -1), "labels": labels.tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    meta = {"label_names": _NAMES, "num_vis": 3072, "num_cases_per_batch": training // 5}
    (folder / "batches.meta").write_bytes(pickle.dumps(meta))


def _write_pictures(folder: Path, count: int = 48) -> None:
    from PIL import Image

    images, labels = _digits(count, test=True)
    for index, (image, label) in enumerate(zip(images, labels, strict=True)):
        path = folder / _NAMES[label] / f"{_NAMES[label]}_{index:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).convert("RGB").resize((250, 250)).save(path)
