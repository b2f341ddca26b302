"""Keeps the sockets of multiprocessing in the folder of the job, which the launcher removes.

By default, the sockets are in a folder ``pymp-*`` in TMPDIR. If a signal or an exception ends a
process, the process does not remove its folder ``pymp-*``. Python imports this module when it
starts. To keep the start of Python fast, this module imports only popdist_import_hook and modules
that Python has already loaded.
"""

import os
import sys

import popdist_import_hook  # type: ignore[import-not-found]

# This constant replaces typing.TYPE_CHECKING. Importing typing would take longer than importing the
# rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_MODULE = "multiprocessing.util"
# Linux limits the path of a socket to 107 bytes. This path is the folder and a file name that
# multiprocessing adds.
_LONGEST_FOLDER = 107 - len("/listener-12345678")


def _keep_in(folder: str, util: "ModuleType") -> None:
    """Make multiprocessing use ``folder`` for temporary files while this folder is writable."""
    default: Callable[[], str] = util.get_temp_dir

    def get_temp_dir() -> str:
        # A process may lose access to the folder when it changes its user or its mounts.
        return folder if os.access(folder, os.W_OK | os.X_OK) else default()

    util.get_temp_dir = get_temp_dir  # type: ignore[attr-defined]


def start() -> None:
    """In a job, set multiprocessing's folder now, or when multiprocessing.util is imported."""
    folder = os.environ.get("POPDIST_JOB_FOLDER", "")
    if not folder or len(os.fsencode(folder)) > _LONGEST_FOLDER:
        return

    def execute_and_keep(execute: "Callable[[ModuleType], object]", util: "ModuleType") -> None:
        execute(util)
        _keep_in(folder, util)

    if _MODULE in sys.modules:
        _keep_in(folder, sys.modules[_MODULE])
    else:
        popdist_import_hook.run_at_import(_MODULE, execute_and_keep)
