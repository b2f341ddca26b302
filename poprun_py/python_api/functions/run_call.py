"""What every instance runs for a function: the call is read, made, and its result written.

A script, so that it runs wherever the launcher itself does: ``run_call.py FOLDER NAME``. The paths
of its files come from the launcher, by the environment. Nothing but the files of this job, which
its launcher sent after the instance had shown the job's secret, is unpickled.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType


def main() -> int:
    """Make the call of this job and return the code to end with."""
    from popdist_py.environment import CALL, CALL_FILES
    from poprun_py.python_api.functions.failures import LOADING, RAISED, write_failure

    if CALL not in os.environ or CALL_FILES not in os.environ:
        name = sys.argv[2] if len(sys.argv) > 2 else "a function"
        print(f"{name} is run by poprun_py.launch only, from Python", file=sys.stderr)  # noqa: T201
        return 2
    # A job that the function launches has none of it.
    path, prefix = Path(os.environ.pop(CALL)), os.environ.pop(CALL_FILES)
    try:
        function, args, kwargs = _load(path)
    except Exception as error:
        return write_failure(prefix, LOADING, error, _within(error.__traceback__))
    try:
        value = function(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return write_failure(prefix, RAISED, error, _within(error.__traceback__))
    return _write_result(prefix, value)


def _load(path: Path) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object]]:
    """Return the function and its arguments, once this Python finds the modules of the parent's.

    Raises:
        Exception: whatever unpickling them raises.
    """
    from poprun_py.python_api.functions.packed_file import open_packed

    call = open_packed(path)
    if path.parent == Path("/proc/self/fd"):
        # The file has no name and was inherited: it is mapped now.
        os.close(int(path.name))
    sys.argv[:] = call.head["argv"]
    for name, lines in call.head["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    own = [entry for entry in sys.path if entry not in call.head["path"]]
    sys.path[:] = [*own, *call.head["path"]]
    function, args, kwargs = call.load()
    return function, args, kwargs


def _write_result(prefix: str, value: object) -> int:
    """Write what the function returned, or why that cannot be; returns the code to end with."""
    from poprun_py.python_api.functions.failures import KEEPING, RESULT, write_failure
    from poprun_py.python_api.functions.packed_file import write_packed
    from poprun_py.python_api.functions.unpicklable import where

    kind = type(value).__name__
    try:
        write_packed(Path(f"{prefix}.result"), {}, value)
    except OSError as error:
        return write_failure(prefix, KEEPING, error, None, kind)
    except Exception as error:
        found = where(value)
        return write_failure(prefix, RESULT, error, None, f"{kind}, at {found}" if found else kind)
    return 0


def _within(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's own code on."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Where this script is, which holds no modules of the user's.
        sys.path.pop(0)
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    sys.exit(main())
