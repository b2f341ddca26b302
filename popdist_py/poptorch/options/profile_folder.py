"""Where a program wants its profile: ``enableProfiling``, or ``autoReport`` in engine options.

Here the profile is the timeline of the process. Nothing here records or writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from popdist_py.poptorch.options import from_text
from popdist_py.poptorch.options.options import Options

__all__ = ["is_report", "profile_folder"]

_DIRECTORY = "autoReport.directory"


def profile_folder(options: Options) -> Path | None:
    """Return the folder for the profile; None if no profile is wanted.

    Raises:
        Error: ``POPLAR_ENGINE_OPTIONS`` is no JSON object.
    """
    given: Mapping[str, Any] = options._Popart.changed().get("engineOptions", {})
    wanted = {**given, **from_text.engine_environment()}
    reports = {name: str(value).lower() for name, value in wanted.items() if is_report(name)}
    return Path(str(wanted.get(_DIRECTORY) or ".")) if "true" in reports.values() else None


def is_report(name: str) -> bool:
    """Tell whether an engine option asks for a part of the profile."""
    return name.startswith("autoReport.")
