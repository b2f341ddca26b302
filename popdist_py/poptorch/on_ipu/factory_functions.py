"""The function that a command line names as ``module:function``, found in a module or a file.

The user's function makes a model, and is called the factory function.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from popdist_py.poptorch.on_ipu.user_failures import FactoryError, user_code

__all__ = ["factory_function"]


def factory_function(factory: str) -> Callable[..., Any]:
    """Return the function that ``factory`` names.

    Args:
        factory: A text such as ``package.module:function`` or ``path/to/file.py:function``.

    Raises:
        FactoryError: The module, the file or the function does not exist, or the import fails. The
            message lists modules or functions with similar names.
    """
    where, colon, name = factory.rpartition(":")
    if not colon or not where or not name:
        raise FactoryError(
            f"{factory!r} does not name a function: expected package.module:function or "
            "file.py:function, as in torchvision.models:resnet50"
        )
    found: Any = _loaded_file(Path(where)) if where.endswith(".py") else _loaded_module(where)
    for part in name.split("."):
        with user_code(factory):
            is_there = hasattr(found, part)
        if not is_there:
            raise FactoryError(f"{where} has no function {name}{_nearest(part, dir(found))}")
        found = getattr(found, part)
    if not callable(found):
        raise FactoryError(
            f"{factory} has the type {type(found).__name__}: expected a function that returns a "
            "module"
        )
    function: Callable[..., Any] = found
    return function


def _loaded_module(name: str) -> ModuleType:
    # The current folder becomes part of Python's search path for modules, as with ``python -m``.
    if "" not in sys.path:
        sys.path.insert(0, "")
    parent, _, last = name.rpartition(".")
    path = getattr(_loaded_module(parent), "__path__", ()) if parent else None
    try:
        is_there = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        is_there = False
    if not is_there:
        known = [each.name for each in iter_modules(path)]
        raise FactoryError(
            f"there is no module {name} (the name of a file must end with "
            f".py){_nearest(last, known)}"
        )
    with user_code(name):
        return importlib.import_module(name)


def _nearest(name: str, known: Sequence[str]) -> str:
    """Return the part of an error message that lists names similar to ``name``."""
    public = {each.lower(): each for each in known if not each.startswith("_")}
    close = [public[each] for each in get_close_matches(name.lower(), public)]
    return f"; did you mean {', '.join(close)}?" if close else ""


def _loaded_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise FactoryError(f"the file {path} does not exist")
    # The folder of the user's file becomes part of Python's search path, as with ``python FILE``.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    with user_code(str(path)):
        spec.loader.exec_module(module)
    return module
