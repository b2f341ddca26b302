"""What keeps MPI to its network, and gives programs the SDK's names and our back end.

The hook, popdist_py/start_hook on PYTHONPATH, lies beside us on every host, in a checkout and in an
install. It reads POPDIST_MPI_NETWORK, POPDIST_SDK_NAMES and POPDIST_TORCH_BACKEND in every Python
that starts, also behind a shell script.
"""

import os
import sys

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_HOOK = os.path.join(_ROOT, "popdist_py", "start_hook")


def variables(environ: "Mapping[str, str]") -> dict[str, str]:
    """Return what to set beside ``environ`` so that Pythons find what it asks for."""
    gives_names = environ.get("POPDIST_SDK_NAMES") in ("auto", "yes")
    replaces_back_end = environ.get("POPDIST_TORCH_BACKEND") in ("gloo", "popdist")
    keeps_mpi = environ.get("POPDIST_MPI_NETWORK") or environ.get("POPDIST_NETWORK")
    if not gives_names and not replaces_back_end and not keeps_mpi:
        return {}
    path = environ.get("PYTHONPATH", "")
    # First, once: Python runs the sitecustomize that it finds first.
    rest = [entry for entry in path.split(os.pathsep) if entry != _HOOK] if path else []
    return {"PYTHONPATH": os.pathsep.join([_HOOK, *rest])}


def lent_sockets() -> "ModuleType":
    """Return the hook's popdist_lent_sockets; the package around it takes long to import."""
    sys.path.insert(0, _HOOK)
    try:
        import popdist_lent_sockets  # type: ignore[import-not-found]
    finally:
        sys.path.remove(_HOOK)
    module: ModuleType = popdist_lent_sockets
    return module
