"""After Ctrl-C a traceback of KeyboardInterrupt is one line, and nothing else is changed."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from poprun_py.running.screen.interrupt_tracebacks import InterruptTracebacks, shortened

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
    assert shortened(text).startswith(shown)
    assert shortened(text).count("KeyboardInterrupt") == 1


@pytest.mark.parametrize(
    "text",
    [OTHER, f"{INTERRUPT}{LINK}{OTHER}", HEADER + OWN, "Process P-1:\n", "KeyboardInterrupt"],
)
def test_everything_else_is_unchanged(text):
    assert shortened(text) == text


@given(st.lists(st.sampled_from([*INTERRUPT.splitlines(True), *LINK.splitlines(True), "x\n", "y"])))
@example([HEADER, "x\n", *LINK.splitlines(True)[1:2], HEADER, "KeyboardInterrupt\n"])
def test_no_line_outside_of_a_traceback_is_lost(lines):
    text = "".join(lines)
    outside = re.sub(rf"^{re.escape(HEADER)}(?: .*\n|\n)*[^ \n].*\n?", "", text, flags=re.MULTILINE)
    assert outside.count("x\n") <= shortened(text).count("x\n") <= text.count("x\n")


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


def test_what_is_held_is_shown_at_the_end_and_when_it_is_too_much():
    shown = []
    held = InterruptTracebacks(lambda index, data: shown.append((index, data)))
    held.feed(0, HEADER.encode(), 10.0)
    held.ended(0)
    held.feed(1, HEADER.encode() + b"  x\n" * 20_000, 10.0)
    assert [len(data) for _, data in shown] == [len(HEADER), len(HEADER) + 80_000]
