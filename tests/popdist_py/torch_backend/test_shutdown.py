"""Groups that are destroyed, aborted or left open, and the end of programs with such groups."""

import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

from popdist_py.torch_backend.membership.errors import GroupClosedError


def _destroyed_with_pending_work(rank):
    tensors = [torch.ones(200_000) for _ in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.destroy_process_group()
    names = [thread.name for thread in threading.enumerate()]
    return [work.is_completed() for work in works], [t[0].item() for t in tensors], names


def test_destroying_a_group_completes_its_calls():
    for completed, sums, threads in values(run_ranks(2, _destroyed_with_pending_work)):
        assert completed == [True] * 5
        assert sums == [2.0] * 5
        assert threads == ["MainThread"]


def _shut_down_twice(rank):
    group = dist.new_group([0, 1])
    dist.barrier(group)
    group.shutdown()
    group.shutdown()
    with pytest.raises(GroupClosedError) as error:
        dist.all_reduce(torch.ones(1), group=group)
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
    return str(error.value)


def test_a_destroyed_group_says_so():
    for text in values(run_ranks(2, _shut_down_twice)):
        assert text.startswith("this process group was destroyed: make a new group")


def _aborted(rank):
    group = dist.new_group([0, 1])
    dist.barrier(group)
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        group.abort()
        with pytest.raises(GroupClosedError, match="was aborted"):
            work.wait()
    else:
        # The first call may still match the call of rank 0.
        works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(2)]
        with pytest.raises(RuntimeError, match=r"rank 0 \(process \d+\) has left the group"):
            works[1].wait()
    dist.barrier()
    return True


def test_aborting_a_group_ends_its_calls():
    assert values(run_ranks(2, _aborted)) == [True, True]


def _aborted_in_first_call(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    if rank == 0:
        work = dist.barrier(group, async_op=True)
        group.abort()
        with pytest.raises(GroupClosedError, match="was aborted"):
            work.wait()
    dist.barrier()
    return True


def test_a_first_call_can_be_aborted():
    assert values(run_ranks(2, _aborted_in_first_call)) == [True, True]


def _forked(rank):
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, async_op=True).wait()
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            dist.all_reduce(tensor)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        dist.destroy_process_group()
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(read, 1000).decode()
    dist.all_reduce(tensor)
    return tensor.item(), text


def test_a_forked_process_does_not_disturb_the_group():
    for value, text in values(run_ranks(2, _forked)):
        assert value == 8.0
        assert "has to make its own group" in text


# The ranks are two forked processes, because importing torch takes most of the time. Their parent
# prints their exit codes.
_PROGRAM = """
import os, sys, torch, torch.distributed as dist, popdist_py.torch_backend.process_group
path, how, children = sys.argv[1], sys.argv[2], []
for rank in range(2):
    children.append(os.fork())
    if children[-1] == 0:
        break
else:
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(*codes, flush=True)
    os._exit(0)
dist.init_process_group("popdist", init_method=f"file://{path}", rank=rank, world_size=2)
dist.all_reduce(torch.ones(1))
dist.all_reduce(torch.ones(1), async_op=True).wait()
if how == "pending" and rank == 0:
    works = [dist.all_reduce(torch.ones(1), async_op=True) for _ in range(3)]
if how == "raises":
    raise ValueError("of the program")
if how == "exits":
    sys.exit(5)
"""


def _ends(program, *args):
    """Return the exit codes and the standard error of both ranks of a program."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), *args], stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=60)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, texts, strict=True)]


_OTHER_ENDS = (("pending", 0), ("raises", 1), ("exits", 5))


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("returns", 0),
        *(pytest.param(*each, marks=pytest.mark.sweep) for each in _OTHER_ENDS),
    ],
)
def test_a_program_may_end_without_destroying_its_group(tmp_path, how, code):
    words = [sys.executable, "-c", _PROGRAM, str(tmp_path / "store"), how]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"{code} {code}\n", done.stderr
    if how == "raises":
        assert done.stderr.count(" ValueError: of the program\n") == 2
    else:
        assert done.stderr == ""


_TRAINING = """
import os, sys, torch, torch.distributed as dist, popdist_py.torch_backend
from torch.nn.parallel import DistributedDataParallel
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("popdist", init_method=f"file://{path}", rank=rank, world_size=2)
layers = [torch.nn.Linear(300, 300) for _ in range(4)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.1)
for step in range(4):
    if step == 2 and rank == 1:
        os.kill(os.getpid(), 9)
    model(torch.ones(2, 300)).sum().backward()
"""


@pytest.mark.sweep
def test_a_training_whose_other_rank_is_killed_ends_with_an_exception(tmp_path):
    (code, text), (killed, _) = _ends(_TRAINING, str(tmp_path / "store"))
    assert killed == -9
    assert code == 1, text
    assert "rank 1 (process" in text
    assert "terminate called" not in text
