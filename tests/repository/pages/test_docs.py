"""The documents: every ``$`` command runs, every link leads to a file, every target exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from repository.pages.test_pages import PAGES
from support.repository import ROOT
from system.test_main_job import MAIN_JOBS

DOCUMENTS = [
    ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
]
DOCUMENTS += sorted((ROOT / "docs").rglob("*.md"))
# test_pages.py runs these, and compares what is shown.
TRANSCRIPTS = [ROOT / "docs" / param.values[0] for param in PAGES]
_FENCE = re.compile(r"^```console\n(.*?)^```", re.M | re.S)
_LINK = re.compile(r"\[[^\]]+\]\((?!https?:|mailto:|#)([^)#]+)")
# A link to a heading, in this page (an empty path) or in another page.
_LINK_TO_HEADING = re.compile(r"\[[^\]]+\]\((?!https?:|mailto:)([^)#\s]*)#([^)\s]+)\)")
_NAMED_PAGE = re.compile(r"\bdocs/[\w/-]+\.(?:md|rst|svg|json)\b")
_BLOCK = re.compile(r"^( *)```.*?^\1```", re.M | re.S)
_TARGET = re.compile(r"^(?:\$ )?make ([a-z][a-z-]*)", re.M)


def commands():
    """Every ``$`` command of the console blocks, with the exit code that a note expects."""
    for document in DOCUMENTS:
        if document in TRANSCRIPTS:
            continue
        for block in _FENCE.findall(document.read_text(encoding="utf-8")):
            for line in block.splitlines():
                if line.startswith("$ "):
                    command, _, note = line[2:].partition("  # exit code ")
                    if command in MAIN_JOBS:
                        continue  # tests/system runs it, and looks at what it prints
                    name = f"{document.name}: {command}"[:90]
                    # tests/system looks closely at timelines, and pages run DDP.
                    again = "--timeline" in command and "examples/train.py" in command
                    again |= "examples/ddp.py" in command
                    marks = [pytest.mark.long] if again else []
                    yield pytest.param(command, int(note or 0), id=name, marks=marks)


@pytest.mark.examples
@pytest.mark.mpi
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("command", "code"), list(commands()))
def test_command_in_a_document_runs(command, code, tmp_path):
    # Commands run in a copy of what they name, so that what they write stays out of the project.
    for name in ("examples", "docs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=360, check=False,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT),
             # Without an mpirun, Open MPI 5 leaves the memory that it would share.
             "OMPI_MCA_btl_sm_backing_directory": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == code, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def test_links_lead_somewhere():
    links = [
        (document, target)
        for document in DOCUMENTS
        for target in _LINK.findall(document.read_text(encoding="utf-8"))
    ]
    assert len({document for document, _ in links}) > len(DOCUMENTS) / 2, "links are found"
    broken = {
        (document.name, target)
        for document, target in links
        if not (document.parent / target).exists()
    }
    assert broken == set()


def test_pages_that_the_code_names_exist():
    named = {
        (str(path.relative_to(ROOT)), page)
        for folder in ("poprun_py", "popdist_py", "tests", "tools", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*.py")
        for page in _NAMED_PAGE.findall(path.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    assert {(path, page) for path, page in named if not (ROOT / page).exists()} == set()


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: Counter[str] = Counter()
    names = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", text))
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _BLOCK.sub("", text), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


def missing_headings(text: str, pages: Mapping[str, str]) -> list[str]:
    """Return the links of a text to headings that do not exist; ``pages`` has the linked pages."""
    links = _LINK_TO_HEADING.findall(_BLOCK.sub("", text))
    return [f"{path}#{name}" for path, name in links if name not in anchors(pages[path])]


def test_links_to_headings_lead_to_a_heading():
    checked, broken = 0, {}
    for document in [*DOCUMENTS, ROOT / "tests" / "README.md"]:
        text = document.read_text(encoding="utf-8")
        paths = {path for path, _ in _LINK_TO_HEADING.findall(text)}
        pages = {
            path: (document.parent / path).read_text(encoding="utf-8") for path in paths - {""}
        }
        checked += len(paths)
        broken[document.name] = missing_headings(text, {"": text, **pages})
    assert checked
    assert {name: links for name, links in broken.items() if links} == {}


def test_missing_headings_are_found():
    text = "## A `b`, [c](x)!\n## Twice\n## Twice\n```sh\n# code\n```\n[a](#a-b-c) [b](#twice-1)"
    assert missing_headings(text, {"": text}) == []
    assert missing_headings("[a](b.md#c) [d](#code)", {"b.md": "# D", "": text}) == [
        "b.md#c",
        "#code",
    ]


def test_targets_of_make_that_documents_name_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {*re.findall(r"^([a-z][a-z-]*):", makefile, re.M)}
    named = {
        target
        for document in DOCUMENTS
        for target in _TARGET.findall(document.read_text(encoding="utf-8"))
    }
    assert "test" in named
    assert named <= targets


def test_make_alone_lists_the_targets():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    for target in ("demo", "test", "check"):
        assert f"make {target}" in done.stdout


def test_page_of_versions_names_every_module_of_the_api():
    pages = (ROOT / "docs" / "api").glob("*.rst")
    modules = {
        name
        for page in pages
        for name in re.findall(
            r"^\.\. public-names:: (\S+)", page.read_text(encoding="utf-8"), re.M
        )
    }
    assert "popdist_py.checkpoint" in modules
    promised = re.findall(
        r"`(pop\w+(?:\.\w+)*?)(?:\.__all__)?`", (ROOT / "docs/releasing.md").read_text()
    )
    assert modules <= set(promised)
