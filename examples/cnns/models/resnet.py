"""Residual networks by He et al. (2015) for CIFAR, and in version 1.5 for ImageNet.

Layers have torchvision's names, so that weights trained with torchvision can be loaded. Version 1.5
halves the image in the 3x3 convolution of a bottleneck. The paper halves it in the first 1x1
convolution.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from models.norms import Norm

__all__ = ["PLANS", "Bottleneck", "Plan", "make"]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut around them."""

    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int, norm: Norm, shortcut: nn.Module):
        super().__init__()
        self.conv1 = _conv(inputs, channels, 3, stride)
        self.bn1 = norm(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = norm(channels)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 convolutions, and a shortcut around them."""

    expansion = 4

    def __init__(
        self,
        inputs: int,
        channels: int,
        stride: int,
        norm: Norm,
        shortcut: nn.Module,
        groups: int = 1,
        group_width: int = 64,
    ) -> None:
        super().__init__()
        width = channels * group_width // 64 * groups
        self.conv1 = _conv(inputs, width, 1)
        self.bn1 = norm(width)
        self.conv2 = _conv(width, width, 3, stride, groups)
        self.bn2 = norm(width)
        self.conv3 = _conv(width, channels * self.expansion, 1)
        self.bn3 = norm(channels * self.expansion)
        self.downsample = shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.downsample(x), inplace=True)


class PaddedShortcut(nn.Module):
    """A shortcut without weights. It takes every second pixel; new channels contain zeros."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride = stride
        self.new_channels = new_channels

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, 0, self.new_channels))


@dataclass(frozen=True)
class Plan:
    """The structure of a residual network.

    Attributes:
        block: The class of a block, or a function that makes a block with groups.
        expansion: The output channels of a block divided by its inner channels.
        depths: The number of blocks of each stage. Each stage after the first halves the image.
        width: The channels of the first stage. Each later stage has twice as many.
        small_images: Whether the stages get the whole image. Otherwise the first layers reduce the
            height and width to a quarter.
        projections: Whether a shortcut that changes the shape is a 1x1 convolution, not padding.
        zero_last: Whether the weights of a block's last norm begin with zeros, so that the block
            at first returns its shortcut, as in Goyal et al. (2017) for large batches.
    """

    block: partial | type
    expansion: int
    depths: tuple[int, ...]
    width: int = 64
    small_images: bool = False
    projections: bool = True
    zero_last: bool = True

    @property
    def halvings(self) -> int:
        """The number of times that height and width are halved."""
        return len(self.depths) - 1 + (0 if self.small_images else 2)


def _for_cifar(layers: int) -> Plan:
    """Return the paper's plan of 6n + 2 layers, which has 3 stages of n blocks."""
    depths = 3 * ((layers - 2) // 6,)
    return Plan(
        BasicBlock, 1, depths, width=16, small_images=True, projections=False, zero_last=False
    )


#: The plan of each model size, by the kind of images.
PLANS = {
    "cifar": {str(layers): _for_cifar(layers) for layers in (8, 14, 20, 32, 44, 56)},
    "imagenet": {
        "18": Plan(BasicBlock, BasicBlock.expansion, (2, 2, 2, 2)),
        "34": Plan(BasicBlock, BasicBlock.expansion, (3, 4, 6, 3)),
        "50": Plan(Bottleneck, Bottleneck.expansion, (3, 4, 6, 3)),
    },
}


def make(plan: Plan, num_classes: int, norm: Norm) -> nn.Sequential:
    """Return the network, with He et al.'s normal weights."""
    kernel, stride = (3, 1) if plan.small_images else (7, 2)
    layers: dict[str, nn.Module] = {
        "conv1": _conv(3, plan.width, kernel, stride),
        "bn1": norm(plan.width),
        "relu": nn.ReLU(inplace=True),
    }
    if not plan.small_images:
        layers["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    inputs = plan.width
    for index, depth in enumerate(plan.depths):
        channels = plan.width * 2**index
        first = _block(plan, inputs, channels, 2 if index else 1, norm)
        inputs = channels * plan.expansion
        others = [_block(plan, inputs, channels, 1, norm) for _ in range(depth - 1)]
        layers[f"layer{index + 1}"] = nn.Sequential(first, *others)
    layers["avgpool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(inputs, num_classes)
    network = nn.Sequential(OrderedDict(layers))
    _draw_weights(network, plan.zero_last)
    return network


def _block(plan: Plan, inputs: int, channels: int, stride: int, norm: Norm) -> nn.Module:
    outputs = channels * plan.expansion
    shortcut: nn.Module
    if stride == 1 and inputs == outputs:
        shortcut = nn.Identity()
    elif plan.projections:
        shortcut = nn.Sequential(_conv(inputs, outputs, 1, stride), norm(outputs))
    else:
        shortcut = PaddedShortcut(stride, outputs - inputs)
    return plan.block(inputs, channels, stride, norm, shortcut)


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    padding = kernel // 2
    return nn.Conv2d(
        inputs, outputs, kernel, stride=stride, padding=padding, groups=groups, bias=False
    )


def _draw_weights(network: nn.Module, zero_last: bool) -> None:
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        elif zero_last and isinstance(part, (BasicBlock, Bottleneck)):
            last = part.bn2 if isinstance(part, BasicBlock) else part.bn3
            nn.init.zeros_(last.weight)
