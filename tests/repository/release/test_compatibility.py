"""The matrix of versions: cases are read or refused, and reports of tests are counted."""

from __future__ import annotations

import zipfile

import pytest

from tools import version_matrix
from tools.release import version_cases, version_page


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


def outcome(case, **values):
    return version_page.Outcome(
        case=case, date="2026-11-28", python="3.12.1", mpi="Open MPI 5.0.11", skipped=0, seconds=9,
        versions={"torch": "2.13.0", "numpy": "2.4.6"}, tests=("tests/system",), **values,
    )  # fmt: skip


def test_a_row_takes_the_place_of_the_older_row_of_its_case():
    page = "# Page\n\n<!-- results -->\n| case |\n| --- |\n| `b` | old |\n<!-- end -->\nmore\n"
    page = version_page.with_row(page, outcome("a", passed=5, failed=()))
    page = version_page.with_row(page, outcome("b", passed=3, failed=("x", "y")))
    versions = "3.12.1 | 2.13.0 | 2.4.6 | none | Open MPI 5.0.11 | `tests/system`"
    assert page == (
        "# Page\n\n<!-- results -->\n| case |\n| --- |\n"
        f"| `a` | {versions} | 5 | 0 | 2026-11-28 |\n| `b` | {versions} | 3 | 2 | 2026-11-28 |\n"
        "<!-- end -->\nmore\n"
    )


def test_the_page_has_the_columns_of_a_row():
    page = version_page.PAGE.read_text(encoding="utf-8")
    made = version_page.with_row(page, outcome("3.99:newest:openmpi", passed=1, failed=()))
    table = made.partition("<!-- results -->\n")[2].partition("<!-- end -->")[0].splitlines()
    assert {line.count("|") for line in table} == {11}
    assert len(made.splitlines()) == len(page.splitlines()) + 1
