"""Import hooks of every Python in an environment with the library: torchvision and missing names.

torchvision may be imported before and after the PopTorch API, also a CUDA build beside a CPU torch.
``popdist_py/poptorch/operators/torchvision_shim.py`` does the work, without the rest of the API.

If ``import poptorch`` ends a program because the package is missing, advice is printed.

A .pth file imports this module whenever Python starts. A checkout may have no .pth file, so the
PopTorch API imports this module too. To keep the start of Python fast, the hooks wait until a
program imports torchvision or a missing name.
"""

import sys

_NAMES = ("poptorch", "popdist", "horovod", "popart")
_SHIM = "popdist_py.poptorch.operators.torchvision_shim"


class _Finder:
    """An import finder that consists of a function."""

    def __init__(self, find_spec):  # type: ignore[no-untyped-def]
        self.find_spec = find_spec


def _find_torchvision(name, path=None, target=None):  # type: ignore[no-untyped-def]
    """Return the spec of torchvision, with another first step; None for all others."""
    if name != "torchvision":
        return None
    others = (finder for finder in sys.meta_path if finder is not _TORCHVISION)
    found = (finder.find_spec(name, path, target) for finder in others)
    spec = next((spec for spec in found if spec is not None), None)
    if spec is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def mend_and_execute(module):  # type: ignore[no-untyped-def]
            _mend()
            execute(module)

        spec.loader.exec_module = mend_and_execute  # type: ignore[method-assign]
    return spec


def _mend() -> None:
    """Define what torchvision's build lacks; without the library, or torch, do nothing."""
    from importlib import util
    from pathlib import Path

    if _SHIM in sys.modules:
        sys.modules[_SHIM].define_missing_operators()
        return
    library = util.find_spec("popdist_py")
    if library is None or library.origin is None:
        return
    file = Path(library.origin).with_name("poptorch") / "operators" / "torchvision_shim.py"
    spec = util.spec_from_file_location(_SHIM, file)
    if spec is None or spec.loader is None or util.find_spec("torch") is None:
        return
    # Under its own name, so that the API finds it done.
    sys.modules[_SHIM] = shim = util.module_from_spec(spec)
    spec.loader.exec_module(shim)
    shim.define_missing_operators()


def _note_missing_name(name, *_):  # type: ignore[no-untyped-def]
    """Return None, as without this finder; the first missing name of the SDK prepares the advice.

    This finder stands behind Python's own finders, so these have not found the name.
    """
    global _has_advised
    if name not in _NAMES or _has_advised:
        return
    # In an instance, the finder of the names is there, and asks all other finders.
    if not any(type(finder).__name__ == "_SdkFinder" for finder in sys.meta_path):
        _has_advised = True
        _advise_at_end()


def _advise_at_end() -> None:
    """Add a line with advice to the traceback of a program that a missing name ends."""
    import os

    if os.environ.get("POPDIST_SDK_NAMES") == "no":
        return  # the user of this job does not want the names
    show = sys.excepthook

    def show_and_advise(kind, error, trace):  # type: ignore[no-untyped-def]
        show(kind, error, trace)
        name = getattr(error, "name", None)
        if isinstance(error, ModuleNotFoundError) and name in _NAMES and sys.stderr is not None:
            sys.stderr.write(
                f"popdist_py: this environment emulates {name}: run the program with poprun-py "
                "PROGRAM, or install the names once with poprun-py --install-names\n"
            )

    sys.excepthook = show_and_advise


_TORCHVISION = _Finder(_find_torchvision)  # type: ignore[no-untyped-call]
_has_advised = False
sys.meta_path.insert(0, _TORCHVISION)
sys.meta_path.append(_Finder(_note_missing_name))  # type: ignore[no-untyped-call]
