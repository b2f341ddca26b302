"""docs/figures/: each figure is there, shows what it has to, and comes out the same again."""

from __future__ import annotations

import pytest
from support.repository import ROOT

from tools.pages import figures
from tools.pages.figures import FIGURES, Figure
from tools.running.project_copy import project_copy

PROGRAM = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
BARS = (
    '<svg xmlns="http://www.w3.org/2000/svg"><rect id="bar-0" height="2"/>'
    '<rect id="bar-1" height="2"/><text>Two bars</text></svg>'
)


def made_up(name: str, text: str, marks=("bar-0", "bar-1", "Two bars"), same=True) -> Figure:
    return Figure(name, ("python", "-c", PROGRAM, "{file}", text), marks, same, 60)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Write figures there."""
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    return figures.FOLDER


def use(monkeypatch, *made: Figure) -> None:
    monkeypatch.setattr(figures, "FIGURES", made)


def test_figures_are_drawn_and_found_to_be_the_same(monkeypatch, folder, capsys):
    use(monkeypatch, made_up("bars.svg", BARS))
    assert figures.main([]) == []
    assert (folder / "bars.svg").exists()
    assert figures.main(["--check"]) == []
    use(monkeypatch, made_up("bars.svg", BARS.replace('height="2"', 'height="3"')))
    written = (folder / "bars.svg").read_bytes()
    found = figures.main(["--check"])
    if figures.other_matplotlib():
        assert "not compared byte by byte" in capsys.readouterr().err
    else:
        assert found == ["bars.svg: it comes out otherwise now: make figures"]
    assert (folder / "bars.svg").read_bytes() == written


def test_figure_without_its_marks_is_not_kept(monkeypatch, folder):
    use(monkeypatch, made_up("bars.svg", '<svg xmlns="http://www.w3.org/2000/svg"/>'))
    assert figures.main([]) == [
        f"bars.svg: {mark!r} is neither an id nor in a text"
        for mark in ("bar-0", "bar-1", "Two bars")
    ]
    assert not (folder / "bars.svg").exists()


def test_figure_needs_svg(tmp_path):
    path = tmp_path / "one.svg"
    path.write_text("<svg")
    assert figures.missing(path, made_up("one.svg", ""))[0].startswith("no SVG: ")
    assert figures.missing(tmp_path / "two.svg", made_up("two.svg", "")) == [
        "there is no such file"
    ]


def test_unknown_figure_is_refused_in_one_line(monkeypatch, capsys):
    use(monkeypatch, made_up("bars.svg", ""))
    with pytest.raises(SystemExit) as caught:
        figures.main(["--only", "nothing"])
    assert caught.value.code == 2
    assert "there are bars.svg" in capsys.readouterr().err


def test_folder_holds_the_figures_of_the_pages():
    found = {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    assert found == {figure.name for figure in FIGURES}
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    assert {name for name in found if f"](figures/{name})" not in pages} == set()


def test_figures_show_what_they_have_to():
    folder = ROOT / "docs" / "figures"
    found = {figure.name: figures.missing(folder / figure.name, figure) for figure in FIGURES}
    assert {name: problems for name, problems in found.items() if problems} == {}


def drawn_again():
    """Yield the figures without measured values; the first one is drawn more often."""
    mark = pytest.mark.examples
    for figure in FIGURES:
        if figure.same_each_time:
            yield pytest.param(figure, id=figure.name, marks=mark)
            mark = pytest.mark.long


@pytest.mark.parametrize("figure", list(drawn_again()))
def test_figure_comes_out_the_same(figure):
    with project_copy() as here:
        assert figures.check(figure, here) == []
    if reason := figures.other_matplotlib():
        pytest.skip(f"the marks are there; bytes are not compared: {reason}")
