"""What is said of a text whose programs run here, and of the figures that are drawn of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FIELDS", "OPTIONS", "Figure", "Quantity", "Text", "TextCommand"]

#: Patterns for ``by_names``: names before ``=``, and options of a command line.
FIELDS = r"(?<![\w.])([A-Za-z_]\w*)="
OPTIONS = r"(?<![\w-])(--?[a-z][\w-]*)"


@dataclass(frozen=True)
class Quantity:
    """A number that a text shows, and the pattern that finds our number in the output here."""

    name: str
    text: float
    #: A regular expression whose only group is the number.
    here: str
    #: The numbers count as equal if their ratio is at most this.
    factor: float = 1.0


@dataclass(frozen=True)
class TextCommand:
    """A command that a text prints, and what stands for it here."""

    #: As the text prints it, in one line.
    text: str
    #: The lines that the text shows below it; empty if it shows none.
    shows: Sequence[str]
    #: What is run in its place: ``python`` and its words; empty if nothing can be.
    #: ``{data}`` is a folder that all commands share, ``{out}`` one of this command.
    here: Sequence[str]
    #: The folder of the project in which it is run.
    folder: str
    #: Why what we show differs, in one or two sentences without figures of a run.
    why: str
    #: Of what is printed, the lines in which one of these patterns is found; or all lines.
    keep: Sequence[str] = ()
    #: The exit code that is right.
    code: int = 0
    #: Whether a line's numbers are left out when a run is compared with another (times, losses).
    numbers_vary: bool = True
    #: At most this long, in seconds, on two cores.
    seconds: int = 120
    #: Compare the names that this pattern's group finds, not lines: for output in another layout.
    by_names: str = ""
    #: Compare these numbers, not lines.
    quantities: Sequence[Quantity] = ()
    #: One or two sentences for the page about other parts that were or were not compared.
    compared: str = ""
    #: True if the result can only be "partly" or "no", such as for a smaller model or other data.
    at_most_partly: bool = False


@dataclass(frozen=True)
class Text:
    """A text, in the order of its commands."""

    title: str
    #: The tutorial of ours, below docs/.
    page: str
    commands: Sequence[TextCommand]


@dataclass(frozen=True)
class Figure:
    """A figure in docs/figures/, drawn by a program of the examples."""

    #: An .svg or .png file.
    name: str
    #: ``python`` and its words, run in the project's root; ``{file}`` is where the figure goes.
    command: Sequence[str]
    #: Ids (``common.drawing.mark``) and words that an SVG has; at least three.
    marks: Sequence[str]
    #: Whether another run gives the same bytes: nothing of it is measured.
    same_each_time: bool
    #: At most this long, in seconds, on two cores.
    seconds: int = 120
