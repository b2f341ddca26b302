"""The symbolic link ``latest`` to the newest run, beside the folders of the runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

from poprun_py.options.run_labels import LATEST


def link_latest(parent: Path, name: str) -> None:
    """Atomically point the link ``latest`` to the run ``name``; keep an ordinary file of that name.

    Raises:
        OSError: The link cannot be made.
    """
    link, partial = parent / LATEST, parent / f".{LATEST}.{name}"
    try:
        if link.exists() and not link.is_symlink():
            raise FileExistsError(None, "a file of this name exists, and is not a link")
        partial.symlink_to(name)
        partial.replace(link)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


def repair_latest(parent: Path, newest: str | None) -> None:
    """Point a link ``latest`` whose run was removed to the run ``newest``; None removes the link.

    Raises:
        OSError: The link cannot be changed.
    """
    link = parent / LATEST
    if not link.is_symlink() or link.exists():
        return
    if newest is not None:
        link_latest(parent, newest)
    else:
        link.unlink(missing_ok=True)
