"""What surrounds a network on the device: images before it, loss and answers behind it."""

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
    """Give the weights their format: half for --precision 16.16.

    Running statistics stay float32: the small share that a step changes would be rounded away.
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
    """Brings images to the format of the activations, and normalises what the host did not."""

    def __init__(self, args: argparse.Namespace, images: Any) -> None:
        super().__init__()
        self.dtype = torch.float32 if args.precision == "32.32" else torch.float16
        self.normalises = not images.normalised_on_host
        # No part of the weights: checkpoints do not have them. Pixels are whole numbers to 255.
        mean, std = (255 * torch.tensor(values) for values in (images.mean, images.std))
        for name, value in (("mean", mean), ("scale", 1 / std)):
            self.register_buffer(name, value.to(self.dtype).view(-1, 1, 1), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        images = images.to(self.dtype)
        return (images - self.mean) * self.scale if self.normalises else images


class ForTraining(nn.Module):
    """A network with its loss.

    Args:
        network: of :func:`models.create`.
        args: of the program: precision and label smoothing count here.
        images: what says ``mean`` and ``std`` of pixels from 0 to 1, for each channel, and whether
            they are ``normalised_on_host``.
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

        Images with the label -1 count nowhere; the loss of nothing else is 0.
        """
        # The exponentials of a softmax over a thousand classes leave the range of half.
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
    """A network that answers: images to predictions [N]."""

    def __init__(self, network: nn.Module, args: argparse.Namespace, images: Any) -> None:
        super().__init__()
        self.images = Images(args, images)
        self.network = network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(self.images(images)).argmax(1)
