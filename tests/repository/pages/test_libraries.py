"""The page about the architecture gives the reason for each package that pip installs with us."""

from __future__ import annotations

import configparser
import re

import pytest
from support.repository import ROOT


def required() -> list[str]:
    """Return the names of the packages that setup.cfg requires."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    return [re.split(r"[ <>=]", line)[0] for line in lines if line and not line.startswith("#")]


def reasons() -> dict[str, str]:
    """Return the reason for each package in the table of the page."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("\n## Libraries\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    return {name: reason for cell, reason in rows for name in re.findall(r"`([\w-]+)`", cell)}


@pytest.mark.parametrize("package", required())
def test_a_required_package_has_its_reason(package):
    reason = reasons().get(package, "")
    assert len(reason.split()) >= 4, f"say in docs/architecture.md why {package} is needed"


def test_the_page_gives_no_reason_for_another_package():
    assert reasons().keys() == set(required())
