"""What the site is made of: every page has its place, every block of code can be read."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import tomllib
from types import SimpleNamespace

import pytest
import yaml
from support.repository import ROOT

from poprun_py.options.declared_options import OPTION_VARIABLES, OPTIONS
from poprun_py.options.gathered_options import INTERNAL_VARIABLES
from poprun_py.options.option_types import option_name
from tools.pages.manual import man_pages, variables
from tools.pages.website import meaning_tables, source_pages
from tools.pages.website.navigation import PARTS

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_BLOCK = re.compile(r"^( *)```([\w-]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def parse_bash(code):
    done = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


def begin_with_a_command(code):
    assert code.startswith("$ ")


# By the word after ```, what reads a block. Tests of pages and commands type console blocks.
LANGUAGES = {
    "python": ast.parse,
    "sh": parse_bash,
    "bash": parse_bash,
    "toml": tomllib.loads,
    "yaml": lambda code: list(yaml.safe_load_all(code)),
    "console": begin_with_a_command,
    "text": str,
    "promql": str,
}


def blocks(page):
    """Yield the language, the text and the line before it of every block of a page."""
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        lines = block[3].splitlines()
        code = "\n".join(line.removeprefix(block[1]) for line in lines) + "\n"
        yield block[2], code, text[: block.start()].rstrip("\n").rpartition("\n")[2]


def test_every_page_has_its_place():
    placed = [name for pages in PARTS.values() for name in pages]
    assert len(placed) == len(set(placed))
    found = [*PAGES, DOCS / "api" / "index.rst", *(DOCS / "reference").glob("*.rst")]
    names = {str(path.relative_to(DOCS).with_suffix("")) for path in found}
    assert set(placed) == names - {"index"}


def test_the_first_page_leads_to_every_page():
    first = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", first))
    assert {str(path.relative_to(DOCS)) for path in PAGES} - linked == {"index.md"}


@pytest.mark.parametrize("language", sorted(LANGUAGES))
def test_every_block_of_code_can_be_read(language):
    found = [(page, code) for page in PAGES for read_as, code in read(page) if read_as == language]
    assert found, f"no page has a block of {language}"
    for page, code in found:
        try:
            LANGUAGES[language](code)
        except Exception as error:
            pytest.fail(f"{page.name}: {error}\n{code}")


def test_every_block_names_a_known_language():
    named = {(page.name, language) for page in PAGES for language, _, _ in blocks(page)}
    assert {(page, language) for page, language in named if language not in LANGUAGES} == set()


def read(page):
    """Yield each block of a page with the language that it is read as."""
    for language, code, before in blocks(page):
        if before.startswith("<!-- file: "):
            # It is saved and used where the page is typed.
            suffix = before.split(".")[-1][:-4].strip()
            language = {"py": "python", "toml": "toml", "yml": "yaml"}.get(suffix, "")
        yield language, code


def test_links_of_a_rendered_file_lead_to_pages_of_the_site(tmp_path, monkeypatch):
    monkeypatch.setattr(source_pages, "ROOT", tmp_path)
    for name in ("docs/runs.md", "tests/README.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    text = "[a](docs/runs.md#where), [b](tests/README.md), [c](gone.md), [d](https://x.org/y)\n"
    (tmp_path / "CHANGES.md").write_text(text)
    builder = SimpleNamespace(get_relative_uri=lambda page, to: f"{page} > {to}".replace(" ", "_"))
    app = SimpleNamespace(srcdir=tmp_path / "docs", builder=builder)
    wanted = []
    shown = source_pages.rendered(app, tmp_path / "CHANGES.md", wanted)
    assert wanted == ["tests/README.md"]
    assert re.findall('href="([^"]*)"', shown) == [
        "source/CHANGES.md_%3E_runs#where",
        "source/CHANGES.md_%3E_source/tests/README.md",
        "gone.md",
        "https://x.org/y",
    ]


def test_every_variable_of_the_code_is_told():
    told = {name for some in variables.VARIABLES.values() for name in some}
    known = told | {*variables.INTERNAL, *INTERNAL_VARIABLES, *OPTION_VARIABLES}
    named = set()
    for package in ("poprun_py", "popdist_py"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named |= set(re.findall(r'"((?:POP[A-Z]+|IPUOF|PVTI|VIPU)_[A-Z_]*[A-Z])"', text))
    assert "POPRUN_LEASES" in named
    assert named - known - {"VIPU_CLI_API", "IPUOF_VIPU_API"} == set()


def test_options_break_between_their_choices():
    html = meaning_tables.breakable("--smt[=yes|<no>] a|b")
    assert re.sub("<code[^>]*>|</code>|<span[^>]*>|</span>", "", html) == (
        "--smt<wbr>[=yes|<wbr>&lt;no&gt;]<wbr> a|<wbr>b"
    )


def test_the_manual_tells_every_option_and_exit_code():
    page = man_pages.pages()["poprun-py.1"].replace("\\-", "-")
    for field in OPTIONS:
        assert option_name(field) in page or field == "verbosity", field
    for code in ("75", "124", "129, 130, 143"):
        assert f".TP\n\\fB{code}\\fR\n" in page


@pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")
@pytest.mark.parametrize("name", ["gc-info.1", "gc-monitor.1", "poprun-py-pod.1", "poprun-py.1"])
def test_manual_page_is_well_formed(name, tmp_path):
    man_pages.main(str(tmp_path))
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", name],
        cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    # No date: a build on another day would make another page. poprun.1 names another file.
    problems = [line for line in done.stdout.splitlines() if "missing date" not in line]
    assert not problems
