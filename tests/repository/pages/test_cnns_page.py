"""docs/cnns.md: its tables have every option of the programs, as it is."""

from __future__ import annotations

import pytest

from examples import cnn_programs as cnns
from tools.pages.cnn_options import PAGE, page


@pytest.fixture(autouse=True)
def programs():
    with cnns.imported():
        yield


def test_every_option_is_on_the_page():
    text = PAGE.read_text(encoding="utf-8")
    parser = cnns.module("arguments").make_parser("", "")
    spelled = {name for action in parser._actions for name in action.option_strings}
    spelled -= {"-h", "--help"}
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert not [name for name in spelled if not any(f"`{name}" in row for row in rows)]


def test_group_without_a_table_is_found():
    text = PAGE.read_text(encoding="utf-8").replace("<!-- options: model -->\n", "")
    with pytest.raises(KeyError, match="model"):
        page(text)


def test_default_is_not_left_out():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `--" in line]
    assert rows
    assert all(line.split(" | ")[1].strip() for line in rows)
