"""The part of the diagnostics hook for a process that forks the programs of restarts.

``wait_for_start`` imports the installed packages that the script imports, and waits for requests of
the wrapper. It returns in each new program (poprun_py/instance/prepared_python.py). The process
ends instead if it has imported something that a fork could change: the library of the launcher,
MPI, a package with threads, or a package that a file beside the script hides.
"""

import ast
import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

_MOST_BYTES = 1 << 18  # of a request with the environment of a program
_PAUSE_SECONDS = 0.0005
_ADOPTION_SECONDS = 10.0
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_MOST_FILES = 100
_INSTALLED = ("site-packages", "dist-packages")
# The library and its names under the SDK are imported after the fork. They need these packages.
_LIBRARY = ("horovod", "popart", "popdist", "popdist_py", "poptorch")
_NEEDED = ("numpy", "numpy.typing", "torch")
# The first optimizer of a program imports this module, which takes as long as torch itself.
_WITH_TORCH = ("torch._dynamo",)


def wait_for_start(descriptor: int) -> None:
    """Import the packages of the script, and return in each program that is forked."""
    # Imports do not disturb the program that runs. The priority ``nice`` could not be taken back.
    _set_policy(os.SCHED_BATCH)
    _import_packages()
    gc.collect()
    gc.freeze()  # a search for garbage would copy every page that a program shares
    _exit_unless_alone()
    with socket.socket(fileno=descriptor) as requests:
        requests.send(b"ready")
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
            if not request:
                os._exit(0)
            if _forks_to_program():
                break
            for each in descriptors:
                os.close(each)
        _become_program(requests, request, descriptors)


def _set_policy(policy: int) -> None:
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, policy, os.sched_param(0))


def _forks_to_program() -> bool:
    """Fork twice; return True in the new process, whose parent has ended."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return False
    if os.fork():
        os._exit(0)
    return True


def _become_program(requests: socket.socket, request: bytes, descriptors: list[int]) -> None:
    """Take the program's environment and output, and wait for the wrapper's permission."""
    wrapper, environ = json.loads(request)
    out, err, go = descriptors
    end = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != wrapper:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(_PAUSE_SECONDS)
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != wrapper:
        os._exit(1)
    os.setpgid(0, 0)
    _set_policy(os.SCHED_OTHER)
    os.environ.clear()
    os.environ.update(environ)
    requests.send(b"%d" % os.getpid())
    if not os.read(go, 1):
        os._exit(1)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for each in descriptors:
        os.close(each)
    _seed_again()


def _seed_again() -> None:
    """Seed the global random generators, so that programs of two restarts draw other numbers.

    Python itself seeds the generator of its module ``random`` after a fork.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


# --- the packages of the script -------------------------------------------------------------------


def _import_packages() -> None:
    """Import the installed packages that the script and its own modules import at their top."""
    script = _script()
    if script is None:
        os._exit(0)
    folder = os.path.dirname(os.path.realpath(script)) if sys.argv[0] != "-m" else os.getcwd()
    names: dict[str, None] = {}
    for name in _imported_names(script, folder, set()):
        if name.partition(".")[0] in _LIBRARY:
            names.update(dict.fromkeys((*_NEEDED, *_WITH_TORCH)))
        elif _is_installed(name.partition(".")[0]):
            names[name] = None
            names.update(dict.fromkeys(_WITH_TORCH if name == "torch" else ()))
    blocker = _MpiBlocker()
    sys.meta_path.insert(0, blocker)
    for name in names:
        importlib.import_module(name)
    sys.meta_path.remove(blocker)
    if "popdist_py" in sys.modules or _hidden(folder):
        os._exit(0)


def _script() -> str | None:
    """Return the path of the program's script, or of the file of its module; None if unknown."""
    name = sys.argv[0]
    if name == "-m":
        # ``sys.argv`` has the words after the module's name.
        module = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]
        path = os.path.join(os.getcwd(), *module.split("."))
        candidates = [f"{path}.py", os.path.join(path, "__main__.py")]
    else:
        candidates = [name]
    return next((each for each in candidates if os.path.isfile(each)), None)


def _imported_names(file: str, folder: str, known: set[str]) -> Iterator[str]:
    """Yield the names of modules that a file, and the modules beside the script, import."""
    known.add(file)
    with open(file, "rb") as source:
        tree = ast.parse(source.read(), file)
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            names = [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.level == 0 and statement.module:
            names = [statement.module]
        else:
            continue
        for name in names:
            own = os.path.join(folder, *name.split(".")) + ".py"
            if not os.path.isfile(own):
                yield name
            elif own not in known and len(known) < _MOST_FILES:
                yield from _imported_names(own, folder, known)


def _is_installed(name: str) -> bool:
    """Return whether a module belongs to Python or is installed, and is not the user's own file."""
    import importlib.util
    import sysconfig

    if name in sys.builtin_module_names or name in sys.modules:
        return True
    spec = None if name == "mpi4py" else importlib.util.find_spec(name)
    origin = (None if spec is None else spec.origin) or ""
    is_of_python = any(
        origin.startswith(f"{sysconfig.get_path(each)}{os.sep}")
        for each in ("stdlib", "platstdlib")
    )
    # A virtual environment may also use the packages of other folders, such as the base Python's.
    return is_of_python or any(f"{os.sep}{each}{os.sep}" in origin for each in _INSTALLED)


class _MpiBlocker:
    """An import finder that ends the process: MPI can start only once under a wrapper."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """End the process if it imports mpi4py.MPI."""
        if name == "mpi4py.MPI":
            os._exit(0)


def _hidden(folder: str) -> bool:
    """Return whether a file beside the script hides an imported module in a usual start."""
    tops = {name.partition(".")[0] for name in sys.modules} - {"__main__", "sitecustomize"}
    own = set()
    for entry in os.scandir(folder):
        name, _, ending = entry.name.partition(".")
        is_package = os.path.isfile(os.path.join(entry.path, "__init__.py"))
        if is_package or ending in ("py", "pyc") or ending.endswith("so"):
            own.add(name)
    return bool(tops & own)


def _exit_unless_alone() -> None:
    """End the process if it has threads, which a fork would lose.

    The threads of OpenBLAS do not count: OpenBLAS ends them before a fork, as the first fork shows.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        os._exit(0)
