"""Groups over several hosts, simulated by ranks that do not share memory."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from functools import wraps
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.processes import connections
from support.ranks import run_ranks, values

from popdist_py.collectives.communicators import join
from popdist_py.torch_backend.membership.errors import RankLostError

# The host of every rank.
LAYOUTS = {
    "two of one": (0, 1),
    "two of two": (0, 0, 1, 1),
    "two, uneven": (0, 1, 1),
    "two, alternating": (0, 1, 0),
    "three": (0, 1, 2),
}


def _on_hosts(function):
    """Call a function while ranks of other simulated hosts do not share memory with it."""

    @wraps(function)
    def call(rank, hosts, *args):
        with mock.patch.object(join, "place_of_this_process", return_value=f"host {hosts[rank]}"):
            return function(rank, hosts, *args)

    return call


def _numbers(rank, size=1000, dtype=torch.float32):
    return ((torch.arange(size) + rank) % 3 + 1).to(dtype)


def _check_reductions(me, count):
    for size in (1, 1000, 300_001):
        everyone = torch.stack([_numbers(rank, size) for rank in range(count)])
        for op, expected in (
            (dist.ReduceOp.SUM, everyone.sum(0)),
            (dist.ReduceOp.MAX, everyone.amax(0)),
            (dist.ReduceOp.PRODUCT, everyone.prod(0)),
        ):
            tensor = everyone[me].clone()
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, expected), (size, op)
        for root in range(count):
            tensor = everyone[me].clone()
            dist.reduce(tensor, root)
            assert me != root or torch.equal(tensor, everyone.sum(0))
    rows = torch.stack([_numbers(me + column, 50) for column in range(count)])
    block = torch.empty(50)
    dist.reduce_scatter_tensor(block, rows.reshape(-1))
    assert torch.equal(block, sum(_numbers(rank + me, 50) for rank in range(count)))


def _check_moves(me, count):
    for size in (0, 1, 1000, 700_001):
        for dtype in (torch.float32, torch.bfloat16, torch.uint8):
            everyone = [_numbers(rank, size, dtype) for rank in range(count)]
            gathered = [torch.empty(size, dtype=dtype) for _ in range(count)]
            dist.all_gather(gathered, everyone[me])
            assert all(map(torch.equal, gathered, everyone)), (size, dtype)
        for root in range(count):
            tensor = _numbers(me, size)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, _numbers(root, size)), (size, root)
            gathered = [torch.empty(size) for _ in range(count)] if me == root else None
            dist.gather(_numbers(me, size), gathered, root)
            assert me != root or all(
                torch.equal(row, _numbers(rank, size)) for rank, row in enumerate(gathered)
            )


def _check_scatters(me, count):
    for root in range(count):
        tensor = torch.empty(100)
        rows = [_numbers(rank + root, 100) for rank in range(count)]
        dist.scatter(tensor, rows if me == root else None, root)
        assert torch.equal(tensor, rows[me])
    given = [_numbers(me * count + rank, 1 + rank) for rank in range(count)]
    received = [torch.empty(1 + me) for _ in range(count)]
    dist.all_to_all(received, given)
    for rank, tensor in enumerate(received):
        assert torch.equal(tensor, _numbers(rank * count + me, 1 + me))


def _check_sparse(me, count):
    rows = torch.arange(me + 1)
    tensor = torch.sparse_coo_tensor(rows[None], torch.ones(me + 1, 3), (count, 3))
    dist.all_reduce(tensor)
    expected = torch.arange(count, 0, -1).float()[:, None].expand(count, 3)
    assert torch.equal(tensor.to_dense(), expected)


def _check_objects(me, count):
    everyone = [None] * count
    dist.all_gather_object(everyone, {"rank": me, "text": "x" * 100_000 * me})
    assert [len(each["text"]) for each in everyone] == [100_000 * rank for rank in range(count)]
    for root in range(count):
        objects = [("from", root)] if me == root else [None]
        dist.broadcast_object_list(objects, root)
        assert objects == [("from", root)]
        gathered = [None] * count if me == root else None
        dist.gather_object(["y" * me], gathered, root)
        assert me != root or gathered == [["y" * rank] for rank in range(count)]
    dist.barrier()


def _check_equal_bits(me, count):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for size in (100, 300_001):
            tensor = torch.randn(size, generator=torch.Generator().manual_seed(me)).to(dtype)
            dist.all_reduce(tensor)
            gathered = [torch.empty_like(tensor) for _ in range(count)]
            dist.all_gather(gathered, tensor)
            assert all(torch.equal(tensor, other) for other in gathered), (dtype, size)


@_on_hosts
def _check_all(rank, hosts):
    count = dist.get_world_size()
    for check in (
        _check_reductions,
        _check_moves,
        _check_scatters,
        _check_sparse,
        _check_objects,
        _check_equal_bits,
    ):
        check(rank, count)
    return dist.group.WORLD._membership._communicator.hosts


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=[pytest.mark.sweep] * (each != "two of two")) for each in LAYOUTS],
)
def test_every_collective(layout):
    hosts = LAYOUTS[layout]
    expected = sorted({tuple(r for r, h in enumerate(hosts) if h == host) for host in hosts})
    for found in values(run_ranks(len(hosts), _check_all, hosts)):
        assert list(found) == expected


def _normal(rank, size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype)


@_on_hosts
def _reduce_in_tree_order(rank, hosts):
    with mock.patch.dict(os.environ, POPDIST_DETERMINISTIC="1"):
        group = dist.new_group()
    count, found = len(hosts), []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int32):
        for size in (0, 1, 999, 300_001):
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT)[: 2 - dtype.is_complex]:
                tensor = _normal(rank, size, dtype)
                dist.all_reduce(tensor, op, group=group)
                found.append(tensor)
            given = _normal(rank, size, dtype)
            tensor = given.clone()
            dist.reduce(tensor, count - 1, group=group)
            total = tensor.clone()
            dist.broadcast(total, count - 1, group=group)
            assert rank == count - 1 or torch.equal(tensor, given)
            block = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(block, _normal(rank, size * count, dtype), group=group)
            blocks = torch.empty(size * count, dtype=dtype)
            dist.all_gather_into_tensor(blocks, block, group=group)
            found += [total, blocks]
    tensor = _normal(rank, 999, torch.float32)
    dist.all_reduce(tensor, dist.ReduceOp.AVG, group=group)
    return [each.to(torch.complex128).numpy().tobytes() for each in (*found, tensor)]


def test_deterministic_reductions_have_the_same_bits_on_any_hosts():
    expected = None
    for hosts in ((0, 0, 0, 0, 0), (0, 0, 1, 1, 2), (0, 1, 0, 1, 0), (0, 1, 2, 3, 4)):
        for found in values(run_ranks(len(hosts), _reduce_in_tree_order, hosts)):
            expected = expected or found
            assert found == expected, hosts
    parts = [_normal(rank, 999, torch.float32) for rank in range(5)]
    total = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    assert expected[-1] == (total / 5).to(torch.complex128).numpy().tobytes()


@_on_hosts
def _use_subsets(rank, hosts):
    first, second = dist.new_group([0, 2]), dist.new_group([1, 2, 3])
    found = []
    for _ in range(20):
        works, tensors = [], []
        for group in (first, second, dist.group.WORLD):
            if rank in dist.get_process_group_ranks(group):
                tensors.append(torch.full((3000,), float(rank)))
                works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
        for work in works:
            work.wait()
        found = [tensor[-1].item() for tensor in tensors]
    return found


def test_several_groups_at_once():
    found = values(run_ranks(4, _use_subsets, (0, 0, 1, 1)))
    assert found == [[2.0, 6.0], [6.0, 6.0], [2.0, 6.0, 6.0], [6.0, 6.0]]


@_on_hosts
def _differ(rank, hosts, size):
    dist.all_reduce(torch.zeros(4))
    dist.all_reduce(torch.zeros(size if rank == 2 else 4))


@pytest.mark.parametrize("hosts", [(0, 1, 1), (0, 1, 2)])
def test_a_mismatch_names_who_called_what(hosts):
    for outcome in run_ranks(3, _differ, hosts, 5):
        assert "CollectiveMismatchError" in outcome.kinds, outcome.error
        assert "ranks 0, 1 called all_reduce(op=sum, shape=(4,)" in outcome.error
        assert "rank 2 called all_reduce(op=sum, shape=(5,)" in outcome.error


@_on_hosts
def _be_lost(rank, hosts, lost):
    dist.barrier()
    if rank == lost:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.zeros(4))


@_on_hosts
def _send_blocks_that_do_not_fit(rank, hosts):
    received = [torch.full((4,), 255, dtype=torch.uint8) for _ in hosts]
    sizes = [1 if (rank, receiver) == (0, 2) else 4 for receiver in range(len(hosts))]
    try:
        dist.all_to_all(received, [torch.full((size,), rank, dtype=torch.uint8) for size in sizes])
    except RuntimeError as error:
        return str(error), [block.tolist() for block in received]
    return "", []


def test_a_block_that_does_not_fit_is_named_and_not_spread():
    *_, (text, received) = values(run_ranks(3, _send_blocks_that_do_not_fit, (0, 0, 1)))
    assert "rank 0 sends 1 byte to rank 2, which expects 4" in text
    assert received == [[255] * 4, [1] * 4, [2] * 4]


@pytest.mark.parametrize("lost", [2, pytest.param(3, marks=pytest.mark.sweep)])
def test_a_lost_rank_is_named_on_all_hosts(lost):
    outcomes = run_ranks(4, _be_lost, (0, 0, 1, 1), lost, timeout=2)
    for rank, outcome in enumerate(outcomes):
        if rank == lost:
            assert outcome.exit_code == -signal.SIGKILL
        else:
            assert "InstanceLostError" in outcome.kinds, (rank, outcome)
            assert f"rank {lost} " in outcome.error, (rank, outcome.error)


@_on_hosts
def _be_late(rank, hosts, late):
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    others = [f"done {other}" for other in range(len(hosts)) if other != late]
    if rank == late:
        store.wait(others)
        return
    try:
        dist.all_reduce(torch.zeros(4))
    finally:
        store.set(f"done {rank}", "")


@pytest.mark.sweep
def test_a_rank_that_does_not_come_is_named_in_time():
    *others, late = run_ranks(3, _be_late, (0, 0, 1), 2, timeout=1)
    assert not late.error or "DistStoreError" in late.kinds, late
    for outcome in others:
        assert "InstanceLostError" in outcome.kinds, outcome
        assert "rank 2 " in outcome.error


@_on_hosts
def _look_at_sockets(rank, hosts):
    import psutil

    before = connections()
    dist.all_reduce(torch.zeros(4))
    after = [each for each in connections() if each not in before]
    return len(after), sum(each.status == psutil.CONN_LISTEN for each in after)


def test_one_host_opens_no_socket_and_nobody_listens():
    assert values(run_ranks(2, _look_at_sockets, (0, 0))) == [(0, 0)] * 2
    assert values(run_ranks(2, _look_at_sockets, (0, 1))) == [(2, 0)] * 2


@_on_hosts
def _be_unreachable(rank, hosts):
    dist.all_reduce(torch.zeros(4))


def test_hosts_that_do_not_reach_one_another_say_what_to_do():
    environ = {"GLOO_SOCKET_IFNAME": "absent0"}
    for outcome in run_ranks(3, _be_unreachable, (0, 0, 1), environ=environ):
        assert "the hosts do not reach one another by TCP on absent0" in outcome.error
        assert "--host-subnet" in outcome.error


@_on_hosts
def _call_alone_after_a_shorter_timeout(rank, hosts):
    dist.all_reduce(torch.ones(1))  # joins with a time-out of minutes
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.2), dist.group.WORLD)
    if rank == len(hosts) - 1:
        dist.distributed_c10d._get_default_store().wait(["others were told"])
        return 0.0, ""
    began = time.monotonic()
    with pytest.raises(RankLostError) as error:
        dist.all_reduce(torch.ones(1))
    seconds = time.monotonic() - began
    store = dist.distributed_c10d._get_default_store()
    if store.add("told", 1) == len(hosts) - 1:
        store.set("others were told", b"")
    return seconds, str(error.value)


@pytest.mark.parametrize("layout", ["two of one", "two of two", "two, uneven"])
def test_a_timeout_that_is_set_later_holds_in_every_wait(layout):
    hosts = LAYOUTS[layout]
    found = values(run_ranks(len(hosts), _call_alone_after_a_shorter_timeout, hosts))
    for seconds, text in found[:-1]:
        assert seconds < 3, found
        assert f"rank {len(hosts) - 1}" in text, found
        assert "0.2 s" in text or "on another host was lost" in text, found
