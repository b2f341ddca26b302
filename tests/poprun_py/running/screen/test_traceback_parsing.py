"""Finding and comparing tracebacks, and shortening those of KeyboardInterrupt after Ctrl-C."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from poprun_py.running.screen.traceback_parsing import (
    InterruptTracebacks,
    equal_lines,
    find_traceback,
    normal_line,
    shorten_interrupts,
)

HEADER = "Traceback (most recent call last):\n"
OWN = '  File "/home/me/train.py", line 9, in main\n    for batch in loader:\n'
LIBRARY = (
    '  File "/venv/lib/python3.11/site-packages/torch/data/dataloader.py", line 725, in next\n'
    "    data = self._next_data()\n"
    "           ^^^^^^^^^^^^^^^^^\n"
)
INTERRUPT = f"{HEADER}{OWN}{LIBRARY}KeyboardInterrupt\n"
OTHER = f"{HEADER}{OWN}{LIBRARY}ValueError: bad batch\n"
LINK = "\nDuring handling of the above exception, another exception occurred:\n\n"
SHORT = "KeyboardInterrupt in main, /home/me/train.py line 9\n"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (INTERRUPT, SHORT),
        (f"before\n{INTERRUPT}after\n", f"before\n{SHORT}after\n"),
        (f"Process SpawnProcess-1:\n{INTERRUPT}", SHORT),
        (f"Exception ignored in: <function f>\n{HEADER}{OWN}KeyboardInterrupt: \n", SHORT),
        ("".join(f"[rank1]: {line}\n" for line in INTERRUPT.splitlines()), SHORT),
        (f"{OTHER}{LINK}{INTERRUPT}", SHORT),
        (f"{HEADER}{LIBRARY}KeyboardInterrupt\n", "KeyboardInterrupt in next, /venv/"),
        (f'{HEADER}  File "t.py", line 3, in <module>\nKeyboardInterrupt\n',
         "KeyboardInterrupt, t.py line 3\n"),
    ],
)  # fmt: skip
def test_an_interrupt_is_one_line(text, shown):
    assert shorten_interrupts(text).startswith(shown)
    assert shorten_interrupts(text).count("KeyboardInterrupt") == 1


@pytest.mark.parametrize(
    "text",
    [OTHER, f"{INTERRUPT}{LINK}{OTHER}", HEADER + OWN, "Process P-1:\n", "KeyboardInterrupt"],
)
def test_other_text_is_unchanged(text):
    assert shorten_interrupts(text) == text


@given(st.lists(st.sampled_from([*INTERRUPT.splitlines(True), *LINK.splitlines(True), "x\n", "y"])))
@example([HEADER, "x\n", *LINK.splitlines(True)[1:2], HEADER, "KeyboardInterrupt\n"])
def test_lines_outside_of_tracebacks_are_kept(lines):
    text = "".join(lines)
    outside = re.sub(rf"^{re.escape(HEADER)}(?: .*\n|\n)*[^ \n].*\n?", "", text, flags=re.MULTILINE)
    assert outside.count("x\n") <= shorten_interrupts(text).count("x\n") <= text.count("x\n")


def test_a_traceback_is_held_until_it_is_complete():
    shown = []
    held = InterruptTracebacks(lambda index, data: shown.append((index, data)))
    data = f"epoch 1\n{INTERRUPT}".encode()
    held.feed(0, data[:30], 10.0)
    held.feed(0, data[30:], 10.1)
    held.feed(1, b"\xffsaving\n", 10.1)
    assert shown == [(0, b"epoch 1\n"), (1, b"\xffsaving\n")]
    assert held.next_deadline() == 10.5
    held.on_time(10.5)
    assert shown[2:] == [(0, SHORT.encode())]
    assert held.next_deadline() == float("inf")


def test_held_output_is_shown_at_the_end_or_if_it_is_too_long():
    shown = []
    held = InterruptTracebacks(lambda index, data: shown.append((index, data)))
    held.feed(0, HEADER.encode(), 10.0)
    held.ended(0)
    held.feed(1, HEADER.encode() + b"  x\n" * 20_000, 10.0)
    assert [len(data) for _, data in shown] == [len(HEADER), len(HEADER) + 80_000]


def normal(text, index):
    return [normal_line(line, index, f"node{index}", 7000 + index) for line in text.split("\n")]


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: <Tensor object at 0x7f{0}ab{0}c0>",
        "RuntimeError: rank {0} has no data",
        "OSError: node{0}: no space left",
        "OSError: process 700{0} is gone",
        "RuntimeError: DataLoader worker (pid 81{0}) exited",
        "TimeoutError: at 2026-11-2{0} 10:00:0{0}.123",
        "[rank{0}]: ValueError: x",
    ],
)
def test_differences_between_instances_are_ignored(text):
    first, second = (normal(text.format(index), index) for index in (1, 2))
    assert first == second


@pytest.mark.parametrize(
    "text", ["KeyError: {0}", "ValueError: rank {0}{0} is lost", "line {0}", "OSError: node{0}{0}"]
)
def test_other_numbers_count_as_differences(text):
    first, second = (normal(text.format(index), index) for index in (1, 2))
    assert first != second


GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "a.py", line 9, in <module>
  | ExceptionGroup: several (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "a.py", line 3, in f
    | ValueError: one
    +------------------------------------
"""
NOT_PYTHON = """  File "a.py", line 3
    a = (
        ^
SyntaxError: '(' was never closed
"""
RANKS = """[rank1]: Traceback (most recent call last):
[rank1]:   File "a.py", line 9, in <module>
[rank1]: ValueError: x
"""


@pytest.mark.parametrize("text", [GROUP, NOT_PYTHON, RANKS], ids=["group", "syntax", "torch"])
def test_tracebacks_of_other_kinds(text):
    lines = normal(text, 1)
    assert find_traceback(b"noise\n" + text.encode()) == len("noise\n")
    assert equal_lines(lines, lines) == len(lines)
    assert equal_lines(lines[:2], lines) == 0
