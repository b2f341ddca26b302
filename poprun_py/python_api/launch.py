"""``poprun_py.launch`` and ``start``: run a function or a program in every instance of a job."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from poprun_py.errors import UsageError, start_errors
from poprun_py.instance.job_folders import JobFolder, folder_name
from poprun_py.options.keyword_types import LaunchOptions, Word
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.python_api.handle import JobHandle
from poprun_py.python_api.job_output import SHOWN, uses_standard_descriptors
from poprun_py.python_api.job_target import job_target
from poprun_py.python_api.launcher_child import LauncherChild, Stream
from poprun_py.python_api.messages import JobRequest
from poprun_py.running.supervise.job import LaunchResult
from poprun_py.terminal import Log

T = TypeVar("T")
Program = Sequence[Word] | LaunchConfig | LaunchPlan


class _JobKeywords(LaunchOptions, total=False):
    """The keyword arguments that ``launch`` and ``start`` share; ``launch`` describes them."""

    log: Log | None
    warn: Log | None
    tell_binding: Log | None
    environ: Mapping[str, str] | None


class _LaunchKeywords(_JobKeywords, total=False):
    descriptors: tuple[int, int] | None


class _StartKeywords(_JobKeywords, total=False):
    show: bool


@overload
def launch(
    target: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Unpack[_LaunchKeywords],
) -> list[T]: ...
@overload
def launch(target: Program, **keywords: Unpack[_LaunchKeywords]) -> LaunchResult: ...
def launch(
    target: Callable[..., T] | Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    log: Log | None = None,
    warn: Log | None = None,
    tell_binding: Log | None = None,
    environ: Mapping[str, str] | None = None,
    descriptors: tuple[int, int] | None = None,
    **options: Unpack[LaunchOptions],
) -> list[T] | LaunchResult:
    """Run a function or a program in every instance of a job, and wait for the end of the job.

    The output of the instances is shown as the command ``poprun-py`` shows it. Ctrl-C stops the
    job.

    Args:
        target: A function; a program as a list of words, numbers and paths; or a configuration or
            plan that has a program.
        args: The positional arguments of the function, the same for every instance.
        kwargs: The keyword arguments of the function.
        log: A function that gets each line of the launcher's log, called in a separate thread. By
            default the log is written to stderr if ``verbosity`` enables it.
        warn: A function that gets each warning; by default warnings are written to stderr.
        tell_binding: A function that gets each instance's CPU binding, as the kernel reports it; by
            default bindings are written to the log.
        environ: The environment of the job; by default the environment of the plan if ``target`` is
            a plan, else the environment of this process.
        descriptors: Two open file descriptors that receive the instances' stdout and stderr.
        options: Options of the command line, named like the fields of LaunchConfig.

    Returns:
        For a function, the list of its return values, ordered by the index of the instance. For a
        program, its LaunchResult, whose ``raise_for_failure`` raises an error if the job failed.

    Raises:
        UsageError: An option is wrong, or does not fit the hosts and machines. No program started.
        StartError: The job could not start.
        TimeLimitError: The job ran into its time limit, or hung; ``result`` has the details.
        JobFailedError: The job of a function failed without an exception of the function.
        Exception: The exception that the function raised in an instance.
    """
    is_function = callable(target)
    listeners = _checked_listeners(log, warn, tell_binding)
    _check_descriptors(descriptors)
    inherits_streams = descriptors is None and uses_standard_descriptors()
    pipe = None if inherits_streams else subprocess.PIPE
    outputs: tuple[Stream, Stream] = descriptors or (pipe, pipe)
    with _job_folder(is_needed=is_function) as folder:
        path = None if folder is None else folder.path
        resolved = job_target(target, args, kwargs, options, path)
        request = JobRequest(
            job=resolved.job,
            environ=_checked_environ(environ),
            folder=path,
            listeners=frozenset(listeners),
        )
        # Text that was printed before the launch must appear before the job's output.
        for stream in (sys.stdout, sys.stderr):
            if inherits_streams and stream is not None:
                with contextlib.suppress(OSError):  # A full disk does not stop the job.
                    stream.flush()
        launcher = LauncherChild(
            resolved.name,
            request,
            (None, *outputs),
            is_in_front=threading.current_thread() is threading.main_thread(),
            listeners=listeners,
        )
        job = JobHandle[Any](resolved, launcher, folder=folder)
    with job:
        try:
            return job.result() if is_function else job.wait()
        except Exception as error:  # omit this module's frames from the traceback
            raise error.with_traceback(None) from error.__cause__


@overload
def start(
    target: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **keywords: Unpack[_StartKeywords],
) -> JobHandle[list[T]]: ...
@overload
def start(target: Program, **keywords: Unpack[_StartKeywords]) -> JobHandle[LaunchResult]: ...
def start(
    target: Callable[..., T] | Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    show: bool = False,
    log: Log | None = None,
    warn: Log | None = None,
    tell_binding: Log | None = None,
    environ: Mapping[str, str] | None = None,
    **options: Unpack[LaunchOptions],
) -> JobHandle[list[T]] | JobHandle[LaunchResult]:
    """Start a function or a program in every instance of a job, and return without waiting.

    The job reads no standard input, and Ctrl-C does not reach it.

    Args:
        target: A function, a program, a configuration or a plan, as for ``launch``.
        args: The positional arguments of the function, the same for every instance.
        kwargs: The keyword arguments of the function.
        show: Whether the output of the instances is shown as it is written. The handle's
            ``output`` returns the output even if it is not shown.
        log: A function that gets each line of the launcher's log, as for ``launch``.
        warn: A function that gets each warning, as for ``launch``.
        tell_binding: A function that gets each instance's CPU binding, as for ``launch``.
        environ: The environment of the job; by default the environment of the plan if ``target`` is
            a plan, else the environment of this process.
        options: Options of the command line, named like the fields of LaunchConfig.

    Raises:
        UsageError: An option is wrong. No process started.
        StartError: The launcher process cannot be started.
    """
    listeners = _checked_listeners(log, warn, tell_binding)
    with _job_folder() as folder:
        assert folder is not None
        resolved = job_target(target, args, kwargs, options, folder.path)
        shown_file = Path(folder.path) / SHOWN
        request = JobRequest(
            job=resolved.job,
            environ=_checked_environ(environ),
            folder=folder.path,
            keeps_output=True,
            listeners=frozenset(listeners),
        )
        with shown_file.open("ab") as shown:
            outputs = (subprocess.PIPE, subprocess.PIPE) if show else (shown.fileno(),) * 2
            launcher = LauncherChild(
                resolved.name,
                request,
                (subprocess.DEVNULL, *outputs),
                is_in_front=False,
                output_file=shown_file,
                listeners=listeners,
            )
        return JobHandle(resolved, launcher, folder=folder)


def _checked_listeners(
    log: Log | None, warn: Log | None, tell_binding: Log | None
) -> dict[str, Log]:
    """Return the functions that the caller has given, keyed by the kind of line that they take."""
    given = {"log": log, "warn": warn, "binding": tell_binding}
    for kind, call in given.items():
        if call is not None and not callable(call):
            raise UsageError(f"{kind} {call!r}: expected a function that takes a line")
    return {kind: call for kind, call in given.items() if call is not None}


def _checked_environ(environ: object) -> dict[str, str] | None:
    """Return a checked copy of an environment. Errors omit the variables' values (secrets)."""
    if environ is None:
        return None
    if not isinstance(environ, Mapping):
        raise UsageError(
            f"environ of type {type(environ).__name__}: expected a mapping, such as os.environ"
        )
    for name, value in environ.items():
        if not _is_text(name) or not name or "=" in name:
            raise UsageError(
                f"environ: {name!r} is not the name of a variable: expected a text without ="
            )
        if not _is_text(value):
            raise UsageError(f"environ: variable {name}: expected a text without NUL characters")
    return dict(environ)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _check_descriptors(descriptors: object) -> None:
    if descriptors is None:
        return
    is_pair = isinstance(descriptors, Sequence) and len(descriptors) == 2
    if not is_pair or not all(_is_descriptor(each) for each in descriptors):  # type: ignore[attr-defined]
        raise UsageError(
            f"descriptors {descriptors!r}: expected two descriptors of open files, for stdout and "
            "stderr, such as (1, 2)"
        )


def _is_descriptor(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@contextlib.contextmanager
def _job_folder(*, is_needed: bool = True) -> Iterator[JobFolder | None]:
    """Make the private folder of a job, and remove it if the job cannot be started.

    Raises:
        StartError: The folder cannot be made.
    """
    if not is_needed:
        yield None
        return
    import tempfile

    with start_errors("no folder for the job can be made"):
        folder = JobFolder.make(tempfile.gettempdir(), folder_name("job"))
    try:
        yield folder
    except BaseException:
        folder.remove()
        raise
