"""What the environment tells of the user's terminal."""

import pytest

from poprun_py.terminal import can_erase, has_cursor, may_colour


@pytest.mark.parametrize(
    ("environ", "erases", "cursor", "colour"),
    [
        ({"TERM": "xterm"}, True, True, True),
        ({"TERM": "dumb"}, False, False, False),
        ({}, True, False, True),
        ({"TERM": ""}, True, False, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, True, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True, True, True),  # as no-color.org has it
    ],
)
def test_kind(environ, erases, cursor, colour):
    assert (can_erase(environ), has_cursor(environ), may_colour(environ)) == (
        erases, cursor, colour,
    )  # fmt: skip
