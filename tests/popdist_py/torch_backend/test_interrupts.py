"""Programs that are interrupted within a call end, and do not harm other ranks."""

import signal
import threading

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

from popdist_py.torch_backend.membership.errors import GroupClosedError, RankLostError
from popdist_py.torch_backend.work import CallQueue, NestedCallError, PopdistWork


def _interrupt_soon(handler):
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)


def _ctrl_c(*_):
    raise KeyboardInterrupt


def _reduce_thrice(group, size):
    for _ in range(3):
        dist.all_reduce(torch.ones(size), group=group)


def _interrupted(rank, size):
    group = dist.new_group()
    dist.all_reduce(torch.ones(size), group=group)
    if rank == 0:
        _interrupt_soon(_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(torch.ones(size), group=group)
        with pytest.raises(
            GroupClosedError, match="KeyboardInterrupt interrupted a call of this"
        ) as error:
            dist.all_reduce(torch.ones(size), group=group)
    dist.barrier()
    if rank == 1:
        with pytest.raises(RankLostError, match=r"rank 0 \(process \d+\) has left") as error:
            _reduce_thrice(group, size)  # reaches the first barrier of the call
    dist.barrier()
    return str(error.value)


@pytest.mark.parametrize("size", [10, pytest.param(1_000_000, marks=pytest.mark.sweep)])
def test_the_group_of_an_interrupted_call_is_left(size):
    assert len(values(run_ranks(2, _interrupted, size))) == 2


def _left_by_a_signal_handler(rank):
    group = dist.new_group()
    dist.barrier(group)
    if rank == 0:
        _interrupt_soon(lambda *_: group.shutdown())
        with pytest.raises(GroupClosedError, match="was destroyed"):
            dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    return True


def test_a_signal_handler_may_leave_the_group_of_the_call_it_interrupts():
    assert values(run_ranks(2, _left_by_a_signal_handler)) == [True, True]


def test_a_call_within_a_call_is_refused():
    queue = CallQueue()
    inner = PopdistWork("broadcast", lambda: None)
    with pytest.raises(NestedCallError, match="broadcast was called by a signal handler"):
        queue.run(PopdistWork("all_reduce", lambda: queue.run(inner)))
    queue.run(inner)
    queue.close()


def test_an_interrupt_while_a_call_completes_leaves_the_queue_usable(monkeypatch):
    """Ctrl-C may come while a call ends, or right after it has returned."""
    begun, queue = [], CallQueue()

    def interrupted_once(name):
        method = getattr(PopdistWork, name)

        def interrupted(work):
            if name in begun:
                return method(work)
            begun.append(name)
            if name == "run":
                method(work)
            raise KeyboardInterrupt

        monkeypatch.setattr(PopdistWork, name, interrupted)

    for name in ("_end", "run"):
        interrupted_once(name)
        work = PopdistWork("all_reduce", lambda: None)
        with pytest.raises(KeyboardInterrupt):
            queue.run(work)
        assert work.is_completed()
        assert not queue.is_inside
        queue.run(PopdistWork("broadcast", lambda: None))
    # This thread runs an asynchronous call because it waits for it. That completes the future.
    begun.remove("run")
    queue._thread = threading.current_thread()  # so that no other thread runs it
    queue.submit(asynchronous := PopdistWork("all_gather", lambda: None))
    future = asynchronous.get_future()
    with pytest.raises(KeyboardInterrupt):
        asynchronous.wait()
    assert future.done()
    queue.close()


def test_an_interrupt_is_that_of_the_thread_which_makes_the_call():
    queue = CallQueue()
    begun, release = threading.Event(), threading.Event()

    def block():
        begun.set()
        assert release.wait(20)

    queue.submit(PopdistWork("blocking", block))
    assert begun.wait(20)
    queue._turn.release()  # as if the thread had not begun yet
    first, second = PopdistWork("first", _ctrl_c), PopdistWork("second", lambda: None)
    queue.submit(first)
    queue.submit(second)
    with pytest.raises(KeyboardInterrupt):
        second.wait()
    assert first.is_completed()
    second.wait()
    queue._turn.acquire()
    release.set()
    queue.close()
