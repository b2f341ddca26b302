"""Commands that start no job."""

from __future__ import annotations

import subprocess

import pytest

from poprun_py.command.cli import run


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
