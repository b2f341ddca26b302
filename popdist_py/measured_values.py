"""Measurements of this machine, cached in the user's cache folder for later jobs.

If a cache file is missing, unreadable or invalid, the callers of this module measure its values
again. This module only stores the values, and neither measures nor interprets them. The module
imports only the standard library.
"""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from popdist_py.atomic_file import replaced_at_end

_MOST_VALUES = 1000  # in one file; beyond this number, the oldest values are removed


def recall(file: str, key: str) -> Any:
    """Return the value that a job stored with ``remember`` on this machine, or None."""
    with suppress(OSError, ValueError, AttributeError, RuntimeError):
        return json.loads(_path(file).read_text()).get(_own(key))
    return None


def remember(file: str, key: str, value: Any) -> None:
    """Store a value that JSON supports. Do nothing if the file cannot be written."""
    # expanduser() raises RuntimeError if the user has no home folder. The json module raises
    # RecursionError, which is a RuntimeError, if JSON is nested too deeply.
    with suppress(OSError, RuntimeError):
        path = _path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        values: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError, RecursionError):
            values = dict(json.loads(path.read_text()))
        values.pop(_own(key), None)
        values[_own(key)] = value
        kept = dict(list(values.items())[-_MOST_VALUES:])
        # Another job may read the file at the same time, so the file is replaced atomically.
        with replaced_at_end(path) as partial:
            partial.write_text(json.dumps(kept))


def _path(file: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "popdist" / f"{file}.json"


def _own(key: str) -> str:
    """Return the key after this machine's name, because hosts may share the cache folder."""
    return f"{platform.node()}/{key}"
