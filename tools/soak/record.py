"""The record of a soak: a line of JSON for the draw, and one for every case that was done."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Record:
    """A file of lines, to which a soak that was cut off is added.

    Args:
        path: the file.
        draw: what decides which cases there are: another draw is another record.

    Raises:
        ValueError: the file is that of another draw.
    """

    def __init__(self, path: Path, draw: dict[str, Any]) -> None:
        self._path = path
        self.lines: list[dict[str, Any]] = []
        if path.exists() and path.stat().st_size:
            lines = whole_lines(path)
            if lines[:1] != [draw]:
                raise ValueError(
                    f"{path} is the record of another draw ({json.dumps(lines[:1])[:200]}): give "
                    "another file, or remove that one"
                )
            self.lines = lines[1:]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(draw) + "\n")

    def add(self, line: dict[str, Any]) -> None:
        """Add a case that was done."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def attempts(self, number: int) -> list[dict[str, Any]]:
        """Return what was done for a case, in order."""
        return [line for line in self.lines if line["number"] == number]


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record; the last may have been cut off."""
    found = []
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            break
    return found


def last_attempts(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the attempt by which each case is judged."""
    return list({line["number"]: line for line in lines}.values())
