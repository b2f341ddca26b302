"""The function ``profile_folder``, which returns the folder for the profile of a program.

A program requests a profile with the setter ``enableProfiling``, or with the ``autoReport`` keys of
the engine options. On emulated IPUs, the profile is the timeline of the process. The module
``profile_folder`` does not record or write the timeline.
"""

from __future__ import annotations

from pathlib import Path

from popdist_py.poptorch.options.options import Options

__all__ = ["profile_folder"]


def profile_folder(options: Options) -> Path | None:
    """Return the folder for the profile, or None if the program does not request a profile.

    Raises:
        Error: ``POPLAR_ENGINE_OPTIONS`` is not a JSON object.
    """
    popart = options._Popart
    # On real IPUs, each ``autoReport`` engine option requests a part of the profile. In this
    # library, each ``autoReport`` option requests the timeline of the process.
    is_requested = popart.is_engine_option_on(
        "autoReport.all",
        "autoReport.outputArchive",
        "autoReport.outputDebugInfo",
        "autoReport.outputExecutionProfile",
        "autoReport.outputGraphProfile",
        "autoReport.outputLoweredVars",
        "autoReport.outputSerializedGraph",
    )
    if not is_requested:
        return None
    return Path(str(popart.engine_value("autoReport.directory") or "."))
