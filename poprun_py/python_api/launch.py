"""``poprun_py.launch`` and ``start``: a function or a program in every instance of a job."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack, overload

from poprun_py.console import Log
from poprun_py.errors import UsageError, start_errors
from poprun_py.instance.job_folders import JobFolder, folder_name
from poprun_py.options.keyword_types import LaunchOptions, Word
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.launch_plan import LaunchPlan
from poprun_py.python_api.checks import checked_environ, require_descriptors
from poprun_py.python_api.child import Child, Stream
from poprun_py.python_api.handle import JobHandle
from poprun_py.python_api.job_output import SHOWN
from poprun_py.python_api.job_screen import Echo, has_own_descriptors
from poprun_py.python_api.order import Order
from poprun_py.python_api.work import Work
from poprun_py.running.supervise.job import LaunchResult

T = TypeVar("T")
Program = Sequence[Word] | LaunchConfig | LaunchPlan


class _JobKeywords(LaunchOptions, total=False):
    """What every job takes by name; what each is for stands at ``launch``."""

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
    """Run a function or a program in every instance of a job, to the end; nothing of it is left.

    What the instances write is shown, as the command shows it. Ctrl-C stops the job.

    Args:
        target: a function; a program as a list of words, numbers and paths; or a configuration or
            plan of one.
        args: of the function, the same for every instance.
        kwargs: of the function.
        log: takes the launcher's log, line by line, in a thread of its own; by default it is
            written to stderr, where ``verbosity`` asks for it.
        warn: takes what the user should know at any verbosity; by default written to stderr.
        tell_binding: takes what the kernel says of each instance's binding; logged by default.
        environ: the environment of the job; by default that of this process, or of the plan.
        descriptors: where stdout and stderr go instead.
        options: as of the command line.

    Returns:
        What the function returned in every instance, in their order; of a program how it ended,
        well or not (``raise_for_failure``).

    Raises:
        UsageError: the options are wrong, or do not fit hosts and machines; nothing was started.
        StartError: the job could not start.
        TimeLimitError: it ran into its time limit, or hung; ``result`` tells the rest.
        JobFailedError: an instance of a function did not end by itself.
        Exception: what the function raised in an instance.
    """
    is_function = callable(target)
    listeners = _listeners(log, warn, tell_binding)
    require_descriptors(descriptors)
    own = descriptors is None and has_own_descriptors()
    echoed = descriptors is None and not own
    pipe = subprocess.PIPE if echoed else None
    outputs: tuple[Stream, Stream] = descriptors or (pipe, pipe)
    with _Folder() as folder:
        work = Work.of(target, args, kwargs, options, folder.make)
        order = Order(
            job=work.job,
            environ=checked_environ(environ),
            folder=folder.name,
            listeners=frozenset(listeners),
        )
        for stream in (sys.stdout, sys.stderr):  # what was printed before comes before
            if own and stream is not None:
                with contextlib.suppress(OSError):  # the job runs even if this text is lost
                    stream.flush()
        is_in_front = threading.current_thread() is threading.main_thread()
        child = Child(order, (None, *outputs), is_in_front=is_in_front)
        job = JobHandle[Any](
            work, child, folder=folder.keep(), echoes=_echoes(child, None), listeners=listeners
        )
    with job:
        try:
            return job.result() if is_function else job.wait()
        except Exception as error:  # frames of ours would tell the caller nothing
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
    """Start a function or a program in every instance of a job, and return at once.

    The job reads no standard input, and Ctrl-C does not reach it.

    Args:
        target: a function, a program, a configuration or a plan, as of ``launch``.
        args: of the function, the same for every instance.
        kwargs: of the function.
        show: whether what the instances write is shown as it comes; ``output`` has it anyway.
        log: takes the launcher's log, as of ``launch``.
        warn: takes what the user should know, as of ``launch``.
        tell_binding: takes what the kernel says of each instance's binding.
        environ: the environment of the job; by default that of this process, or of the plan.
        options: as of the command line.

    Raises:
        UsageError: the options are wrong; nothing was started.
        StartError: the launcher's process cannot be started.
    """
    listeners = _listeners(log, warn, tell_binding)
    with _Folder() as folder:
        place = folder.make()
        work = Work.of(target, args, kwargs, options, lambda: place)
        order = Order(
            job=work.job,
            environ=checked_environ(environ),
            folder=folder.name,
            keeps_output=True,
            listeners=frozenset(listeners),
        )
        with (place / SHOWN).open("ab") as shown:
            outputs = (subprocess.PIPE, subprocess.PIPE) if show else (shown.fileno(),) * 2
            child = Child(order, (subprocess.DEVNULL, *outputs), is_in_front=False)
        return JobHandle(
            work,
            child,
            folder=folder.keep(),
            echoes=_echoes(child, place / SHOWN),
            listeners=listeners,
        )


def _listeners(log: Log | None, warn: Log | None, tell_binding: Log | None) -> dict[str, Log]:
    given = {"log": log, "warn": warn, "binding": tell_binding}
    for kind, call in given.items():
        if call is not None and not callable(call):
            raise UsageError(f"{kind} {call!r}: expected a function that takes a line")
    return {kind: call for kind, call in given.items() if call is not None}


def _echoes(child: Child, kept: Path | None) -> tuple[Echo, ...]:
    return tuple(Echo(pipe, name, kept) for name, pipe in child.pipes.items())


class _Folder:
    """The private folder of a job, if it needs one: removed again unless the job is started."""

    def __init__(self) -> None:
        self._held: JobFolder | None = None

    @property
    def name(self) -> str | None:
        return None if self._held is None else self._held.path

    def make(self) -> Path:
        """Make it.

        Raises:
            StartError: it cannot be made.
        """
        import tempfile

        with start_errors("no folder for the job can be made"):
            self._held = JobFolder.make(tempfile.gettempdir(), folder_name("job"))
        return Path(self._held.path)

    def keep(self) -> JobFolder | None:
        """Leave it to the job."""
        held, self._held = self._held, None
        return held

    def __enter__(self) -> _Folder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._held is not None:
            self._held.remove()
