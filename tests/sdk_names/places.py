"""The packages of the SDK's names, their folder, and how a process forgets them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType

from support.repository import ROOT

NAMES = ROOT / "popdist_py" / "sdk_names"
PACKAGES = ("horovod", "popart", "popdist", "poptorch")


def forget() -> None:
    """Let the next import of each package start anew."""
    for name in _imported():
        del sys.modules[name]


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Let imports start anew, and put the modules back afterwards.

    Folders of tests have the same names as packages of the SDK.
    """
    before = _imported()
    forget()
    try:
        yield
    finally:
        forget()
        sys.modules.update(before)


def _imported() -> dict[str, ModuleType]:
    return {name: m for name, m in sys.modules.items() if name.partition(".")[0] in PACKAGES}
