"""Groups of equal stacks, and the instances that the others wait for."""

from __future__ import annotations

import pytest

from poprun_py.running.supervise.launch_result import StackGroup
from poprun_py.running.supervise.stacks import (
    _waits,
    blocking_by_stacks,
    blocking_by_steps,
    group_stacks,
    groups_text,
    is_ending,
    stack_place,
)

WAITING = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/threading.py", line 1 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/site/popdist_py/public_collectives/calls.py", line 99999 in barrier
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
        ("from mpi4py import MPI", True),
        ("import mpi4py.MPI as mpi", True),
        ("import mpi4py", False),
        ("comm.recv(source=0)", True),
        ("dist.send(tensor, 1)", True),
        ("data = sock.recv(65536)", False),
        ("self.socket.recv_into(view)", False),
        ("s.sendall(data)", False),
        ("reply = self._conn.recv()", False),
        ("client.send(request)", False),
    ],
)
def test_the_source_line_tells_whether_an_instance_waits_for_others(tmp_path, line, waits):
    source = tmp_path / "train.py"
    source.write_text(line + "\n")
    text = f'Thread 0x01 (most recent call first):\n  File "{source}", line 1 in <module>\n'
    assert group_stacks({0: process(text)})[0].waits is waits


def stack(*frames):
    """Return a stack of (file, function), the innermost first."""
    lines = [f'  File "{file}", line 1 in {function}' for file, function in frames]
    return "\n".join(["Thread 0x01 (most recent call first):", *lines])


IMPORTING = [("<frozen importlib._bootstrap>", name) for name in (
    "_call_with_frames_removed", "exec_module", "_load_unlocked", "_find_and_load_unlocked",
    "_find_and_load", "_call_with_frames_removed", "_handle_fromlist",
)]  # fmt: skip
TRAIN = ("/home/me/train.py", "<module>")


@pytest.mark.parametrize(
    ("frames", "waits"),
    [
        # In MPI_Init, which the import of mpi4py.MPI calls, with and without the job's finder.
        ([*IMPORTING[:2], ("/s/popdist_py/start_hook/popdist_mpi_sockets.py", "_started"),
          ("/s/popdist_py/start_hook/popdist_mpi_sockets.py", "execute_and_move"),
          ("/s/popdist_py/start_hook/popdist_import_hook.py", "execute_and_run"), *IMPORTING[2:],
          TRAIN], True),
        ([*IMPORTING, ("/s/popdist_py/collectives/between_hosts/mpi_start.py", "start_mpi"),
          ("/s/popdist_py/context.py", "_join"), TRAIN], True),
        ([*IMPORTING, ("/home/me/data.py", "<module>"), TRAIN], False),
    ],
)  # fmt: skip
def test_the_frames_of_an_import_do_not_hide_a_waiting_call(frames, waits):
    assert group_stacks({0: process(stack(*frames))})[0].waits is waits


def test_a_call_in_pythons_own_modules_does_not_wait_for_instances(tmp_path):
    folder = tmp_path / "lib" / "python3.11"
    folder.mkdir(parents=True)
    (folder / "socket.py").write_text("return self._sock.recv_into(b)\n")
    text = stack((f"{folder}/socket.py", "readinto"), TRAIN)
    assert not group_stacks({0: process(text)})[0].waits


@pytest.mark.parametrize(
    ("frames", "ends"),
    [
        ([("/v/lib/python3.11/threading.py", "_shutdown")], True),
        ([("/home/me/train.py", "upload")], True),  # called by atexit
        ([("/home/me/train.py", "main"), TRAIN], False),
        ([("/home/me/train.py", "main"), ("<frozen runpy>", "_run_module_as_main")], False),
        ([], False),
    ],
)
def test_the_outermost_frame_shows_that_a_program_is_ending(frames, ends):
    (group,) = group_stacks({0: process(stack(*frames))})
    assert is_ending(group) is ends


def test_a_main_thread_without_python_is_ending():
    (group,) = group_stacks({0: process(stack() + "\n  <no Python frame>")})
    assert is_ending(group)


def test_a_cut_stack_does_not_count_as_ending():
    (group,) = group_stacks({0: process(stack(("/home/me/deep.py", "call")) + "\n  ...")})
    assert not is_ending(group)


def test_equal_stacks_are_one_group_and_the_smallest_group_comes_first():
    other = WAITING.replace("0x00007f0000000002", "0x00007f00000000aa")
    groups = group_stacks({0: process(WAITING), 1: process(LOADING), 2: process(other)})
    assert [(g.instances, g.waits) for g in groups] == [((1,), False), ((0, 2), True)]
    text = groups_text(groups)
    assert text.startswith("instance 1 (1):\n  thread (most recent call first):\n")
    assert "instances 0,2 (2), waiting for other instances:" in text
    assert "0x" not in text


def test_the_others_wait_for_an_instance_that_does_not_wait():
    groups = group_stacks({0: process(WAITING), 1: process(LOADING)})
    assert blocking_by_steps((0, 1), {0: (7, 0), 1: (7, 0)}, groups) == (1,)


def test_the_others_wait_for_an_instance_whose_last_step_was_later():
    groups = group_stacks({0: process(WAITING), 1: process(LOADING), 2: process(WAITING)})
    assert blocking_by_steps((0,), {0: (7, 0), 1: (7, 0), 2: (7, 0)}, groups) == (1,)
    assert blocking_by_steps((1,), {0: (7, 0), 1: (7, 0), 2: (7, 0)}, groups) == (1,)


def test_the_others_wait_for_an_instance_without_a_stack():
    groups = group_stacks({0: process(WAITING), 1: process("", state="T")})
    assert blocking_by_steps((0, 1), {0: (7, 0), 1: (7, 0)}, groups) == (1,)
    assert "the process is stopped" in groups_text(groups)


def test_if_all_wait_the_slowest_instance_blocks_the_others():
    groups = group_stacks({0: process(WAITING), 1: process(WAITING)})
    assert blocking_by_steps((0, 1), {0: (8, 0), 1: (7, 0)}, groups) == (1,)
    assert blocking_by_steps((0, 1), {0: (8, 1), 1: (8, 2)}, groups) == (0,)


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
def test_the_place_of_a_stack_is_the_users_own_line(frames, told):
    assert stack_place(standing(*frames)) == told


def test_place_of_a_process_without_a_stack():
    (group,) = group_stacks({0: process("", state="T")})
    assert stack_place(group) == "its process is stopped"
    (group,) = group_stacks({0: process("")})
    assert stack_place(group) == ""


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
def test_without_steps_the_others_wait_for_the_instance_that_waits_least(stacks, odd):
    groups = tuple(standing(each, instances=(i,)) for i, each in enumerate(stacks))
    hung = tuple(range(len(stacks)))
    assert blocking_by_stacks(hung, {}, groups) == odd


def test_of_equally_waiting_instances_the_number_of_collectives_and_the_rarest_stack_decide():
    other = (*MAIN, "comm.bcast(1)")
    groups = (standing(other, instances=(2,)), standing(IN_BARRIER, instances=(0, 1, 3)))
    hung = (3, 2, 1, 0)
    assert blocking_by_stacks(hung, {}, groups) == (2,)
    assert blocking_by_stacks(hung, {0: (5, 0), 1: (4, 0), 2: (5, 0), 3: (5, 0)}, groups) == (1,)
    assert blocking_by_stacks((7,), {}, groups) == (7,)  # its wrapper has gone
