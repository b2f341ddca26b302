"""Files that options name for writing: none is lost in silence."""

from __future__ import annotations

import gzip
import os

import pytest

from popdist_py.timeline.folder import TRACE_BEGINNINGS
from poprun_py.command import compare, report
from poprun_py.command.cli import run
from poprun_py.errors import UsageError
from poprun_py.options.written_files import (
    PAGE_BEGINNINGS,
    require_new,
    require_same_kind,
)


def test_a_new_file_and_a_device_may_be_written(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path / "new", pipe):
        require_new(path, "--export-plan", "")
        require_same_kind(path, "--timeline", "timeline", TRACE_BEGINNINGS)


def test_a_link_to_a_file_is_a_file(tmp_path):
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "link").symlink_to("plan.json")
    with pytest.raises(UsageError, match="link: the file exists already: name another file, or"):
        require_new(tmp_path / "link", "--export-plan link", "pray")


@pytest.mark.parametrize(
    ("data", "kinds"),
    [
        (b"", "page timeline"),
        (b"\n\n<!DOCTYPE html>\n<html>", "page"),
        (b'{"traceEvents": [', "timeline"),
        (gzip.compress(b"{}", mtime=0), "timeline"),
        (b"import torch\n", ""),
        (b"loss,step\n1,2\n", ""),
    ],
)
def test_a_page_or_a_timeline_replaces_its_own_kind(data, kinds, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(data)
    for kind, beginnings in (("page", PAGE_BEGINNINGS), ("timeline", TRACE_BEGINNINGS)):
        if kind in kinds.split():
            require_same_kind(path, "--output", kind, beginnings)
        else:
            with pytest.raises(UsageError, match=f"exists and is not a {kind}: name another file"):
                require_same_kind(path, "--output", kind, beginnings)


def test_every_option_that_names_a_page_or_a_timeline_is_checked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.html"
    mine.write_text("my notes\n")
    with pytest.raises(UsageError, match=r"--output mine\.html: the file exists and is not a p"):
        compare.check_page_name("mine.html")
    with pytest.raises(UsageError, match=r"--output mine\.html: the file exists and is not a p"):
        report._path("mine.html")
    assert run(["--timeline=mine.html", "touch", "started"]) == 2
    assert "--timeline mine.html: the file exists and is not a timeline" in capsys.readouterr().err
    assert not (tmp_path / "started").exists()
    assert mine.read_text() == "my notes\n"
