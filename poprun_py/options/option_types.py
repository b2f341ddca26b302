"""The classes ``OptionType`` and ``Option``, and all types of option values.

``declared_options.py`` declares every option of a launch with these types.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeGuard

from poprun_py.errors import UsageError, nearest, shortened

# The maximum number of instances. A number above it is probably a typing mistake, and planning
# for so many instances would take hours.
MAX_INSTANCES = 65_536
# As the value of an option, the word ``auto`` lets the launcher choose the value.
AUTO = "auto"
# As a time limit, the word ``forever`` means that the time is not limited.
FOREVER = "forever"
# The words with which users of torchrun request one process per CPU.
CPU_WORDS = ("auto", "cpu")
TOPOLOGY_FORMS = ("yes", "no", "tree", "cores", "json", "svg", "html")
_YES_NO_WORDS = {
    **dict.fromkeys(("yes", "on", "true", "1"), True),
    **dict.fromkeys(("no", "off", "false", "0"), False),
}
# Error messages do not contain integers above this limit, because Python refuses to print integers
# with thousands of digits.
_HUGE = 1 << 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionType:
    """A type of option values.

    Attributes:
        metavar: The placeholder for a value in help texts.
        expected: A description of the accepted values, for error messages.
        read: A function that converts text from a command line or an environment variable to a
            value. The function raises ValueError, KeyError or OverflowError for invalid text.
        accepts: A function that tells whether a value from Python or from a file is accepted.
        keyword: The type annotation of the option as a keyword argument in Python.
        choices: The accepted words, for shell completion and for suggestions.
        normalise: A function that converts an accepted value to the form that LaunchConfig stores.
        takes_text: Whether files and Python code may also give the value as command-line text.
        takes_path: Whether Python code may also give the value as a PathLike object.
    """

    metavar: str
    expected: str
    read: Callable[[str], Any]
    accepts: Callable[[Any], bool]
    keyword: str
    choices: tuple[str, ...] = ()
    normalise: Callable[[Any], Any] = lambda value: value
    takes_text: bool = False
    takes_path: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """The declaration of one option of a launch.

    Attributes:
        group: The group of the option in the help and in the documentation.
        default: The value of the option if it is not given.
        type: The type of the option's value, or of each value of a repeatable option.
        help: The description of the option for the help.
        short: The one-letter name of the option, such as ``-n``; None if the option has none.
        repeatable: Whether the option may be given several times, so that its value is a tuple.
        implied: The option's value if the user gives none; None if the user must give a value.
        saved: Whether exported configurations and plans contain the option.
        secret: Whether the option's value is secret, so that messages hide the value.
    """

    group: str
    default: Any
    type: OptionType
    help: str
    short: str | None = None
    repeatable: bool = False
    implied: str | None = None
    saved: bool = True
    secret: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return a value from Python or from a file in the form that LaunchConfig stores.

        Raises:
            UsageError: The value is not accepted. The error message contains ``name``, the value,
                and a description of the accepted values.
        """
        if self.repeatable:
            if not isinstance(value, list | tuple):
                given = f"of type {type(value).__name__}" if self.secret else repr(value)
                raise UsageError(
                    f"{name} {given}: expected a list of values, each of them {self.type.expected}"
                )
            return tuple(self._check_one(name, item) for item in value)
        return self._check_one(name, value)

    def check_or_read(self, name: str, value: Any) -> Any:
        """Check a value as ``check`` does, but also accept command-line text for some types.

        Raises:
            UsageError: The value is not accepted.
        """
        if isinstance(value, str) and self.type.takes_text:
            return self.read(name, value)
        return self.check(name, value)

    def read(self, name: str, text: str) -> Any:
        """Return an option's value from the text on a command line or in an environment variable.

        Raises:
            UsageError: The text is not accepted.
        """
        try:
            value = self.type.read(text)
        except (ValueError, OverflowError, KeyError):
            raise self._error(name, text) from None
        return self._check_one(name, value)

    def _check_one(self, name: str, value: Any) -> Any:
        if self.type.takes_path and isinstance(value, PathLike):
            value = fspath(value)
        python_value = plain(value)
        if not self.type.accepts(python_value):
            raise self._error(name, value)
        return self.type.normalise(python_value)

    def _error(self, name: str, value: Any) -> UsageError:
        shown = "a huge number" if isinstance(value, int) and abs(value) >= _HUGE else repr(value)
        if self.secret:
            # The error message about a secret NAME=VALUE contains only the name.
            given, equals, _ = value.partition("=") if isinstance(value, str) else ("", "", "")
            shown = f"{given!r}=..." if equals else f"of type {type(value).__name__}"
        hint = nearest(value, self.type.choices) if isinstance(value, str) else ""
        return UsageError(f"{name} {shortened(shown)}: expected {self.type.expected}{hint}")


