"""Decides how ``make`` builds its virtual environment. Standard library only.

A machine that has torch keeps it: the environment then sees the base Python's packages, and the
constraint is that torch, so that pip does not fetch a second one of several gigabytes.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

# torchvision 0.(n + 15) is built for torch 2.n, and its metadata asks for exactly that one.
_TORCHVISION_OFFSET = 15


def base_torch() -> str | None:
    """Return the version of the torch that this Python has, or None."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    major, minor = (int(part) for part in version.split(".")[:2])
    return version if (major, minor) >= (2, 4) else None


def constraints(torch: str | None, pinned: str) -> str:
    """Return the constraints: the project's, with the installed torch and its torchvision."""
    if torch is None or f"torch=={torch.partition('+')[0]}\n" in pinned:
        return pinned
    minor = int(torch.split(".")[1])
    lines = [
        line
        for line in pinned.splitlines()
        if not line.startswith(("torch==", "torchvision==", "numpy=="))
    ]
    return "\n".join(
        [*lines, f"torch=={torch}", f"torchvision==0.{minor + _TORCHVISION_OFFSET}.*", ""]
    )


if __name__ == "__main__":
    if "--constraints" in sys.argv:
        text = (Path(__file__).parent.parent / "constraints.txt").read_text(encoding="utf-8")
        sys.stdout.write(constraints(base_torch(), text))
    elif base_torch() is not None:
        sys.stdout.write("--system-site-packages")
