"""Argument parsing of the examples. An error is one line that names the accepted values."""

from __future__ import annotations

import argparse
import difflib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

__all__ = [
    "HelpFormat",
    "Parser",
    "figure_file",
    "from_zero",
    "nearest",
    "positive",
    "rate",
    "readable_file",
    "worker_count",
    "writable_file",
    "writable_folder",
]


class HelpFormat(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A help text with the program's docstring as it is, and with the defaults of the arguments."""


class Parser(argparse.ArgumentParser):
    """A parser with errors of one line, and with defaults in ``--help``."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """End the program with exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists the arguments)\n")

    def spellings(self) -> dict[str, list[str]]:
        """Return the option strings of each argument, by the name of the argument's value.

        If two options such as ``--a`` and ``--b`` set the same value, one list contains both.
        """
        found: dict[str, list[str]] = {}
        for action in self._actions:  # argparse does not have a public list of arguments
            found.setdefault(action.dest, []).extend(action.option_strings)
        return found

    def say_idle(self, args: argparse.Namespace, *rules: tuple[bool, str, str]) -> None:
        """Print one line that names ineffective arguments. Only one of several instances prints.

        Args:
            args: The arguments. Arguments with their default value are not named.
            rules: One rule for each group of arguments. A rule consists of a boolean that tells
                whether the arguments are ineffective, the reason, and the names of the arguments in
                ``args``, separated by spaces.
        """
        words = self.spellings()
        found = [
            f"{max(words[name], key=len)} ({reason})"
            for applies, reason, names in rules
            for name in names.split()
            if applies and getattr(args, name) != self.get_default(name)
        ]
        if found and os.environ.get("RANK", "0") == "0":
            print(f"{self.prog}: without effect here: {', '.join(found)}", file=sys.stderr)


def positive(text: str) -> int:
    """Parse an integer of 1 or more."""
    return _number(text, int, lambda value: value >= 1, "an integer from 1 on")


def from_zero(text: str) -> int:
    """Parse an integer of 0 or more."""
    return _number(text, int, lambda value: value >= 0, "an integer from 0 on")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; is NAME meant?" for the known name most similar to ``name``, or an empty text."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; is {close[0]!r} meant?" if close else ""


_MOST_WORKERS = 1024  # a larger number is a mistake that would fill the memory


def worker_count(text: str) -> int:
    """Parse a number of processes that load data."""
    accepted = f"an integer from 0 to {_MOST_WORKERS}"
    return _number(text, int, lambda value: 0 <= value <= _MOST_WORKERS, accepted)


def rate(text: str) -> float:
    """Parse a number above 0, such as a learning rate."""
    return _number(text, float, lambda value: 0 < value < float("inf"), "a number above 0")


def readable_file(text: str) -> Path:
    """Parse the path of an existing file that can be read."""
    path = Path(text)
    if not path.is_file() or not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is given, a file that can be read is accepted")
    return path


def writable_file(text: str) -> Path:
    """Parse the path of a file that can be written. The folder of the file need not exist."""
    path = Path(text)
    place = path if path.exists() else _nearest_place(path)
    if path.is_dir() or not (path.exists() or place.is_dir()) or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} is given, a file that can be written is accepted"
        )
    return path


def writable_folder(text: str) -> Path:
    """Parse the path of a folder that can be written to. The folder need not exist."""
    path = Path(text)
    place = _nearest_place(path / "file")
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} is given, a folder that can be written is accepted"
        )
    return path


def _nearest_place(path: Path) -> Path:
    """Return the nearest existing parent folder of ``path``."""
    return next(each for each in path.absolute().parents if each.exists())


def figure_file(text: str) -> Path:
    """Parse the path of a figure file that matplotlib can write."""
    path = Path(text)
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text!r} is given, NAME.svg, .png or .pdf is accepted")
    if not importlib.util.find_spec("matplotlib"):
        raise argparse.ArgumentTypeError(
            f"{text!r} needs matplotlib: python -m pip install matplotlib, or leave it out"
        )
    return path


def _number(text, kind, is_accepted, accepted):
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_accepted(value):
        raise argparse.ArgumentTypeError(f"{text!r} is given, {accepted} is accepted")
    return value
