"""What every instance runs for a function: the call is read, made, and its result written.

A script, so that it runs wherever the launcher itself does: ``run_call.py FOLDER NAME``. The paths
of its files come from the launcher, by the environment. Nothing but the files of this job, which
its launcher sent after the instance had shown the job's secret, is unpickled.
"""

from __future__ import annotations

import linecache
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any


def main() -> int:
    """Make the call of this job and return the code to end with."""
    from popdist_py.environment import CALL, CALL_FILES
    from poprun_py.functions.failures import write_failure
    from poprun_py.functions.packed_file import open_packed

    if CALL not in os.environ or CALL_FILES not in os.environ:
        name = sys.argv[2] if len(sys.argv) > 2 else "a function"
        print(f"{name} is run by poprun_py.launch only, from Python", file=sys.stderr)  # noqa: T201
        return 2
    # A job that the function launches has none of it.
    path, prefix = Path(os.environ.pop(CALL)), os.environ.pop(CALL_FILES)
    call = open_packed(path)
    if path.parent == Path("/proc/self/fd"):
        os.close(int(path.name))
    sys.argv[:] = call.head["argv"]
    for name, lines in call.head["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    own = [entry for entry in sys.path if entry not in call.head["path"]]
    sys.path[:] = [*own, *call.head["path"]]
    try:
        function, args, kwargs = call.load()
    except Exception as error:
        return write_failure(prefix, "loading", error, _within(error.__traceback__))
    del call
    try:
        value = function(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return write_failure(prefix, "raised", error, _within(error.__traceback__))
    return _write_result(prefix, value)


def _write_result(prefix: str, value: Any) -> int:
    from poprun_py.functions.failures import write_failure
    from poprun_py.functions.packed_file import write_packed

    try:
        write_packed(Path(f"{prefix}.result"), {}, value)
    except Exception as error:
        from poprun_py.functions.unpicklable import where

        kind = type(value).__name__
        return write_failure(prefix, "result", error, None, f"{kind}, at {where(value) or 'all'}")
    return 0


def _within(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from the user's own code on."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


if __name__ == "__main__":
    # Where this script is, which holds no modules of the user's.
    sys.path.pop(0)
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    sys.exit(main())
