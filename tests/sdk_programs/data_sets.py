"""Small data sets in the files of well-known ones: torchvision reads them without a download."""

from __future__ import annotations

from pathlib import Path

from examples.common.sample_data import make_cifar10, make_fashion_mnist, make_mnist

__all__ = ["make_data"]


def make_data(folder: Path) -> None:
    """Write MNIST, FashionMNIST, CIFAR-10 and a folder of pictures below ``folder``."""
    make_mnist(folder)
    make_fashion_mnist(folder)
    make_cifar10(folder, training=65, test=20)
    _write_pictures(folder / "lfw")


def _write_pictures(folder: Path, count: int = 48) -> None:
    """Write digits as jpg files of 250 by 250 in one folder for each name, as LFW has them."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    names = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    for index in range(count):
        name = names[digits.target[index]]
        path = folder / name / f"{name}_{index:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray((digits.images[index] * 15.9).astype("uint8"))
        picture.convert("RGB").resize((250, 250)).save(path)
