"""Comparison of a text's output with our output for the same command.

A command holds ("yes") if our output contains all output of the text. It also holds if the text
shows no output and the command runs as printed. It holds "partly" if our output contains a part of
the text's output, or if another command runs in its place. Otherwise the result is "no".
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import SequenceMatcher

from tutorial_texts.values import Quantity, TextCommand

from tools.running.printed import comparable

__all__ = ["NO", "PARTLY", "YES", "holds"]

YES, PARTLY, NO = "yes", "partly", "no"
# A progress bar without a line break behind it, as notebooks show it.
_UNENDED = re.compile(r"((?:it/s|s/it)[^\]\n]*\])(?=\w)")
# Options for folders, and the file names that follow them, are not compared.
_PLACES = {"--data-dir", "--log-dir", "--profile-dir", "-path_to_folder", "-output"}


def holds(command: TextCommand, lines: Sequence[str]) -> str:
    """Return YES, PARTLY or NO for a command whose output is ``lines`` in this project."""
    if not command.here:
        return NO
    if command.quantities:
        found = _counted([_is_equal(one, lines) for one in command.quantities])
    elif command.by_names:
        ours = re.findall(command.by_names, "\n".join(lines))
        theirs = re.findall(command.by_names, "\n".join(command.shows))
        found = _counted([name in ours for name in theirs])
    elif command.shows:
        found = _lines(command, lines)
    else:
        found = YES if _runs_as_printed(command) else PARTLY
    return PARTLY if found == YES and command.at_most_partly else found


def _counted(same: Sequence[bool]) -> str:
    if not any(same):
        return NO
    return YES if all(same) else PARTLY


def _lines(command: TextCommand, lines: Sequence[str]) -> str:
    """Compare the lines in their order."""
    shows = _UNENDED.sub(r"\1\n", "\n".join(command.shows)).splitlines()
    wanted, found = (
        comparable([line.strip() for line in each], numbers_vary=command.numbers_vary)
        for each in (shows, lines)
    )
    blocks = SequenceMatcher(None, wanted, found, autojunk=False).get_matching_blocks()
    same = sum(block.size for block in blocks)
    return _counted([index < same for index in range(len(wanted))])


def _is_equal(quantity: Quantity, lines: Sequence[str]) -> bool:
    match = re.search(quantity.here, "\n".join(lines), re.M)
    ours = float(match[1].replace(",", "")) if match else 0.0
    return ours > 0 and max(ours / quantity.text, quantity.text / ours) <= quantity.factor


def _runs_as_printed(command: TextCommand) -> bool:
    is_code = tuple(command.here) == ("python", "-c", command.text)
    return is_code or _words(command.text) == _words(shlex.join(command.here))


def _words(command: str) -> list[str]:
    """Return the words of a command without folders, and with one name for Python."""
    try:
        words = shlex.split(command)
    except ValueError:  # the text prints Python code, which can contain single quotation marks
        words = command.split()
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word not in _PLACES:
            kept.append({"python3": "python"}.get(word, word.removeprefix("examples/course/")))
        skip = word in _PLACES
    return kept
