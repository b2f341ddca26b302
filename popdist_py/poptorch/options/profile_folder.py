"""The folder into which a program wants its profile written.

A program asks for a profile with ``enableProfiling``, or with the ``autoReport`` keys of the engine
options. On emulated IPUs, the profile is the timeline of the process. This module does not record
or write the timeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from popdist_py.poptorch.options import engine_options, from_text
from popdist_py.poptorch.options.options import Options

__all__ = ["profile_folder"]

_DIRECTORY = "autoReport.directory"


def profile_folder(options: Options) -> Path | None:
    """Return the folder for the profile, or None if the program does not ask for a profile.

    Raises:
        Error: ``POPLAR_ENGINE_OPTIONS`` is not a JSON object.
    """
    given: Mapping[str, Any] = options._Popart.changed().get("engineOptions", {})
    wanted = {**given, **from_text.engine_environment()}
    asked = engine_options.REPORTS & wanted.keys()
    if not any(engine_options.is_on(wanted[name]) for name in asked):
        return None
    return Path(str(wanted.get(_DIRECTORY) or "."))
