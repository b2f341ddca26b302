"""ResNeXt (Xie et al., 2016): Residual networks with 3x3 convolutions in groups."""

from __future__ import annotations

from functools import partial

from models.resnet import Bottleneck, Plan

__all__ = ["PLANS"]


def _plan(groups: int, group_width: int, depths: tuple[int, ...], **changes) -> Plan:
    block = partial(Bottleneck, groups=groups, group_width=group_width)
    return Plan(block, Bottleneck.expansion, depths, **changes)


#: The plan of each model size, by the kind of images. The paper has 29 (8x64d) and 50 (32x4d). Size
#: 11 is an addition for trials. Its groups have a quarter of the width.
PLANS = {
    "cifar": {
        "11": _plan(8, 16, (1, 1, 1), small_images=True),
        "29": _plan(8, 64, (3, 3, 3), small_images=True),
    },
    "imagenet": {"50": _plan(32, 4, (3, 4, 6, 3))},
}
