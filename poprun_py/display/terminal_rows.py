"""Rows of a terminal: the width of text in columns, and messages that are wrapped at words.

Nothing here writes to a terminal or asks for its size.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence

# A message is not wrapped on a narrower terminal, where most words would get a row of their own.
_FEWEST_COLUMNS = 20
_INDENT = "  "
_QUOTES = {"'": "'", '"': '"', "`": "`", "(": ")"}
_MOST_QUOTED_WORDS = 16
# A command in a message begins with one of these words and ends at a punctuation mark.
_COMMANDS = frozenset(
    {"apt", "cd", "docker", "export", "mpirun", "pip", "poprun-py", "poprun-py-pod", "python",
     "python3", "srun", "ssh", "sudo", "sysctl", "ulimit"}
)  # fmt: skip
_OPTION = re.compile(r"--?[A-Za-z]")


def num_columns(text: str) -> int:
    """Return the number of a terminal's columns that printable text takes."""
    if text.isascii():
        return len(text)
    return sum(map(_columns_of, text))


def cut(text: str, columns: int) -> str:
    """Return the beginning of printable text that fits into ``columns`` columns."""
    width = 0
    for index, char in enumerate(text):
        width += _columns_of(char)
        if width > columns:
            return text[:index]
    return text


def _columns_of(char: str) -> int:
    if unicodedata.combining(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def wrapped(line: str, columns: int) -> str:
    """Return a message with newlines between its words, for a terminal of ``columns`` columns.

    A path stays whole, even if it is longer than a row, so that a user can copy it. A command with
    options stays whole too. Other commands, quoted texts, and options with their values stay
    whole if they fit into a row.
    """
    if columns < _FEWEST_COLUMNS or num_columns(line) <= columns:
        return line
    rows = [""]
    for phrase in _phrases(line.split(" "), columns - len(_INDENT)):
        longer = f"{rows[-1]} {phrase}" if rows[-1] else phrase
        if rows[-1].strip() and num_columns(longer) > columns:
            rows.append(_INDENT + phrase)
        else:
            rows[-1] = longer
    return "\n".join(rows)


def _phrases(words: Sequence[str], most_columns: int) -> Iterator[str]:
    """Yield the words of a message, joined to phrases that are not broken."""
    start = 0
    while start < len(words):
        end = _end_of_phrase(words, start)
        phrase = " ".join(words[start:end])
        is_command = words[start] in _COMMANDS and any(map(_OPTION.match, words[start:end]))
        if num_columns(phrase) > most_columns and not is_command:
            end = start + 1
        yield " ".join(words[start:end])
        start = end


def _end_of_phrase(words: Sequence[str], start: int) -> int:
    """Return the index after the phrase that begins with the word ``start``."""
    first = words[start]
    closing = _QUOTES.get(first[:1])
    if closing is not None:
        for end in range(start, min(start + _MOST_QUOTED_WORDS, len(words))):
            quoted = words[end][1:] if end == start else words[end]
            if closing in quoted:
                return end + 1
    if first in _COMMANDS:
        end = start
        while end + 1 < len(words) and not _ends_clause(words[end]):
            end += 1
        return end + 1
    end = start + 1
    # An option stays with the word before it and with its value.
    if end < len(words) and not _ends_clause(first) and _OPTION.match(words[end]):
        first, end = words[end], end + 1
    if end < len(words) and _OPTION.match(first) and not _ends_clause(first) and "=" not in first:
        end += 1
    return end


def _ends_clause(word: str) -> bool:
    return word.endswith((",", ";", ":", ".", ")", "?"))
