"""The packages of the SDK's names, their folder, and how a process forgets them."""

from __future__ import annotations

import sys

from support.repository import ROOT

NAMES = ROOT / "popdist_py" / "sdk_names"
PACKAGES = ("horovod", "popart", "popdist", "poptorch")


def forget() -> None:
    """Let the next import of each package start anew."""
    for name in [n for n in sys.modules if n.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
