"""What an option is: its kind of value, how it is written, read and checked.

``launch_config.py`` declares every option once with these. The command line, the help, the
configuration files and the reference pages are derived from there. No option lives here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, TypeGuard

from poprun_py.errors import UsageError, nearest

__all__ = [
    "FLAG",
    "PATH",
    "SECONDS",
    "TEXT",
    "YES_NO",
    "YES_NO_WORDS",
    "Kind",
    "Option",
    "choice",
    "is_word",
    "option",
    "option_name",
    "whole",
]

# Python refuses to write out numbers of thousands of digits.
_HUGE = 1 << 1024
YES_NO_WORDS = {
    "yes": True,
    "on": True,
    "true": True,
    "1": True,
    "no": False,
    "off": False,
    "false": False,
    "0": False,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of value: ``read`` turns typed text into one, ``accepts`` checks one from Python."""

    metavar: str
    expected: str
    read: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option: kind, group in the help, one help sentence, and how it may be written."""

    kind: Kind
    group: str
    help: str
    short: str | None = None
    repeatable: bool = False
    implied: str | None = None  # the value of the bare option, where `=VALUE` may be left out
    saved: bool = True  # part of an exported configuration
    secret: bool = False  # never shown

    def check(self, name: str, value: Any) -> Any:
        """Return ``value`` if this option takes it.

        Raises:
            UsageError: it does not; the message names the option, the value and what is accepted.
        """
        if self.repeatable:
            if not isinstance(value, list | tuple):
                raise UsageError(f"{name} {value!r}: expected a list, each {self.kind.expected}")
            return tuple(self._check_one(name, item) for item in value)
        return self._check_one(name, value)

    def _check_one(self, name: str, value: Any) -> Any:
        if self.kind is PATH and isinstance(value, PathLike):
            value = fspath(value)
        if not self.kind.accepts(value):
            raise UsageError(self.refusal(name, value))
        return value

    def read(self, name: str, text: str) -> Any:
        """Turn typed ``text`` into a value.

        Raises:
            UsageError: the text is no such value.
        """
        try:
            value = self.kind.read(text)
        except (ValueError, OverflowError, KeyError):
            raise UsageError(self.refusal(name, text)) from None
        return self._check_one(name, value)

    def refusal(self, name: str, value: Any) -> str:
        """Return the line that refuses ``value``."""
        shown = "a huge number" if isinstance(value, int) and abs(value) >= _HUGE else repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        hint = nearest(value, self.kind.choices) if isinstance(value, str) else ""
        return f"{name} {shown}: expected {self.kind.expected}{hint}"


def option(
    default: Any,
    kind: Kind,
    group: str,
    help: str,
    *,
    short: str | None = None,
    repeatable: bool = False,
    implied: str | None = None,
    saved: bool = True,
    secret: bool = False,
) -> Any:
    """Declare a field of the configuration as an option; its name is the field's."""
    return field(
        default=default,
        metadata={
            "option": Option(
                kind=kind,
                group=group,
                help=help,
                short=short,
                repeatable=repeatable,
                implied=implied,
                saved=saved,
                secret=secret,
            )
        },
    )


def option_name(field_name: str) -> str:
    """Return the command-line spelling of a configuration field: ``num_ilds`` -> ``--num-ilds``."""
    return "--" + field_name.replace("_", "-")


def whole(minimum: int, metavar: str = "N", *, maximum: int = 2**31 - 1) -> Kind:
    """Return the kind of whole numbers from ``minimum`` to ``maximum``.

    Every count has an end: a typing slip is refused instead of planned for hours.
    """
    return Kind(
        metavar=metavar,
        expected=f"a whole number of at least {minimum} and at most {maximum}",
        read=_whole_number,
        accepts=lambda v: type(v) is int and minimum <= v <= maximum,
    )


def choice(*values: str) -> Kind:
    """Return the kind of a fixed set of words, in any letter case."""
    return Kind(
        metavar="|".join(values),
        expected="one of " + ", ".join(values),
        read=str.lower,
        accepts=lambda v: v in values,
        choices=values,
    )


def _whole_number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    value = float(text)
    return int(value) if value.is_integer() else value


def is_word(value: Any) -> TypeGuard[str]:
    """Tell whether ``value`` is a text that can stand on a command line or in the environment."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


TEXT = Kind(
    metavar="TEXT",
    expected="a text without NUL characters",
    read=str,
    accepts=is_word,
)
PATH = Kind(
    metavar="PATH",
    expected="a path",
    read=str,
    accepts=lambda v: is_word(v) and v != "",
)
YES_NO = Kind(
    metavar="yes|no",
    expected="yes or no (also on, off, true, false, 1, 0)",
    read=lambda text: YES_NO_WORDS[text.lower()],
    accepts=lambda v: isinstance(v, bool),
)
FLAG = Kind(
    metavar="",
    expected="true or false",
    read=lambda text: YES_NO_WORDS[text.lower()],
    accepts=lambda v: isinstance(v, bool),
)
SECONDS = Kind(
    metavar="SECONDS",
    expected="a number of seconds above 0",
    read=_seconds,
    accepts=lambda v: (
        isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= sys.float_info.max
    ),
)
