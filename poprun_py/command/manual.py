"""The help topic ``manual``, which shows the manual page of ``poprun-py``.

The command ``man poprun-py`` only finds the page if the environment's folder ``bin`` is on PATH.
This topic finds the page in every installation. Each installation makes the page.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_PAGE = "poprun-py.1"


def find_page(folders: Iterable[Path]) -> Path | None:
    """Return the path of the manual page in the first folder with this page, or None."""
    return next((folder / _PAGE for folder in folders if (folder / _PAGE).is_file()), None)


def page_folders() -> list[Path]:
    """Return the folders in which an installation may have manual pages."""
    installed = (sysconfig.get_path("data"), site.getuserbase())
    return [Path(each, "share", "man", "man1") for each in installed]


def show_manual() -> bool:
    """Show the manual page with the program ``man``; return whether it was shown."""
    page, man = find_page(page_folders()), shutil.which("man")
    if page is None or man is None:
        return False
    return subprocess.run([man, str(page)], check=False).returncode == 0
