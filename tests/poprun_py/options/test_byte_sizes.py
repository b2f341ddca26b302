"""Sizes as GNU tools write them, and none."""

from __future__ import annotations

import pytest

from poprun_py.errors import UsageError
from poprun_py.options.byte_sizes import size_in_bytes
from poprun_py.options.declared_options import OPTIONS

OPTION = OPTIONS["log_limit"]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65536", 1 << 16), ("64KiB", 1 << 16), ("64k", 1 << 16), ("66 kB", 66_000),
        ("100MB", 100_000_000), ("2GiB", 2 << 30), ("2g", 2 << 30), ("0.5 TB", 500_000_000_000),
        ("70000b", 70_000), ("none", None), ("NONE", None),
    ],
)  # fmt: skip
def test_sizes_have_the_units_of_gnu_tools(text, size):
    assert size_in_bytes(OPTION.read("--log-limit", text)) == size


def test_python_and_files_may_give_numbers():
    assert size_in_bytes(OPTION.check("log_limit", 1 << 20)) == 1 << 20


@pytest.mark.parametrize(
    "text",
    ["", "big", "-1", "1", "63KiB", "1e9", "1_000_000", "100 M B", "9" * 400, "2PiB", "\u0663MB"],
)
def test_other_sizes_are_refused_in_one_line(text):
    with pytest.raises(UsageError, match="expected a size of at least 64KiB, such as 100MB or "):
        OPTION.read("--log-limit", text)


@pytest.mark.parametrize("value", [True, 1, 1.5, None, 1 << 70])
def test_other_values_are_refused(value):
    with pytest.raises(UsageError):
        OPTION.check("log_limit", value)
