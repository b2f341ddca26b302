"""Limits the MPI sockets of an instance to the job's network when the program starts MPI.

Open MPI listens on every address of the machine. In a job with checkpoints in memory, this module
also tells the wrapper that the program has started MPI. MPI cannot start a second time under the
same wrapper, so the launcher then restarts the program under a new wrapper.

Python imports this module when it starts. To keep the start of Python fast, this module imports
only popdist_import_hook and modules that Python has already loaded.
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

# Parts of the paths of libraries that may contain PMIx. These libraries are PMIx itself and two
# libraries of Open MPI 4.
_PMIX = ("/libpmix.so", "/mca_pmix_", "/libopen-pal.so")
_SHARED_MEMORY = {"sm", "vader"}
_HERE = os.path.dirname(os.path.abspath(__file__))
# The offset of the flag "has started MPI", a byte in the shared memory. The module
# poprun_py/instance/progress_memory.py contains the same number.
_STARTED_AT = 30 * 8


class _Mover:
    """Makes the sockets that MPI opens at its start listen only on the network of the job.

    Args:
        network: The network for the sockets, as an interface or a CIDR; empty to move no sockets.
        is_alone: Whether all instances run on this host.
        heartbeat: The file of the memory that is shared with the wrapper; empty to tell nothing.
    """

    def __init__(self, network: str, *, is_alone: bool, heartbeat: str = "") -> None:
        self._network = network
        self._is_alone = is_alone
        self._heartbeat = heartbeat

    def execute_and_move(
        self, execute: "Callable[[ModuleType], object]", module: "ModuleType"
    ) -> None:
        """Run the code of mpi4py.MPI, and move the sockets that this code opens."""
        package = sys.modules.get("mpi4py")
        if getattr(getattr(package, "rc", None), "initialize", True):
            self._tell_wrapper()
        self._started(execute, module)
        if not module.Is_initialized():
            # If mpi4py.rc.initialize is false, importing mpi4py.MPI does not start MPI. Such a
            # program starts MPI later by one of these two functions.
            for start in ("Init", "Init_thread"):
                setattr(module, start, self._watched(getattr(module, start)))

    def _watched(self, start: "Callable[..., object]") -> "Callable[..., object]":
        def starting(*args: object, **kwargs: object) -> object:
            self._tell_wrapper()
            return self._started(start, *args, **kwargs)

        return starting

    def _tell_wrapper(self) -> None:
        """Set the flag in the shared memory before MPI starts, because the start may fail."""
        if not self._heartbeat:
            return
        import signal

        try:
            with open(self._heartbeat, "r+b", buffering=0) as file:
                file.seek(_STARTED_AT)
                file.write(b"\1")
            # The wrapper, whose process id is in the path, wakes up and tells the launcher.
            os.kill(int(self._heartbeat.split("/")[2]), signal.SIGCHLD)
        except (OSError, ValueError, IndexError):
            pass  # the program runs without a wrapper

    def _started(self, start: "Callable[..., object]", *args: object, **kwargs: object) -> object:
        """Call ``start``, which may start MPI, and move the sockets that MPI then opens."""
        if not self._network:
            return start(*args, **kwargs)
        listening = _listening()
        before = listening.descriptors()
        result = start(*args, **kwargs)
        connects = not self._is_alone or not _has_shared_memory()
        meet = _fence() if connects else None
        if before and (meet is not None or not connects):
            listening.move_own(self._network, before)
        if meet is not None:
            meet()
        return result


def _has_shared_memory() -> bool:
    """Tell whether the instances of one host communicate through shared memory, not sockets."""
    transports = os.environ.get("OMPI_MCA_btl", "sm")  # noqa: SIM112 (Open MPI's spelling)
    return transports[:1] != "^" and bool(_SHARED_MEMORY.intersection(transports.split(",")))


def _listening() -> "ModuleType":
    """Import and return popdist_listening, although its folder is no longer in sys.path."""
    sys.path.insert(0, _HERE)
    try:
        import popdist_listening  # type: ignore[import-not-found]
    finally:
        sys.path.remove(_HERE)
    module: ModuleType = popdist_listening
    return module


def _fence() -> "Callable[[], object] | None":
    """Return a function that waits for all instances by PMIx, or None if PMIx is not loaded.

    All instances wait until every instance has moved its sockets. Otherwise an instance could
    connect to a socket whose move then resets the connection.
    """
    import ctypes

    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        paths = {line.split(maxsplit=5)[-1].strip() for line in lines if ".so" in line}
    for path in (path for name in _PMIX for path in paths if name in path):
        if fence := getattr(ctypes.CDLL(path), "PMIx_Fence", None):
            return lambda: fence(None, ctypes.c_size_t(0), None, ctypes.c_size_t(0))
    return None


def start() -> None:
    """Move MPI's sockets when a program of a job imports mpi4py.MPI."""
    alone, between = (os.environ.get(f"POPDIST_{name}") for name in ("MPI_NETWORK", "NETWORK"))
    network, heartbeat = alone or between or "", ""
    if os.environ.get("POPDIST_MEMORY_CHECKPOINTS") == "1":
        heartbeat = os.environ.get("POPDIST_HEARTBEAT", "")
    if network or heartbeat:
        mover = _Mover(network, is_alone=bool(alone), heartbeat=heartbeat)
        popdist_import_hook.run_at_import("mpi4py.MPI", mover.execute_and_move)
