"""The log of the PopTorch API: one logger named ``poptorch::python`` that writes to stderr.

Levels and their numbers are PopTorch's; Python's own numbers stay inside this module.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from types import TracebackType
from typing import Final

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
    """``[HH:MM:SS.mmm] [name] [level] message``, coloured on a terminal only."""

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
    """Writes to whatever ``sys.stderr`` is at the time, so that redirection is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def setLogLevel(level: str | int) -> None:
    """Set how much PopTorch logs.

    Args:
        level: TRACE, DEBUG, INFO, WARN, ERR or OFF, or their numbers 0, 1, 2, 3, 4, 6.

    Raises:
        ValueError: any other level.
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
    """Send the traceback of an exception that nobody catches through the log.

    A hook that stands already stays: it may have to end a whole job.
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
    """Give the logger its handler and its first level, once."""
    if logger.handlers:
        return
    logger.propagate = True
    handler = _StderrHandler()
    handler.setFormatter(_Formatter())
    logger.addHandler(handler)
    setLogLevel(os.environ.get("POPTORCH_LOG_LEVEL", "WARN"))


_configure()
