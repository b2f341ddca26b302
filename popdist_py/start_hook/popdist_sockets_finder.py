"""Keeps the sockets of multiprocessing in the folder of the job, which the launcher removes.

By default they lie in a folder ``pymp-*`` in TMPDIR. A process removes that folder when it ends by
itself, but not when a signal or an exception ends it. This module is imported when Python starts,
so it imports only modules that Python has loaded by then.
"""

import os
import sys

# Stands for typing.TYPE_CHECKING: importing typing takes longer than the rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MODULE = "multiprocessing.util"
# Linux limits the path of a socket to 107 bytes; multiprocessing adds a name to the folder.
_LONGEST_FOLDER = 107 - len("/listener-12345678")


class _UtilFinder:
    """Finds multiprocessing.util through the other finders, and adds a last step to its import."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        """Return the spec of multiprocessing.util with a last step added; None for others."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        # The import system skips finders without find_spec, too.
        finds = (getattr(finder, "find_spec", lambda *_: None) for finder in sys.meta_path)
        found: ModuleSpec | None = next(
            (spec for find in finds if (spec := find(name, path))), None
        )
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_move(module: "ModuleType") -> None:
                execute(module)
                _keep_in(self._folder, module)

            found.loader.exec_module = execute_and_move  # type: ignore[method-assign]
        return found


def _keep_in(folder: str, util: "ModuleType") -> None:
    """Make ``folder`` multiprocessing's temporary folder while it exists and can be written."""
    default: Callable[[], str] = util.get_temp_dir

    def get_temp_dir() -> str:
        # The folder may be out of reach after a change of user or of mounts.
        return folder if os.access(folder, os.W_OK | os.X_OK) else default()

    util.get_temp_dir = get_temp_dir  # type: ignore[attr-defined]


def start() -> None:
    """Install the finder for multiprocessing.util, in a Python of a job."""
    folder = os.environ.get("POPDIST_JOB_FOLDER", "")
    if not folder or len(os.fsencode(folder)) > _LONGEST_FOLDER:
        return
    if _MODULE in sys.modules:
        _keep_in(folder, sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _UtilFinder(folder))
