"""The works of asynchronous calls, with their waits, futures, errors, order and threads."""

import os
import re
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

from popdist_py.errors import InstanceLostError
from popdist_py.torch_backend.work import CallQueue, PopdistWork, WaitTimeoutError

LIMIT = 20.0


def _until(is_true):
    end = time.monotonic() + LIMIT
    while not is_true():
        assert time.monotonic() < end, "did not become true"
        time.sleep(0.001)


@pytest.fixture
def queue():
    queue = CallQueue(lambda: "process group 7")
    yield queue
    queue.close()


def _failing(error):
    def fail():
        raise error

    return PopdistWork("all_reduce", fail)


def _blocked(queue):
    """Keep the thread of a queue busy; return the work, and an event that ends it."""
    begun, release = threading.Event(), threading.Event()

    def block():
        begun.set()
        assert release.wait(LIMIT)

    work = PopdistWork("blocking", block)
    queue.submit(work)
    assert begun.wait(LIMIT)
    return work, release


def test_a_call_that_nobody_waits_for_runs(queue):
    done = threading.Event()
    queue.submit(PopdistWork("all_reduce", done.set))
    assert done.wait(LIMIT)


def test_calls_run_in_order_whoever_makes_them(queue):
    order = []
    works = [PopdistWork("call", lambda i=i: order.append(i)) for i in range(200)]
    for i, work in enumerate(works):
        if i % 7 == 3:
            queue.run(work)
        else:
            queue.submit(work)
        if i % 5 == 2:
            works[i - 1].wait()
    works[-1].wait()
    assert order == list(range(200))


def test_who_waits_makes_a_call_that_nobody_has_begun(queue):
    _, release = _blocked(queue)
    queue._turn.release()  # as if the thread had not begun yet
    threads = []
    work = PopdistWork("all_reduce", lambda: threads.append(threading.get_ident()))
    queue.submit(work)
    work.wait()
    assert threads == [threading.get_ident()]
    queue._turn.acquire()
    release.set()


def test_a_wait_with_a_time_out_names_call_and_group(queue):
    work, release = _blocked(queue)
    with pytest.raises(
        WaitTimeoutError, match=r"blocking of process group 7 was not complete 0.01 s"
    ):
        work.wait(timedelta(milliseconds=10))
    assert not work.is_completed()
    assert not work.is_success()
    release.set()
    assert work.wait(timedelta(seconds=LIMIT))
    assert work.is_success()


def test_an_error_is_told_by_wait_and_future(queue):
    work = _failing(ValueError("of the call"))
    queue.submit(work)
    future = work.get_future()
    told = []
    future.add_done_callback(lambda future: told.append(future))
    with pytest.raises(ValueError, match="of the call"):
        work.wait()
    with pytest.raises(RuntimeError, match="of the call"):
        future.wait()
    with pytest.raises(RuntimeError, match="of the call"):
        work.get_future().wait()
    assert isinstance(work.exception(), ValueError)
    assert work.is_completed()
    assert not work.is_success()
    _until(lambda: told)


def test_a_future_holds_the_tensors_and_calls_back(queue):
    tensor = torch.ones(3)
    _, release = _blocked(queue)
    later = PopdistWork("all_reduce", lambda: tensor.mul_(2), [tensor])
    queue.submit(later)
    doubled = later.get_future().then(lambda future: future.value()[0] * 2)
    release.set()
    assert doubled.wait().tolist() == [4.0] * 3
    assert later.result()[0] is tensor
    assert later.get_future().wait()[0] is tensor


def test_a_callback_may_wait_for_a_later_call_of_the_group(queue):
    _, release = _blocked(queue)
    first, second = PopdistWork("first", lambda: None), PopdistWork("second", lambda: None)
    queue.submit(first)
    queue.submit(second)
    future = first.get_future().then(lambda _: second.wait())
    release.set()
    assert future.wait() is True


