"""EfficientNet-B0 (Tan and Le, 2019) from torchvision, adapted to small images."""

from __future__ import annotations

from torch import nn
from torchvision.models import efficientnet_b0

from models.norms import Norm

__all__ = ["halvings", "make"]


def make(kind: str, num_classes: int, norm: Norm) -> nn.Module:
    """Return the network. For CIFAR, its first convolution does not halve the image."""
    network = efficientnet_b0(num_classes=num_classes, norm_layer=norm)
    if kind == "cifar":
        network.features[0][0].stride = (1, 1)
    return network


def halvings(kind: str) -> int:
    """Return the number of times that height and width are halved."""
    return 4 if kind == "cifar" else 5
