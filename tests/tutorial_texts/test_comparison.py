"""Comparison of a text's output with our output."""

from __future__ import annotations

import pytest
from tutorial_texts.comparison import NO, PARTLY, YES, holds
from tutorial_texts.values import FIELDS, OPTIONS, Quantity, TextCommand

from tools.running.printed import visible


def command(text="python a.py", shows=(), here=("python", "a.py"), **values):
    return TextCommand(text, shows, here, **values)


_TWO = ("step 1", "done")
_SPEED = Quantity(100.0, r"^speed ([\d,.]+)", factor=2)
_BATCH = Quantity(16, r"batch (\d+)")


@pytest.mark.parametrize(
    ("given", "lines", "expected"),
    [
        (command(here=()), ("a",), NO),
        (command(), ("a",), YES),
        (command("python3 a.py --data-dir mine", here=("python", "a.py", "--data-dir", "{data}")),
         (), YES),
        (command(here=("python", "a.py", "--steps", "2")), (), PARTLY),
        (command(here=("python", "b.py")), (), PARTLY),
        (command("print('a')", here=("python", "-c", "print('a')")), (), YES),
        (command(at_most_partly=True), (), PARTLY),
        (command(shows=_TWO), ("new", "step 7", "done"), YES),
        (command(shows=_TWO), ("step 7",), PARTLY),
        (command(shows=_TWO), ("done", "step 7"), PARTLY),
        (command(shows=_TWO, numbers_vary=False), ("step 7", "x"), NO),
        (command(shows=_TWO, at_most_partly=True), _TWO, PARTLY),
        (command(shows=("",)), ("done",), NO),
        (command(shows=("100%|##| 2/2 [00:01<00:00, 2.1it/s]hello 5",)),
         ("100%|##| 2/2 [00:01<00:00, 1.3s/it]", "hello 12"), YES),
        (command(shows=("N(a=1, b_c={}), d=2",), by_names=FIELDS), ("a=5,", "d=1"), PARTLY),
        (command(shows=("-h x", "--to-go y"), by_names=OPTIONS), ("  -h, --to-go",), YES),
        (command(quantities=(_SPEED,)), ("speed 150.5",), YES),
        (command(quantities=(_SPEED,)), ("speed 1,234",), NO),
        (command(quantities=(_SPEED, _BATCH)), ("batch 16",), PARTLY),
    ],
)  # fmt: skip
def test_command_holds(given, lines, expected):
    assert holds(given, lines) == expected


def test_complete_bars_of_compilations_are_shown_where_they_are_asked_for():
    full = "Graph compilation: 100%|##| 100/100 [00:03<00:00]"
    bars = f"Graph compilation: 5%|#| 5/100 [00:00<?]\r{full}"
    output = f"Epoch 1/1\n{bars}a log line\n{bars}\nEpoch 2/2\n"
    assert visible(output) == ["Epoch 1/1", "a log line", "Epoch 2/2"]
    shown = ["Epoch 1/1", full, "a log line", full, "Epoch 2/2"]
    assert visible(output, compiling=True) == shown
