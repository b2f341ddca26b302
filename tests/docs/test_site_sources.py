"""What the site is made of: every page has its place, every block of code can be read."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import tomllib

import pytest
import yaml
from support.repository import ROOT

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
_BLOCK = re.compile(r"^( *)```([\w-]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# Words after ``` that are read here; a console block is typed by the tests of pages and commands.
LANGUAGES = {"python", "sh", "bash", "toml", "json", "yaml", "console", "text", "promql", ""}


@pytest.fixture
def website(monkeypatch):
    """Import a module of docs/, as its scripts do."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module


def blocks(page):
    """Yield the language, the text and the line before it of every block of a page."""
    text = page.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        lines = block[3].splitlines()
        code = "\n".join(line.removeprefix(block[1]) for line in lines) + "\n"
        yield block[2], code, text[: block.start()].rstrip("\n").rpartition("\n")[2]


def test_every_page_has_its_place(website):
    parts = website("website.navigation").PARTS
    placed = [
        (DOCS / page).parent / name
        for page, lists in parts.items()
        for _, names in lists
        for name in names
    ]
    assert len(placed) == len(set(placed))
    found = {path.relative_to(DOCS).with_suffix("") for path in PAGES}
    found |= {path.relative_to(DOCS).with_suffix("") for path in (DOCS / "api").glob("index.rst")}
    assert {str(path.relative_to(DOCS)) for path in placed} == {str(x) for x in found} - {"index"}


def test_the_first_page_leads_to_every_page():
    first = (DOCS / "index.md").read_text(encoding="utf-8")
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", first))
    below_options = {f"options/{path.name}" for path in (DOCS / "options").glob("*.md")}
    names = {str(path.relative_to(DOCS)) for path in PAGES} - below_options - {"index.md"}
    assert names - linked == {"changelog.md", "contributing.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_block_of_code_can_be_read(page):
    for language, code, before in blocks(page):
        assert language in LANGUAGES, f"{page.name}: ```{language}"
        if before.startswith("<!-- file: "):
            # It is saved and used where the page is typed.
            language = {"py": "python", "yml": "yaml"}.get(before.split(".")[-1][:-4].strip(), "")
        if language == "python":
            ast.parse(code)
        elif language in ("sh", "bash"):
            done = subprocess.run(["bash", "-n"], input=code, text=True, capture_output=True)
            assert done.returncode == 0, f"{page.name}: {done.stderr}\n{code}"
        elif language == "toml":
            tomllib.loads(code)
        elif language == "json":
            json.loads(code)
        elif language == "yaml":
            list(yaml.safe_load_all(code))


def test_console_blocks_begin_with_a_command():
    for page in PAGES:
        for language, code, _ in blocks(page):
            assert language != "console" or code.startswith("$ "), f"{page.name}: {code[:80]}"


def test_pages_of_commands_and_variables_are_what_the_declarations_make(website):
    for name, text in website("reference").pages_beside().items():
        found = (DOCS / name).read_text(encoding="utf-8")
        assert found == text, f"docs/{name} is old: python docs/reference.py"


def test_every_variable_of_the_code_is_told(website):
    from poprun_py.config.environment_options import INTERNAL_VARIABLES, OPTION_VARIABLES

    variables = website("website.variables")
    told = {name for some in variables.VARIABLES.values() for name in some}
    known = told | {*variables.INTERNAL, *INTERNAL_VARIABLES, *OPTION_VARIABLES}
    named = set()
    for package in ("poprun_py", "popdist_py"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named |= set(re.findall(r'"((?:POP[A-Z]+|IPUOF|PVTI|VIPU)_[A-Z_]*[A-Z])"', text))
    assert named - known - {"VIPU_CLI_API", "IPUOF_VIPU_API"} == set()


def test_manual_pages_are_what_the_declarations_make(website):
    made = website("man_pages").pages()
    assert {path.name for path in (DOCS / "man").iterdir()} == made.keys()
    for name, text in made.items():
        found = (DOCS / "man" / name).read_text(encoding="utf-8")
        assert found == text, f"docs/man/{name} is old: python docs/man_pages.py"


def test_the_manual_tells_every_option_and_exit_code(website):
    from poprun_py.config.launch_config import options
    from poprun_py.config.option_kinds import option_name

    page = website("man_pages").pages()["poprun-py.1"].replace("\\-", "-")
    for field in options():
        assert option_name(field) in page or field == "verbosity", field
    for code in ("75", "124", "129, 130, 143"):
        assert f".TP\n\\fB{code}\\fR\n" in page


def test_the_wheel_takes_every_manual_page():
    import configparser

    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = config["options.data_files"]["share/man/man1"].split()
    assert listed == sorted(f"docs/man/{path.name}" for path in (DOCS / "man").iterdir())


@pytest.mark.skipif(not shutil.which("mandoc"), reason="mandoc is not installed")
@pytest.mark.parametrize("page", sorted((DOCS / "man").glob("*-*.1")), ids=lambda page: page.stem)
def test_manual_page_is_well_formed(page):
    done = subprocess.run(
        ["mandoc", "-T", "lint", "-W", "warning", str(page)],
        cwd=DOCS, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    # No date: a build on another day would make another page. poprun.1 names another file.
    problems = [line for line in done.stdout.splitlines() if "missing date" not in line]
    assert not problems
