"""Finds the SDK's packages (poptorch, popdist, horovod, popart) in the folder ``sdk_names``.

An import finder has two advantages over an entry of ``sys.path``. First, installed packages take
precedence over ``sdk_names``, even if other finders find them. Second, the finder chooses a package
only when the program imports the package. Python imports popdist_sdk_finder when it starts. To keep
the start of Python fast, this module imports only popdist_import_hook and modules that Python has
already loaded.
"""

import os
import sys
from _frozen_importlib_external import PathFinder

import popdist_import_hook  # type: ignore[import-not-found]

# This constant replaces typing.TYPE_CHECKING. Importing typing would take longer than importing the
# rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_SDK = dict.fromkeys(
    ("horovod", "popart", "popdist", "poptorch"), os.path.join(_LIBRARY, "sdk_names")
)
# The packages in ``sdk_names`` import these modules. The finder finds the modules even if sys.path
# does not contain the folder of the library.
_NEEDED = dict.fromkeys(("popdist_py", "popdist_torchvision_hook"), os.path.dirname(_LIBRARY))
_FOLDERS = {**_SDK, **_NEEDED}


class _SdkFinder:
    """An import finder for the packages in ``sdk_names`` and for the modules that they import.

    Args:
        always: Whether packages in ``sdk_names`` replace installed packages. A package in the
            program's own folder always takes precedence over ``sdk_names``.
    """

    def __init__(self, always: bool) -> None:
        self._always = always
        # sys.path does not contain the program's own folder yet. Python adds this folder later.
        self._installed = tuple(sys.path)

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        """Return the spec of a module in ``_FOLDERS``, and None for every other module."""
        if name not in _FOLDERS:
            return None
        theirs = self._theirs(name)
        if theirs is not None and theirs.loader is not None:
            return theirs
        ours = PathFinder.find_spec(name, [_FOLDERS[name]])
        if ours is not None and theirs is not None:
            # The other finders have found only a folder without __init__.py. As always in Python, a
            # package takes precedence over a folder without __init__.py. The package's search path
            # includes this folder, so modules in the folder can still be imported.
            folders = [*(theirs.submodule_search_locations or ())]
            ours.submodule_search_locations = folders + (ours.submodule_search_locations or [])
        return ours

    def _theirs(self, name: str) -> "ModuleSpec | None":
        """Return the spec of a package that takes precedence over ``sdk_names``, or None.

        A folder without __init__.py is returned only if no finder has found a package.
        """
        if self._always and name in _SDK:
            # If the program's folder is on PYTHONPATH too, sys.path contains this folder twice.
            before = self._installed.count
            own = [entry for entry in sys.path if sys.path.count(entry) > before(entry)]
            return PathFinder.find_spec(name, own)
        found = [*popdist_import_hook.specs(name, without=self)]
        packages = (spec for spec in found if spec.loader is not None)
        return next(packages, found[0] if found else None)


def start(default: str) -> bool:
    """Install the finder if the variable POPDIST_SDK_NAMES is ``auto`` or ``yes``.

    If the variable is not set, ``default`` is used as its value.

    Returns:
        Whether the finder was installed.
    """
    mode = os.environ.get("POPDIST_SDK_NAMES") or default
    if mode not in ("auto", "yes"):
        return False
    # The new finder replaces the _SdkFinder that a .pth file may have installed. The new finder
    # must be the first finder, but other finders may have been added after the .pth file was run.
    others = [f for f in sys.meta_path if type(f).__name__ != _SdkFinder.__name__]
    sys.meta_path[:] = [_SdkFinder(always=mode == "yes"), *others]
    return True
