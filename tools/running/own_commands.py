"""The commands of a checkout as files, whatever the environment had when it was installed."""

from __future__ import annotations

import configparser
import sys
from pathlib import Path

__all__ = ["make_commands"]

_SCRIPT = """#!{python}
import sys
from {module} import {function}
sys.exit({function}())
"""


def make_commands(root: Path, folder: Path) -> Path:
    """Write each command of ``root``/setup.cfg into a new ``folder``, as pip would; returns it."""
    setup = configparser.ConfigParser()
    setup.read(root / "setup.cfg", encoding="utf-8")
    folder.mkdir()
    for line in setup["options.entry_points"]["console_scripts"].strip().splitlines():
        name, _, target = (part.strip() for part in line.partition("="))
        module, _, function = target.partition(":")
        script = folder / name
        script.write_text(
            _SCRIPT.format(python=sys.executable, module=module, function=function),
            encoding="utf-8",
        )
        script.chmod(0o755)
    return folder
