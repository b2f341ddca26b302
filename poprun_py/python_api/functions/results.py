"""Results of a function call, read from the files that the instances have written.

Unpickling can run any code. The user's own function has written the files that are unpickled here,
and they are in a private folder of this user. Files from other hosts are accepted only from
instances that know the job's secret.
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

# After the instance that failed first, the notes describe at most this many failed instances.
_MOST_OTHERS = 8


def read_results(folder: Path, result: LaunchResult) -> list[Any]:
    """Return the values that the function returned, ordered by the index of the instance.

    Arrays in the values stay valid when the folder is removed.

    Args:
        folder: The folder with the file of the pickled call.
        result: The result of the job.

    Raises:
        Exception: The exception that the function raised in the instance that failed first. The
            exception's cause is the traceback of that instance. The exception's notes name the
            instance, its host, and the other instances that failed.
        UsageError: The folder has been removed.
        JobFailedError: An instance failed without an exception of the function, or the value or
            exception of an instance cannot be unpickled.
    """
    if not folder.exists():
        raise UsageError("the job's files have been removed: ask for its result before `with` ends")
    place = place_of_call(folder, result.restart_count)
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
                f"the result of {name} is incomplete, or was changed: check that there is room in "
                f"{prefix.parent}"
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
    """Return the exception to raise for an instance that has written a failure."""
    name = _named(instance)
    error = failure.exception()
    if failure.step == RESULT:
        error = JobFailedError(
            f"the result of {name} ({failure.part}) cannot be sent back ({failure.summary}): "
            "return plain values, arrays or tensors",
            result,
        )
    elif failure.step == KEEPING:
        error = JobFailedError(
            f"the result of {name} ({failure.part}) cannot be kept there ({failure.summary}): make "
            "room, or set TMPDIR to another folder",
            result,
        )
    elif error is None:
        error = JobFailedError(f"{name} raised {failure.summary}", result)
    else:
        error.add_note(f"raised in {name}")
    if failure.step == LOADING:
        error.add_note(
            "the function and its arguments could not be unpickled there: their modules must be "
            "importable on every host, or pickled by value (cloudpickle.register_pickle_by_value)"
        )
    error.__cause__ = RemoteTraceback(failure.text)
    return error


def _ended(first: InstanceResult | None, result: LaunchResult) -> JobFailedError:
    """Return the error for a job that failed without an exception of its function."""
    if first is None:
        how = result.explanation or describe(result.exit_code)
        return JobFailedError(f"the job ended before the function returned: {how}", result)
    how = describe(first.code) if first.code is not None else "no report"
    lines = [line for line in first.stderr_tail.splitlines() if line.strip()]
    last = f"; the last line of its stderr is {lines[-1].strip()!r}" if lines else ""
    return JobFailedError(
        f"{_named(first)} ended with {how} before the function returned{last}", result
    )


def _notes(others: dict[int, Failure], result: LaunchResult) -> Iterator[str]:
    """Yield notes about the instances that failed after the first failed instance."""
    if others:
        word = "instance" if len(others) == 1 else "instances"
        yield f"{len(others)} other {word} failed too:"
    for index in sorted(others)[:_MOST_OTHERS]:
        yield f"  {_named(result.instances[index])}: {others[index].summary}"
    if len(others) > _MOST_OTHERS:
        yield f"  and {len(others) - _MOST_OTHERS} more"


def _named(instance: InstanceResult) -> str:
    return f"instance {instance.index} on {instance.host}"
