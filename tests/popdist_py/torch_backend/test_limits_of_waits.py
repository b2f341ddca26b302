"""Messages and the store of a group have the limits and the errors of its collectives."""

from __future__ import annotations

import socket
import sys
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks, values

from popdist_py.collectives.communicators import join
from popdist_py.peers.silence import SILENT_SECONDS
from popdist_py.torch_backend.messages import endpoint

_getsockopt = socket.socket.getsockopt


def _error_of(call):
    """Return the class and the text of the error that a call raises, and its duration."""
    began = time.monotonic()
    with pytest.raises(RuntimeError) as error:
        call()
    return type(error.value).__name__, str(error.value), time.monotonic() - began


def _wait_while_the_kernel_says(rank, retransmits, silent_seconds, waits):
    """Return errors of rank 0's waits while a fake kernel reports this state of rank 1's host."""
    place = f"host {rank}"
    with (
        mock.patch.object(endpoint, "place_of_this_process", return_value=place),
        mock.patch.object(join, "place_of_this_process", return_value=place),
    ):
        dist.barrier()
        group = dist.new_group()
        ops = [(dist.isend, torch.ones(1)), (dist.irecv, torch.zeros(1))]
        batch = [dist.P2POp(op, tensor, 1 - rank, group) for op, tensor in ops]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        dist.barrier()
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["rank 0 is done"])
            return None

    def getsockopt(connection, level, option, *size):
        value = _getsockopt(connection, level, option, *size)
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO):
            info = bytearray(value)
            info[2] = retransmits
            info[56:60] = (1000 * silent_seconds).to_bytes(4, sys.byteorder)
            return bytes(info)
        return value

    group.set_timeout(timedelta(seconds=3))
    calls = {
        "recv": lambda: dist.recv(torch.ones(1), 1, group=group),
        "recv from any rank": lambda: dist.recv(torch.ones(1), group=group),
        "irecv": lambda: dist.irecv(torch.ones(1), 1, group=group).wait(),
        "batch": lambda: dist.batch_isend_irecv(batch[1:])[0].wait(),
        "isend": lambda: dist.isend(torch.ones(1), 1, group=group).wait(),
        "all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    }
    with mock.patch.object(socket.socket, "getsockopt", getsockopt):
        errors = [_error_of(calls[wait]) for wait in waits]
    store.set("rank 0 is done", b"")
    return errors


def test_a_host_that_does_not_answer_has_one_error_in_messages_and_collectives():
    waits = ("recv", "recv from any rank", "irecv", "batch", "isend", "all_reduce")
    state = (5, SILENT_SECONDS + 1)
    errors = values(run_ranks(2, _wait_while_the_kernel_says, *state, waits))[0]
    assert {kind for kind, _, _ in errors} == {"RankLostError"}
    assert errors[0][1].startswith(
        "receive 1 element of float32 with tag 0 from rank 1: no answer from"
    )
    (reason,) = {text.partition(": ")[2] for _, text, _ in errors}
    assert f"no answer from rank 1 on another host for {SILENT_SECONDS} s" in reason
    assert all(seconds < 3 for _, _, seconds in errors), errors


@pytest.mark.parametrize(
    "state",
    [
        (5, SILENT_SECONDS - 1),  # a network that stalls
        (0, SILENT_SECONDS + 1),  # a program that is late: nothing waits for an answer
    ],
    ids=["stalls", "late"],
)
def test_a_late_rank_of_another_host_is_not_lost(state):
    ((_, text, _),) = values(run_ranks(2, _wait_while_the_kernel_says, *state, ("recv",)))[0]
    assert "has waited 3 s" in text


def _look_at_keep_alive(rank):
    place = f"host {rank}"
    with mock.patch.object(endpoint, "place_of_this_process", return_value=place):
        group = dist.new_group()
        works = [op(torch.ones(1), 1 - rank, group=group) for op in (dist.isend, dist.irecv)]
        for work in works:
            work.wait()
        dist.barrier()
        traffic = group._messages._traffic
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        found = []
        for channel in traffic._channels.values():
            connection = channel.connection
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            found.append([connection.getsockopt(socket.IPPROTO_TCP, each) for each in options])
        dist.barrier()
        return found


def test_the_kernel_looks_after_connections_of_messages_on_which_nothing_is_sent():
    for found in values(run_ranks(2, _look_at_keep_alive)):
        assert len(found) == 2
        assert all(idle + interval * num == SILENT_SECONDS for idle, interval, num in found)


def _set_the_timeout_during_a_wait(rank):
    group, found = dist.new_group(), []
    if rank == 0:
        waits = (
            lambda: dist.recv(torch.ones(1), 1, group=group),
            lambda: dist.all_reduce(torch.ones(1), group=group),  # joins over the store
        )
        for wait in waits:
            group.set_timeout(timedelta(seconds=60))
            timer = threading.Timer(0.3, group.set_timeout, [timedelta(seconds=0.5)])
            timer.start()
            found.append(_error_of(wait))
            timer.join()
    dist.barrier()
    return found


def test_a_timeout_that_is_set_during_a_wait_holds_in_it():
    received, joined = values(run_ranks(2, _set_the_timeout_during_a_wait))[0]
    assert "has waited 0.5 s" in received[1]
    assert "rank 1 did not make this call within 0.5 s (the timeout of the group)" in joined[1]
    assert max(received[2], joined[2]) < 10


def _receive_during_a_call_with_its_own_timeout(rank):
    group, found = dist.new_group(), None
    dist.barrier(group=group)
    if rank == 0:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=30)
        options.asyncOp = True
        group.set_timeout(timedelta(seconds=0.5))
        work = group.allreduce([torch.ones(1)], options)
        found = _error_of(lambda: dist.recv(torch.ones(1), 1, group=group))
    dist.barrier()
    if rank == 1:
        dist.all_reduce(torch.ones(1), group=group)
    else:
        work.wait()
    return found


def test_the_timeout_of_one_collective_is_not_that_of_messages():
    found = values(run_ranks(2, _receive_during_a_call_with_its_own_timeout))[0]
    assert "has waited 0.5 s" in found[1]
    assert found[2] < 10
