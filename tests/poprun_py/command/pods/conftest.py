"""Fixtures for a pod of two hosts, and for running poprun-py-pod."""

from __future__ import annotations

import contextlib
import re
import sys
from types import SimpleNamespace

import pytest

from popdist_py.pods.folder.folder_store import FolderStore
from popdist_py.pods.folder.pod_folders import make_pod
from popdist_py.pods.model.graphcore_systems import system_pod
from poprun_py.command.click_commands import run
from poprun_py.command.pods.pod_command import COMMAND


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return the folder of this test's pods."""
    root = tmp_path / "pods"
    monkeypatch.setenv("POPRUN_PODS", str(root))
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("VIPU_CLI_API_HOST", "VIPU_CLI_API_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["/opt/bin/poprun-py-pod"])
    return root


@pytest.fixture
def ask(root, capsys):
    """Return a function that runs the command and replaces what depends on the machine."""

    def call(*words):
        code = run(COMMAND, [str(word) for word in words])
        shown = capsys.readouterr()
        return SimpleNamespace(code=code, out=_plain(shown.out, root), err=_plain(shown.err, root))

    return call


def _plain(text, root):
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "YYYY-MM-DD HH:MM:SS", text)
    text = re.sub(r'("(?:created|since)": )[\d.]+', r"\g<1>0", text)
    text = re.sub(r'("owner": )"[^"]*"', r'\g<1>"me"', text)
    return re.sub(r"owner: .*", "owner: me", text).replace(str(root), "ROOT")


@pytest.fixture
def pod(root):
    """Return the store of a new POD16 with two hosts."""
    folder = make_pod(root, system_pod("POD16", "lab", ("h0", "h1")))
    with contextlib.closing(FolderStore(folder)) as store:
        yield store
