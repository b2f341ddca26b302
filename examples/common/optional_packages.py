"""An error line for a missing optional package, which replaces the traceback."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

__all__ = ["PACKAGES", "how_to_install", "name_missing_packages"]

#: For the module of each optional package: the package's name for pip, and the extra of poprun-py
#: that installs it.
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
    """Return a line that says how to install a missing package; None for every other error."""
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
    """Install an exception hook that prints how to install a missing optional package."""
    otherwise = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        line = how_to_install(error)
        if line is None:
            otherwise(kind, error, trace)
        elif os.environ.get("RANK", "0") == "0":  # only one of several instances prints
            sys.stderr.write(f"{line}\n")

    sys.excepthook = hook
