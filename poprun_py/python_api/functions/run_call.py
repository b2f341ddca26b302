"""The program of an instance that calls a function: ``run_call.py FOLDER NAME``.

The program reads the call, runs it, and writes its result. The launcher passes the paths of the
files in environment variables. The program unpickles only files of this job, which the launcher
sends only to instances that know the job's secret. The program is a script, so that it also runs
where the package is not installed.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


def main() -> int:
    """Run the pickled call of this job, and return the exit code."""
    from popdist_py.environment import CALL, CALL_FILES
    from poprun_py.python_api.functions.failures import LOADING, RAISED, write_failure

    if CALL not in os.environ or CALL_FILES not in os.environ:
        name = sys.argv[2] if len(sys.argv) > 2 else "a function"
        print(f"{name} is run by poprun_py.launch only, from Python", file=sys.stderr)  # noqa: T201
        return 2
    # Jobs that the function launches must not inherit the variables with the paths of this call.
    path, prefix = Path(os.environ.pop(CALL)), os.environ.pop(CALL_FILES)
    try:
        function, args, kwargs = _load(path)
    except Exception as error:
        return write_failure(prefix, LOADING, error, _user_frames(error.__traceback__))
    try:
        value = function(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return write_failure(prefix, RAISED, error, _user_frames(error.__traceback__))
    return _write_result(prefix, value)


def _load(path: Path) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """Set ``sys.path`` and ``sys.argv`` as in the calling program, and unpickle the call.

    Raises:
        Exception: Any exception that unpickling raises.
    """
    from poprun_py.python_api.functions.packed_file import open_packed

    call = open_packed(path)
    if path.parent == Path("/proc/self/fd"):
        # Close the inherited descriptor of the file: the mapped memory does not need it.
        os.close(int(path.name))
    sys.argv[:] = call.head["argv"]
    for name, lines in call.head["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    own = [entry for entry in sys.path if entry not in call.head["path"]]
    sys.path[:] = [*own, *call.head["path"]]
    function, args, kwargs = call.load()
    return function, args, kwargs


def _write_result(prefix: str, value: object) -> int:
    """Write the function's result, or the reason why writing fails; return the exit code."""
    from poprun_py.python_api.functions.failures import KEEPING, RESULT, write_failure
    from poprun_py.python_api.functions.packed_file import write_packed
    from poprun_py.python_api.functions.pickling import path_to_problem

    kind = type(value).__name__
    try:
        write_packed(Path(f"{prefix}.result"), {}, value)
    except OSError as error:
        return write_failure(prefix, KEEPING, error, None, kind)
    except Exception as error:
        found = path_to_problem(value)
        return write_failure(prefix, RESULT, error, None, f"{kind}, at {found}" if found else kind)
    return 0


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames, which are in this file."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python has added the folder of this script to sys.path. Modules in that folder could
        # hide the user's modules.
        sys.path.pop(0)
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    sys.exit(main())
