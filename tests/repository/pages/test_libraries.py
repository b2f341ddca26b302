"""Each package that installs with this one has a record in docs/decisions.md."""

from __future__ import annotations

import configparser
import re

import pytest
from support.repository import ROOT

# A record begins with the bold name of what was taken; several may share one.
RECORDS = re.findall(
    r"^\*\*.*?(?=\n\n|\Z)",
    (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8"),
    re.M | re.S,
)


def required():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    return [re.split(r"[ <>=]", line)[0] for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("package", required())
def test_a_dependency_has_its_decision(package):
    names = {name for record in RECORDS for name in re.findall(r"\*\*([\w-]+)\*\*", record)}
    assert package in names, f"say in docs/decisions.md why {package} is needed"


def test_every_record_gives_a_reason():
    short = [record.splitlines()[0] for record in RECORDS if len(record.split()) < 15]
    assert RECORDS
    assert short == []
