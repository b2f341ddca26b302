"""What a caller gives to ``launch``, ``start`` and a handle, checked. Nothing acts here."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from numbers import Real

from poprun_py.errors import UsageError
from poprun_py.options.option_types import plain
from poprun_py.python_api.job_output import STREAMS


def require_stream(stream: object) -> None:
    """Refuse what is no stream of an instance.

    Raises:
        UsageError: it is none.
    """
    if stream is not None and not (isinstance(stream, str) and stream in STREAMS):
        raise UsageError(f"stream {stream!r}: expected 'stdout', 'stderr' or None")


def require_instance(instance: object, total: int) -> None:
    """Refuse what is no index of an instance.

    Raises:
        UsageError: it is none, nor None for all.
    """
    index = plain(instance)
    if index is not None and not (_is_index(index) and 0 <= index < total):
        raise UsageError(f"instance {instance!r}: expected 0 to {total - 1}, or None for all")


def require_seconds(name: str, value: object, least: float = -math.inf) -> float | None:
    """Return how long to wait, in seconds; None for no limit.

    Raises:
        UsageError: it is no number, or below ``least``.
    """
    if value is None:
        return None
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not float(value) >= least:  # type: ignore[arg-type]
        raise UsageError(f"{name} {value!r}: expected seconds, 0 or more")
    return min(float(value), threading.TIMEOUT_MAX)  # type: ignore[arg-type]


def require_arguments(name: str, args: object, kwargs: object) -> None:
    """Refuse what is no arguments for a function.

    Raises:
        UsageError: they are no sequence, or no mapping from names.
    """
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UsageError(
            f"args of type {type(args).__name__}: expected a tuple of the arguments of {name}, "
            "such as (3,)"
        )
    if not isinstance(kwargs, Mapping) or not all(isinstance(key, str) for key in kwargs):
        raise UsageError(
            f"kwargs of type {type(kwargs).__name__}: expected a mapping from names of arguments "
            f'of {name}, such as {{"lr": 0.1}}'
        )


def checked_environ(environ: object) -> dict[str, str] | None:
    """Return a copy of an environment; None for that of this process.

    Raises:
        UsageError: it is no mapping from texts to texts. Values are never named.
    """
    if environ is None:
        return None
    if not isinstance(environ, Mapping):
        raise UsageError(
            f"environ of type {type(environ).__name__}: expected a mapping, such as os.environ"
        )
    for name, value in environ.items():
        if not _is_text(name) or not name or "=" in name:
            raise UsageError(
                f"environ: {name!r} is no name of a variable: expected a text without ="
            )
        if not _is_text(value):
            raise UsageError(f"environ: variable {name}: expected a text without NUL characters")
    return dict(environ)


def require_descriptors(descriptors: object) -> None:
    """Refuse what is no pair of descriptors.

    Raises:
        UsageError: it is none.
    """
    if descriptors is None:
        return
    is_pair = isinstance(descriptors, Sequence) and len(descriptors) == 2
    if not is_pair or not all(_is_index(each) and each >= 0 for each in descriptors):  # type: ignore[attr-defined]
        raise UsageError(
            f"descriptors {descriptors!r}: expected two of open files, for stdout and stderr, "
            "such as (1, 2)"
        )


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value
