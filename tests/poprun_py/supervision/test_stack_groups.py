"""Stacks of many instances: grouped, and who among them is missing."""

from __future__ import annotations

import pytest

from poprun_py.supervision.job import StackGroup
from poprun_py.supervision.stacks import (
    _waits,
    group_stacks,
    missing_instances,
    odd_instances,
    place,
    render_groups,
)

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
    [
        ("comm.Barrier()", True),
        ("MPI.Request.Waitall(sent)", True),
        ("os.waitpid(pid, 0)", False),
        ("self.comm.scatter(parts)", True),
        ("MPI.COMM_WORLD.Alltoallw(a, b)", True),
        ("world_comm.Ssend(array, 1)", True),
        ("MPI.Finalize()", True),
        ("out = torch.scatter(x, 0, index, 1)", False),
        ("process.communicate()", False),
    ],
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


def standing(*frames, instances=(0,)):
    """Return instances at frames of (file, function, source), the innermost first."""
    lines = ["Current thread (most recent call first):"]
    for file, function, source in frames:
        lines += [f'  File "{file}", line 31 in {function}', *([f"    {source}"] if source else [])]
    return StackGroup(instances=instances, text="\n".join(lines), waits=_waits("\n".join(lines)))


MAIN = ("/home/me/train.py", "<module>")
SLEEPING = (*MAIN, "time.sleep(1000)")
IN_BARRIER = (*MAIN, "comm.Barrier()")
IN_RECV = (*MAIN, "comm.Recv(buffer, source=0)")
IN_BACKWARD = ("/site-packages/torch/autograd/graph.py", "_engine_run_backward", "")
IN_TORCH = (
    ("/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "barrier", ""),
    ("/v/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", "wrapper", ""),
)


@pytest.mark.parametrize(
    ("frames", "told"),
    [
        ([SLEEPING], "at train.py:31: time.sleep(1000)"),
        ([IN_BARRIER], "waiting in Barrier (train.py:31)"),
        ([*IN_TORCH, (*MAIN, "dist.barrier()")], "waiting in barrier (train.py:31)"),
        ([IN_TORCH[0], (*MAIN, "meet(everybody)")], "waiting in barrier (train.py:31)"),
        ([("/v/lib/python3.11/threading.py", "wait", ""), (*MAIN, "")], "at train.py:31"),
        ([(*MAIN, "x" * 99)], f"at train.py:31: {'x' * 60}..."),
    ],
)
def test_place_is_the_users_own_line(frames, told):
    assert place(standing(*frames)) == told


def test_place_of_a_process_without_a_stack():
    (group,) = group_stacks({0: process("", state="T")})
    assert place(group) == "its process is stopped"
    (group,) = group_stacks({0: process("")})
    assert place(group) == ""


@pytest.mark.parametrize(
    ("stacks", "odd"),
    [
        ([IN_BARRIER, SLEEPING], (1,)),
        ([IN_BARRIER, IN_RECV, IN_BARRIER], (1,)),
        ([IN_BACKWARD, SLEEPING], (1,)),
        ([IN_BACKWARD, IN_BARRIER], (0,)),
        ([IN_RECV, IN_BACKWARD, IN_BARRIER], (1,)),
        ([IN_BARRIER, IN_BARRIER], (0, 1)),
    ],
)
def test_the_odd_one_is_the_one_that_waits_least(stacks, odd):
    groups = tuple(standing(each, instances=(i,)) for i, each in enumerate(stacks))
    hung = tuple(range(len(stacks)))
    assert odd_instances(hung, {}, groups) == odd


def test_of_those_that_wait_alike_the_odd_one_made_fewer_collectives_or_is_elsewhere():
    other = (*MAIN, "comm.bcast(1)")
    groups = (standing(other, instances=(2,)), standing(IN_BARRIER, instances=(0, 1, 3)))
    hung = (3, 2, 1, 0)
    assert odd_instances(hung, {}, groups) == (2,)
    assert odd_instances(hung, {0: (5, 0), 1: (4, 0), 2: (5, 0), 3: (5, 0)}, groups) == (1,)
    assert odd_instances((7,), {}, groups) == (7,)  # its wrapper has gone
