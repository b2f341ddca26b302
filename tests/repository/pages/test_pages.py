"""The pages that are read from top to bottom: what they show is what their commands show."""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import pytest
from support.listening import free_port
from support.processes import survivors, wait_until
from support.repository import ROOT

from tools.running.own_commands import make_commands
from tools.running.transcript import File, Terminal, differences, parse

# Pages that take a quarter of a minute or more are long.
PAGES = [
    pytest.param("first-hour.md", marks=pytest.mark.long),
    pytest.param("ddp-and-mpi.md", marks=pytest.mark.long),
    pytest.param("data-loading.md", marks=pytest.mark.long),
    pytest.param("runs.md", marks=pytest.mark.examples),
    pytest.param("watching.md", marks=pytest.mark.long),
    pytest.param("port-poptorch.md", marks=pytest.mark.long),
    pytest.param("device.md", marks=pytest.mark.examples),
    pytest.param("hands-on.md", marks=pytest.mark.long),
    pytest.param("pods.md", marks=pytest.mark.examples),
    pytest.param("collectives.md", marks=pytest.mark.examples),
    pytest.param("pipelining.md", marks=pytest.mark.long),
    pytest.param("course.md", marks=pytest.mark.long),
    pytest.param("cnns.md", marks=pytest.mark.long),
    pytest.param("python.md", marks=pytest.mark.long),
    pytest.param("placement.md", marks=pytest.mark.examples),
]

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(900)]


@pytest.fixture
def checkout(tmp_path):
    """Make a folder like the project's after ``make``; what commands write stays in it."""
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    environment = tmp_path / ".venv"
    environment.mkdir()
    (environment / "bin").symlink_to(Path(sys.executable).parent)
    for stamp in (".made", ".installed", ".installed-dev"):
        (environment / stamp).touch()
    return tmp_path


@pytest.fixture
def terminal(checkout, tmp_path_factory):
    """Open a terminal in the project's folder; afterwards nothing that it started is left."""
    name, value = "PAGE_TEST_MARK", f"page-{os.getpid()}-{time.monotonic_ns()}"
    commands = make_commands(ROOT, tmp_path_factory.mktemp("commands") / "bin")
    path = f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {
        **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), name: value,
        # Two threads would wait for one another where other tests have the cores.
        "OMP_NUM_THREADS": "1",
        # Without an mpirun, Open MPI 5 leaves the memory that it would share.
        "OMPI_MCA_btl_sm_backing_directory": str(tmp_path_factory.mktemp("memory")),
    }  # fmt: skip
    one = Terminal(checkout, environ, seconds=240)
    yield one
    one.close()
    wait_until(lambda: not survivors(f"{name}={value}"), 10, "processes of the page are left")


def read_page(name):
    """Return the text of a page with a free port for the one it names, which may be taken."""
    return re.sub(
        r"\b1946[45]\b", str(free_port()), (ROOT / "docs" / name).read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_what_its_commands_show(page, terminal, checkout):
    for part in parse(read_page(page)):
        if isinstance(part, File):
            (terminal.folder() / part.name).write_text(part.text, encoding="utf-8")
            continue
        lines, code = terminal.run(part)
        problems = differences(part, lines)
        if code != part.code:
            problems.append(f"exit code {code}, expected {part.code}")
        assert not problems, "\n".join([f"$ {part.text}", *lines, "--", *problems])


def test_every_program_of_the_examples_is_run_by_a_page():
    pages = [(ROOT / "docs" / param.values[0]).read_text(encoding="utf-8") for param in PAGES]
    commands = [line for page in pages for line in page.splitlines() if line.startswith("$ ")]
    programs = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert [name for name in sorted(programs) if not any(name in line for line in commands)] == []
