"""A process with torch that instances of the whole jobs are forked from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import remove_surroundings
from support.repository import ROOT

_WARM = Path(__file__).with_name("warm_python.py")


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """Return the words in front of a program that runs it in a process with torch."""
    address = tmp_path_factory.mktemp("warm") / "s"
    with pytest.MonkeyPatch.context() as patch:
        remove_surroundings(patch)
        patch.setenv("PYTHONPATH", str(ROOT))
        server = subprocess.Popen(
            [sys.executable, _WARM, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    with server:
        assert server.stdout.readline() == b"ready\n"
        yield (sys.executable, "-S", _WARM, address)
        server.stdin.close()
