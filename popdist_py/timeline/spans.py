"""Spans of the job's timeline, from the public class ``span`` and from the library's activities.

The launcher's option ``--timeline``, the environment variable ``PVTI_OPTIONS`` or the function
``record`` starts recording. Without recording, a span takes almost no time. The module
``span_file`` defines the layout of the files.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import get_ident, main_thread
from types import TracebackType
from typing import Any, Final, ParamSpec, TypeVar

from popdist_py import activities, environment
from popdist_py.timeline.recorder import Opened, Recorder

# One encoder serves all calls, because json.dumps would make a new encoder for each call.
_to_json: Final = json.JSONEncoder(default=str).encode

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PROGRAM: Final = "program"
DEVICE: Final = "device"
DATA_LOADER: Final = "data loader"
_COLLECTIVES: Final = "collectives"
_STEPS: Final = "steps"
# The row and the name with which the timeline displays each activity of the library.
_LIBRARY: Final = {
    activities.OTHER: (_PROGRAM, activities.NAMES[activities.OTHER]),
    activities.COMPILING: (DEVICE, "compile"),
    activities.COMPUTING: (DEVICE, "step"),
    activities.LOADING: (DATA_LOADER, "load"),
    activities.TRANSFERRING: (DEVICE, "transfer"),
    activities.REDUCING: (_COLLECTIVES, "reduce"),
    activities.WAITING: (_COLLECTIVES, "wait for instances"),
    activities.UPDATING: (DEVICE, "update"),
    activities.SAVING: ("checkpoints", "checkpoint"),
    activities.VALIDATING: (DEVICE, "validation"),
}

_recorder: Recorder | None = None
# A text that names the instances that make the current collective calls. An empty text stands for
# all instances.
_group = ""


class span:
    """Records the time of a block, or of each call of a function, in the job's timeline.

    Write ``with popdist_py.span("augment", images=64):`` or ``@popdist_py.span("augment")``. A span
    takes a few microseconds while a timeline is recorded, and less than one microsecond otherwise.
    In a coroutine, use ``with``. The span then includes the time for which the coroutine waits.

    Args:
        name: The name of the span. Use few different names, and put varying values into
            ``arguments``.
        arguments: Texts and numbers that the timeline displays with the span.
    """

    __slots__ = ("_arguments", "_begun", "_name")

    _track = _PROGRAM

    def __init__(self, name: str, /, **arguments: Any) -> None:
        self._name = name
        self._arguments = arguments
        # The start time of the block, the recorder's open span, and the previous value of
        # ``_begun``. The previous value is needed if ``with`` blocks of the same object are nested.
        self._begun: tuple[int, Opened | None, Any] | None = None

    def __enter__(self) -> span:
        if _recorder is not None:
            begin = time.monotonic_ns()
            opened = _recorder.begin(str(self._name), self._track, begin)
            self._begun = begin, opened, self._begun
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _recorder is not None:
            end = time.monotonic_ns()
            # If recording was started inside the block, the start time of the block is unknown.
            begin, opened, self._begun = self._begun or (end, None, None)
            arguments = _shown(self._arguments) if self._arguments else ""
            _recorder.record(str(self._name), self._track, begin, end, arguments, opened=opened)

    def __call__(self, function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        """Return a function that calls ``function`` and records each call as a span."""

        @functools.wraps(function)
        def timed(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            if _recorder is None:
                return function(*args, **kwargs)
            # Each call uses its own copy of the span, because calls may be nested or run in several
            # threads.
            with copy.copy(self):
                return function(*args, **kwargs)

        return timed


class row_span(span):
    """Records a span of the library in a given row of the timeline.

    Args:
        row: The name of the row, such as ``DEVICE``.
        name: The name of the span.
        arguments: Texts and numbers that the timeline displays with the span. The dictionary may
            change until the span ends.
    """

    __slots__ = ("_track",)

    def __init__(self, row: str, name: str, arguments: dict[str, Any] | None = None) -> None:
        super().__init__(name)
        self._track = row
        if arguments is not None:
            self._arguments = arguments


def _shown(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON, or an empty string if they cannot be encoded.

    Arguments that cannot be encoded must not end the program.
    """
    try:
        return _to_json(arguments)
    except (TypeError, ValueError, RecursionError):
        return ""


def record(folder: str | Path) -> Path | None:
    """Record spans of this process from now on, and write the trace when the process ends.

    The launcher's option ``--timeline`` records all instances into one trace. Call this function in
    a program that runs without this option. With the option, the function does nothing.

    Args:
        folder: The folder for the trace. The folder is made if it does not exist.

    Returns:
        The path of the trace, or None if a timeline is recorded already.

    Raises:
        OSError: The folder cannot be made.
    """
    if _recorder is not None:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    environ = environment.InstanceEnvironment.from_environ(os.environ)
    index = environ.replica_index_offset // environ.num_local_replicas
    prefix = Path(folder).absolute() / f"instance-{index}"
    _begin(str(prefix), environment.TIMELINE_MIB << 20)
    path = prefix.with_name(f"{prefix.name}.timeline.json.gz")
    atexit.register(_write_own, prefix, path, os.getpid())
    return path