def test_after_a_lost_rank_calls_fail_at_once_with_its_error(queue):
    ran = []
    lost = _failing(InstanceLostError("instance 1 ended"))
    queue.submit(lost)
    later = PopdistWork("broadcast", lambda: ran.append(1))
    queue.submit(later)
    for work in (lost, later):
        with pytest.raises(InstanceLostError, match="instance 1 ended"):
            work.wait()
    with pytest.raises(InstanceLostError, match="instance 1 ended"):
        queue.run(PopdistWork("broadcast", lambda: ran.append(1)))
    assert not ran


def test_closing_runs_what_was_submitted_and_ends_the_thread():
    queue = CallQueue()
    _, release = _blocked(queue)
    ran = []
    for i in range(20):
        queue.submit(PopdistWork("call", lambda i=i: ran.append(i)))
    thread = queue._thread
    closer = threading.Thread(target=queue.close)
    closer.start()
    closer.join(0.1)  # close() waits, or has given up
    release.set()
    closer.join(LIMIT)
    queue.close()
    assert len(ran) == 20
    assert not thread.is_alive()


def test_closing_while_the_thread_starts_waits_for_it(monkeypatch):
    queue, ran, closed = CallQueue(), [], []
    start = threading.Thread.start

    def close():
        queue.close()
        closed.append(list(ran))

    closer = threading.Thread(target=close)

    def start_while_another_closes(thread):
        if thread.name == "popdist-process-group":
            start(closer)
            closer.join(0.1)  # close() cannot end before the thread has started
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_while_another_closes)
    queue.submit(work := PopdistWork("call", lambda: ran.append(1)))
    work.wait()
    closer.join(LIMIT)
    assert len(closed) == 1


def _many_at_a_time(rank):
    tensors = [torch.full((100 * i + 1,), float(rank + i)) for i in range(60)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.all_reduce(last := torch.ones(1))
    works[30].wait()
    for work in works[::7]:
        work.wait()
    futures = torch.futures.collect_all([work.get_future() for work in works])
    futures.wait()
    if dist.get_backend() == "gloo":  # gloo completes futures before their calls have run
        for work in works:
            work.wait()
    assert all(work.is_completed() and work.is_success() for work in works)
    return [tensor[-1].item() for tensor in tensors], last.item()


@pytest.mark.parametrize("backend", ["gloo", "popdist"])
def test_many_calls_in_flight_have_their_results(backend):
    expected = [float(2 * i + 1) for i in range(60)], 2.0
    assert values(run_ranks(2, _many_at_a_time, backend=backend)) == [expected] * 2


def _wait_in_the_thread(rank):
    dist.all_reduce(torch.zeros(1))
    tensor = torch.zeros(4)
    if rank == 1:
        time.sleep(2.0)  # the other rank waits this long
        dist.all_reduce(tensor)
        return 0.0
    work = dist.all_reduce(tensor, async_op=True)
    began, cpu = time.monotonic(), time.process_time()
    while not work.is_completed():
        time.sleep(0.1)
    return (time.process_time() - cpu) / (time.monotonic() - began)


@pytest.mark.sweep
def test_the_thread_takes_no_core_while_it_waits():
    share, _ = values(run_ranks(2, _wait_in_the_thread))
    assert share < 0.01


def _die_within_backward(rank, how):
    """Run a step on both ranks. Then the last rank leaves or makes another call."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(torch.nn.Linear(300, 300))
    model(torch.ones(2, 300)).sum().backward()
    loss = model(torch.ones(2, 300)).sum()
    if rank == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.zeros(5))
    loss.backward()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param("killed", "rank 1", marks=pytest.mark.sweep),
        ("differs", r"all_reduce\(op=sum, shape=\(5,\)"),
    ],
)
def test_an_error_within_backward_is_an_exception_of_the_program(how, words):
    first, second = run_ranks(2, _die_within_backward, how, timeout=2.0, fresh=how == "killed")
    assert "RuntimeError" in first.kinds
    assert "all_reduce" in first.error
    assert re.search(words, first.error)
    assert first.exit_code == 0
    if how == "differs":
        assert "all_reduce" in second.error
