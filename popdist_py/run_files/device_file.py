"""The file ``.device.json``, in which the device model describes the compiled models.

    {"version": 1, "models": [{"name": ..., "mode": ..., ...}, ...]}

The caller of ``keep_model`` chooses a model's keys other than ``name`` and ``mode``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from popdist_py.atomic_file import write_whole
from popdist_py.run_files.place import run_file

NAME: Final = "device.json"
# VERSION increases when a key of the file is removed or changes its meaning.
VERSION: Final = 1

_models: dict[tuple[str, str], Mapping[str, Any]] = {}


def is_wanted() -> bool:
    """Return whether this process writes the file ``.device.json``."""
    return run_file(NAME) is not None


def keep_model(model: Mapping[str, Any]) -> None:
    """Add the description of a model to the file, and write the whole file again.

    The description replaces an earlier description with the same ``name`` and ``mode``. After an
    error, the file is unchanged.

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
