"""Comparison of the output that a text shows for a command with the output here.

A command holds ("yes") if all that the text shows is shown here, or if the text shows no output and
the command runs here as it is printed. It holds partly if only some of the output is shown here, or
another command is run in its place. Otherwise it does not hold.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from tools.pages.seed_texts.values import Quantity, TextCommand
from tools.running.printed import comparable

__all__ = ["NO", "PARTLY", "YES", "Comparison", "compare"]

YES, PARTLY, NO = "yes", "partly", "no"
# A progress bar without a line break behind it, as notebooks show it.
_UNENDED = re.compile(r"((?:it/s|s/it)[^\]\n]*\])(?=\w)")
# Options for folders, and the file names that follow them, are not compared.
_PLACES = {"--data-dir", "--log-dir", "--profile-dir", "-path_to_folder", "-output"}


@dataclass(frozen=True)
class Comparison:
    """The result (YES, PARTLY or NO), and a sentence that says what was compared."""

    holds: str
    compared: str


def compare(command: TextCommand, lines: Sequence[str] | None) -> Comparison:
    """Compare the output that a text shows with ``lines``, the output here; None if never run."""
    if not command.here:
        return Comparison(NO, "Nothing was compared: it is not run here.")
    if lines is None:
        return Comparison(NO, "Nothing was compared: it has not been run yet.")
    if command.quantities:
        found, words = _quantities(command.quantities, lines)
    elif command.by_names:
        found, words = _names(command, lines)
    elif command.shows:
        found, words = _lines(command, lines)
    else:
        found, words = _exit_code(command)
    if found == YES and command.at_most_partly:
        found = PARTLY
    return Comparison(found, " ".join(filter(None, (words, command.compared))))


def _counted(same: int, total: int) -> str:
    if not same:
        return NO
    return YES if same == total else PARTLY


def _lines(command: TextCommand, lines: Sequence[str]) -> tuple[str, str]:
    shows = _UNENDED.sub(r"\1\n", "\n".join(command.shows)).splitlines()
    wanted, found = (
        comparable([line.strip() for line in each], numbers_vary=command.numbers_vary)
        for each in (shows, lines)
    )
    blocks = SequenceMatcher(None, wanted, found, autojunk=False).get_matching_blocks()
    same = sum(block.size for block in blocks)
    numbers = ", their numbers left out" if command.numbers_vary else " to the letter"
    words = f"{same} of the text's {len(wanted)} lines are shown here in their order{numbers}."
    return _counted(same, len(wanted)), words


def _names(command: TextCommand, lines: Sequence[str]) -> tuple[str, str]:
    wanted, found = (
        dict.fromkeys(re.findall(command.by_names, "\n".join(each)))
        for each in (command.shows, lines)
    )
    missing = [name for name in wanted if name not in found]
    but = f" (not {', '.join(missing)})" if missing else ""
    words = (
        f"{len(wanted) - len(missing)} of the text's {len(wanted)} names are shown here "
        f"too{but}; their order, line breaks and values were not compared."
    )
    return _counted(len(wanted) - len(missing), len(wanted)), words


def _quantities(quantities: Sequence[Quantity], lines: Sequence[str]) -> tuple[str, str]:
    same, words = 0, []
    for one in quantities:
        match = re.search(one.here, "\n".join(lines), re.M)
        if match is None:
            words.append(f"{one.name} {one.text:,g} in the text, not shown here")
            continue
        ours = float(match[1].replace(",", ""))
        is_same = ours > 0 and max(ours / one.text, one.text / ours) <= one.factor
        same += is_same
        allowed = "equal" if one.factor == 1 else f"within a factor of {one.factor:g}"
        words.append(
            f"{one.name} {one.text:,.10g} in the text, {ours:,.10g} here: "
            f"{'' if is_same else 'not '}{allowed}"
        )
    return _counted(same, len(quantities)), f"{'; '.join(words)}."


def _exit_code(command: TextCommand) -> tuple[str, str]:
    printed, run = _words(command.text), _words(shlex.join(command.here))
    is_code = tuple(command.here) == ("python", "-c", command.text)
    as_printed = is_code or printed == run
    added = _added(printed, run)
    if as_printed:
        how = "The command as printed"
    elif added is not None:
        how = f"The command as printed, with `{shlex.join(added)}` added,"
    else:
        how = "Another command in its place"
    words = f"{how} ended with exit code {command.code}; the text shows no output to compare with."
    return (YES if as_printed else PARTLY), words


def _added(printed: Sequence[str], run: Sequence[str]) -> list[str] | None:
    """Return the words that ``run`` has besides ``printed``; None unless it has all of these."""
    rest, added = list(printed), []
    for word in run:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            added.append(word)
    return None if rest else added


def _words(command: str) -> list[str]:
    """Return the words of a command to compare: without folders, and with one name for Python."""
    try:
        words = shlex.split(command)
    except ValueError:  # the text prints Python code, whose quotation marks may have no partner
        words = command.split()
    kept: list[str] = []
    skip = False
    for word in words:
        if not skip and word not in _PLACES:
            kept.append({"python3": "python"}.get(word, word.removeprefix("examples/course/")))
        skip = word in _PLACES
    return kept
