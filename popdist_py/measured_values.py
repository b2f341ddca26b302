"""What was measured on this machine, for later jobs: small files in the user's cache folder.

Every file is a cache: if it is missing, unreadable or of another kind, what it held is measured
again. Nothing here measures, or knows what the values mean. Standard library only.
"""

from __future__ import annotations

import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from popdist_py.atomic_file import replaced_at_end

__all__ = ["recall", "remember"]

_MOST_VALUES = 1000  # of one file; those that were stored first go


def recall(file: str, key: str) -> Any:
    """Return what ``remember`` stored on this machine, by whichever job; None if there is none."""
    with suppress(OSError, ValueError, AttributeError, RuntimeError):
        return json.loads(_path(file).read_text()).get(_own(key))
    return None


def remember(file: str, key: str, value: Any) -> None:
    """Store a value that JSON knows; do nothing where no file can be written."""
    # Without a home there is no path, and what nests too deeply is no cache.
    with suppress(OSError, RuntimeError):
        path = _path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        values: dict[str, Any] = {}
        with suppress(OSError, ValueError, TypeError, RecursionError):
            values = dict(json.loads(path.read_text()))
        values.pop(_own(key), None)
        values[_own(key)] = value
        kept = dict(list(values.items())[-_MOST_VALUES:])
        # Another job may read the file at any time.
        with replaced_at_end(path) as partial:
            partial.write_text(json.dumps(kept))


def _path(file: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "popdist" / f"{file}.json"


def _own(key: str) -> str:
    """Return the key of this machine: hosts may share the folder."""
    return f"{platform.node()}/{key}"
