"""The images, loss and metrics of main.py."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torchvision
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.running import make_once
from common.sample_data import SampleCIFAR10, make_cifar10

__all__ = [
    "IMAGENET_STATISTICS",
    "ModelWithLoss",
    "ModelWithNormalization",
    "accuracy",
    "get_transform",
    "is_stand_in",
    "training_set",
]

IMAGENET_STATISTICS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
_FOLDER = torchvision.datasets.CIFAR10.base_folder


class ModelWithNormalization(torch.nn.Module):
    """A model that casts 8-bit images and normalises them on the IPU instead of the host.

    As in the session, 8-bit values are not divided by 255 before the normalisation.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.normalize = transforms.Normalize(**IMAGENET_STATISTICS)

    def forward(self, img):
        return self.model(self.normalize(img.to(self.dtype)))


class ModelWithLoss(torch.nn.Module):
    """A model that returns its scores. If labels are given, it also returns the loss."""

    def __init__(self, model: torch.nn.Module, criterion: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, img, labels=None):
        out = self.model(img)
        return out if labels is None else (out, self.criterion(out, labels))


def get_transform(
    precision: str = "16.16", eight_bit_io: bool = False, side: int = 64
) -> transforms.Compose:
    """Return the image transformation of the host.

    With 8-bit I/O, the host neither converts the type of images nor normalises them.
    """
    preprocessing_steps = [
        transforms.RandomHorizontalFlip(),
        transforms.Resize((side, side)),
        transforms.PILToTensor(),
    ]
    if not eight_bit_io:
        dtype = torch.float16 if precision[:2] == "16" else torch.float32
        preprocessing_steps += [
            transforms.ConvertImageDtype(dtype),
            transforms.Normalize(**IMAGENET_STATISTICS),
        ]
    return transforms.Compose(preprocessing_steps)


def accuracy(out: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the accuracy on the returned micro-batches, in per cent.

    With ``OutputMode.Final``, a call returns only the last micro-batch of each replica. The labels
    of these micro-batches are the last labels of the call.
    """
    return 100 * (out.argmax(1) == labels[-len(out) :]).float().mean().item()


def training_set(folder: Path, transform: transforms.Compose) -> torch.utils.data.Dataset:
    """Return CIFAR-10's 50,000 pictures to train on, from its files of the Python version.

    If the files are missing, this function makes handwritten digits in the same format.

    Raises:
        SystemExit: The folder cannot be written, or its files are not in the format of CIFAR-10.
    """
    try:
        make_once(folder / _FOLDER, make_cifar10)
        return SampleCIFAR10(root=folder, train=True, transform=transform)
    except (OSError, RuntimeError, EOFError, KeyError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "files are missing or damaged"
        sys.exit(
            f"no CIFAR-10 in {folder / _FOLDER}: {reason}. Unpack cifar-10-python.tar.gz in "
            f"{folder}, or name another --data-dir: in an empty one a stand-in is made."
        )


def is_stand_in(dataset: SampleCIFAR10) -> bool:
    """Return whether the pictures are handwritten digits, not CIFAR-10's own."""
    return "zero" in (Path(dataset.root) / _FOLDER / "batches.meta").read_bytes().decode("latin-1")
