"""Writes every page, picture and module that the code alone makes: ``make generated``.

``python -m tools.pages.generated NAME...`` writes some of them. Measurements stay as they are:
``make bench``, ``make figures``, ``tools.pages.report`` (pictures) and
``tools.pages.losses_table`` measure anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tools import keyword_types
from tools.pages import placement

__all__ = ["GENERATORS", "main", "outdated"]

#: By name, what returns the texts that belong into some files.
GENERATORS: Mapping[str, Callable[[], Mapping[Path, str]]] = {
    "keyword-types": keyword_types.files,
    "placement": placement.files,
}


def outdated(files: Mapping[Path, str]) -> dict[Path, str]:
    """Return those of the files, each with its text, that hold another text or do not exist."""
    return {
        path: text
        for path, text in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def main(names: Sequence[str]) -> int:
    """Write the files that have changed, of the named generators or of all, and tell which."""
    if unknown := sorted(set(names) - GENERATORS.keys()):
        sys.stderr.write(f"no generator {unknown[0]}: there are {', '.join(GENERATORS)}\n")
        return 2
    for name in names or GENERATORS:
        for path, text in outdated(GENERATORS[name]()).items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
