"""Spans of a program for the job's timeline: ``popdist_py.span``, and the library's own activities.

Recording begins with the launcher's ``--timeline``, with ``PVTI_OPTIONS``, or with ``record()``,
and costs next to nothing before. Nothing here knows what is in a file.
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
from popdist_py.timeline.recorder import Recorder

__all__ = [
    "DATA_LOADER",
    "DEVICE",
    "add",
    "among",
    "call_name",
    "is_recording",
    "record",
    "row_span",
    "span",
    "torch_trace_path",
]

# As json.dumps, which makes another encoder for each call.
_to_json: Final = json.JSONEncoder(default=str).encode

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PROGRAM: Final = "program"
DEVICE: Final = "device"
DATA_LOADER: Final = "data loader"
_COLLECTIVES: Final = "collectives"
# The row and the name of what the library does, by activity.
_LIBRARY: Final = {
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
# Which instances make the calls of this thread now, where not all do.
_group = ""


class span:
    """The time of a block, or of each call of a function, in the job's timeline.

    ``with popdist_py.span("augment", images=64):`` or ``@popdist_py.span("augment")``. Costs a few
    microseconds while a timeline is recorded; a fraction of one else. In a coroutine take ``with``:
    its time counts while it waits, too.

    Args:
        name: what goes on; few different ones, with what varies in ``arguments``.
        arguments: what else is shown; texts and numbers.
    """

    __slots__ = ("_arguments", "_begin", "_name")

    _track = _PROGRAM

    def __init__(self, name: str, /, **arguments: Any) -> None:
        self._name = name
        self._arguments = arguments

    def __enter__(self) -> span:
        if _recorder is not None:
            self._begin = time.monotonic_ns()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _recorder is not None:
            end = time.monotonic_ns()
            # Recording may have begun inside the block.
            begin = getattr(self, "_begin", end)
            arguments = _shown(self._arguments) if self._arguments else ""
            _recorder.record(str(self._name), self._track, begin, end, arguments)

    def __call__(self, function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        """Return ``function``, each call of which is a span."""

        @functools.wraps(function)
        def timed(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            if _recorder is None:
                return function(*args, **kwargs)
            # A span of its own: calls may be nested, or run in several threads.
            with copy.copy(self):
                return function(*args, **kwargs)

        return timed


class row_span(span):
    """A span of the library's own, in a row of its kind.

    Args:
        row: such as ``DEVICE``.
        name: what goes on.
    """

    __slots__ = ("_track",)

    def __init__(self, row: str, name: str) -> None:
        super().__init__(name)
        self._track = row


def _shown(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON; no program ends because of what cannot be shown."""
    try:
        return _to_json(arguments)
    except (TypeError, ValueError, RecursionError):
        return ""


def record(folder: str | Path) -> Path | None:
    """Record this process from now on; the trace is written when it ends.

    Without the launcher's ``--timeline``, which records all instances into one trace: where it is
    given, this does nothing.

    Args:
        folder: where the trace is put; made if missing.

    Returns:
        The trace's path; None if a timeline is recorded already.

    Raises:
        OSError: the folder cannot be made.
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
    """Mark calls that only some instances make: they are counted apart.

    Args:
        instances: which ones; empty for all.
    """
    global _group
    before, _group = _group, instances
    try:
        yield
    finally:
        _group = before


def call_name(name: str) -> str:
    """Return what a call is called by those that make it."""
    return f"{name} of {_group}" if _group else name


def add(row: str, name: str, begin: int, end: int, arguments: str = "") -> None:
    """Add a span that nobody had to time here, such as one of an emulated IPU's schedule.

    Args:
        row: in which it is shown, such as ``IPU 0``.
        name: what went on.
        begin: nanoseconds of ``time.monotonic_ns()``.
        end: the same.
        arguments: what else is shown: a JSON object, or empty.
    """
    if _recorder is not None:
        _recorder.record(name, row, begin, end, arguments)


def is_recording() -> bool:
    """Tell whether spans are recorded."""
    return _recorder is not None


def torch_trace_path() -> Path | None:
    """Return where torch.profiler's trace of this process becomes part of the timeline.

    Returns:
        A new path for each call; None while no timeline is recorded.
    """
    return None if _recorder is None else _recorder.torch_trace_path()


def _begin(prefix: str, size: int) -> None:
    global _recorder
    _recorder = Recorder(prefix, size)
    _listen()


def _listen() -> None:
    """Hear of the library's activities, also in a process that was forked."""
    if _recorder is not None:
        activities.listen(_hear)


def _hear(activity: int, name: str, begin: int, end: int) -> None:
    row = _LIBRARY.get(activity)
    if _recorder is None or row is None:
        return
    track, shown = row
    if not name:
        _recorder.record(shown, track, begin, end)
    elif activity == activities.REDUCING:
        # Every instance makes the named calls, in the same order. What runs beside the program got
        # its name when it was submitted.
        whole = call_name(name) if get_ident() == main_thread().ident else name
        _recorder.call(f"{shown} {whole}", track, begin, end)
    else:
        _recorder.record(f"{shown} {name}", track, begin, end)


def _write_own(prefix: Path, path: Path, pid: int) -> None:
    """Make the trace of a program that the launcher does not record."""
    if os.getpid() != pid:  # forked
        return
    from popdist_py.timeline.merging import Instance, merge_files

    instance = Instance(label=prefix.name.replace("-", " "), prefix=prefix)
    try:
        merge_files([instance], path)
        instance.remove_files()
    except OSError as error:
        logging.getLogger(__name__).warning("%s cannot be written: %s", path, error.strerror)


def _begin_as_asked(environ: Mapping[str, str]) -> None:
    """Record if the launcher or PVTI_OPTIONS asks for it."""
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
            "PVTI_OPTIONS=%r records nothing: %s", environ["PVTI_OPTIONS"], error
        )


os.register_at_fork(after_in_child=_listen)
_begin_as_asked(os.environ)
