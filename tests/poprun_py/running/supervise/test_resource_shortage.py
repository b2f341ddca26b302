"""Whether the folder for temporary files can still take any."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from poprun_py.running.supervise.outcome import is_full

ROOMY = {"f_files": 10, "f_favail": 5, "f_blocks": 1 << 20, "f_bavail": 1 << 19, "f_frsize": 4096,
         "f_flag": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({}, False),
        ({"f_files": 0, "f_favail": 0, "f_blocks": 0, "f_bavail": 0}, False),
        ({"f_favail": 0}, True),
        ({"f_bavail": 9}, True),
        ({"f_flag": os.ST_RDONLY | os.ST_NOSUID}, True),
    ],
)
def test_a_file_system_that_takes_no_files(tmp_path, monkeypatch, changed, wanted):
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(**{**ROOMY, **changed}))
    assert is_full(tmp_path) is wanted
