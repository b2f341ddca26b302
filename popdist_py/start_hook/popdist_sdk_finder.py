"""Finds the SDK's packages (poptorch, popdist, horovod, popart) in the folder ``sdk_names``.

A finder rather than an entry of ``sys.path``: what is installed goes before ours however it is
found, and that is decided for each package when the program imports it. Imported when Python
starts, so it imports nothing that is not there by then.
"""

import os
import sys
from _frozen_importlib_external import PathFinder

import popdist_import_hook  # type: ignore[import-not-found]

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SDK = dict.fromkeys(
    ("horovod", "popart", "popdist", "poptorch"), os.path.join(_LIBRARY, "sdk_names")
)
# What the names need: there also for a Python that was given no more than a path to this folder.
_NEEDED = dict.fromkeys(("popdist_py", "popdist_torchvision_hook"), os.path.dirname(_LIBRARY))
_FOLDERS = {**_SDK, **_NEEDED}


class _SdkFinder:
    """Stands before the other finders, and asks them first; ``always`` only for the user's own."""

    def __init__(self, always: bool) -> None:
        self._always = always
        # Without the program's own folder, which comes onto the path later.
        self._installed = tuple(sys.path)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        """Return the spec of one of the packages; None for every other module."""
        if name not in _FOLDERS:
            return None
        theirs = self._theirs(name)
        if theirs is not None and theirs.loader is not None:
            return theirs
        ours = PathFinder.find_spec(name, [_FOLDERS[name]])
        if ours is not None and theirs is not None:
            # A folder without __init__.py stands behind packages, as always in Python. The modules
            # in it can still be imported.
            folders = [*(theirs.submodule_search_locations or ())]
            ours.submodule_search_locations = folders + (ours.submodule_search_locations or [])
        return ours

    def _theirs(self, name: str) -> "ModuleSpec | None":
        """Return what goes before ours; a folder without __init__.py only if nothing else does."""
        if self._always and name in _SDK:
            # The program's folder may be on PYTHONPATH too: then it comes once more.
            before = self._installed.count
            own = [entry for entry in sys.path if sys.path.count(entry) > before(entry)]
            return PathFinder.find_spec(name, own)
        found = [*popdist_import_hook.specs(name, without=self)]
        packages = (spec for spec in found if spec.loader is not None)
        return next(packages, found[0] if found else None)


def start(default: str) -> bool:
    """Let this Python find the packages as POPDIST_SDK_NAMES says, or ``default``; tell whether."""
    mode = os.environ.get("POPDIST_SDK_NAMES") or default
    if mode not in ("auto", "yes"):
        return False
    # In place of one from a .pth file, after which others have added what they install.
    others = [f for f in sys.meta_path if type(f).__name__ != _SdkFinder.__name__]
    sys.meta_path[:] = [_SdkFinder(always=mode == "yes"), *others]
    return True
