"""The program of an instance that calls a function: ``run_call.py FOLDER NAME``.

The program reads the pickled call, calls the function, and writes the result or a description of
the failure. The launcher passes the paths of the call and the result in environment variables.
The program unpickles only files of its own job. The launcher sends the files of a job only to
instances that know the job's secret. The program is a script, so that it also runs where the
package is not installed.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_EXIT_CODE_OF_FAILURE = 1


def main() -> int:
    """Run the job's pickled call, and return the exit code of the instance."""
    from popdist_py.environment import CALL, CALL_FILES

    if CALL not in os.environ or CALL_FILES not in os.environ:
        name = sys.argv[2] if len(sys.argv) > 2 else "a function"
        text = f"{name} can only be run by poprun_py.launch() from a Python program"
        print(text, file=sys.stderr)  # noqa: T201
        return 2
    # Jobs that the function launches must not inherit the variables CALL and CALL_FILES.
    path, prefix = Path(os.environ.pop(CALL)), os.environ.pop(CALL_FILES)
    try:
        function, args, kwargs, prints_failure = _load(path)
    except Exception as error:
        return write_failure(
            prefix,
            error,
            note="the function and its arguments could not be unpickled in the instance: their "
            "modules must be importable on every host, or be pickled by value "
            "(cloudpickle.register_pickle_by_value)",
        )
    try:
        value = function(*args, **kwargs)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        value = None
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return write_failure(prefix, error, is_printed=prints_failure)
    return _write_result(prefix, value)


def _load(
    path: Path,
) -> tuple[Callable[..., object], tuple[object, ...], dict[str, object], bool]:
    """Set ``sys.path`` and ``sys.argv`` as in the calling program, and unpickle the call.

    Returns:
        The function, its arguments, and whether to print the traceback of its exception.

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
    return function, args, kwargs, call.head["prints_failure"]


def _write_result(prefix: str, value: object) -> int:
    """Write the function's result, or the reason why writing failed; return the exit code."""
    from poprun_py.python_api.functions.packed_file import write_packed
    from poprun_py.python_api.functions.pickling import path_to_problem, pickled

    kind = type(value).__name__
    try:
        parts = pickled(value)
    except Exception as error:
        found = path_to_problem(value)
        part = f"{kind}, at {found}" if found else kind
        return write_failure(
            prefix,
            error,
            problem=f"({part}) cannot be sent back ({_summary(error)}): return plain values, "
            "arrays or tensors",
        )
    try:
        write_packed(Path(f"{prefix}.result"), {}, parts)
    except OSError as error:
        return write_failure(
            prefix,
            error,
            problem=f"({kind}) cannot be written to a file on its host ({_summary(error)}): free "
            "some space, or set TMPDIR to another folder",
        )
    return 0


def write_failure(
    prefix: str,
    error: BaseException,
    *,
    problem: str = "",
    note: str = "",
    is_printed: bool = True,
) -> int:
    """Write an exception to a file, print it to stderr, and return the exit code of the instance.

    Args:
        prefix: The path of the file without its suffix ``.failure``.
        error: The exception.
        problem: The reason why the function's result cannot be sent, as the end of the sentence
            with which the job fails; empty if the function itself raised the exception.
        note: A note to add to the exception.
        is_printed: Whether to print the exception even if the file can be written.
    """
    from poprun_py.python_api.functions.packed_file import write_packed

    lines = traceback.format_exception(type(error), error, _user_frames(error.__traceback__))
    text = lines[-1] if problem else "".join(lines)
    if is_printed:
        _print(text)
    head = {"summary": _summary(error), "text": text, "problem": problem, "note": note}
    try:
        write_packed(Path(f"{prefix}.failure"), head, _pickled_if_possible(error))
    except OSError as failure:
        if not is_printed:
            _print(text)
        _print(f"the error of the function cannot be written to a file: {failure}\n")
    return _EXIT_CODE_OF_FAILURE


def _user_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames, which are those of this file."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _print(text: str) -> None:
    # The user's function may have closed or replaced stderr.
    with contextlib.suppress(Exception):
        print(text, end="", file=sys.stderr, flush=True)  # noqa: T201


def _summary(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message."""
    from poprun_py.python_api.functions.pickling import first_line

    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return ": ".join(filter(None, (f"{module}{kind.__qualname__}", first_line(error))))


def _pickled_if_possible(error: BaseException) -> list[list[bytes | memoryview]]:
    """Return the pickled exception, or the pickled None if the exception cannot be unpickled.

    Unpickling fails, for example, if the exception's class needs more arguments than its ``args``.
    """
    from poprun_py.python_api.functions.pickling import pickled

    with contextlib.suppress(Exception):
        chunks, *arrays = parts = pickled(error)
        stream, buffers = b"".join(chunks), [array for (array,) in arrays]
        if type(pickle.loads(stream, buffers=buffers)) is type(error):
            return parts
    return pickled(None)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Remove the folder of this script from sys.path, because the modules in the folder could
        # hide the user's modules.
        sys.path.pop(0)
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    sys.exit(main())
