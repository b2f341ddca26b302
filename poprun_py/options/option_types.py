"""What an option is: its kind of value, how it is written, read and checked.

``launch_config.py`` declares every option once with these. The command line, the help, the
configuration files and the reference pages are derived from there. No option lives here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from os import PathLike, fspath
from typing import Any, TypeGuard

from poprun_py.errors import UsageError, nearest

# Far above any job; a typing slip is refused instead of planned for hours.
MAX_INSTANCES = 65_536
# What the launcher chooses by itself.
AUTO = "auto"
# No limit of time.
FOREVER = "forever"
# torchrun's words for as many processes as there are CPUs.
CPU_WORDS = ("auto", "cpu")
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
    """A kind of value: ``read`` turns typed text into one, ``accepts`` checks one from Python.

    ``keep`` gives the one form in which accepted values are kept. ``is_text_in_files``: a file of
    options may hold the text that would be typed.
    """

    metavar: str
    expected: str
    read: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    choices: tuple[str, ...] = ()
    keep: Callable[[Any], Any] = lambda value: value
    is_text_in_files: bool = False


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
                given = f"of type {type(value).__name__}" if self.secret else repr(value)
                raise UsageError(f"{name} {given}: expected a list, each {self.kind.expected}")
            return tuple(self._check_one(name, item) for item in value)
        return self._check_one(name, value)

    def _check_one(self, name: str, value: Any) -> Any:
        if self.kind in (PATH, FILE_OR_AUTO) and isinstance(value, PathLike):
            value = fspath(value)
        python_value = plain(value)
        if not self.kind.accepts(python_value):
            raise UsageError(self.refusal(name, value))
        return self.kind.keep(python_value)

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
        """Return the line that refuses ``value``; of a secret NAME=VALUE it tells the name."""
        shown = "a huge number" if isinstance(value, int) and abs(value) >= _HUGE else repr(value)
        if self.secret:
            given, equals, _ = value.partition("=") if isinstance(value, str) else ("", "", "")
            shown = f"{given!r}=..." if equals else f"of type {type(value).__name__}"
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


def plain(value: Any) -> Any:
    """Return Python's own value for a number or array of numpy or torch, in lists too."""
    if isinstance(value, list | tuple | range):
        return tuple(map(plain, value))
    return value.tolist() if hasattr(type(value), "tolist") else value


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
        accepts=lambda v: isinstance(v, str) and v in values,
        choices=values,
    )


def spelled(*words: str) -> Kind:
    """Return the kind of a fixed set of names, typed in any letter case and kept as they stand."""
    canonical = {word.lower(): word for word in words}
    return Kind(
        metavar="NAME",
        expected="one of " + ", ".join(words),
        read=lambda text: canonical.get(text.lower(), text),
        accepts=lambda v: isinstance(v, str) and v in words,
        choices=words,
    )


def _whole_number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_INSTANCES


# The units of a length of time, the largest first, in seconds.
_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_TIME = re.compile("".join(rf"(?:(\d+(?:\.\d*)?){unit})?" for unit in _UNITS), re.ASCII)


def _seconds(text: str) -> float:
    """Return the seconds of ``90``, ``90s``, ``5m``, ``1h30m`` or ``2d``."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    match = _TIME.fullmatch(text.lower())
    if match is not None and text:
        numbers = zip(match.groups(), _UNITS.values(), strict=True)
        value: float = sum((float(number) * unit for number, unit in numbers if number), 0.0)
    else:
        value = float(text)
    return int(value) if value.is_integer() else value


def _indices(text: str) -> tuple[int, ...] | None:
    """Return the indices of ``0,2-3``; None for ``all``."""
    if text.lower() == "all":
        return None
    found: set[int] = set()
    for part in text.split(","):
        first, hyphen, last = part.partition("-")
        low = _whole_number(first)
        high = _whole_number(last) if hyphen else low
        if high < low or high > MAX_INSTANCES:
            raise ValueError(part)
        found.update(range(low, high + 1))
    return tuple(sorted(found))


def _are_indices(value: Any) -> bool:
    """Tell whether ``value`` is None, an index, or a list of indices."""
    indices = value if isinstance(value, list | tuple) else [value]
    return value is None or (
        len(indices) > 0 and all(type(i) is int and 0 <= i <= MAX_INSTANCES for i in indices)
    )


def _kept_indices(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(sorted(set(value))) if isinstance(value, list | tuple) else (value,)


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
FILE_OR_AUTO = Kind(
    metavar="FILE|auto",
    expected="the path of a file, or auto",
    read=str,
    accepts=PATH.accepts,
)
YES_NO = Kind(
    metavar="yes|no",
    expected="yes or no (also on, off, true, false, 1, 0)",
    read=lambda text: YES_NO_WORDS[text.lower()],
    accepts=lambda v: isinstance(v, bool),
    is_text_in_files=True,
)
FLAG = Kind(
    metavar="",
    expected="true or false",
    read=lambda text: YES_NO_WORDS[text.lower()],
    accepts=lambda v: isinstance(v, bool),
    is_text_in_files=True,
)
_TIME_WORDS = "a number of seconds above 0, or a time such as 90s, 5m, 1h30m or 2d"
SECONDS = Kind(
    metavar="TIME",
    expected=_TIME_WORDS,
    read=_seconds,
    accepts=lambda v: (
        isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= sys.float_info.max
    ),
    is_text_in_files=True,
)
SECONDS_OR_AUTO = Kind(
    metavar="TIME|auto",
    expected=f"{_TIME_WORDS}; or auto",
    read=lambda text: "auto" if text.lower() == "auto" else _seconds(text),
    accepts=lambda v: v == "auto" if isinstance(v, str) else SECONDS.accepts(v),
    is_text_in_files=True,
)
SECONDS_OR_FOREVER = Kind(
    metavar=f"TIME|{FOREVER}",
    expected=f"{_TIME_WORDS}; or {FOREVER}",
    read=lambda text: FOREVER if text.lower() == FOREVER else _seconds(text),
    accepts=lambda v: v == FOREVER if isinstance(v, str) else SECONDS.accepts(v),
    is_text_in_files=True,
)
INDICES = Kind(
    metavar="INDICES",
    expected="indices from 0 such as 1 or 0,2-3, or all",
    read=_indices,
    accepts=_are_indices,
    keep=_kept_indices,
    is_text_in_files=True,
)
COUNT_OR_AUTO = Kind(
    metavar="N|auto",
    expected="a whole number of at least 1, or auto (cpu) for the number of CPUs",
    read=lambda text: text.lower() if text.lower() in CPU_WORDS else _whole_number(text),
    accepts=lambda v: v in CPU_WORDS if isinstance(v, str) else _is_count(v),
)
# Names that contain no blanks: V-IPU's servers, partitions and clusters.
NAME = Kind(
    metavar="NAME",
    expected="a name without blanks",
    read=str,
    accepts=lambda v: (
        isinstance(v, str) and v != "" and not any(c.isspace() or c == "\0" for c in v)
    ),
)
