"""Comparisons in docs/seeds.md: whether a command of the texts holds here."""

from __future__ import annotations

import re

import pytest

from tools.pages.seed_texts import index
from tools.pages.seed_texts.compared import NO, PARTLY, YES, compare
from tools.pages.seed_texts.values import FIELDS, OPTIONS, Quantity, TextCommand
from tools.running.printed import visible


def command(text="python a.py", shows=(), here=("python", "a.py"), **values):
    return TextCommand(text, shows, here, ".", "It is short.", **values)


_TWO = ("step 1", "done")
_SPEED = Quantity("speed (items/s)", 100.0, r"^speed ([\d,.]+)", factor=2)


@pytest.mark.parametrize(
    ("given", "lines", "holds", "words"),
    [
        (command(here=()), ("a",), NO, "it is not run here"),
        (command(), None, NO, "it has not been run yet"),
        (command(), ("a",), YES, "The command as printed ended with exit code 0; the text"),
        (command("python3 a.py --data-dir mine", here=("python", "a.py", "--data-dir", "{data}")),
         (), YES, "as printed"),
        (command(here=("python", "a.py", "--steps", "2")), (), PARTLY,
         "^The command as printed, with `--steps 2` added, ended with exit code 0;"),
        (command(here=("python", "b.py")), (), PARTLY, "^Another command in its place ended"),
        (command("print('a')", here=("python", "-c", "print('a')")), (), YES, "as printed"),
        (command(code=1), (), YES, "exit code 1"),
        (command(at_most_partly=True), (), PARTLY, "as printed"),
        (command(shows=_TWO), ("new", "step 7", "done"), YES, "2 of the text's 2 lines"),
        (command(shows=_TWO), ("step 7",), PARTLY, "1 of the text's 2 lines"),
        (command(shows=_TWO), ("done", "step 7"), PARTLY, "1 of the text's 2 lines"),
        (command(shows=_TWO, numbers_vary=False), ("step 7", "x"), NO, "0 of .* to the letter"),
        (command(shows=_TWO, at_most_partly=True), _TWO, PARTLY, "2 of the text's 2 lines"),
        (command(shows=("",)), ("done",), NO, "0 of the text's 0 lines"),
        (command(shows=("N(a=1, b_c={}), d=2",), by_names=FIELDS), ("a=5,", "d=1"), PARTLY,
         r"2 of the text's 3 names are shown here too \(not b_c\)"),
        (command(shows=("-h x", "--to-go y"), by_names=OPTIONS), ("  -h, --to-go",), YES,
         "2 of the text's 2 names are shown here too; their order, line breaks and values"),
        (command(quantities=(_SPEED,)), ("speed 150.5",), YES,
         r"speed \(items/s\) 100 in the text, 150.5 here: within a factor of 2\."),
        (command(quantities=(_SPEED,)), ("speed 1,234",), NO, "1,234 here: not within a factor"),
        (command(quantities=(_SPEED, Quantity("batch", 16, r"batch (\d+)"))), ("batch 16",), PARTLY,
         "100 in the text, not shown here; batch 16 in the text, 16 here: equal"),
    ],
)  # fmt: skip
def test_what_holds_and_what_is_said_of_it(given, lines, holds, words):
    found = compare(given, lines)
    assert found.holds == holds
    assert re.search(words, found.compared), found.compared


def test_what_the_author_adds_comes_last():
    found = compare(command(compared="Losses were not compared."), ())
    assert found.compared.endswith("no output to compare with. Losses were not compared.")


def test_every_row_of_the_texts_says_what_was_compared():
    for text in index.texts().values():
        for one in text.commands:
            assert compare(one, ("a line",)).compared.endswith(".")
            assert not (one.by_names and not one.shows)


def test_complete_bars_of_compilations_are_shown_where_they_are_asked_for():
    full = "Graph compilation: 100%|##| 100/100 [00:03<00:00]"
    bars = f"Graph compilation: 5%|#| 5/100 [00:00<?]\r{full}"
    output = f"Epoch 1/1\n{bars}a log line\n{bars}\nEpoch 2/2\n"
    assert visible(output) == ["Epoch 1/1", "a log line", "Epoch 2/2"]
    shown = ["Epoch 1/1", full, "a log line", full, "Epoch 2/2"]
    assert visible(output, compiling=True) == shown
