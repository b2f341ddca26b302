"""``poprun_py.launch`` and ``start``: run a function or a program in every instance of a job."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from poprun_py.display.user_traceback import running_ipython
from poprun_py.errors import UsageError, start_errors
from poprun_py.instance.job_folders import JobFolder, folder_name
from poprun_py.options.keyword_types import LaunchOptions, Word
from poprun_py.options.launch_config import LaunchConfig, changed_config
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.planning.user_program import short_name
from poprun_py.python_api.handle import SHOWN, JobHandle
from poprun_py.python_api.launcher_child import LauncherChild, Stream
from poprun_py.python_api.messages import JobRequest
from poprun_py.running.supervise.launch_result import LaunchResult
from poprun_py.terminal import Log

T = TypeVar("T")
Program = Sequence[Word] | LaunchConfig | LaunchPlan


class _JobKeywords(LaunchOptions, total=False):
    """The keyword arguments that ``launch`` and ``start`` share."""

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
        The list of the function's return values, ordered by the index of the instance, or the
        LaunchResult of the program. If the program failed, ``LaunchResult.raise_for_failure``
        raises an error.

    Raises:
        UsageError: An option is wrong, or does not fit the hosts and machines. No program started.
        StartError: The job could not start.
        TimeLimitError: The job ran into its time limit, or hung; ``result`` has the details.
        JobFailedError: The job of a function failed without an exception of the function.
        Exception: The exception that the function raised in an instance.
    """
    _check_descriptors(descriptors)
    outputs: tuple[Stream, Stream] = descriptors or (subprocess.PIPE, subprocess.PIPE)
    if descriptors is None and _uses_standard_descriptors():
        outputs = None, None
        # Text that was printed before the launch must appear before the job's output.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):  # A full disk does not stop the job.
                stream.flush()
    job = _started(
        target,
        args,
        kwargs,
        options,
        listeners=_checked_listeners(log=log, warn=warn, tell_binding=tell_binding),
        environ=_checked_environ(environ),
        outputs=outputs,
        in_background=False,
        prints_failure=descriptors is not None or not _shows_exceptions(options),
    )
    with job:
        try:
            return job.result() if callable(target) else job.wait()
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
        show: Whether the output of the instances is shown as it is written. ``JobHandle.output``
            returns the output even if the output is not shown.
        log: A function that gets each line of the launcher's log, as for ``launch``.
        warn: A function that gets each warning.
        tell_binding: A function that gets each instance's CPU binding.
        environ: The environment of the job.
        options: Options of the command line, named like the fields of LaunchConfig.

    Raises:
        UsageError: An option is wrong. No process started.
        StartError: The launcher process cannot be started.
    """
    return _started(
        target,
        args,
        kwargs,
        options,
        listeners=_checked_listeners(log=log, warn=warn, tell_binding=tell_binding),
        environ=_checked_environ(environ),
        outputs=(subprocess.PIPE, subprocess.PIPE) if show else None,
        in_background=True,
    )


def _shows_exceptions(options: Mapping[str, object]) -> bool:
    """Return whether IPython shows the exception of a function, and it is needed nowhere else.

    The files of output_dir have the whole output, and a job that is restarted raises only the
    exception of its last attempt.
    """
    is_kept = options.get("output_dir") is not None or bool(options.get("max_restarts"))
    return running_ipython() is not None and not is_kept


def _uses_standard_descriptors() -> bool:
    """Return whether ``print`` writes to descriptors 1 and 2 of this process.

    In a notebook, and in tests that capture output, ``sys.stdout`` writes elsewhere.
    """
    return _descriptor_of(sys.stdout) == 1 and _descriptor_of(sys.stderr) == 2


def _descriptor_of(stream: Any) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return -1


def _started(
    target: object,
    args: object,
    kwargs: object,
    options: Mapping[str, object],
    *,
    listeners: Mapping[str, Log],
    environ: Mapping[str, str] | None,
    outputs: tuple[Stream, Stream] | None,
    in_background: bool,
    prints_failure: bool = True,
) -> JobHandle[Any]:
    """Start a job; if ``outputs`` is None, the output goes only to a file in the job's folder.

    The output of a job in the background is always stored in the job's folder.
    """
    with contextlib.ExitStack() as after_errors:
        folder = _job_folder() if in_background or callable(target) else None
        shown = None
        if folder is not None:
            after_errors.callback(folder.remove)
            shown = Path(folder.path) / SHOWN if in_background else None
        name, job, read = _resolved(
            target, args, kwargs, options, folder, prints_failure=prints_failure
        )
        job = _with_variables(job, os.environ if environ is None else environ)
        request = JobRequest(
            job=job,
            environ=environ,
            folder=None if folder is None else folder.path,
            keeps_output=in_background,
            listeners=frozenset(listeners),
        )
        stdin = subprocess.DEVNULL if in_background else None
        stdout, stderr = outputs or (shown, shown)
        is_main_thread = threading.current_thread() is threading.main_thread()
        launcher = LauncherChild(
            name,
            request,
            (stdin, stdout, stderr),
            is_in_front=is_main_thread and not in_background,
            output_file=shown,
            listeners=listeners,
        )
        after_errors.callback(launcher.abandon)
        handle = JobHandle(name, read, launcher, folder)
        after_errors.pop_all()
        return handle


def _job_folder() -> JobFolder:
    """Make the private folder of a job.

    Raises:
        StartError: The folder cannot be made.
    """
    import tempfile

    with start_errors("cannot make a temporary folder for the job"):
        return JobFolder.make(tempfile.gettempdir(), folder_name("job"))


# --- checks of arguments ------------------------------------------------------------------


def _checked_listeners(**given: Log | None) -> dict[str, Log]:
    """Return the functions that the caller has given, keyed by the kind of line that they take."""
    listeners = {name: call for name, call in given.items() if call is not None}
    for name, call in listeners.items():
        if not callable(call):
            raise UsageError(
                f"{name} {call!r}: expected a function with one argument, a line of text"
            )
    return {name.removeprefix("tell_"): call for name, call in listeners.items()}


def _checked_environ(environ: object) -> dict[str, str] | None:
    """Return a checked copy of an environment. Error messages omit the values of variables."""
    if environ is None:
        return None
    if not isinstance(environ, Mapping):
        raise UsageError(
            f"environ of type {type(environ).__name__}: expected a mapping, such as os.environ"
        )
    for name, value in environ.items():
        if not _is_text(name) or not name or "=" in name:
            raise UsageError(
                f"environ: {name!r} is not a valid name of an environment variable: expected a "
                "string without = and NUL characters"
            )
        if not _is_text(value):
            raise UsageError(
                f"environ: the value of {name} must be a string without NUL characters"
            )
    return dict(environ)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _check_descriptors(descriptors: Any) -> None:
    if descriptors is None:
        return
    is_pair = isinstance(descriptors, Sequence) and len(descriptors) == 2
    if not is_pair or not all(map(_is_descriptor, descriptors)):
        raise UsageError(
            f"descriptors {descriptors!r}: expected two open file descriptors, for stdout and "
            "stderr, such as (1, 2)"
        )


def _is_descriptor(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _resolved(
    target: object,
    args: object,
    kwargs: object,
    options: Mapping[str, object],
    folder: JobFolder | None,
    *,
    prints_failure: bool,
) -> tuple[str, LaunchConfig | LaunchPlan, Callable[[LaunchResult], Any]]:
    """Return a target's name, configuration or plan, and a function that reads the job's value.

    The function converts the job's LaunchResult to the value that ``launch`` returns, or raises the
    job's error. ``folder`` is the private folder of the job.

    Raises:
        UsageError: The target cannot be launched.
    """
    if callable(target):
        assert folder is not None
        return _resolved_function(
            target, args, kwargs, options, Path(folder.path) / "call", prints_failure=prints_failure
        )
    if args or kwargs:
        raise UsageError(
            "args and kwargs can be given for a function only: give the arguments of a program in "
            "its list of words"
        )
    job = _config_or_plan(target, options)
    config = job.config if isinstance(job, LaunchPlan) else job
    if not config.program:
        raise UsageError("nothing to launch: expected a program or a function")
    return short_name(config.program), job, LaunchResult.raise_for_failure


def _with_variables(
    job: LaunchConfig | LaunchPlan, environ: Mapping[str, str]
) -> LaunchConfig | LaunchPlan:
    from poprun_py.options.gathered_options import with_variables

    if isinstance(job, LaunchPlan):
        return replace(job, config=with_variables(job.config, environ))
    return with_variables(job, environ)


def _config_or_plan(target: object, options: Mapping[str, object]) -> LaunchConfig | LaunchPlan:
    if isinstance(target, LaunchPlan):
        if options:
            raise UsageError(
                f"{next(iter(options))}: the options of a LaunchPlan cannot be changed. Make a "
                "new plan with poprun_py.plan()"
            )
        return target
    if isinstance(target, LaunchConfig):
        return changed_config(target, options) if options else target
    if isinstance(target, list | tuple):
        return changed_config(LaunchConfig(), options, target)
    shown = ascii(target)
    raise UsageError(
        f"{shown if len(shown) <= 60 else f'{shown[:57]}...'} cannot be launched: expected a "
        'function, a program as a list of words such as ["train.py", "--lr", 0.1], a '
        "LaunchConfig, or a LaunchPlan"
    )


def _resolved_function(
    function: Callable[..., object],
    args: object,
    kwargs: object,
    options: Mapping[str, object],
    folder: Path,
    *,
    prints_failure: bool,
) -> tuple[str, LaunchConfig, Callable[[LaunchResult], list[Any]]]:
    from poprun_py.python_api.functions.packed_call import function_name, write_call
    from poprun_py.python_api.functions.results import read_results

    name = function_name(function)
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UsageError(
            f"args of type {type(args).__name__}: expected a tuple of the arguments of {name}, "
            "such as (3,)"
        )
    kwargs = {} if kwargs is None else kwargs
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(
            f"kwargs of type {type(kwargs).__name__}: expected a mapping from names of arguments "
            f'of {name}, such as {{"lr": 0.1}}'
        )
    folder.mkdir(mode=0o700)
    program = write_call(folder, function, args, kwargs, prints_failure=prints_failure)
    job = changed_config(LaunchConfig(), options, program)
    return name, job, partial(read_results, folder)
