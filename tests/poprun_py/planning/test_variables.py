"""The variables of the user: read from a file as a shell does; impossible ones are refused."""

from __future__ import annotations

import pytest

from poprun_py import UsageError
from poprun_py.planning.variables import user_variables


def test_a_file_of_variables_reads_as_in_a_shell():
    text = "A=\"x y\"\r\nexport  B='z'\n# no\nC=it's\nD='\nE=a\u2028b\nHOME\n"
    assert dict(user_variables((), text, {"HOME": "/h"})) == {
        "A": "x y", "B": "z", "C": "it's", "D": "'", "E": "a\u2028b", "HOME": "/h",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=x\0y", "line 1 A: expected a value without NUL"),
        ("A=1\nA B=2", "line 2 'A B': expected NAME=VALUE"),
        ("POPRUN_CPUS=x", "poprun-py sets it for itself"),
    ],
)
def test_variables_that_no_program_can_get_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        user_variables((), text, {})
