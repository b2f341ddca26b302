"""Generated pages, pictures and modules are what the code makes now (``make generated``)."""

from __future__ import annotations

import pytest

from poprun_py.planning.cpu_placement import MODES
from tools.pages import generated, placement


@pytest.mark.parametrize("name", generated.GENERATORS)
def test_a_generated_file_is_up_to_date(name):
    files = generated.GENERATORS[name]()
    assert files, "it writes something"
    assert [str(path) for path in generated.outdated(files)] == [], f"make generated ({name})"


def test_changed_files_alone_are_written_and_told(monkeypatch, tmp_path, capsys):
    same, old, new = (tmp_path / name for name in ("same", "old", "folder/new"))
    same.write_text("a")
    old.write_text("b")
    texts = {same: "a", old: "c", new: "d"}
    others = {tmp_path / "other": "e"}
    monkeypatch.setattr(generated, "GENERATORS", {"x": lambda: texts, "y": lambda: others})
    assert generated.main(["x"]) == 0
    assert capsys.readouterr().out == f"{old}\n{new}\n"
    assert {path: path.read_text() for path in texts} == texts
    assert not (tmp_path / "other").exists()
    assert generated.main(["z"]) == 2
    assert capsys.readouterr().err == "no generator z: there are x, y\n"


def test_the_page_about_placement_names_each_mode():
    page = placement.PAGE.read_text(encoding="utf-8")
    names = ["--numa-aware yes" if mode == "roundrobin" else mode for mode in MODES]
    assert [name for name in names if f"| `{name}`" not in page] == []


def test_a_page_shows_each_drawing_of_a_plan():
    pages = placement.PAGE.read_text() + placement.PAGE.with_name("index.md").read_text()
    assert [name for name in placement.JOBS if f"]({name})" not in pages] == []
