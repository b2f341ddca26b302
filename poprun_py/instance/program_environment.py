"""What keeps MPI and gloo to their network, and gives programs the SDK's names and our back end.

The hook, popdist_py/start_hook on PYTHONPATH, lies beside us on every host, in a checkout and in an
install. It reads POPDIST_MPI_NETWORK, POPDIST_SDK_NAMES, POPDIST_TORCH_BACKEND and
POPDIST_JOB_FOLDER in every Python that starts, also in one that a shell script starts.
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
# Where the kernel tells the networks that this host is on, and which faster ones it has.
_ROUTES, _FABRIC = "/proc/net/route", "/sys/class/infiniband"


def variables(environ: "Mapping[str, str]") -> dict[str, str]:
    """Return what to set beside ``environ`` so that Pythons find what it asks for."""
    gives_names = environ.get("POPDIST_SDK_NAMES") in ("auto", "yes")
    replaces_back_end = environ.get("POPDIST_TORCH_BACKEND") in ("gloo", "popdist")
    keeps_mpi = environ.get("POPDIST_MPI_NETWORK") or environ.get("POPDIST_NETWORK")
    has_folder = environ.get("POPDIST_JOB_FOLDER")
    if not (gives_names or replaces_back_end or keeps_mpi or has_folder):
        return {}
    found = _of_interface(keeps_mpi, environ) if keeps_mpi else {}
    path = environ.get("PYTHONPATH", "")
    # First, once: Python runs the sitecustomize that it finds first.
    rest = [entry for entry in path.split(os.pathsep) if entry != _HOOK] if path else []
    return {"PYTHONPATH": os.pathsep.join([_HOOK, *rest]), **found}


def _of_interface(network: str, environ: "Mapping[str, str]") -> dict[str, str]:
    """Return what keeps gloo, and MPICH's UCX, to the interface of a network; the user's is kept.

    By itself gloo takes whatever address this host's name leads to, UCX every one.
    """
    names = {"GLOO_SOCKET_IFNAME"}
    if "PMI_RANK" in environ and "OMPI_COMM_WORLD_RANK" not in environ:
        names |= set() if os.path.isdir(_FABRIC) else {"UCX_NET_DEVICES"}
    interface = _interface_of(network)
    return {name: interface for name in names if interface and name not in environ}


def _interface_of(network: str) -> str:
    """Return the interface of a network, which may be its name; empty if there is none here."""
    address, slash, bits = network.partition("/")
    if not slash:
        return network
    try:
        wanted, mask = _number(address), (1 << 32) - (1 << 32 - int(bits))
        with open(_ROUTES, encoding="ascii") as lines:
            for line in list(lines)[1:]:
                name, target, gateway = line.split()[:3]
                # Written as the words of this machine, whose bytes are in the network's order.
                found = int.from_bytes(int(target, 16).to_bytes(4, sys.byteorder), "big")
                if int(gateway, 16) == 0 and found & mask == wanted & mask:
                    return name
    except (OSError, ValueError):
        pass
    return ""


def _number(address: str) -> int:
    """Return an IPv4 address as a number; ValueError for others, which are listed elsewhere."""
    first, second, third, fourth = map(int, address.split("."))
    return int.from_bytes(bytes((first, second, third, fourth)), "big")


def lent_sockets() -> "ModuleType":
    """Return the hook's popdist_lent_sockets; the package around it takes long to import."""
    sys.path.insert(0, _HOOK)
    try:
        import popdist_lent_sockets  # type: ignore[import-not-found]
    finally:
        sys.path.remove(_HOOK)
    module: ModuleType = popdist_lent_sockets
    return module
