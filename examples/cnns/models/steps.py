"""Modules around a network on the device: image normalisation, loss and predictions."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from datasets.images import PADDING
from torch import nn

from popdist_py import poptorch

__all__ = ["ForTraining", "ForValidation", "prepare"]


def prepare(network: nn.Module, args: argparse.Namespace) -> nn.Module:
    """Convert the weights to half precision for --precision 16.16.

    The running statistics of norms stay in float32, because their small changes would be lost by
    rounding in half precision.
    """
    if args.precision != "16.16":
        return network
    network.half()
    for part in network.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.data = part.running_mean.float()
            part.running_var.data = part.running_var.float()
    return network


class Images(nn.Module):
    """Conversion of images to the type of the activations, with normalisation if needed."""

    def __init__(self, args: argparse.Namespace, images: Any) -> None:
        super().__init__()
        self.dtype = torch.float32 if args.precision == "32.32" else torch.float16
        self.normalises = not images.normalised_on_host
        # Checkpoints do not have these buffers. Pixels are integers from 0 to 255.
        mean, std = (255 * torch.tensor(values) for values in (images.mean, images.std))
        for name, value in (("mean", mean), ("scale", 1 / std)):
            self.register_buffer(name, value.to(self.dtype).view(-1, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(self.dtype)
        return (images - self.mean) * self.scale if self.normalises else images


class ForTraining(nn.Module):
    """A network with its loss.

    Args:
        network: The network, made by :func:`models.create`.
        args: The options of the program. Precision and label smoothing are used.
        images: The properties of the images: ``mean``, ``std`` and ``normalised_on_host``.
    """

    def __init__(self, network: nn.Module, args: argparse.Namespace, images: Any) -> None:
        super().__init__()
        self.images = Images(args, images)
        self.network = network
        self.label_smoothing = args.label_smoothing

    def forward(
        self, images: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of right answers and the mean loss of a micro-batch, both float32.

        Padding with the label -1 is ignored. The loss of a micro-batch of padding is 0.
        """
        # The exponentials of a softmax over a thousand classes exceed the range of half precision.
        scores = self.network(self.images(images)).float()
        right = (scores.argmax(1) == labels).sum().float()
        loss = F.cross_entropy(
            scores,
            labels.long(),
            ignore_index=PADDING,
            label_smoothing=self.label_smoothing,
            reduction="sum",
        )
        real = (labels != PADDING).sum().clamp(min=1)
        return right, poptorch.identity_loss(loss / real, reduction="none")


class ForValidation(nn.Module):
    """A network that maps images to predictions [N]."""

    def __init__(self, network: nn.Module, args: argparse.Namespace, images: Any) -> None:
        super().__init__()
        self.images = Images(args, images)
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(self.images(images)).argmax(1)
