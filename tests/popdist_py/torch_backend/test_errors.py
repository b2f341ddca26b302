"""Mismatched calls and missing ranks raise an exception that names the rank."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

from popdist_py.torch_backend.membership.errors import MismatchError


def _rows():
    return [torch.zeros(2) for _ in range(dist.get_world_size())]


# Pairs of different calls, and the text about each call that the error must contain.
_DIFFERENT = {
    "shape": (
        lambda: dist.all_reduce(torch.zeros(3)),
        lambda: dist.all_reduce(torch.zeros(4)),
        ("all_reduce", "(3,)", "(4,)"),
    ),
    "large shape": (
        lambda: dist.all_reduce(torch.zeros(1 << 20)),
        lambda: dist.all_reduce(torch.zeros(1 << 19)),
        ("all_reduce", "(1048576,)", "(524288,)"),
    ),
    "dtype": (
        lambda: dist.all_reduce(torch.zeros(3)),
        lambda: dist.all_reduce(torch.zeros(3, dtype=torch.int64)),
        ("float32", "int64"),
    ),
    "operation": (
        lambda: dist.all_reduce(torch.zeros(3)),
        lambda: dist.all_reduce(torch.zeros(3), dist.ReduceOp.MAX),
        ("op=sum", "op=max"),
    ),
    "root": (
        lambda: dist.broadcast(torch.zeros(3), 0),
        lambda: dist.broadcast(torch.zeros(3), 1),
        ("broadcast", "root=0", "root=1"),
    ),
    "collective": (
        lambda: dist.all_reduce(torch.zeros(3)),
        lambda: dist.broadcast(torch.zeros(3), 0),
        ("all_reduce", "broadcast"),
    ),
    "barrier": (
        lambda: dist.barrier(),
        lambda: dist.all_gather(_rows(), torch.zeros(2)),
        ("barrier", "all_gather"),
    ),
    "root of a reduction": (
        lambda: dist.reduce(torch.zeros(3), 0),
        lambda: dist.reduce(torch.zeros(3), 1),
        ("0", "1"),
    ),
    "asynchronous": (
        lambda: dist.all_reduce(torch.zeros(3), async_op=True).wait(),
        lambda: dist.all_reduce(torch.zeros(4), async_op=True).wait(),
        ("(3,)", "(4,)"),
    ),
    "number of tensors": (
        lambda: dist.all_reduce_coalesced([torch.zeros(3), torch.zeros(3)]),
        lambda: dist.all_reduce_coalesced([torch.zeros(3)]),
        ("2 tensors", "(3,)"),
    ),
    "type in a list": (
        lambda: dist.all_gather(_rows(), torch.zeros(2)),
        lambda: dist.gather(torch.zeros(2), _rows(), 1),
        ("all_gather", "gather(root=1"),
    ),
    "scattering": (
        lambda: dist.scatter(torch.zeros(2), _rows(), 0),
        lambda: dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(4)),
        ("scatter", "reduce_scatter"),
    ),
}


def _splits(rank):
    own, other = (1, 3) if rank else (2, 2)
    with pytest.raises(MismatchError) as error:
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [own, other], [own, other])
    after = torch.ones(2)
    dist.all_reduce(after)
    return str(error.value), after.tolist()


def test_splits_that_do_not_fit_are_named():
    for text, after in values(run_ranks(2, _splits)):
        # The error of each rank names the first different block that the rank finds.
        assert "all_to_all(dtype=float32): " in text
        assert " bytes to rank " in text
        assert "instance" not in text
        assert after == [2.0, 2.0]


def _different(rank):
    found = {}
    for name, (first, second, _) in _DIFFERENT.items():
        try:
            (second if rank else first)()
        except MismatchError as error:
            found[name] = (str(error), isinstance(error, (RuntimeError, dist.DistBackendError)))
        after = torch.ones(2)
        dist.all_reduce(after)
        assert after.tolist() == [2.0, 2.0], name
    return found


def test_ranks_with_different_calls_get_one_error_and_go_on():
    first, second = values(run_ranks(2, _different))
    assert first == second
    assert list(first) == list(_DIFFERENT)
    for name, (text, is_torch_error) in first.items():
        assert is_torch_error
        for word in ("rank 0 called", "rank 1 called", *_DIFFERENT[name][2]):
            assert word in text, name
        assert "instance" not in text


def _different_in_subset(rank):
    group = dist.new_group([2, 1])
    if rank == 0:
        return ""
    with pytest.raises(MismatchError) as error:
        dist.all_reduce(torch.zeros(rank), group=group)
    return str(error.value)


def test_errors_name_the_rank_of_the_whole_job_in_a_subset():
    for text in values(run_ranks(3, _different_in_subset))[1:]:
        assert "rank 1 (rank 0 of the group) called" in text
        assert "rank 2 (rank 1 of the group) called" in text


_CALLS = {
    "all_reduce": lambda: dist.all_reduce(torch.zeros(3)),
    "large all_reduce": lambda: dist.all_reduce(torch.zeros(1 << 20)),
    "asynchronous": lambda: dist.all_reduce(torch.zeros(3), async_op=True).wait(),
    "broadcast": lambda: dist.broadcast(torch.zeros(3), 1),
    "all_gather_object": lambda: dist.all_gather_object([None] * dist.get_world_size(), "value"),
    "barrier": lambda: dist.barrier(),
    "monitored_barrier": lambda: dist.monitored_barrier(),
}


def _killed(rank, call, first_call, how):
    if not first_call:
        dist.barrier()
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)
    with pytest.raises(dist.DistBackendError) as error:
        _CALLS[call]()
    return str(error.value)


def _assert_lost(outcomes, *words):
    for outcome in outcomes[:1] + outcomes[2:]:
        (text,) = values([outcome])
        for word in words:
            assert word in text


@pytest.mark.parametrize("first_call", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_a_killed_rank_is_named(first_call):
    outcomes = run_ranks(2, _killed, "all_reduce", first_call, "kill")
    _assert_lost(outcomes, "rank 1 (process", "ended")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("call", "first_call", "how"),
    [
        *((call, False, "kill") for call in _CALLS),
        # The ranks meet in the first call of a group, except in a monitored barrier.
        *((call, True, "kill") for call in ("all_reduce", "asynchronous", "monitored_barrier")),
        *(("all_reduce", first_call, "exit") for first_call in (True, False)),
    ],
)
def test_an_ended_rank_is_named_in_every_call(call, first_call, how):
    outcomes = run_ranks(3, _killed, call, first_call, how)
    _assert_lost(outcomes, "ank 1 (process", "ended")


def _waits_for_one_that_sleeps(rank, first_call):
    if not first_call:
        dist.barrier()
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["over"])
        return None
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.all_reduce(torch.zeros(3))
    seconds = time.monotonic() - began
    dist.distributed_c10d._get_default_store().set("over", "1")
    return str(error.value), seconds


@pytest.mark.parametrize("first_call", [pytest.param(True, marks=pytest.mark.sweep), False])
def test_a_rank_that_does_not_come_is_named_after_the_time_out(first_call):
    outcomes = run_ranks(2, _waits_for_one_that_sleeps, first_call, timeout=1.5)
    text, seconds = values(outcomes)[0]
    assert "rank 1" in text
    assert "did not make this call within 1.5 s (the timeout of the group)" in text
    assert seconds > 1.4


def _time_outs(rank):
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
    if rank == 1:
        store.wait(["over"])
        return None
    options = dist.AllreduceOptions()
    options.asyncOp = False
    options.timeout = timedelta(seconds=0.5)
    with pytest.raises(RuntimeError) as of_call:
        dist.group.WORLD.allreduce([torch.zeros(1)], options)
    store.set("over", "1")
    return str(of_call.value)


def test_a_call_may_have_a_time_out_of_its_own():
    assert "within 0.5 s" in values(run_ranks(2, _time_outs))[0]


def _set_time_out(rank):
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.7))
    if rank == 1:
        store.wait(["over"])
        return None
    with pytest.raises(RuntimeError) as of_group:
        dist.barrier()
    store.set("over", "1")
    return str(of_group.value)


def test_the_time_out_of_a_group_can_be_set():
    assert "within 0.7 s" in values(run_ranks(2, _set_time_out))[0]


def _monitored(rank, wait_all_ranks):
    dist.monitored_barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank in (1, 3):
        store.wait(["over"])
        return None
    with pytest.raises(RuntimeError) as error:
        dist.monitored_barrier(timeout=timedelta(seconds=1), wait_all_ranks=wait_all_ranks)
    if store.add("failed", 1) == 2:
        store.set("over", "1")
    return str(error.value)


@pytest.mark.parametrize("wait_all_ranks", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_monitored_barrier_names_the_ranks_that_do_not_come(wait_all_ranks):
    first, _, third, _ = values(run_ranks(4, _monitored, wait_all_ranks))
    named = "Ranks 1, 3" if wait_all_ranks else "Rank 1"
    assert first == f"{named} failed to pass monitoredBarrier in 1000 ms"
    # gloo's words for this error, and the ranks that the error names.
    reached = "Rank 2 successfully reached monitoredBarrier, but received errors while waiting "
    assert third == f"{reached}for send/recv from rank 0: {first}"


def _stopped_store(rank, folder):
    ports = dist.FileStore(f"{folder}/ports", 2)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        ports.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(ports.get("port")), 2, is_master=False)
    dist.init_process_group("popdist", store=store, rank=rank, world_size=2)
    if rank == 0:
        store.wait(["there"])
        os._exit(3)
    store.set("there", "1")
    with pytest.raises(RuntimeError) as error:
        dist.barrier()
    return str(error.value)


def test_a_store_that_ended_with_its_rank_is_said(tmp_path):
    outcomes = run_ranks(2, _stopped_store, str(tmp_path), backend=None)
    text = values(outcomes[1:])[0]
    assert "rank 1 cannot reach the key-value store" in text
    assert "rank 0 or the launcher" in text
