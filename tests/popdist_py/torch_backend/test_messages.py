"""Messages between ranks arrive in order, and errors name the ranks and the operation."""

import json
import os
import socket
import threading
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ranks import run_ranks, values

from popdist_py.collectives.between_hosts import tcp_connect
from popdist_py.torch_backend.messages import endpoint

BACKENDS = pytest.mark.parametrize("backend", ["gloo", "popdist"])
LARGE = 100_000  # number of elements; too many bytes for an inline message


# --- Tests of both back ends ------------------------------------------------------------------


def _send_and_receive(rank):
    other, found = 1 - rank, []

    def exchange(tensor):
        received = torch.zeros_like(tensor)
        works = [dist.isend(tensor, other), dist.irecv(received, other)]
        for work in works:
            work.wait()
        assert all(work.is_completed() for work in works)
        return received

    for dtype in (torch.bool, torch.int8, torch.float16, torch.bfloat16, torch.complex64):
        tensor = (torch.arange(6) + rank).to(dtype)
        assert torch.equal(exchange(tensor), (torch.arange(6) + other).to(dtype))
    assert exchange(torch.empty(0)).numel() == 0
    # The tags come in another order than the sends.
    works = [dist.isend(torch.tensor([tag + 10 * rank]), other, tag=tag) for tag in (1, 2, 2)]
    for tag in (2, 2, 1):
        received = torch.zeros(1, dtype=torch.int64)
        assert dist.recv(received, other, tag=tag) == other
        found.append(received.item())
    for work in works:
        work.wait()
    objects = [None, None]
    if rank:
        dist.recv_object_list(objects, 0)
    else:
        dist.send_object_list([{"a": 1}, "b" * LARGE], 1)
    pair = [torch.full((4,), rank), torch.zeros(4, dtype=torch.int64)]
    batch = [dist.P2POp(dist.isend, pair[0], other), dist.P2POp(dist.irecv, pair[1], other)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    dist.all_reduce(pair[0])
    return found, [objects[0], len(objects[1] or "")], pair[0].tolist(), pair[1].tolist()


@BACKENDS
def test_tensors_and_objects_arrive(backend):
    zero, one = values(run_ranks(2, _send_and_receive, backend=backend))
    assert zero[0] == [12, 12, 11]
    assert one[0] == [2, 2, 1]
    assert one[1] == [{"a": 1}, LARGE]
    assert zero[2:] == ([1] * 4, [1] * 4)
    assert one[2:] == ([1] * 4, [0] * 4)


def _any_source(rank):
    group = dist.new_group([0, 2])
    sources = []
    if rank == 0:
        for _ in range(4):
            received = torch.zeros(LARGE if len(sources) > 1 else 2)
            source = dist.recv(received, tag=7 if len(sources) > 1 else 6)
            assert received[0].item() == source
            sources.append(source)
        received = torch.zeros(1)
        sources.append(dist.recv(received, group=group))
        dist.barrier()
        return sorted(sources[:2]), sorted(sources[2:4]), sources[4]
    dist.send(torch.full((2,), float(rank)), 0, tag=6)
    dist.send(torch.full((LARGE,), float(rank)), 0, tag=7)
    if rank == 2:
        dist.send(torch.ones(1), 0, group=group)
    dist.barrier()
    return None


@BACKENDS
def test_a_receive_from_any_source_tells_the_source(backend):
    assert values(run_ranks(3, _any_source, backend=backend))[0] == ([1, 2], [1, 2], 2)


def _follow_plan(rank, plan):
    """Start all sends and receives of a plan; return the received numbers, in order."""
    sends = [
        dist.isend(torch.full((size,), number), to, tag=tag)
        for number, (source, to, tag, size) in enumerate(plan)
        if source == rank
    ]
    received = [
        (source, tag, torch.zeros(size, dtype=torch.int64))
        for source, to, tag, size in plan
        if to == rank
    ]
    works = [dist.irecv(tensor, source, tag=tag) for source, tag, tensor in received]
    for work in [*reversed(works), *sends]:
        work.wait()
    assert all((tensor == tensor[0]).all() for *_, tensor in received)
    return [tensor[0].item() for *_, tensor in received]


def _follow_plans(rank, plans):
    return [_follow_plan(rank, plan) for plan in plans]


_steps = st.tuples(
    st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.sampled_from([1, 40, 20_000])
)


@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.lists(_steps, max_size=30), min_size=5, max_size=10))
def test_all_that_is_sent_is_received_in_order(plans):
    for rank, found in enumerate(values(run_ranks(3, _follow_plans, plans))):
        expected = [[i for i, step in enumerate(plan) if step[1] == rank] for plan in plans]
        assert found == expected


