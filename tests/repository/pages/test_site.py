"""The site that make docs builds: links, pictures, search, and what a phone and a browser show."""

from __future__ import annotations

import html
import importlib
import os
import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.repository import ROOT

from popdist_py.poptorch.old_spellings import TABLE
from poprun_py.options.declared_options import OPTION_VARIABLES, OPTIONS
from poprun_py.options.option_types import option_name
from tools.pages.manual import variables
from tools.pages.manual.commands import FILES, LAUNCHER
from tools.running.browser import CHROMIUM, open_browser

DOCS = ROOT / "docs"
PHONE, SCREEN = 390, 1280
KINDS = (
    *("index.html", "reference/options.html", "api/poprun_py.html", "reference/commands.html"),
    *("performance.html", "architecture.html", "source/examples/ddp.py.html"),
)
# Words that a reader looks for, and the page that must come up.
SEARCHES = {
    "num-replicas": "reference/options",
    "checkpoint": "reliability",
    "all_reduce": "api/popdist_py",
    "Slurm": "ddp-and-mpi",
}

building = pytest.mark.examples


class Links(HTMLParser):
    """What a page leads to and shows, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.targets, self.pictures, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag == "a" and values.get("href"):
            self.targets.append(values["href"])
        if tag in ("img", "script") and values.get("src"):
            self.pictures.append(values["src"])
        if values.get("id"):
            self.anchors.add(values["id"])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site as make docs does, but for the names of the API in the tables of contents.

    They take a third of the time: Sphinx copies all of them for the sidebar of every page.
    """
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"),
            *("-D", "toc_object_entries=0", "-d", str(folder / "doctrees")),
            *(str(DOCS), str(folder / "html")),
        ],
        capture_output=True, text=True, timeout=800, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    """Return the links of every page, by its path in the site."""
    found = sorted(site.rglob("*.html"))
    assert len(found) > len([*DOCS.rglob("*.md")]), "there is a page for each of ours, and more"
    return {path.relative_to(site): Links(path.read_text(encoding="utf-8")) for path in found}


@building
@pytest.mark.timeout(900)
def test_every_link_and_picture_is_there(site, pages):
    broken = defaultdict(set)
    for path, page in pages.items():
        for target in page.targets + page.pictures:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            name = unquote(parts.path)
            to = Path(os.path.normpath(path.parent / name)) if name else path
            if not (site / to).exists():
                broken[str(path)].add(target)
            elif parts.fragment and to in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[to].anchors and anchor != "top":
                    broken[str(path)].add(target)
    assert not broken


@building
@pytest.mark.timeout(900)
def test_nothing_is_loaded_from_elsewhere(site, pages):
    for path, page in pages.items():
        assert not [each for each in page.pictures if urlsplit(each).netloc], path
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?https?:|@import", style.read_text(encoding="utf-8")), (
            style
        )


@building
@pytest.mark.timeout(900)
def test_every_public_name_has_a_place(pages):
    for module, page in (
        ("poprun_py", "api/poprun_py.html"),
        ("popdist_py", "api/popdist_py.html"),
        ("popdist_py.poptorch", "api/poptorch.html"),
        ("popdist_py.horovod.torch", "api/horovod.html"),
        ("popdist_py.checkpoint", "api/checkpoint.html"),
    ):
        public = importlib.import_module(module)
        anchors = pages[Path(page)].anchors
        for name in public.__all__:
            if name != "__version__" and not isinstance(getattr(public, name), type(os)):
                assert f"{module}.{name}" in anchors, page


@building
@pytest.mark.timeout(900)
def test_the_reference_has_every_declaration(site):
    def text(name):
        return html.unescape(
            re.sub("<[^>]*>", "", (site / "reference" / name).read_text(encoding="utf-8"))
        )

    options, commands, names = map(text, ("options.html", "commands.html", "variables.html"))
    assert [name for name in map(option_name, OPTIONS) if name not in options] == ["--verbosity"]
    told = {name for some in variables.VARIABLES.values() for name in some}
    assert {name for name in (*told, *OPTION_VARIABLES) if name not in names} == set()
    assert [name for name in (*LAUNCHER, *FILES) if name not in commands] == []
    spellings = text("old-spellings.html")
    assert [each for each in TABLE if each.old_text not in spellings] == []


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: make system-packages")
    with open_browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def check_widths(browser, site, names, width):
    """No page goes sideways: what is wide scrolls in a box of its own.

    The theme cuts the document off; the box of the text would scroll.
    """
    for name in names:
        assert (site / name).exists()
        there = f"location.pathname.endsWith('/{name}') && document.readyState === 'complete'"
        browser.open(site / name, until=there)
        boxes = "[document.documentElement, document.querySelector('.content')]"
        wide = browser.value(f"Math.max(...{boxes}.map(box => box.scrollWidth))")
        assert wide <= width, f"{name} is {wide} pixels wide on {width}"


@building
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("width", "dark"), [(PHONE, False), (SCREEN, True)])
def test_pages_of_every_kind_fit(site, browser, width, dark):
    browser.look(dark=dark, width=width)
    check_widths(browser, site, KINDS, width)
    assert not browser.problems


# The pages with options and variables, and the share of a table's width that its last column has.
OPTION_PAGES = ("reference/options.html", "reference/commands.html", "reference/variables.html")
SHARES = """
[...document.querySelectorAll('table.meanings tbody tr')].map(row =>
    row.lastElementChild.offsetWidth / row.offsetWidth)
"""


@building
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("width", "least"), [(PHONE, 0.9), (SCREEN, 0.5)])
def test_meanings_have_half_of_the_width(site, browser, width, least):
    browser.look(width=width)
    for name in OPTION_PAGES:
        there = f"location.pathname.endsWith('/{name}') && document.readyState === 'complete'"
        browser.open(site / name, until=there)
        shares = browser.value(SHARES)
        assert shares, f"{name} has no table of meanings"
        assert min(shares) >= least, f"{name}: {shares}"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_page_fits_on_a_phone(site, pages, browser):
    browser.look(width=PHONE)
    check_widths(browser, site, pages, PHONE)


@building
@pytest.mark.timeout(900)
def test_search_and_copying_need_no_network(site, browser):
    browser.open(site / "first-hour.html", until="document.querySelector('button.copybtn')")
    for words, page in SEARCHES.items():
        browser.call("Page.navigate", url=f"{(site / 'search.html').as_uri()}?q={words}")
        browser.wait_for(f"document.querySelector('ul.search a[href*=\"{page}.html\"]')")
    assert not browser.problems
    assert all(address.startswith(("file:", "data:")) for address in browser.requests)
