"""The log of the PopTorch API, a logger with the name ``poptorch::python`` that writes to stderr.

The names and numbers of log levels are those of PopTorch. The module ``logger`` converts PopTorch's
log levels to the levels of Python's package logging.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Final

from tqdm import tqdm

__all__ = ["install_excepthook", "logger", "setLogLevel"]

logger: Final = logging.getLogger("poptorch::python")

_NUMBERS: Final = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARN": 3, "ERR": 4, "OFF": 6}
_INTERNAL: Final = {"TRACE_ALL": 0, "DEBUG_IR": 1}
_PYTHON: Final = {
    0: logging.DEBUG,
    1: logging.DEBUG,
    2: logging.INFO,
    3: logging.WARNING,
    4: logging.ERROR,
    6: logging.CRITICAL,
}
_COLOURS: Final = {
    logging.WARNING: "\x1b[33;20m",
    logging.ERROR: "\x1b[31;20m",
    logging.CRITICAL: "\x1b[31;1m",
}


class _Formatter(logging.Formatter):
    """Formats lines as ``[HH:MM:SS.mmm] [name] [level] message``, in colour on a terminal only."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = (
            f"[{clock}.{int(record.msecs):03d}] [{record.name}] "
            f"[{record.levelname.lower()}] {record.getMessage()}"
        )
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        colour = _COLOURS.get(record.levelno) if sys.stderr.isatty() else None
        return f"{colour}{text}\x1b[0m" if colour else text


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes to the current ``sys.stderr``, even if a program has redirected it.

    If one of the program's own log handlers writes a line to the terminal, this handler does not
    write the line.
    """

    def emit(self, record: logging.LogRecord) -> None:
        if not _program_shows(record):
            self.stream = sys.stderr
            with _bars_aside():
                super().emit(record)


def _bars_aside() -> AbstractContextManager[None]:
    """Clear progress bars while a log line is written, so that the line starts on an empty line.

    The first call of tqdm makes locks, so ``_bars_aside`` does not call tqdm while no progress bar
    exists.
    """
    bars = getattr(tqdm, "_instances", None)
    return tqdm.external_write_mode(file=sys.stderr) if bars else nullcontext()


def _program_shows(record: logging.LogRecord) -> bool:
    """Tell whether a handler of the root logger writes the log record to stdout or stderr."""
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return logger.propagate and any(
        record.levelno >= handler.level and stream is not None and stream in standard
        for handler in logging.getLogger().handlers
        for stream in [_stream(handler)]
    )


def _stream(handler: logging.Handler) -> object:
    """Return the output stream of a log handler.

    Log handlers of the package rich store the stream in a console object.
    """
    return getattr(handler, "stream", None) or getattr(
        getattr(handler, "console", None), "file", None
    )


def setLogLevel(level: str | int) -> None:
    """Set the level of PopTorch's log.

    Args:
        level: The name TRACE, DEBUG, INFO, WARN, ERR or OFF of the level, or its number 0, 1, 2, 3,
            4 or 6.

    Raises:
        ValueError: The log level is unknown.
    """
    if isinstance(level, int):
        if level not in _PYTHON:
            accepted = ", ".join(f"{number} ({name})" for name, number in _NUMBERS.items())
            raise ValueError(f"Invalid log level integer {level}: expected one of {accepted}")
        number = level
    else:
        numbers = _NUMBERS | _INTERNAL
        if level not in numbers:
            raise ValueError(
                f"Unknown log level {level}: expected one of {', '.join(sorted(_NUMBERS))}"
            )
        number = numbers[level]
    logger.setLevel(_PYTHON[number])


def install_excepthook() -> None:
    """Write the traceback of every uncaught exception to the log from now on.

    If another module has already installed an exception hook, ``install_excepthook`` does nothing.
    The exception hook of another module may have to end the whole job.
    """
    previous = sys.excepthook
    if previous is not sys.__excepthook__:
        return

    def log(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt) or not logger.isEnabledFor(logging.CRITICAL):
            previous(kind, value, trace)
        else:
            logger.critical("Unhandled exception", exc_info=(kind, value, trace))

    sys.excepthook = log


def _configure() -> None:
    """Give PopTorch's logger a handler and its initial level, unless it has a handler already."""
    if logger.handlers:
        return
    logger.propagate = True
    handler = _StderrHandler()
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)
    _take_level(os.environ.get("POPTORCH_LOG_LEVEL", "WARN"))


def _take_level(text: str) -> None:
    """Set the log level from the text of POPTORCH_LOG_LEVEL; warn about an unknown level."""
    try:
        setLogLevel(int(text) if text.isdigit() else text)
    except ValueError as error:
        setLogLevel("WARN")
        logger.warning(
            "POPTORCH_LOG_LEVEL=%s is ignored, and the level WARN is used: %s", text, error
        )


_configure()
