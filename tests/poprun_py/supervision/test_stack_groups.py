"""Stacks of many instances: grouped, and who among them is missing."""

from __future__ import annotations

import pytest

from poprun_py.supervision.stacks import group_stacks, missing_instances, render_groups

WAITING = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 1 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/site/popdist_py/collective_calls.py", line 99999 in barrier
  File "/home/me/train.py", line 99999 in <module>
"""
LOADING = """Current thread 0x00007f0000000003 (most recent call first):
  File "/home/me/data.py", line 99999 in read
  File "/home/me/train.py", line 99999 in <module>
"""


def process(text, state="S"):
    return [{"pid": 1, "state": state, "text": text}]


@pytest.mark.parametrize(
    ("line", "waits"),
    [("comm.Barrier()", True), ("MPI.Request.Waitall(sent)", True), ("os.waitpid(pid, 0)", False)],
)
def test_line_tells_who_waits_for_other_instances(tmp_path, line, waits):
    source = tmp_path / "train.py"
    source.write_text(line + "\n")
    text = f'Thread 0x01 (most recent call first):\n  File "{source}", line 1 in <module>\n'
    assert group_stacks({0: process(text)})[0].waits is waits


def test_equal_stacks_are_one_group_and_the_odd_one_comes_first():
    other = WAITING.replace("0x00007f0000000002", "0x00007f00000000aa")
    groups = group_stacks({0: process(WAITING), 1: process(LOADING), 2: process(other)})
    assert [(g.instances, g.waits) for g in groups] == [((1,), False), ((0, 2), True)]
    text = render_groups(groups)
    assert text.startswith("instance 1 (1):\n  thread (most recent call first):\n")
    assert "instances 0,2 (2), waiting for others:" in text
    assert "0x" not in text


def test_the_one_that_does_not_wait_is_missing():
    groups = group_stacks({0: process(WAITING), 1: process(LOADING)})
    assert missing_instances((0, 1), {0: (7, 0), 1: (7, 0)}, groups) == (1,)


def test_the_one_that_does_not_wait_is_missing_though_its_last_step_was_later():
    groups = group_stacks({0: process(WAITING), 1: process(LOADING), 2: process(WAITING)})
    assert missing_instances((0,), {0: (7, 0), 1: (7, 0), 2: (7, 0)}, groups) == (1,)
    assert missing_instances((1,), {0: (7, 0), 1: (7, 0), 2: (7, 0)}, groups) == (1,)


def test_the_one_that_gives_no_stack_is_missing():
    groups = group_stacks({0: process(WAITING), 1: process("", state="T")})
    assert missing_instances((0, 1), {0: (7, 0), 1: (7, 0)}, groups) == (1,)
    assert "the process is stopped" in render_groups(groups)


def test_the_slowest_is_missing_if_all_wait():
    groups = group_stacks({0: process(WAITING), 1: process(WAITING)})
    assert missing_instances((0, 1), {0: (8, 0), 1: (7, 0)}, groups) == (1,)
    assert missing_instances((0, 1), {0: (8, 1), 1: (8, 2)}, groups) == (0,)


def test_wrapper_that_does_not_answer_is_named():
    groups = group_stacks({0: process(WAITING), 1: None})
    assert groups[0].instances == (1,)
    assert "no answer" in groups[0].text
