"""docs/figures/: each figure is there, shows what it has to, and comes out the same again."""

from __future__ import annotations

import importlib.util

import pytest
from support.repository import ROOT, load

figures = load("docs/figures.py")
from seed_texts import index  # noqa: E402
from seed_texts.running import place  # noqa: E402
from seed_texts.values import Figure  # noqa: E402

_ALL_THERE = all(importlib.util.find_spec(f"seed_texts.{name}") for name in index.NAMES)
FIGURES = index.figures() if _ALL_THERE else ()
DRAW = """
import sys
from pathlib import Path
from common.drawing import mark, new_figure, save
figure = new_figure(4, 3)
axes = figure.add_subplot()
{draw}
save(figure, Path(sys.argv[1]))
"""
BARS = "for i in range(2): mark(axes.bar(i, {height})[0], f'bar-{{i}}')\naxes.set_title('Two bars')"


def made_up(name: str, draw: str, marks=("bar-0", "bar-1", "Two bars"), same=True) -> Figure:
    program = f"import sys; sys.path.append('examples'){DRAW.format(draw=draw)}"
    return Figure(name, ("python", "-c", program, "{file}"), marks, same, 60)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Write figures there."""
    monkeypatch.setattr(figures, "FOLDER", tmp_path / "figures")
    return figures.FOLDER


def use(monkeypatch, *made: Figure) -> None:
    monkeypatch.setattr(figures, "all_figures", lambda: made)


def test_figures_are_drawn_and_found_to_be_the_same(monkeypatch, folder, capsys):
    use(monkeypatch, made_up("bars.svg", BARS.format(height=2)))
    assert figures.main([]) == []
    assert (folder / "bars.svg").exists()
    assert figures.main(["--check"]) == []
    use(monkeypatch, made_up("bars.svg", BARS.format(height="i + 1")))
    written = (folder / "bars.svg").read_bytes()
    found = figures.main(["--check"])
    if figures.other_matplotlib():
        assert "not compared byte by byte" in capsys.readouterr().err
    else:
        assert found == ["bars.svg: it comes out otherwise now: make figures"]
    assert (folder / "bars.svg").read_bytes() == written


def test_figure_without_its_marks_is_not_kept(monkeypatch, folder):
    use(monkeypatch, made_up("bars.svg", "axes.plot([1, 2])"))
    assert figures.main([]) == [
        f"bars.svg: {mark!r} is neither an id nor in a text"
        for mark in ("bar-0", "bar-1", "Two bars")
    ]
    assert not (folder / "bars.svg").exists()


@pytest.mark.sweep
def test_png_is_large_enough_and_not_blank(monkeypatch, folder):
    blank = "axes.set_axis_off(); figure.set_facecolor('white')"
    use(
        monkeypatch,
        made_up("good.png", "axes.plot([1, 2])", ()),
        made_up("blank.png", blank, ()),
        made_up("small.png", "figure.set_size_inches(2, 1)", ()),
    )
    assert figures.main([]) == [
        "blank.png: nothing is drawn",
        "small.png: 100 pixels, at least 200 are needed",
    ]
    assert [path.name for path in folder.iterdir()] == ["good.png"]


def test_figure_needs_several_marks_and_svg(tmp_path):
    path = tmp_path / "one.svg"
    path.write_text("<svg")
    assert figures.missing(path, made_up("one.svg", "", ("a", "b"))) == [
        "2 marks are looked for, at least 3 are needed"
    ]
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


def test_folder_holds_the_figures_of_the_texts():
    assert _ALL_THERE
    found = {path.name for path in (ROOT / "docs" / "figures").iterdir()}
    assert found == {figure.name for figure in FIGURES}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_figure_shows_what_it_has_to(figure):
    assert figures.missing(ROOT / "docs" / "figures" / figure.name, figure) == []


def drawn_again():
    """The figures without measured values, the quickest of them by default."""
    same = sorted((x for x in FIGURES if x.same_each_time), key=lambda figure: figure.seconds)
    for figure in same:
        marks = () if figure is same[0] else pytest.mark.sweep
        yield pytest.param(figure, id=figure.name, marks=marks)


@pytest.mark.parametrize("figure", list(drawn_again()))
def test_figure_comes_out_the_same(figure):
    with place() as here:
        assert figures.check(figure, here) == []
    if reason := figures.other_matplotlib():
        pytest.skip(f"the marks are there; bytes are not compared: {reason}")