def option_name(field: str) -> str:
    """Return the command-line spelling of an option: ``num_ilds`` -> ``--num-ilds``."""
    return "--" + field.replace("_", "-")


def plain(value: Any) -> Any:
    """Convert numbers and arrays of NumPy or torch to Python's types, also inside lists."""
    if isinstance(value, list | tuple | range):
        return tuple(map(plain, value))
    return value.tolist() if hasattr(type(value), "tolist") else value


def is_word(value: Any) -> TypeGuard[str]:
    """Tell whether a value is text that a command line or an environment variable can hold."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


# --- option types with parameters ---------------------------------------------------------------


def whole_number(minimum: int, metavar: str = "N", *, maximum: int = 2**31 - 1) -> OptionType:
    """Return the OptionType of whole numbers from ``minimum`` to ``maximum``."""
    return OptionType(
        metavar=metavar,
        expected=f"a whole number of at least {minimum} and at most {maximum}",
        read=_whole_number,
        accepts=lambda v: type(v) is int and minimum <= v <= maximum,
        keyword="int",
    )


def choice(*words: str, metavar: str = "") -> OptionType:
    """Return the OptionType of a choice of words, which users may type in any letter case."""
    exact = {word.lower(): word for word in words}
    return OptionType(
        metavar=metavar or "|".join(words),
        expected="one of " + ", ".join(words),
        read=lambda text: exact.get(text.lower(), text),
        accepts=lambda v: isinstance(v, str) and v in words,
        keyword="Literal[" + ", ".join(f'"{word}"' for word in words) + "]",
        choices=words,
    )


# --- conversions of texts, and checks of values -------------------------------------------------


def _whole_number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)


# The number of seconds in each unit of time, from the largest unit to the smallest.
_UNITS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_TIME = re.compile("".join(rf"(?:(\d+(?:\.\d*)?){unit})?" for unit in _UNITS), re.ASCII)


def _seconds(text: str) -> float:
    """Return the seconds in a text such as ``90``, ``90s``, ``5m``, ``1h30m`` or ``2d``."""
    if not text.isascii() or "_" in text:
        raise ValueError(text)
    match = _TIME.fullmatch(text.lower())
    if match is not None and text:
        numbers = zip(match.groups(), _UNITS.values(), strict=True)
        value: float = sum((float(number) * unit for number, unit in numbers if number), 0.0)
    else:
        value = float(text)
    return int(value) if value.is_integer() else value


def _is_time(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= sys.float_info.max


def _indices(text: str) -> tuple[int, ...] | None:
    """Return the indices of instances in a text such as ``0,2-3``; None for ``all``."""
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
    indices = value if isinstance(value, list | tuple) else [value]
    return value is None or (
        len(indices) > 0 and all(type(i) is int and 0 <= i <= MAX_INSTANCES for i in indices)
    )


def _sorted_indices(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    return tuple(sorted(set(value))) if isinstance(value, list | tuple) else (value,)


def _yes_no_or_word(text: str) -> str:
    """Return the text in lower case; ``on`` and ``0``, for example, become yes and no."""
    word = text.lower()
    if word not in _YES_NO_WORDS:
        return word
    return "yes" if _YES_NO_WORDS[word] else "no"


# --- option types -------------------------------------------------------------------------------


TEXT = OptionType(
    metavar="TEXT",
    expected="a text without NUL characters",
    read=str,
    accepts=is_word,
    keyword="str",
)
# The OptionType of names without blanks, such as the name of a V-IPU server, partition or cluster.
NAME = OptionType(
    metavar="NAME",
    expected="a name without blanks",
    read=str,
    accepts=lambda v: (
        isinstance(v, str) and v != "" and not any(c.isspace() or c == "\0" for c in v)
    ),
    keyword="str",
)
PATH = OptionType(
    metavar="PATH",
    expected="a path",
    read=str,
    accepts=lambda v: is_word(v) and v != "",
    keyword="str | PathLike[str]",
    takes_path=True,
)
# Users of srun give a file to --output.
LINE_PREFIX = replace(
    choice("tag", "time", "plain"),
    expected="tag, time or plain, the prefix of each line; to write output to files, give"
    " --output-dir",
)
FILE_OR_AUTO = replace(PATH, metavar="FILE|auto", expected="the path of a file, or auto")
POD = replace(
    PATH, metavar="POD", expected="the name of a pod, its folder, http://HOST:PORT, server or none"
)
JOB = replace(
    PATH,
    metavar="JOB",
    expected="a process id, the name of a run, or the folder of a run",
    accepts=lambda v: type(v) is int and v > 0 if isinstance(v, int) else is_word(v) and v != "",
    normalise=str,
)
YES_NO = OptionType(
    metavar="yes|no",
    expected="yes or no (also on, off, true, false, 1, 0)",
    read=lambda text: _YES_NO_WORDS[text.lower()],
    accepts=lambda v: isinstance(v, bool),
    keyword="bool",
    takes_text=True,
)
# The OptionType of an option that needs no value on the command line, such as --dry-run.
# Configuration files and environment variables set such an option to true or false.
FLAG = replace(YES_NO, metavar="", expected="true or false")
TOPOLOGY_FORM = replace(
    choice(*TOPOLOGY_FORMS),
    expected=f"{', '.join(TOPOLOGY_FORMS[:-1])} or {TOPOLOGY_FORMS[-1]}",
    read=_yes_no_or_word,
)
AUTO_YES_NO = replace(
    choice("auto", "yes", "no"),
    expected="auto, yes or no",
    read=_yes_no_or_word,
    accepts=lambda v: isinstance(v, bool) or v in ("auto", "yes", "no"),
    keyword='bool | Literal["auto", "yes", "no"]',
    normalise=lambda v: v if isinstance(v, str) else "yes" if v else "no",
    takes_text=True,
)
_TIME_EXPECTED = "a number of seconds above 0, or a time such as 90s, 5m, 1h30m or 2d"
TIME = OptionType(
    metavar="TIME",
    expected=_TIME_EXPECTED,
    read=_seconds,
    accepts=_is_time,
    keyword="float | str",
    takes_text=True,
)


def _time_or(word: str) -> OptionType:
    """Return the OptionType of a time or of one fixed word, such as ``auto``."""
    return replace(
        TIME,
        metavar=f"TIME|{word}",
        expected=f"{_TIME_EXPECTED}; or {word}",
        read=lambda text: word if text.lower() == word else _seconds(text),
        accepts=lambda v: v == word if isinstance(v, str) else _is_time(v),
    )


TIME_OR_AUTO, TIME_OR_FOREVER = _time_or(AUTO), _time_or(FOREVER)
INDICES = OptionType(
    metavar="INDICES",
    expected="indices of instances (from 0), such as 1 or 0,2-3, or all",
    read=_indices,
    accepts=_are_indices,
    keyword="int | str | Sequence[int]",
    normalise=_sorted_indices,
    takes_text=True,
)
COUNT_OR_AUTO = OptionType(
    metavar="N|auto",
    expected="a whole number of at least 1, or auto or cpu for the number of CPUs",
    read=lambda text: text.lower() if text.lower() in CPU_WORDS else _whole_number(text),
    accepts=lambda v: (
        v in CPU_WORDS if isinstance(v, str) else type(v) is int and 1 <= v <= MAX_INSTANCES
    ),
    keyword='int | Literal["auto", "cpu"]',
)


# --- destinations of --metrics-to -----------------------------------------------------------------


TENSORBOARD, WANDB, CSV, JSONL = "tensorboard", "wandb", "csv", "jsonl"
# Tools that write to a folder or file, by default in the folder of the run; with the word that
# stands for this path in texts.
METRICS_PATHS = {TENSORBOARD: "DIR", CSV: "FILE", JSONL: "FILE"}
_DESTINATION = re.compile(rf"((?ai:{'|'.join((*METRICS_PATHS, WANDB))}))(?::(.*\S.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class MetricsDestination:
    """A tool or a file format that stores a run's metrics, and the place of these metrics.

    Attributes:
        tool: The name of the tool or format: ``tensorboard``, ``wandb``, ``csv`` or ``jsonl``.
        where: TensorBoard's folder, the project of Weights & Biases, or a file; empty for the
            default.
    """

    tool: str
    where: str = ""

    @classmethod
    def read(cls, text: str) -> MetricsDestination:
        """Return the metrics destination that a text such as ``tensorboard:logs`` describes.

        Raises:
            ValueError: The metrics tool is unknown, or no text follows the colon.
        """
        match = _DESTINATION.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(match[1].lower(), match[2] or "")

    def __str__(self) -> str:
        return f"{self.tool}:{self.where}" if self.where else self.tool

    def beside(self, folder: Path) -> MetricsDestination:
        """Return this destination, with a relative folder or file joined to ``folder``."""
        if self.tool not in METRICS_PATHS or not self.where:
            return self
        return MetricsDestination(self.tool, str(folder / self.where))


def read_destinations(texts: Iterable[str]) -> tuple[MetricsDestination, ...]:
    """Return the metrics destinations that the ``texts`` describe, without duplicates."""
    return tuple(map(MetricsDestination.read, dict.fromkeys(texts)))


def _normalised(text: str) -> str:
    return str(MetricsDestination.read(text))


METRICS_DESTINATION = OptionType(
    metavar="TOOL[:WHERE]",
    expected="tensorboard, tensorboard:DIR, wandb, wandb:PROJECT, csv, csv:FILE, jsonl or"
    " jsonl:FILE",
    read=_normalised,
    accepts=lambda v: is_word(v) and _DESTINATION.fullmatch(v) is not None,
    keyword="str",
    normalise=_normalised,
)