# --- Transports of popdist --------------------------------------------------------------------


def _exchange_strided(rank):
    for size in (3, LARGE):
        tensor, into = torch.arange(2 * size).view(-1, 2), torch.zeros(size, 3).long()
        work = dist.isend(tensor[:, rank], 1 - rank)
        dist.recv(into[:, 1], 1 - rank)
        work.wait()
        assert torch.equal(into[:, 1], tensor[:, 1 - rank])
        assert not into[:, ::2].any()


def test_a_tensor_of_any_strides_is_sent_and_filled():
    values(run_ranks(2, _exchange_strided))


def _use_another_default_device(rank):
    found = []
    columns = torch.zeros(4, 2)
    received, sent = columns.t(), torch.full((2, 4), rank + 1.0)
    sparse = torch.eye(2).to_sparse()
    with torch.device("meta"):
        works = [dist.isend(sent, 1 - rank), dist.irecv(received, 1 - rank)]
        for work in works:
            work.wait()
        dist.all_reduce(sent)
        dist.all_reduce(sparse)
    for tensor in (sent, columns):
        found.append(tensor.sum().item())
        tensor.untyped_storage().resize_(0)
    return [*found, sparse.to_dense().sum().item()]


def test_a_default_device_and_a_later_change_of_size_are_the_program_s_own():
    found = values(run_ranks(2, _use_another_default_device))
    assert found == [[24.0, 16.0, 4.0], [24.0, 8.0, 4.0]]


def _on_other_hosts(rank):
    """Make messages use the connections between hosts."""
    return mock.patch.object(endpoint, "place_of_this_process", return_value=f"place {rank}")


def _exchange_in_threads(rank, other_hosts):
    with _on_other_hosts(rank) if other_hosts else nullcontext():
        return _exchange_in_three_threads(rank)


def _exchange_in_three_threads(rank):
    group = dist.new_group()
    found = {}

    def exchange(tag):
        for size in (10, LARGE, 1_000_000):
            tensor, received = torch.full((size,), float(tag + rank)), torch.zeros(size)
            work = dist.isend(tensor, 1 - rank, tag=tag, group=group)
            dist.recv(received, 1 - rank, tag=tag, group=group)
            work.wait()
            found[tag, size] = bool((received == tag + 1 - rank).all())

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in (10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(found), all(found.values()), sorted(_tcp_listeners())


def _own_inodes():
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(link))  # noqa: PTH115
    return inodes


def _tcp_listeners():
    """Return the listening TCP addresses of this process, in the format of /proc."""
    inodes, found = _own_inodes(), []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                found.append(words[1].partition(":")[0])
    return found


def _unix_listeners():
    """Return the names of the listening abstract sockets of this process."""
    inodes = _own_inodes()
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {
        words[7].replace("@", "\0", 1)
        for words in lines
        if len(words) == 8 and f"socket:[{words[6]}]" in inodes and words[7].startswith("@popdist-")
    }


@pytest.mark.parametrize(
    ("other_hosts", "environ", "listeners"),
    [
        (False, {}, []),
        (False, {"POPDIST_SHARED_MEMORY": "0"}, []),
        (True, {}, ["0100007F"]),  # 127.0.0.1
    ],
    ids=["memory", "socket", "other-host"],
)
def test_threads_exchange_messages_over_each_way(other_hosts, environ, listeners):
    for outcome in values(run_ranks(2, _exchange_in_threads, other_hosts, environ=environ)):
        assert outcome == (9, True, listeners)


def _to_itself_and_late(rank):
    received = torch.zeros(LARGE)
    work = dist.isend(torch.ones(LARGE), rank, tag=1)
    dist.irecv(received, rank, tag=1).wait()
    work.wait()
    if rank == 0:  # the sends complete without a wait
        futures = [dist.isend(torch.ones(n), 1, tag=n).get_future() for n in (4, LARGE)]
        for future in futures:
            future.wait()
        dist.barrier()
        return received.sum().item()
    filled = torch.zeros(LARGE)
    ended = threading.Event()
    future = dist.irecv(filled, 0, tag=LARGE).get_future()
    future.then(lambda done: (done.value(), dist.recv(torch.zeros(4), 0, tag=4), ended.set()))
    assert ended.wait(20)
    dist.barrier()
    return filled.sum().item()


def test_futures_complete_while_nobody_waits():
    assert values(run_ranks(2, _to_itself_and_late)) == [float(LARGE)] * 2


