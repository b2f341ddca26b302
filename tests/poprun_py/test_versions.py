"""The versions of packages, and the commit in ``--version``, if git can read it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata

import pytest
from support.repository import ROOT

from poprun_py import versions


@pytest.fixture
def clear_caches():
    """Let the module forget the versions that it has read, before and after a test."""
    caches = (versions._installed, versions._metadata_folders)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("clear_caches")
def test_versions_agree_with_those_of_importlib():
    found = versions.versions(full=True)
    for name in ("click", "psutil", "prometheus-client"):
        assert found[name] == metadata.version(name)
    assert found["python"].startswith("{}.{}.{}".format(*sys.version_info))


@pytest.mark.usefixtures("clear_caches")
def test_packages_of_every_kind_have_versions(tmp_path, monkeypatch):
    for place, version in (("first", "1.0"), ("second", "2.0")):
        folder = tmp_path / place / f"My_package-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: my-package\nVersion: {version}\n\nVersion: 9\n")
    (tmp_path / "first" / "empty-1.dist-info").mkdir()
    egg = tmp_path / "second" / "old.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Name: old\nVersion: 3.1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path / each) for each in ("none", "first", "second")])
    # The first folder on sys.path counts.
    assert versions._installed("my.package") == "1.0"
    assert versions._installed("old") == "3.1"
    assert versions._installed("missing") == "not installed"


def test_reading_versions_imports_no_parser_of_emails():
    code = (
        "import sys; from poprun_py.versions import versions; versions(full=True); "
        "print(*sys.modules)"
    )
    command = (sys.executable, "-c", code)
    done = subprocess.run(command, check=True, timeout=30, capture_output=True, text=True)
    assert not {"email", "importlib.metadata"} & set(done.stdout.split())


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Make a repository with one commit, which the module takes for its own."""
    if not shutil.which("git"):
        pytest.skip("git is not installed")
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
