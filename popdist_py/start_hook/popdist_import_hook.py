"""An import hook, which calls a function when a program imports a certain module.

Python imports this module at its start. To keep the start of Python fast, this module imports only
modules that Python has already loaded.
"""

import sys

# This constant replaces typing.TYPE_CHECKING. Importing typing would take longer than importing the
# rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Run = Callable[[Callable[[ModuleType], object], ModuleType], None]


def run_at_import(name: str, run: "Run") -> None:
    """Call ``run(execute, module)`` when a program imports the module ``name`` for the first time.

    If the module is already imported, ``run`` is called at once, with a function that does nothing.

    Args:
        name: The full name of the module, such as ``torch.distributed``.
        run: A function that must call ``execute(module)``, which runs the module's code.
    """
    if name in sys.modules:
        run(_do_nothing, sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, run))


def _do_nothing(module: "ModuleType") -> None:
    pass


def specs(name: str, path: object = None, without: object = None) -> "Iterator[ModuleSpec]":
    """Yield the module specs for ``name`` from all import finders except the finder ``without``."""
    for finder in sys.meta_path:
        # Like Python's import system, this loop skips finders without find_spec.
        find = getattr(finder, "find_spec", None)
        if finder is not without and find is not None and (spec := find(name, path)) is not None:
            yield spec


class _Finder:
    """Finds a module by the other import finders, and replaces the function that runs its code."""

    def __init__(self, name: str, run: "Run") -> None:
        self._name = name
        self._run = run

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        """Return the module's spec with a replaced ``exec_module``, or None for other modules."""
        if name != self._name:
            return None
        found = next(specs(name, path, without=self), None)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_run(module: "ModuleType") -> None:
                # The hook must run only once. However, a program may ask for the module's spec
                # several times, and two specs may share a loader.
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._run(execute, module)
                else:
                    execute(module)

            found.loader.exec_module = execute_and_run  # type: ignore[method-assign]
        return found
