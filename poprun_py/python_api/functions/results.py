"""What a call came to: a value of every instance, or what the first that failed has raised.

Unpickling runs code: what is read here was written by the user's own function, in instances that
showed the secret of the job, and lies in a folder that nobody else can enter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poprun_py.errors import JobFailedError, UsageError
from poprun_py.python_api.functions.failures import (
    KEEPING,
    LOADING,
    RESULT,
    Failure,
    RemoteTraceback,
    read_failure,
)
from poprun_py.python_api.functions.packed_file import IncompleteFileError, open_packed
from poprun_py.running.supervise.file_transfer import place_of_call
from poprun_py.running.supervise.job import InstanceResult, LaunchResult, describe

# So many other instances that failed are described.
_MOST_OTHERS = 8


def read(folder: Path | str, result: LaunchResult) -> list[Any]:
    """Return what the function returned, in instance order.

    Arrays lie in pages of the files in ``folder``, which may be removed.

    Args:
        folder: that the call was written into.
        result: how its job ended.

    Raises:
        Exception: what the function raised in the instance that failed first, of its own type. Its
            cause is the traceback there, its notes name the instance, its host, and who else
            failed.
        UsageError: the folder was removed before.
        JobFailedError: an instance ended in another way, or what it returned or raised cannot be
            brought here.
    """
    if not Path(folder).exists():
        raise UsageError("the job's files are gone: ask for its result before `with` ends")
    place = place_of_call(Path(folder), result.restart_count)
    if result.exit_code == 0:
        return [_value(place.prefix(each.index), each, result) for each in result.instances]
    failures = {
        each.index: found
        for each in result.instances
        if (found := read_failure(place.prefix(each.index))) is not None
    }
    first = result.first_failure
    failure = failures.pop(first.index, None) if first is not None else None
    if first is None or failure is None:
        error: Exception = _ended(first, result)
    else:
        error = _error(failure, first, result)
    for note in _notes(failures, result):
        error.add_note(note)
    raise error


def _value(prefix: Path, instance: InstanceResult, result: LaunchResult) -> Any:
    name = _named(instance)
    path = prefix.with_name(f"{prefix.name}.result")
    try:
        file = open_packed(path)
    except IncompleteFileError:
        if not path.exists():
            problem = f"{name} ended with exit code 0 before the function returned"
        else:
            problem = (
                f"the result of {name} is not whole, or was changed: is there room in "
                f"{prefix.parent}?"
            )
        raise JobFailedError(problem, result) from None
    try:
        return file.load()
    except Exception as error:
        kind = type(error).__name__
        raise JobFailedError(
            f"the result of {name} cannot be read here ({kind}: {error}): return what this "
            "Python can import, or plain values",
            result,
        ) from error


def _error(failure: Failure, instance: InstanceResult, result: LaunchResult) -> Exception:
    """Return what is raised for an instance that has written why it failed."""
    name = _named(instance)
    error = failure.exception()
    if failure.what == RESULT:
        error = JobFailedError(
            f"the result of {name} ({failure.part}) cannot be sent back ({failure.summary}): "
            "return plain values, arrays or tensors",
            result,
        )
    elif failure.what == KEEPING:
        error = JobFailedError(
            f"the result of {name} ({failure.part}) cannot be kept there ({failure.summary}): make "
            "room, or set TMPDIR to another folder",
            result,
        )
    elif error is None:
        error = JobFailedError(f"{name} raised {failure.summary}", result)
    else:
        error.add_note(f"raised in {name}")
    if failure.what == LOADING:
        error.add_note(
            "the function and its arguments could not be loaded there: its modules have to be "
            "importable on every host, or sent along (cloudpickle.register_pickle_by_value)"
        )
    error.__cause__ = RemoteTraceback(failure.text)
    return error


def _ended(first: InstanceResult | None, result: LaunchResult) -> JobFailedError:
    """Return what is raised for a job that no exception of its function ended."""
    if first is None:
        how = result.explanation or describe(result.exit_code)
        return JobFailedError(f"the job ended before the function returned: {how}", result)
    how = describe(first.code) if first.code is not None else "no report"
    lines = [line for line in first.stderr_tail.splitlines() if line.strip()]
    said = f"; its last line is {lines[-1].strip()!r}" if lines else ""
    return JobFailedError(
        f"{_named(first)} ended with {how} before the function returned{said}", result
    )


def _notes(others: dict[int, Failure], result: LaunchResult) -> Iterator[str]:
    """Say who else failed."""
    if others:
        word = "instance" if len(others) == 1 else "instances"
        yield f"{len(others)} other {word} failed too:"
    for index in sorted(others)[:_MOST_OTHERS]:
        yield f"  {_named(result.instances[index])}: {others[index].summary}"
    if len(others) > _MOST_OTHERS:
        yield f"  and {len(others) - _MOST_OTHERS} more"


def _named(instance: InstanceResult) -> str:
    return f"instance {instance.index} on {instance.host}"
