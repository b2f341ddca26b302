"""The networks of main.py and the limits of their input, without a slow import."""

from __future__ import annotations

__all__ = ["NETWORKS", "too_few_values"]

#: Each network with the block of its layer3 that begins the second IPU.
NETWORKS = {"resnet18": 1, "resnet34": 3, "resnet50": 3, "resnet101": 8}


def too_few_values(batch_size: int, side: int) -> str | None:
    """Return the error of a micro-batch that is too small for every network, else None.

    All networks halve the height and width of images five times, rounding up.
    """
    if batch_size > 1 or side > 32:
        return None
    return (
        "argument --batch-size: 1 is given with images of 32 or less, whose last batch "
        "normalisation gets one value per channel: 2 or more are accepted, or --side 33"
    )
