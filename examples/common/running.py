"""Start and end of the examples' programs: making data once, and handling Ctrl-C."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["make_once", "run"]

_INTERRUPTED = 130  # 128 + SIGINT, as in a shell


def run(main: Callable[[], object]) -> None:
    """Call ``main``. Ctrl-C prints one line without a traceback, and gives exit code 130."""
    try:
        main()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # only one of several instances prints
            sys.stderr.write(f"\n{Path(sys.argv[0]).name}: interrupted\n")
        sys.exit(_INTERRUPTED)


def make_once(folder: Path, make: Callable[[Path], None]) -> bool:
    """Make ``folder`` unless it exists, and return whether this call made it.

    ``make`` gets a temporary folder, and makes a folder of the same name in it. The complete folder
    is then moved to its place, so other programs never see an incomplete folder. If several
    programs make the same folder at once, the first complete folder is kept.

    Raises:
        OSError: The folder cannot be written.
    """
    if folder.exists():
        return False
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as beside:
        make(Path(beside))
        try:
            Path(beside, folder.name).rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
            return False
    return True
