"""Checks of the files that options name for writing, so that no file is lost in silence.

An exported file, such as a plan, is new, or the user agrees that it is replaced. A timeline or a
page is made again by the same command, so it may replace a file of its own kind.
"""

from __future__ import annotations

from pathlib import Path

from popdist_py.atomic_file import holds_another_kind
from poprun_py.errors import UsageError

# The first bytes of a page, which may be replaced by another page.
PAGE_BEGINNINGS = (b"<!DOCTYPE html>",)


def require_new(path: Path, shown: str, otherwise: str) -> None:
    """Refuse the path of a file that exists; devices and pipes have no content to lose.

    Args:
        path: The path that the user gave.
        shown: The option with its value, in the form in which the user gave both.
        otherwise: What the user may do in place of naming another file.

    Raises:
        UsageError: The file exists.
    """
    if path.is_file():
        raise UsageError(f"{shown}: the file exists already: name another file, or {otherwise}")


def require_same_kind(path: Path, option: str, kind: str, beginnings: tuple[bytes, ...]) -> None:
    """Refuse the path of a file with other content than the file that will replace it.

    Args:
        path: The path that the user gave.
        option: The option in the form in which the user gave it.
        kind: What the new file will be, such as ``timeline``.
        beginnings: The first bytes of files of this kind.

    Raises:
        UsageError: The file exists, is not empty, and begins with other bytes.
    """
    if holds_another_kind(path, beginnings):
        raise UsageError(
            f"{option} {path}: the file exists and is not a {kind}: name another file, or remove"
            " this file"
        )
