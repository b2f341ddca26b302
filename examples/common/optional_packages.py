"""Packages that only some examples need: one line names a missing one and how to install it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

__all__ = ["PACKAGES", "how_to_install", "name_missing_packages"]

#: By the name under which a program imports it: pip's name, and the extra of poprun-py that has it.
PACKAGES: Mapping[str, tuple[str, str]] = {
    "PIL": ("pillow", "tutorials"),
    "crc32c": ("crc32c", "tutorials"),
    "google": ("protobuf", "tutorials"),
    "jupytext": ("jupytext", "test"),
    "matplotlib": ("matplotlib", "tutorials"),
    "optuna": ("optuna", "sweeps"),
    "pytorch_lightning": ("pytorch-lightning", "frameworks"),
    "skimage": ("scikit-image", "tutorials"),
    "sklearn": ("scikit-learn", "examples"),
    "submitit": ("submitit", "sweeps"),
    "tfrecord": ("tfrecord", "tutorials"),
    "wandb": ("wandb", "test"),
    "yaml": ("pyyaml", "tutorials"),
}


def how_to_install(error: BaseException) -> str | None:
    """Return one line that names the package that is missing; None for every other error."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    found = PACKAGES.get((error.name or "").partition(".")[0])
    if found is None:
        return None
    name, extra = found
    return (
        f"{Path(sys.argv[0]).name} needs {name}, which is not installed: "
        f"python -m pip install {name} (poprun-py's extra {extra!r} has it)"
    )


def name_missing_packages() -> None:
    """Print the line in place of a traceback, also for what a program imports at its top."""
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = how_to_install(error)
        if line is None:
            otherwise(kind, error, trace)
        elif os.environ.get("RANK", "0") == "0":  # of several instances, one speaks
            sys.stderr.write(f"{line}\n")

    sys.excepthook = hook
