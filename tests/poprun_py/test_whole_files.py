"""The launcher's files are there whole or not at all."""

from __future__ import annotations

import pytest

from poprun_py.atomic_file import write_whole


def test_a_file_is_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "report.json"
    for text in ("one", "zwei ü"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
        assert list(path.parent.iterdir()) == [path]
        assert path.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_written_leaves_everything_as_it_was(tmp_path):
    path = tmp_path / "report.json"
    write_whole(path, "whole")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "half \ud800")
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(folder, "text")
    assert path.read_text() == "whole"
    assert sorted(tmp_path.iterdir()) == [folder, path]
