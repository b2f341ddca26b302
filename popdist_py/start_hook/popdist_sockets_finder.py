"""Keeps the sockets of multiprocessing in the folder of the job, which the launcher removes.

By default they lie in a folder ``pymp-*`` in TMPDIR: a process removes it when it ends by itself,
and leaves it when a signal or an exception ends it. Imported when Python starts, so it imports
nothing that is not there by then.
"""

import os
import sys

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_MODULE = "multiprocessing.util"
# The longest path of a socket, less the name that multiprocessing gives it.
_LONGEST_FOLDER = 107 - len("/listener-12345678")


class _UtilFinder:
    """Finds multiprocessing.util as the other finders do, and adds a last step to its import."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        """Return the spec of multiprocessing.util, with another last step; None for all others."""
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        # Import passes over finders without find_spec as well.
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
    """Have multiprocessing's temporary folder be ``folder``, for as long as it is there."""
    default: Callable[[], str] = util.get_temp_dir

    def get_temp_dir() -> str:
        # Not where the program has another user now, or other mounts.
        return folder if os.access(folder, os.W_OK | os.X_OK) else default()

    util.get_temp_dir = get_temp_dir  # type: ignore[attr-defined]


def start() -> None:
    """Wait for multiprocessing.util in a Python of a job."""
    folder = os.environ.get("POPDIST_JOB_FOLDER", "")
    if not folder or len(os.fsencode(folder)) > _LONGEST_FOLDER:
        return
    if _MODULE in sys.modules:
        _keep_in(folder, sys.modules[_MODULE])
    else:
        sys.meta_path.insert(0, _UtilFinder(folder))
