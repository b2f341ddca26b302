"""Lets torchvision be imported before and after the PopTorch API: a CUDA build beside a CPU torch.

A .pth file imports this module whenever Python starts, in an environment with the library; so does
the PopTorch API, for a checkout without such a file. So it costs next to nothing: it waits until
torchvision is imported, if ever. What is done then is
``popdist_py/poptorch/operators/torchvision_shim.py``'s, which runs without the rest of the API.
"""

import sys

_SHIM = "popdist_py.poptorch.operators.torchvision_shim"


class _Finder:
    """Finds torchvision as the other finders do, and mends it before it runs."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Return the spec of torchvision, with another first step; None for all others."""
        if name != "torchvision":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
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


sys.meta_path.insert(0, _Finder())
