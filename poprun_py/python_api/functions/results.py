"""Results of a function call, read from the files that the instances have written.

Unpickling a file can run any code. The files that are unpickled here are safe, because the user's
own function has written them into a private folder of this user. Files from other hosts are
accepted only from instances that know the job's secret.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from popdist_py.errors import counted
from poprun_py.display.user_traceback import UserTraceback, running_ipython
from poprun_py.errors import JobFailedError, UsageError
from poprun_py.python_api.functions.packed_file import (
    IncompleteFileError,
    PackedFile,
    open_packed,
)
from poprun_py.running.supervise.job_description import place_of_call
from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult, describe

# The notes of a raised exception describe at most this number of other failed instances.
_MOST_OTHERS = 8


class RemoteTraceback(Exception):
    """An instance's traceback as text, set as the cause of an exception in the calling program."""

    @property
    def instance_text(self) -> str:
        """The traceback as the instance's Python wrote it."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f'\n"""\n{self.instance_text}"""'


def read_results(folder: Path, result: LaunchResult) -> list[Any]:
    """Return the values that the function returned, ordered by the index of the instance.

    If ``folder``, the folder of the call, is removed later, arrays in the values stay valid.

    Raises:
        Exception: The exception that the function raised in the instance that failed first. The
            exception's cause is the traceback of the failed instance. The exception's notes name
            the instance, the host, and the other instances that failed.
        UsageError: The folder has been removed.
        JobFailedError: An instance failed without an exception of the function, or the value or
            exception of an instance cannot be unpickled.
    """
    if not folder.exists():
        raise UsageError(
            "the files of the job have been removed: get the result before the `with` block of the "
            "job ends"
        )
    place = place_of_call(folder, result.restart_count)
    if result.exit_code == 0:
        return [
            _value(place.prefix(each.index).with_suffix(".result"), each, result)
            for each in result.instances
        ]
    failures: dict[int, PackedFile] = {}
    for each in result.instances:
        with contextlib.suppress(IncompleteFileError):
            failures[each.index] = open_packed(place.prefix(each.index).with_suffix(".failure"))
    first = result.first_failure
    if first is not None and first.index in failures:
        error = _error(failures.pop(first.index), first, result)
    else:
        error = _ended(first, result)
    for note in _notes(failures, result):
        error.add_note(note)
    raise error


def _value(path: Path, instance: InstanceResult, result: LaunchResult) -> Any:
    name = _named(instance)
    try:
        file = open_packed(path)
    except IncompleteFileError:
        if not path.exists():
            problem = f"{name} ended with exit code 0 before the function returned"
        else:
            problem = (
                f"the file with the result of {name} is incomplete or was changed: check that "
                f"{path.parent} has free space"
            )
        raise JobFailedError(problem, result) from None
    try:
        return file.load()
    except Exception as error:
        kind = type(error).__name__
        raise JobFailedError(
            f"the result of {name} cannot be unpickled in this process ({kind}: {error}): return "
            "values of types that this process can import, or plain values",
            result,
        ) from error


def _error(failure: PackedFile, instance: InstanceResult, result: LaunchResult) -> Exception:
    """Return the exception to raise for an instance that has written a failure file."""
    name, head = _named(instance), failure.head
    raised: object = None
    with contextlib.suppress(Exception):
        raised = failure.load()
    if head["problem"]:
        error: Exception = JobFailedError(f"the result of {name} {head['problem']}", result)
    elif isinstance(raised, Exception):
        error = raised
        error.add_note(f"raised in {name}")
    else:  # A KeyboardInterrupt of an instance, for example, must not end the calling program.
        error = JobFailedError(f"{name} raised {head['summary']}", result)
    if head["note"]:
        error.add_note(head["note"])
    error.__cause__ = RemoteTraceback(head["text"])
    if running_ipython() is not None and not hasattr(error, "_render_traceback_"):
        with contextlib.suppress(AttributeError, TypeError):  # a class with slots
            error._render_traceback_ = UserTraceback(error)  # type: ignore[attr-defined]
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


def _notes(others: dict[int, PackedFile], result: LaunchResult) -> Iterator[str]:
    """Yield notes about the instances that failed after the first failed instance."""
    if others:
        yield f"{counted(len(others), 'other instance')} failed too:"
    for index in sorted(others)[:_MOST_OTHERS]:
        yield f"  {_named(result.instances[index])}: {others[index].head['summary']}"
    if len(others) > _MOST_OTHERS:
        yield f"  and {counted(len(others) - _MOST_OTHERS, 'more instance')}"


def _named(instance: InstanceResult) -> str:
    return f"instance {instance.index} on {instance.host}"
