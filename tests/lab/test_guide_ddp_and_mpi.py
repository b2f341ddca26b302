"""The part of docs/ddp-and-mpi.md about two hosts, typed on two hosts of a lab.

On the page, ``<!-- two hosts -->`` stands before a block of commands with their output. A console
block would run on one host, in test_pages.py.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest
from support.repository import ROOT

from tools.running.own_commands import make_commands
from tools.running.transcript import Command, File, Terminal, differences, parse

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]
PAGE = ROOT / "docs" / "ddp-and-mpi.md"
# A block of a numbered list is indented.
_TWO_HOSTS = re.compile(
    r"^(?P<indent> *)<!-- two hosts -->\n *```text\n(?P<text>.*?)^ *```$", re.M | re.S
)
_FILE = re.compile(r"^<!-- file: .*?^```$", re.M | re.S)


def parts() -> list[Command | File]:
    """Return the files and the commands for two hosts, in the order of the page."""
    page = PAGE.read_text(encoding="utf-8")
    blocks = [(match.start(), match[0]) for match in _FILE.finditer(page)]
    for match in _TWO_HOSTS.finditer(page):
        text = textwrap.dedent(match["text"])
        blocks.append((match.start(), f"```console\n{text}```"))
    return parse("\n\n".join(text for _, text in sorted(blocks)))


@pytest.fixture
def checkout(tmp_path):
    """Make a checkout that both hosts see."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture
def terminal(lab, checkout, tmp_path):
    """Open a terminal on the first host, in the checkout."""
    commands = make_commands(ROOT, tmp_path / "commands")
    environ = {
        **os.environ,
        "PATH": f"{commands}:{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "TMPDIR": "/tmp",
        # Several instances share a core of this machine.
        "OMP_NUM_THREADS": "1",
        "POPRUN_OVERSUBSCRIBE": "yes",
        "POPRUN_LEASES": "",
    }
    one = Terminal(checkout, environ, seconds=120)
    shell = ("bash", "--norc", "--noprofile", "--noediting", "-i")
    one.run(Command(f"exec {' '.join(lab[0].enter(*shell))}", 0, ()))
    one.run(Command(f"cd {checkout}", 0, ()))
    yield one
    one.close()


@pytest.fixture
def separate_project(lab, checkout):
    """Give the second host a folder of its own at the path of the project; returns the path."""
    folder = checkout / "project"
    folder.mkdir()
    mounted = lab[1].run("mount", "-t", "tmpfs", "tmpfs", folder)
    assert mounted.returncode == 0, mounted.stderr
    yield folder
    lab[1].run("umount", folder)


def test_the_commands_for_two_hosts_show_what_the_page_shows(terminal, separate_project):
    typed = []
    for part in parts():
        if isinstance(part, File):
            (separate_project / part.name).write_text(part.text, encoding="utf-8")
            continue
        typed.append(part.text)
        lines, code = terminal.run(part)
        problems = differences(part, lines)
        if code != part.code:
            problems.append(f"exit code {code}, expected {part.code}")
        assert not problems, "\n".join([f"$ {part.text}", *lines, "--", *problems])
    for words in ("--check", "examples/ddp.py", "examples/mpi.py", "--sync"):
        assert any(words in command for command in typed), words
