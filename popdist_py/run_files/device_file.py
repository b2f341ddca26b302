"""The file ``.device.json``, in which the device model describes the compiled models.

    {"version": 1, "models": [{"name": ..., "mode": ..., ...}, ...]}

The caller of ``keep_model`` chooses the other keys of a model's document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from popdist_py.atomic_file import write_whole
from popdist_py.run_files.place import run_file

NAME: Final = "device.json"
# The version increases when a key is removed or changes its meaning.
VERSION: Final = 1

_models: dict[tuple[str, str], Mapping[str, Any]] = {}


def is_wanted() -> bool:
    """Return whether this process writes the file ``.device.json``."""
    return run_file(NAME) is not None


def keep_model(model: Mapping[str, Any]) -> None:
    """Add the document of a model, and write the whole file again.

    The document replaces an earlier document with the same ``name`` and ``mode``. After an error,
    the file is unchanged.

    Raises:
        OSError: The file cannot be written.
        TypeError, ValueError: ``model`` cannot be written as JSON.
    """
    path = run_file(NAME)
    if path is None:
        return
    models = {**_models, (model["name"], model["mode"]): model}
    text = json.dumps({"version": VERSION, "models": list(models.values())})
    _models.update(models)
    write_whole(path, text + "\n")
