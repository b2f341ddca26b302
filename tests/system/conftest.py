"""Instances forked from a process with torch, and commands that start no job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import remove_surroundings
from support.repository import ROOT

from poprun_py.cli import run

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


@pytest.fixture
def look(tmp_path, monkeypatch, capfd):
    """Call ``poprun-py`` in this process, for commands that start no job: it is twice as quick."""

    def call(*words, env=None, cwd=None):
        with monkeypatch.context() as patch:
            patch.chdir(cwd or tmp_path)
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            capfd.readouterr()
            code = run([str(word) for word in words])
            return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    return call