@contextlib.contextmanager
def among(instances: str) -> Iterator[None]:
    """Number the collective calls in a block as calls of a subset of the instances.

    Args:
        instances: A text that names the subset, or an empty string for all instances.
    """
    global _group
    before, _group = _group, instances
    try:
        yield
    finally:
        _group = before


def call_name(name: str) -> str:
    """Return the name of a collective call, followed by the subset of instances that make it."""
    return f"{name} of {_group}" if _group else name


def add(row: str, name: str, begin: int, end: int, arguments: str = "") -> None:
    """Add a span with known times, such as a span of an emulated IPU's schedule.

    Args:
        row: The row that displays the span, such as ``IPU 0``.
        name: The name of the span.
        begin: The start time in nanoseconds of ``time.monotonic_ns()``.
        end: The end time in nanoseconds of ``time.monotonic_ns()``.
        arguments: A JSON object that the timeline displays with the span, or an empty string.
    """
    if _recorder is not None:
        _recorder.record(name, row, begin, end, arguments)


def is_recording() -> bool:
    """Tell whether spans are recorded."""
    return _recorder is not None


def torch_trace_path() -> Path | None:
    """Return a path to which torch.profiler can write a trace for the timeline.

    Returns:
        A new path for each call, or None if no timeline is recorded.
    """
    return None if _recorder is None else _recorder.torch_trace_path()


def _begin(prefix: str, size: int) -> None:
    global _recorder
    _recorder = Recorder(prefix, size)
    _listen()


def _listen() -> None:
    """Record the library's activities, in this process or after a fork in the child process."""
    if _recorder is not None:
        activities.listen(_Activities(_recorder))


class _Activities:
    """Records the library's activities as spans."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def begun(self, activity: int, name: str, begin: int) -> Opened | None:
        """Write the start of an activity's span."""
        track, shown, is_call = _shown_activity(activity, name)
        return self._recorder.begin(shown, track, begin, is_call=is_call)

    def ended(self, activity: int, name: str, begin: int, end: int, begun: Opened | None) -> None:
        """Record the span of an activity that has ended."""
        track, shown, is_call = _shown_activity(activity, name)
        self._recorder.record(shown, track, begin, end, is_call=is_call, opened=begun)

    def step(self, begin: int, end: int) -> None:
        """Record a training step that the program counted itself, without a wrapped model."""
        self._recorder.record("step", _STEPS, begin, end)


def _shown_activity(activity: int, name: str) -> tuple[str, str, bool]:
    """Return the row and the name of an activity's span, and whether it is a collective call."""
    track, shown = _LIBRARY[activity]
    if not name:
        return track, shown, False
    if activity != activities.REDUCING:
        return track, f"{shown} {name}", False
    # Every instance makes its named collective calls in the same order. For a call in a background
    # thread, ``name`` already contains the subset of instances.
    whole = call_name(name) if get_ident() == main_thread().ident else name
    return track, f"{shown} {whole}", True


def _write_own(prefix: Path, path: Path, pid: int) -> None:
    """Write the trace of a program that recorded itself, without the launcher's ``--timeline``."""
    if os.getpid() != pid:  # this is a forked child process
        return
    from popdist_py.timeline.merging import Instance, merge_files

    instance = Instance(label=prefix.name.replace("-", " "), prefix=prefix)
    try:
        merge_files([instance], path)
        instance.remove_files()
    except OSError as error:
        logging.getLogger(__name__).warning(
            "the timeline %s cannot be written: %s", path, error.strerror
        )


def _begin_as_asked(environ: Mapping[str, str]) -> None:
    """Start recording if the launcher or ``PVTI_OPTIONS`` requests it."""
    size, _, prefix = environ.get(environment.TIMELINE, "").partition(":")
    if prefix and size.isdigit():
        _begin(prefix, int(size))
        return
    try:
        wanted = json.loads(environ.get("PVTI_OPTIONS") or "{}")
        if str(wanted.get("enable", "")).lower() == "true":
            record(wanted.get("directory") or ".")
    except (ValueError, AttributeError, TypeError, OSError) as error:
        logging.getLogger(__name__).warning(
            "PVTI_OPTIONS=%r is invalid, so no timeline is recorded: %s",
            environ["PVTI_OPTIONS"],
            error,
        )


os.register_at_fork(after_in_child=_listen)
_begin_as_asked(os.environ)
