"""The table of losses in docs/reliability.md: what it counts of a record."""

from __future__ import annotations

import pytest

from tools.pages.losses_table import table

DRAW = {"program": "poptorch", "per_host": 1, "seed": 3}
LINES = [
    DRAW,
    {"line": "median", "seconds": 0.1, "steps": 900},
    {"line": "loss", "kind": "an instance", "seconds": 2.0, "again": 0},
    {"line": "loss", "kind": "an instance", "seconds": 3.0, "again": 1},
    {"line": "loss", "kind": "a wrapper", "seconds": 5.0, "again": 0},
    {"line": "part", "steps": 500, "seconds": 60.0},
    {"line": "part", "steps": 400, "seconds": 60.0, "load": 1.5, "cores": 2},
]
EQUAL = {"line": "digests", "wrong": [], "equal": True}


def test_the_table_has_a_row_for_each_kind_and_says_how_much_is_training():
    text, _, *rows = table([*LINES, EQUAL]).splitlines()
    assert text == (
        "A PopTorch program with 4 instances on 4 hosts (seed 3) had 3 losses in 2.0 minutes and "
        "900 steps of 100 ms, at a load of 1.5 on 2 cores. The job spent 92 % of the time in "
        "training, and the training ends with the weights of the undisturbed training, bit for "
        "bit. Without losses and without states in memory, the same steps would have taken 75 % of "
        "the time."
    )
    assert rows[2:] == [
        "| an instance | 2 | 2.5 s, 3.0 s | 1 | yes |",
        "| a wrapper | 1 | 5.0 s, 5.0 s | 0 | yes |",
    ]


def test_other_weights_are_told_in_bold():
    text = table([*LINES, {"line": "digests", "wrong": [50, 100], "equal": False}])
    assert "**ends with other weights than the undisturbed training, from step [50] on**" in text
    assert "| **no** |" in text


def test_a_run_that_was_not_compared_has_no_table():
    with pytest.raises(ValueError, match="has not been compared"):
        table(LINES)
