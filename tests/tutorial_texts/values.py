"""The commands that a tutorial text prints, with the commands that run here in their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FIELDS", "OPTIONS", "Quantity", "Text", "TextCommand"]

#: Patterns for ``by_names``: names before ``=``, and options of a command line.
FIELDS = r"(?<![\w.])([A-Za-z_]\w*)="
OPTIONS = r"(?<![\w-])(--?[a-z][\w-]*)"


@dataclass(frozen=True)
class Quantity:
    """A number that a text shows.

    Attributes:
        text: The number in the text.
        here: A regular expression whose only group is the number in our output.
        factor: The numbers count as equal if their ratio is at most this.
    """

    text: float
    here: str
    factor: float = 1.0


@dataclass(frozen=True)
class TextCommand:
    """A command that a text prints, and the command that a test runs.

    Attributes:
        text: The text's command in one line.
        shows: The text's output lines; empty if the text shows no output.
        here: The words of the command that a test runs; empty if the text's command cannot run.
            ``{data}`` is a folder that all commands share, ``{out}`` a folder of this command.
        folder: The command's working folder in the project.
        keep: Patterns of the output lines that are recorded; empty for all lines.
        code: The expected exit code.
        numbers_vary: Whether the numbers in the output differ between runs (times, losses).
        seconds: The time limit on two cores.
        quick: Whether the command takes at most about two seconds.
        by_names: A pattern whose group finds names. The names are compared instead of the lines.
        quantities: The numbers that are compared instead of the lines.
        at_most_partly: Whether the result is "partly" at best, such as for other data.
    """

    text: str
    shows: Sequence[str] = ()
    here: Sequence[str] = ()
    folder: str = "."
    keep: Sequence[str] = ()
    code: int = 0
    numbers_vary: bool = True
    seconds: int = 120
    quick: bool = False
    by_names: str = ""
    quantities: Sequence[Quantity] = ()
    at_most_partly: bool = False


@dataclass(frozen=True)
class Text:
    """A text with its commands in the order of the text.

    Attributes:
        title: The heading of its section in docs/seeds.md.
        page: The tutorial of this project, below docs/.
    """

    title: str
    page: str
    commands: Sequence[TextCommand]
