"""The part of the diagnostics hook that forks a spare, which forks the programs of restarts.

``fork_spare`` imports the installed packages that the script imports before any other statement. It
then forks the spare, and returns in the program. The spare waits for requests of the wrapper, and
``fork_spare`` returns in each program that the spare forks (poprun_py/instance/prepared_python.py).
The program starts once more, in the usual way, if it has imported something that a fork could
change: the library of the launcher, MPI, a package with threads, a package that uses a GPU, or a
package that a file beside the script hides.
"""

import ast
import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

_MOST_BYTES = 1 << 18  # of a request with the environment of a program
_PAUSE_SECONDS = 0.0005
_ADOPTION_SECONDS = 10.0
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
# The drivers of these devices do not work in a process whose parent has used them.
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel")
_MOST_FILES = 100
_INSTALLED = ("site-packages", "dist-packages")
# The library and its names under the SDK are imported after the fork. They need these packages.
_LIBRARY = ("horovod", "popart", "popdist", "popdist_py", "poptorch")
_NEEDED = ("numpy", "numpy.typing", "torch")
# The first optimizer of a program imports this module, which takes as long as torch itself.
_WITH_TORCH = ("torch._dynamo",)


def fork_spare(
    wrapper: int,
    descriptor: int,
    imports_output: int,
    is_ahead: bool,
    hide_hook: Callable[[], None],
) -> None:
    """Import the packages of the script and fork the spare; return in each program.

    If ``is_ahead`` is true, this process is not a program, and ends instead.
    """
    for each in (descriptor, imports_output):
        os.set_inheritable(each, False)
    requests = socket.socket(fileno=descriptor)
    usual = _UsualStart(requests, imports_output, is_ahead)
    is_spare = False
    try:
        usual.hide_library()
        hide_hook()
        _import_packages(usual.begin)
        gc.collect()
        gc.freeze()  # a search for garbage would copy every page that a program shares
        if not _is_alone() or usual.has_printed():
            usual.begin()
        is_spare = _forks_to_spare(requests)
    except KeyboardInterrupt:
        usual.restore()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        usual.begin()  # an import fails in the script again, where the script may handle it
    if is_ahead and not is_spare:
        os._exit(0)
    changes = usual.changes_of_imports()
    usual.restore()
    if is_spare:
        _wait_for_start(wrapper, requests)
    else:
        requests.close()
    _change_environment(changes)


class _UsualStart:
    """The program's environment and output, which it needs in order to start in the usual way.

    Until ``restore`` is called, the output of imports goes to a file of the wrapper. If the program
    ends during an import, the wrapper shows the output.
    """

    def __init__(self, requests: socket.socket, imports_output: int, is_ahead: bool) -> None:
        self._requests = requests
        self._is_ahead = is_ahead
        self._environ = dict(os.environ)
        self._environ_of_imports = self._environ
        self._output = os.dup(1), os.dup(2)
        self._imports_output = imports_output
        os.dup2(self._imports_output, 1)
        os.dup2(self._imports_output, 2)

    def hide_library(self) -> None:
        """Remove the library's variables, which may differ between two attempts."""
        for name in [each for each in os.environ if each.startswith("POPDIST_")]:
            del os.environ[name]
        # torch would import the library, whose back end the start hook registers later.
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        self._environ_of_imports = dict(os.environ)

    def changes_of_imports(self) -> dict[str, str | None]:
        """Return the variables that imports have set, and None for variables that they removed."""
        before = self._environ_of_imports
        names = (before.keys() | os.environ.keys()) - {"PYTHONPATH"}  # the hook changes this one
        after = {name: os.environ.get(name) for name in names}
        return {name: value for name, value in after.items() if value != before.get(name)}

    def has_printed(self) -> bool:
        """Return whether an import has printed text, which the programs of restarts would lack."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        return os.fstat(self._imports_output).st_size > 0

    def restore(self) -> None:
        """Give the program its own output and environment."""
        for each, number in zip(self._output, (1, 2), strict=True):
            os.dup2(each, number)
            os.close(each)
        os.close(self._imports_output)
        os.environ.clear()
        os.environ.update(self._environ)

    def begin(self) -> NoReturn:
        """Execute the program's command again, without a spare; end if there is no program."""
        with contextlib.suppress(OSError):
            self._requests.send(b"0")
        if self._is_ahead:
            os._exit(0)
        self.restore()
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores the signal
        os.execve(sys.executable or sys.orig_argv[0], sys.orig_argv, self._environ)


def _change_environment(changes: dict[str, str | None]) -> None:
    """Set environment variables of this process; the value None unsets a variable."""
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _forks_to_spare(requests: socket.socket) -> bool:
    """Fork twice; return True in the spare, whose process id has been sent to the wrapper."""
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        return False
    try:
        os.setpgid(0, 0)
        second = os.fork()
        if second:
            # The wrapper adopts the spare after this message, when this process ends.
            requests.send(b"%d" % second)
    except BaseException:
        os._exit(1)
    if second:
        os._exit(0)
    return True


