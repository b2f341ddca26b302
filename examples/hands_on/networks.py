"""The networks of main.py and the limits of their input, without a slow import."""

from __future__ import annotations

__all__ = ["NETWORKS", "too_few_values"]

#: For each network, the number of the first block of its ``layer3`` on the second IPU.
NETWORKS = {"resnet18": 1, "resnet34": 3, "resnet50": 3, "resnet101": 8}


def too_few_values(batch_size: int, side: int) -> str | None:
    """Return an error text if a micro-batch is too small for every network; otherwise None.

    All networks halve the height and width of images five times, rounding up.
    """
    if batch_size > 1 or side > 32:
        return None
    return (
        "argument --batch-size: 1 is given with images of 32 or less, whose last batch "
        "normalisation gets one value per channel: 2 or more are accepted, or --side 33"
    )
