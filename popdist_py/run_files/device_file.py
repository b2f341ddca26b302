"""What the model of the device says of the models that a program compiled: ``.device.json``.

    {"version": 1, "models": [{"name": ..., "mode": ..., ...}, ...]}

What stands in a model's part is the caller's matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from popdist_py.atomic_file import write_whole
from popdist_py.run_files.place import run_file

__all__ = ["NAME", "VERSION", "is_wanted", "keep_model"]

NAME: Final = "device.json"
# A larger one where a key went or changed its meaning.
VERSION: Final = 1

_models: dict[tuple[str, str], Mapping[str, Any]] = {}


def is_wanted() -> bool:
    """Tell whether this program has such a file."""
    return run_file(NAME) is not None


def keep_model(model: Mapping[str, Any]) -> None:
    """Write the file anew with one more model; the last one of a ``name`` and ``mode`` counts.

    Raises:
        OSError: it cannot be written; the file is as it was.
        TypeError, ValueError: it is no JSON; the same.
    """
    path = run_file(NAME)
    if path is None:
        return
    models = {**_models, (model["name"], model["mode"]): model}
    text = json.dumps({"version": VERSION, "models": list(models.values())})
    _models.update(models)
    write_whole(path, text + "\n")
