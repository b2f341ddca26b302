"""Registers the back end popdist in a Python of a job when it imports torch.distributed, if ever.

The store in which the processes of torch.distributed find one another is kept to its address.
popdist_separate_models.py tells the launcher of programs that train without the other instances.
Where the library is installed PyTorch does so by itself; a checkout, a torch before 2.5 and
TORCH_DEVICE_BACKEND_AUTOLOAD=0 have this. Imported when Python starts, so it imports nothing that
is not there by then.
"""

import os
import sys

import popdist_import_hook  # type: ignore[import-not-found]

# As typing's, which takes longer to import than everything here.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))


def _execute_and_register(execute: "Callable[[ModuleType], object]", module: "ModuleType") -> None:
    execute(module)
    _watch(module)
    _register()
    _keep_store()


def _watch(module: "ModuleType") -> None:
    """Report to the launcher at exit if the program trained without the other instances."""
    sys.path.insert(0, _HERE)
    try:
        import popdist_separate_models  # type: ignore[import-not-found]

        popdist_separate_models.start(module)
    except (ImportError, AttributeError):
        pass  # the package was removed, or torch has another version
    finally:
        sys.path.remove(_HERE)


def _register() -> None:
    """Register, also where the library is not on the path of the program."""
    sys.path.append(_ROOT)
    try:
        import popdist_py.torch_backend  # noqa: F401
    except ImportError:
        pass  # the package was removed
    finally:
        sys.path.pop()


def _keep_store() -> None:
    """Have the store of a rendezvous listen at the address that it is told; torch does everywhere.

    Not where that is a name: it may lead to another address here than on other hosts.
    """
    rendezvous = sys.modules.get("torch.distributed.rendezvous")
    store = getattr(rendezvous, "TCPStore", None)
    if store is None:
        return

    def made(host_name: str, port: int, *args: object, **settings: object) -> object:
        if settings.get("is_master") and "master_listen_fd" not in settings:
            listener = _listener(host_name, port)
            if listener >= 0:
                settings["master_listen_fd"] = listener
        return store(host_name, port, *args, **settings)

    rendezvous.TCPStore = made  # type: ignore[union-attr]


def _listener(address: str, port: int) -> int:
    """Return the descriptor of a socket that listens there; -1 if it cannot."""
    import socket

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.inet_pton(family, address)
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        return -1
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(4096)
    except OSError:
        # The store of this process is there already, or the address is of a proxy.
        listener.close()
        return -1
    return listener.detach()


def start() -> None:
    """Wait for torch.distributed in a Python of a job."""
    if os.environ.get("POPDIST_TORCH_BACKEND"):
        popdist_import_hook.run_at_import("torch.distributed", _execute_and_register)
