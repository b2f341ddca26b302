"""The soak's table of docs/reliability.md: what it counts of a record."""

from __future__ import annotations

from tools.pages.soak_table import table


def test_the_table_counts_cases_by_the_attempt_that_counts():
    case = {
        "row": "SIGKILL of a program", "phase": "training", "missed": False, "code": 137,
        "seconds": 1.0, "load": 2.0, "limit": 2, "cause": True, "left": [], "resumed": True,
        "wrong": [],
    }  # fmt: skip
    lines = [
        {"seed": 4, "rows": ["4 SIGKILL of a program", "1 other"], "left_out": {"lab": "no ip"}},
        {**case, "number": 0, "attempt": 1, "wrong": ["took 9.0 s"], "seconds": 9.0},
        {**case, "number": 1, "attempt": 1, "phase": "end", "code": 0, "cause": None},
        {**case, "number": 2, "attempt": 1, "missed": True, "code": 0, "cause": None},
        {**case, "number": 3, "attempt": 1, "left": ["a"], "wrong": ["files left: a"]},
        {**case, "number": 0, "attempt": 2, "seconds": 6.0, "load": 1.5, "limit": 5},
    ]
    told, _, *rows = table(lines).splitlines()
    assert told == (
        "4 cases of seed 4, 2 kinds of fault: 3 as expected, 1 of all only when they were done "
        "once more, alone, 1 not even then. Left out: lab: no ip."
    )
    assert rows[2] == (
        "| SIGKILL of a program | 4 (1 too late) | training (2), end (1) | 137 (2), 0 (2) "
        "| 1.0 s, 6.0 of 5 s at a load of 1.5 | 2 of 2 | 1 | 4 of 4 **1 wrong** |"
    )
    assert rows[3] == "| other | 0 | - | - | - | - | 0 | - |"