def _wait_for_start(wrapper: int, requests: socket.socket) -> None:
    """In the spare, wait for requests of the wrapper; return in each program that is forked."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.close(null)
        _await_adoption(wrapper)
        while True:
            request, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 3)
            if not request:
                os._exit(0)
            if _forks_to_program():
                break
            for each in descriptors:
                os.close(each)
        _become_program(requests, request, descriptors)
        requests.close()
    except BaseException:
        os._exit(1)  # Python would run the script here


def _await_adoption(wrapper: int) -> None:
    """Wait until the wrapper is the parent of this process."""
    end = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != wrapper:
        if time.monotonic() > end:
            os._exit(1)
        time.sleep(_PAUSE_SECONDS)
    os.setpgid(0, 0)


def _end_with(wrapper: int) -> None:
    """Let this process end when the wrapper ends, which is its parent."""
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != wrapper:
        os._exit(1)


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
    _await_adoption(wrapper)
    _end_with(wrapper)
    os.environ.clear()
    os.environ.update(environ)
    with contextlib.suppress(OSError):  # the CPUs may have been taken from the job meanwhile
        os.sched_setaffinity(0, os.sched_getaffinity(wrapper))
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


def _import_packages(begin_usually: Callable[[], NoReturn]) -> None:
    """Import the installed packages that the script and its own modules import first."""
    script = _script()
    if script is None:
        begin_usually()
    folder = os.path.dirname(os.path.realpath(script)) if sys.argv[0] != "-m" else os.getcwd()
    names = _first_imports(script, folder)
    if not names:
        begin_usually()
    blocker = _MpiBlocker(begin_usually)
    sys.meta_path.insert(0, blocker)
    for name in names:
        importlib.import_module(name)
    sys.meta_path.remove(blocker)
    if "popdist_py" in sys.modules or _hidden(folder):
        begin_usually()


def _first_imports(script: str, folder: str) -> list[str]:
    """Return the packages to import, in the script's order."""
    names: dict[str, None] = {}
    for name in _imported_names(script, folder, set())[0]:
        top = name.partition(".")[0]
        if top in _LIBRARY:
            names.update(dict.fromkeys((*_NEEDED, *_WITH_TORCH)))
        elif _is_installed(top):
            names[name] = None
            names.update(dict.fromkeys(_WITH_TORCH if name == "torch" else ()))
        else:
            break  # the module might set variables that the next packages read
    return list(names)


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


def _imported_names(file: str, folder: str, known: set[str]) -> tuple[list[str], bool]:
    """Return the modules that a file imports before it may do anything else.

    The modules beside the script are read, too. The second value tells whether no statement of the
    file can change what the next packages find, such as ``os.environ``.
    """
    known.add(file)
    found: list[str] = []
    with open(file, "rb") as source:
        tree = ast.parse(source.read(), file)
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            names = [each.name for each in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            if statement.level or not statement.module:
                return found, False
            names = [statement.module]
        elif _is_harmless(statement):
            continue
        else:
            return found, False
        for name in names:
            own = os.path.join(folder, *name.split(".")) + ".py"
            if not os.path.isfile(own):
                found.append(name)
            elif own not in known and len(known) < _MOST_FILES:
                more, goes_on = _imported_names(own, folder, known)
                found += more
                if not goes_on:
                    return found, False
    return found, True


def _is_harmless(statement: ast.stmt) -> bool:
    """Return whether a statement only defines names, without a call."""
    executed: list[ast.AST]
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        executed = [statement.args, *statement.decorator_list]
        executed += [statement.returns] if statement.returns else []
        has_decorators = bool(statement.decorator_list)
    elif isinstance(statement, ast.ClassDef):
        executed = [*statement.bases, *statement.keywords]
        has_decorators = bool(statement.decorator_list)
        if not all(_is_harmless(each) for each in statement.body):
            return False
    elif isinstance(statement, ast.Assign):
        executed, has_decorators = [statement.value], False
        if not all(isinstance(each, ast.Name) for each in statement.targets):
            return False
    else:
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        return is_text or isinstance(statement, ast.Pass)
    calls = any(isinstance(node, ast.Call) for each in executed for node in ast.walk(each))
    return not has_decorators and not calls


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
    """An import finder that begins a usual start: MPI can start only once under a wrapper."""

    def __init__(self, begin_usually: Callable[[], NoReturn]) -> None:
        self._begin_usually = begin_usually

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Begin a usual start if the process imports mpi4py.MPI."""
        if name == "mpi4py.MPI":
            self._begin_usually()


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


def _is_alone() -> bool:
    """Return whether the process has no threads and no accelerator, which a fork would lose.

    The threads of OpenBLAS do not count: OpenBLAS ends them before a fork, as the first fork shows.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    has_threads = threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1
    return not has_threads and not any(path.startswith(_ACCELERATORS) for path in _open_paths())


def _open_paths() -> Iterator[str]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listed folder is closed
            yield os.readlink(f"/proc/self/fd/{name}")
