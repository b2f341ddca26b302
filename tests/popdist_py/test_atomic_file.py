"""Files that are replaced as a whole or not at all, and files that only their owner can read."""

from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest

from popdist_py.atomic_file import open_private, replaced_at_end, write_whole


def test_the_old_file_is_there_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with replaced_at_end(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def write_half():
        with replaced_at_end(path) as partial:
            partial.write_text("ne")
            raise ValueError("half written")

    with pytest.raises(ValueError, match="half"):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_share_a_partial_file(tmp_path):
    path = tmp_path / "file"
    with replaced_at_end(path) as first, replaced_at_end(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"


def test_a_file_is_replaced_and_its_owner_alone_reads_it(tmp_path):
    path = tmp_path / "report.json"
    for text in ("one", "zwei ü"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert list(path.parent.iterdir()) == [path]
        assert path.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    folder = tmp_path / "new"
    with pytest.raises(FileNotFoundError, match=f"the folder {folder} does not exist"):
        write_whole(folder / "report.json", "text")
    assert not folder.exists()


def test_what_cannot_be_written_leaves_everything_as_it_was(tmp_path):
    path = tmp_path / "report.json"
    write_whole(path, "whole")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(folder, "text")
    assert path.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [folder, path]


def test_a_path_that_is_not_utf_8_is_escaped_in_a_text(tmp_path):
    path = tmp_path / "report.json"
    write_whole(path, "the folder b\udcff")
    assert path.read_text(encoding="utf-8") == r"the folder b\udcff"


def test_a_folder_that_has_become_read_only_is_told_as_what_happened_first(tmp_path, monkeypatch):
    def refuse(path, missing_ok=False):
        raise OSError(errno.EROFS, "nothing can be removed")

    monkeypatch.setattr(Path, "unlink", refuse)
    with (
        pytest.raises(OSError, match="nothing can be written") as caught,
        replaced_at_end(tmp_path / "file"),
    ):
        raise OSError(errno.EROFS, "nothing can be written")
    assert caught.value.__context__ is None


def test_only_the_owner_can_read_a_private_file(tmp_path):
    path = tmp_path / "file"
    with open_private(path, "wb") as file:
        file.write(b"first")
    with open_private(path, "ab", buffering=0) as file:
        file.write(b", second")
    assert path.read_text() == "first, second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
