"""The tutorial texts, and the recorded outputs of their commands in ``printed/``.

A record begins with the command after ``$``, as the text prints it. The lines after it are the
output of the command that runs here in its place. This command writes all records again:

    pytest tests/tutorial_texts -m "examples or long" --rewrite-goldens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tutorial_texts import cnns, course, data_loading, hands_on, pipelining
from tutorial_texts.values import Text

__all__ = ["TEXTS", "read", "write"]

TEXTS: Mapping[str, Text] = {
    "data_loading": data_loading.TEXT,
    "hands_on": hands_on.TEXT,
    "course": course.TEXT,
    "pipelining": pipelining.TEXT,
    "cnns": cnns.TEXT,
}
_FOLDER = Path(__file__).with_name("printed")
_COMMAND = "$ "


def read(name: str) -> dict[str, list[str]]:
    """Return the recorded lines of each command of a text."""
    records: dict[str, list[str]] = {}
    for line in (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(_COMMAND):
            lines = records.setdefault(line.removeprefix(_COMMAND), [])
        else:
            lines.append(line)
    return records


def write(name: str, command: str, lines: Sequence[str]) -> None:
    """Replace the record of a command of a text."""
    records = {**read(name), command: lines}
    words = [
        line
        for one in TEXTS[name].commands
        if one.text in records
        for line in (_COMMAND + one.text, *records[one.text])
    ]
    (_FOLDER / f"{name}.txt").write_text("".join(f"{word}\n" for word in words), encoding="utf-8")