def _leave_nothing(rank):
    def state():
        names = [thread.name for thread in threading.enumerate()]
        return names, len(list(Path("/proc/self/fd").iterdir()))

    dist.barrier()
    dist.new_group()
    before = state()
    for _ in range(3):
        group = dist.new_group()
        work = dist.isend(torch.ones(LARGE), 1 - rank, group=group)
        dist.recv(torch.zeros(LARGE), 1 - rank, group=group)
        work.wait()
        group.shutdown()
        dist.new_group().shutdown()
    return before == state()


def test_a_group_that_is_left_leaves_nothing():
    assert values(run_ranks(2, _leave_nothing)) == [True, True]


# --- Failures with popdist --------------------------------------------------------------------


def _error_of(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:  # the classes that programs for gloo catch
        return type(error).__name__, str(error)
    return None


def _mismatch(rank, size):
    if rank == 0:
        return _error_of(dist.isend(torch.ones(size), 1, tag=3).wait)
    return _error_of(lambda: dist.recv(torch.ones(size + 2, dtype=torch.float64), 0, tag=3))


def test_a_tensor_that_does_not_fit_is_named_on_both_ranks():
    zero, one = values(run_ranks(2, _mismatch, LARGE))
    assert zero == one
    assert one[0] == "MismatchError"
    assert "rank 0 sent 100000 elements of float32 with tag 3, but rank 1 expects 100002" in one[1]
    assert "rank 0 sent 10 elements of float32" in values(run_ranks(2, _mismatch, 10))[1][1]


def _wait_in_vain(rank):
    other, short = 1 - rank, timedelta(seconds=0.3)
    found = [
        _error_of(lambda: dist.irecv(torch.ones(12), other, tag=3).wait(short)),
        _error_of(lambda: dist.irecv(torch.ones(12), tag=3).wait(short)),
        _error_of(lambda: dist.isend(torch.ones(LARGE), other, tag=4).wait(short)),
        _error_of(lambda: dist.isend(torch.ones(1), 1 - rank, tag=-1)),
    ]
    dist.barrier()  # the other rank may still be in a receive
    # Failed receives do not get any later message.
    work = dist.isend(torch.ones(12), other, tag=3)
    received = torch.zeros(12)
    dist.recv(received, other, tag=3)
    work.wait()
    dist.barrier()
    assert received.sum().item() == 12
    return found


def test_a_wait_that_takes_too_long_names_whom_it_waited_for():
    found = values(run_ranks(2, _wait_in_vain))[0]
    assert [error[0] for error in found] == ["RankLostError"] * 3 + ["ValueError"]
    texts = [error[1] for error in found]
    assert (
        "rank 0 has waited 0.3 s to receive 12 elements of float32 with tag 3 from"
        " rank 1" in texts[0]
    )
    assert "from any rank" in texts[1]
    assert "send 100000 elements of float32 with tag 4 to rank 1" in texts[2]
    assert "tag -1" in texts[3]


def _outlive(rank, in_order, other_hosts):
    with _on_other_hosts(rank) if other_hosts else nullcontext():
        return _outlive_the_end(rank, in_order)


def _outlive_the_end(rank, in_order):
    group = dist.new_group()
    if rank == 1:
        dist.send(torch.ones(3), 0, tag=1, group=group)
        dist.recv(torch.ones(3), 0, tag=1, group=group)
        if in_order:
            dist.destroy_process_group()
            return None
        os._exit(3)
    if rank == 2:
        dist.recv(torch.ones(3), 0, tag=2, group=group)
        dist.send(torch.ones(3), 0, tag=2, group=group)
        return None
    receives = [dist.irecv(torch.ones(3), 1, tag=5, group=group)]
    if not in_order:
        receives.append(dist.irecv(torch.ones(3), tag=5, group=group))
    dist.send(torch.ones(3), 1, tag=1, group=group)
    found = [_error_of(work.wait) for work in receives]
    found.append(_error_of(lambda: dist.send(torch.ones(LARGE), 1, group=group)))
    # Messages from before the end of a rank are received, and the remaining rank can be reached.
    dist.recv(torch.ones(3), 1, tag=1, group=group)
    dist.send(torch.ones(3), 2, tag=2, group=group)
    if in_order:
        assert dist.recv(torch.ones(3), tag=2, group=group) == 2
    return found


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("other_hosts", [False, True])
def test_the_end_of_a_rank_is_named(in_order, other_hosts):
    outcomes = run_ranks(3, _outlive, in_order, other_hosts)
    assert not outcomes[0].error, outcomes[0].error
    reason = "rank 1 has left the group" if in_order else "rank 1 has ended"
    for kind, text in outcomes[0].value:
        assert kind == "RankLostError"
        assert reason in text


def _time_out_and_abort(rank):
    group = dist.new_group()
    group.set_timeout(timedelta(seconds=0.2))
    found = [_error_of(dist.irecv(torch.ones(1), 1 - rank, group=group).wait)]
    dist.barrier()
    group.set_timeout(timedelta(seconds=60))
    work = dist.irecv(torch.ones(1), 1 - rank, group=group)
    abort = threading.Timer(0.2, group.abort)
    abort.start()
    found.append(_error_of(work.wait))
    # If a rank sees the other's abort first, its own abort is still to come.
    abort.join()
    found.append(_error_of(lambda: dist.send(torch.ones(1), 1 - rank, group=group)))
    dist.barrier()
    return found


def test_a_changed_time_out_and_an_abort_reach_messages():
    for late, aborted, closed in values(run_ranks(2, _time_out_and_abort)):
        assert late[0] == "RankLostError"
        assert "waited 0.2 s" in late[1]
        # The second rank to abort may see the end of the first.
        assert aborted[0] in ("GroupClosedError", "RankLostError")
        assert "aborted before rank" in aborted[1] or "left the group" in aborted[1]
        assert closed[0] == "GroupClosedError"


def _wait_in_a_subgroup(rank):
    group = dist.new_group([1, 2])
    found = None
    if rank == 2:
        group.set_timeout(timedelta(seconds=0.1))
        found = _error_of(dist.irecv(torch.ones(1), 1, group=group).wait)
    dist.barrier()
    return found


def test_errors_name_ranks_as_the_program_knows_them():
    _, text = values(run_ranks(3, _wait_in_a_subgroup))[2]
    assert "rank 2 (rank 1 of the group) has waited 0.1 s" in text
    assert "from rank 1 (rank 0 of the group)" in text


def _forked(rank):
    received = torch.zeros(1)
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        listening = len(_unix_listeners())
        error = _error_of(lambda: dist.send(torch.ones(1), 1 - rank))
        os.write(write_end, f"{listening} {error}".encode())
        os._exit(0)
    os.waitpid(child, 0)
    work = dist.isend(torch.ones(1), 1 - rank)
    dist.recv(received, 1 - rank)
    work.wait()
    return os.read(read_end, 1000).decode()


def test_a_forked_process_listens_and_sends_no_longer():
    for text in values(run_ranks(2, _forked)):
        assert text.startswith("0 ")
        assert "has to make its own group" in text


def _strangers(rank):
    dist.barrier()
    (name,) = _unix_listeners()
    other = 1 - rank
    with socket.socket(socket.AF_UNIX) as loud, socket.socket(socket.AF_UNIX) as silent:
        for stranger in (loud, silent):
            stranger.settimeout(20)
            stranger.connect(name)
        # A greeting with the number of a rank that the group does not have.
        loud.sendall((2).to_bytes(4, "little") + bytes(8))
        for size in (4, LARGE):
            work = dist.isend(torch.ones(size), other)
            received = torch.zeros(size)
            dist.recv(received, other)
            work.wait()
            assert received.sum().item() == size
        try:
            return loud.recv(1) == b""
        except ConnectionResetError:
            return True


def test_a_stranger_is_refused_and_harms_nobody():
    assert values(run_ranks(2, _strangers)) == [True, True]


@pytest.mark.parametrize("leads", ["127.0.0.2", "other host"])
def test_other_hosts_reach_a_rank_on_the_network_towards_the_master(monkeypatch, leads):
    # The name of this host resolves to a loopback address, as Debian configures it.
    monkeypatch.setenv("MASTER_ADDR", "master")
    towards = {"master": leads if leads[0].isdigit() else None, "other host": "127.0.0.3"}
    monkeypatch.setattr(tcp_connect, "address_towards", towards.get)
    monkeypatch.setattr(tcp_connect, "_addresses_of", lambda _: ["127.0.1.1"])
    store, places = dist.HashStore(), iter(["first", "second"])
    monkeypatch.setattr(endpoint, "place_of_this_process", lambda: next(places))
    monkeypatch.setattr(socket, "gethostname", lambda: "this host")
    own = endpoint.Endpoint(store, 0, 2, None)
    monkeypatch.setattr(socket, "gethostname", lambda: "other host")
    other = endpoint.Endpoint(store, 1, 2, None)
    own.settle()
    assert json.loads(store.get("messages/0/tcp"))[0] == (towards["master"] or "127.0.0.3")
    own.close()
    other.close()
