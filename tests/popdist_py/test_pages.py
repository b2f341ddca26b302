"""The programs of docs/collectives.md and docs/runs.md run as they stand."""

from __future__ import annotations

import re

import pytest
from support.repository import ROOT

# test_pages.py of the repository runs the files of a page.
_BLOCK = re.compile(r"(?<!-->\n)^```python\n(.*?)^```", re.M | re.S)
# The first program needs no torch, whose import takes longest. Other tests make the calls of the
# others.
PROGRAMS = [
    pytest.param(
        text,
        id=f"{name} {number}",
        marks=[pytest.mark.sweep] * ((name, number) != ("collectives", 0)),
    )
    for name in ("collectives", "runs")
    for number, text in enumerate(_BLOCK.findall((ROOT / "docs" / f"{name}.md").read_text()))
]
# The files that a program writes, by a text that the program contains.
FILES = {
    "runs/first": ["metrics.csv", "runs/first"],
}


@pytest.mark.mpi
@pytest.mark.parametrize("text", PROGRAMS)
def test_a_program_of_a_page_runs(poprun, script, tmp_path, text):
    done = poprun("--num-instances", 2, "--num-replicas", 4, script(text))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "warning" not in done.stderr.lower()
    for files in (files for word, files in FILES.items() if word in text):
        for name in files:
            assert (tmp_path / name).exists(), name


def test_the_pages_have_programs():
    assert len(PROGRAMS) == 2
