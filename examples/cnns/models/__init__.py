"""The networks of the CNN programs by name, with functions that make and cut them.

torchvision is imported for EfficientNet only, so that programs with other networks start faster. A
wrong option raises a ValueError with a message of one line.
"""

from __future__ import annotations

import argparse

from torch import nn

from models import norms, resnet, resnext
from models.placement import place, splits
from models.steps import ForTraining, ForValidation, prepare

__all__ = [
    "ForTraining",
    "ForValidation",
    "create",
    "label",
    "place",
    "sizes",
    "splits",
]

_PLANS = {"resnet": resnet.PLANS, "resnext": resnext.PLANS}
_SHORT_NAMES = {"resnet": "RN", "resnext": "RNX", "efficientnet": "EN"}


def sizes(model: str, dataset: str) -> tuple[str, ...]:
    """Return the sizes that a model has for the images of a data set, the smallest first."""
    return ("B0",) if model == "efficientnet" else tuple(_PLANS[model][_kind(dataset)])


def create(args: argparse.Namespace, num_classes: int) -> nn.Module:
    """Return the network that the arguments describe, with weights of the chosen precision.

    The network maps images [N, 3, S, S] to scores [N, classes]. torch's random generator determines
    its weights.

    Raises:
        ValueError: The data set does not have this model size, or a batch norm gets too few values.
    """
    size, kind = args.model_size.upper(), _kind(args.dataset)
    accepted = sizes(args.model, args.dataset)
    if size not in accepted:
        raise ValueError(
            f"--model-size {args.model_size} is given for {args.model} on {args.dataset}: "
            f"{', '.join(accepted)} {'are' if len(accepted) > 1 else 'is'} accepted"
        )
    norm = norms.make(args)
    if args.model == "efficientnet":
        from models import efficientnet  # imported here because torchvision is slow to import

        halvings = efficientnet.halvings(kind)
        network = efficientnet.make(kind, num_classes, norm)
    else:
        plan = _PLANS[args.model][kind][size]
        halvings = plan.halvings
        network = resnet.make(plan, num_classes, norm)
    if args.norm == "batch" and args.batch_size == 1 and args.image_size <= 2**halvings:
        raise ValueError(
            f"--batch-size 1 is given with images of {args.image_size}, whose last batch "
            f"norm gets one value per channel: give 2 or more, --image-size {2**halvings + 1} or "
            "more, or --group-norm"
        )
    return prepare(network, args)


def label(args: argparse.Namespace) -> str:
    """Return a short name of the model and its size, such as "RN20", "RNX50" or "ENB0"."""
    return _SHORT_NAMES[args.model] + args.model_size.upper()


def _kind(dataset: str) -> str:
    return "imagenet" if dataset == "imagenet" else "cifar"
