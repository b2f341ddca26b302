"""Registers the back end popdist when a program of a job imports torch.distributed.

Python imports this module at its start. To keep the start of Python fast, this module imports only
popdist_import_hook and modules that Python has already loaded. If the library is installed, PyTorch
registers the back end itself. This module is needed if the library is not installed, with torch
before 2.5, and with TORCH_DEVICE_BACKEND_AUTOLOAD=0. The module also makes the TCPStore of a
rendezvous listen on only one address. The module popdist_separate_models reports programs that
train without the other instances.
"""

import os
import sys

import popdist_import_hook  # type: ignore[import-not-found]

# This constant replaces typing.TYPE_CHECKING. Importing typing would take longer than importing the
# rest of this module.
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
        pass  # the library was removed, or torch's internals have changed
    finally:
        sys.path.remove(_HERE)


def _register() -> None:
    """Register the back end popdist, even if ``sys.path`` does not contain the library."""
    sys.path.append(_ROOT)
    try:
        import popdist_py.torch_backend  # noqa: F401
    except ImportError:
        pass  # the library was removed
    finally:
        sys.path.pop()


def _keep_store() -> None:
    """Make the TCPStore of a rendezvous listen only on its given address, not on every address.

    If a host name is given, the store still listens on every address. The address of a host name
    may differ between hosts.
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
    """Return the descriptor of a socket that listens at ``address``, or -1 if that fails."""
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
        # Binding fails if this process already has a store at this port, or if the address belongs
        # to a proxy.
        listener.close()
        return -1
    return listener.detach()


def start() -> None:
    """Register the back end when a program of a job imports torch.distributed."""
    if os.environ.get("POPDIST_TORCH_BACKEND"):
        popdist_import_hook.run_at_import("torch.distributed", _execute_and_register)
