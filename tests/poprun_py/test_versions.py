"""The commit in ``--version``: of a checkout only, and only if git can read it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from support.repository import ROOT

from poprun_py import versions

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Make a repository with one commit, which the module takes for its own."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "file").write_text("one\n")
    person = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for words in (("init", "-q"), ("add", "file"), (*person, "commit", "-qm", "one")):
        subprocess.run(["git", "-C", folder, *words], check=True, timeout=30)
    # Git sets this variable for hooks of another repository. The module must ignore it.
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(versions, "_ROOT", folder)
    return folder


def test_a_checkout_tells_its_commit_and_whether_it_has_changes(checkout):
    head = (checkout / ".git" / "HEAD").read_text().split()[-1]
    commit = (checkout / ".git" / head).read_text()[:8]
    assert versions.version_text("text").endswith(f" (commit {commit})")
    (checkout / "new").touch()  # A file that git does not know is not a change.
    assert json.loads(versions.version_text("json"))["commit"] == commit
    (checkout / "file").write_text("two\n")
    assert versions.version_text("text").endswith(f" (commit {commit}, with changes)")
    assert f"(commit {commit}, with changes)\npopdist-py " in versions.version_text("full-text")
    # The records of runs contain only the version.
    assert "commit" not in json.dumps(versions.versions(full=True))


def test_without_git_or_a_repository_there_is_only_the_version(checkout, tmp_path, monkeypatch):
    (checkout / ".git" / "HEAD").write_text("damaged")
    assert "commit" not in versions.version_text("text")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "commit" not in versions.version_text("json")
    monkeypatch.setattr(versions, "_ROOT", tmp_path)
    assert versions.version_text("text") == f"poprun-py {versions._OURS}"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this tree is not a checkout")
def test_a_launch_does_not_ask_git(tmp_path):
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\ntouch {tmp_path}/asked\n")
    git.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for words, is_asked in ((["--help"], False), (["--version"], True)):
        subprocess.run(
            [sys.executable, "-m", "poprun_py", *words],
            env=environ, capture_output=True, timeout=60, check=True,
        )  # fmt: skip
        assert (tmp_path / "asked").exists() == is_asked
