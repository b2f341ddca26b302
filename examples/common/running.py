"""How the programs of the examples begin and end: data made once, and Ctrl-C in one line."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

__all__ = ["make_once", "run"]

_INTERRUPTED = 130  # 128 and SIGINT, as of a shell's own commands


def run(main: Callable[[], object]) -> None:
    """Call ``main``; who presses Ctrl-C gets one line and exit code 130, no traceback."""
    try:
        main()
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":  # of several instances, one speaks
            sys.stderr.write(f"\n{Path(sys.argv[0]).name}: interrupted\n")
        sys.exit(_INTERRUPTED)


def make_once(folder: Path, make: Callable[[Path], None]) -> bool:
    """Have ``folder`` made unless there is one; returns whether this call has made it.

    ``make`` gets another folder beside and makes one of the same name there, which is moved when it
    is whole: nobody sees half of it. Of several programs that do so at once, the first one's stays.

    Raises:
        OSError: It cannot be written.
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
