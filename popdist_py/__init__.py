"""PopDist in Python, for programs that run as instances of a poprun-py job.

Importing this package imports neither torch, NumPy nor mpi4py. ``init()`` connects the program to
the other instances of its job. The functions of PopDist's own API keep their names, such as
``getNumInstances``. The public names are listed only in the stub ``__init__.pyi``. The package
imports a module at the first use of one of the module's names. The launcher can therefore import
one module without the others.
"""

from functools import cache
from importlib import import_module

__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> object:
    module_of_name = _module_of_name()
    if name == "__all__":
        names = (each for each, module in module_of_name.items() if module != __name__)
        value: object = sorted(["__version__", *names])
    elif name not in module_of_name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    elif module_of_name[name] == __name__:
        return import_module(f"{__name__}.{name}")
    else:
        value = getattr(import_module(module_of_name[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})  # type: ignore[misc]


@cache
def _module_of_name() -> dict[str, str]:
    """Return a dict from each public name to the name of its module, read from the stub."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__path__[0], "__init__.pyi").read_text(encoding="utf-8"))
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: str(each.module) for each in imports for alias in each.names}
