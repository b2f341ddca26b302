"""Pages made of every kind of part, their escaping, and their content security policy."""

from __future__ import annotations

import base64
import configparser
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from support.repository import ROOT

from popdist_py import html_pages
from popdist_py.html_pages.charts import Line, lines
from popdist_py.html_pages.page import (
    Alert,
    Badge,
    Cell,
    Chart,
    ChartRow,
    Code,
    Details,
    Fact,
    Facts,
    InlineSvgs,
    Links,
    Section,
    Sentence,
    SvgImage,
    Table,
    TableRow,
    page,
)
from tools.running.browser import CHROMIUM, open_browser

EVIL = "</script></style><script>alert(1)</script><img src=x onerror=alert(1)>'\"&\x1b[31m\udcff"
ALLOWED = {"http://www.w3.org/2000/svg"}


def chart(title: str = "Loss", told: str = "It falls."):
    return lines(title, told, [Line(name=title, xs=[0, 1], ys=[2, 1])], x=title, y=title)


class Elements(HTMLParser):
    """Collects the elements and the text of a page like a browser."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    handle_startendtag = handle_starttag

    def handle_data(self, data):
        if self.tags[-1:] and self.tags[-1][0] == "script" and self.get_starttag_text():
            self.scripts.append(data)
        self.text += data


def every_part(text: str):
    return [
        Sentence(text), Alert(text), Alert(text, is_failure=True), Facts([Fact(text, text, text)]),
        Table(text, [text, text], [[text, "1"]]), Code(text), Details(text, [Code(text)]),
        SvgImage(text, text), chart(text, text), ChartRow([chart(text, text)]),
        InlineSvgs(["<svg></svg>"], ".poprun-py .a{}"), Links([(text, text)], text),
        Table(text, [text], [[Links([(text, "a/b.stdout"), (text, text)])], [Links(())]]),
        TableRow([Table(text, [text], [[text]]), Table(text, [text], [["1"]], is_sortable=True)]),
        Table(text, [text, "n"],
              [[Cell(text, "bad"), Cell("1", share=0.5)], [text]], frozenset([0])),
    ]  # fmt: skip


def test_page_of_every_part(golden, monkeypatch):
    monkeypatch.setattr("popdist_py.html_pages.page.packed_plotly", lambda: "PLOTLY")
    text = page(
        "Title", [Section("One", every_part("words")), Section("None", ())], lead="Lead.",
        badge=Badge("Failed", "bad"), opening=[Sentence("Opening.")], footer="Footer.",
    )  # fmt: skip
    golden("page.html", text + "\n")


def test_all_text_is_escaped():
    harmless, evil = (
        Elements(
            page(
                word,
                [Section(word, every_part(word))],
                lead=word,
                badge=Badge(word, "bad"),
                footer=word,
            )
        )
        for word in ("word", EVIL)
    )
    assert [tag for tag, _ in evil.tags] == [tag for tag, _ in harmless.tags]
    assert not any(name.startswith("on") for _, attributes in evil.tags for name in attributes)
    assert evil.text.count("alert(1)") > 20


def test_a_page_is_ascii_and_makes_no_requests():
    text = page(EVIL, [Section("One", every_part("\u00e4\u4e16" + EVIL))])
    assert text.isascii()
    head, _, _ = text.partition('<script type="text/plain"')
    assert set(re.findall(r"\w+://[^\"' <]+", head)) <= ALLOWED
    assert not re.search(r"<link|@import|url\(", head)


def test_the_policy_allows_only_the_script_of_charts():
    text = page("t", [Section("One", [chart()])])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert "script-src" not in page("t", [Section("One", [Sentence("s")])])


def test_tables_that_can_be_sorted_have_the_only_other_script():
    table = Table("t", ["a", "n"], [["x", "1"], ["y", "2"]], is_sortable=True)
    for parts in ([table], [Details("more", [table])]):
        text = page("t", [Section("One", parts)])
        (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{hashed}' 'strict-dynamic';" in text
        assert '<table class="pp-sortable">' in text
    both = page("t", [Section("One", [table, chart()])])
    assert len(re.findall(r"'sha256-", both)) == 2


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: make system-packages")
def test_a_browser_sorts_tables(tmp_path):
    rows = [["b", "1,000"], ["a", "<0.1"], ["c", "20"]]
    path = tmp_path / "page.html"
    table = Table("t", ["name", "n"], rows, is_sortable=True)
    path.write_text(page("t", [Section("One", [table])]))
    with open_browser(tmp_path / "profile") as browser:
        browser.open(path)
        names = "[...document.querySelectorAll('td:first-child')].map(e => e.textContent).join('')"
        seen = [browser.value(names)]
        for column in (2, 2, 1):
            browser.value(f"document.querySelector('th:nth-child({column}) button').click()")
            seen.append(browser.value(names))
        assert seen == ["bac", "bca", "acb", "abc"]
        assert browser.problems == []


def test_plotly_is_embedded_once_and_only_with_charts():
    without = page("t", [Section("One", [Sentence("s")])])
    assert "<script" not in without
    assert len(without) < 12_000
    text = page("t", [Section("One", [chart(), chart()])])
    (packed,) = re.findall(r'id="plotly">([^<]*)<', text)
    assert b"plotly.js v" in gzip.decompress(base64.b64decode(packed))[:500]
    assert len(packed) < 2_300_000


def test_without_plotly_a_page_tells_what_to_install_and_keeps_the_summaries(monkeypatch):
    monkeypatch.setattr("popdist_py.html_pages.page.packed_plotly", lambda: "")
    text = page("t", [Section("One", [chart(told="It falls.")])])
    assert "<script" not in text
    assert "pip install plotly" in text
    assert ".pp-plot{display:none}" in text
    assert "It falls." in text
    assert "pip install plotly" not in page("t", [Section("One", [Sentence("s")])])


def test_figures_have_the_order_of_the_charts():
    text = page("t", [Section("One", [chart("A"), ChartRow([chart("B"), chart("C")])])])
    figures = json.loads(re.search(r'id="figures">(.*?)</script>', text)[1])
    assert [figure["data"][0]["name"] for figure in figures] == ["A", "B", "C"]
    assert text.count('class="pp-plot"') == 3


def test_summaries_are_shown_without_javascript():
    text = page("t", [Section("One", [chart("Loss", "It falls from 2 to 1.")])])
    assert "It falls from 2 to 1." in re.sub("<[^>]*>", "", text.partition("<script")[0])
    assert "<noscript><style>.pp-plot{display:none}</style></noscript>\n</head>" in text
    assert "<noscript>" not in page("t", [Section("One", [Sentence("s")])])


def test_the_table_of_contents_links_to_the_sections():
    text = page("t", [Section(name, [Sentence("s")]) for name in "ABC"])
    assert re.findall(r'href="#(s\d)"', text) == re.findall(r'<section id="(s\d)"', text)


@pytest.mark.parametrize(("cell", "is_number"), [
    ("12", True), ("1,234.5 ms", True), ("-", True), ("<0.1", True), ("3 GiB", True),
    ("instance 3", False), ("2026-01-31 12:00", False), ("exit code 0", False),
])  # fmt: skip
def test_columns_of_numbers_are_aligned_at_the_right(cell, is_number):
    assert (
        '<td class="pp-number">' in page("t", [Section("s", [Table("t", ["c"], [[cell]])])])
    ) == is_number


def test_a_figure_cannot_end_its_script_element():
    text = page("t", [Section("One", [Chart("t", "s", {"data": [], "layout": {"a": EVIL}})])])
    (figures,) = re.findall(r'id="figures">(.*?)</script>', text)
    assert json.loads(figures) == [{"data": [], "layout": {"a": EVIL}}]


def test_an_installed_package_has_the_templates_and_styles():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    patterns = setup["options.package_data"]["popdist_py"].split()
    folder = Path(html_pages.__file__).parent
    installed = {path for each in patterns for path in folder.parent.glob(each)}
    others = {path for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    assert others
    assert others <= installed
