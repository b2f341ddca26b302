"""Joining a job in the way that a test requires, for the programs of this folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from unittest import mock

import popdist_py
from popdist_py import context
from popdist_py.collectives import Communicator
from popdist_py.environment import CollectiveSettings

HOSTS = "TEST_NUM_HOSTS"
WITHOUT_READING = "TEST_WITHOUT_READING"
WITHOUT_SOCKETS = "TEST_WITHOUT_SOCKETS"
SMALL_MESSAGES = "TEST_SMALL_MESSAGES"


def join() -> Communicator:
    """Join the job; TEST_NUM_HOSTS simulates this number of hosts.

    TEST_WITHOUT_READING simulates a kernel that forbids reading the memory of other processes.
    TEST_WITHOUT_SOCKETS simulates hosts that refuse connections.
    """
    hosts = int(os.environ.get(HOSTS, "1"))
    if hosts == 1:
        with _sockets_permitted():
            popdist_py.init()
    else:
        context._communicator = _as_on(hosts)
    if WITHOUT_READING in os.environ:
        context.communicator()._sliced._can_read = False
        context.communicator()._host.can_read = False
    return context.communicator()


def _as_on(hosts: int) -> Communicator:
    from popdist_py.collectives.between_hosts.mpi_start import start_mpi

    start_mpi(1)
    from mpi4py import MPI

    from popdist_py.collectives.communicators import join

    world = MPI.COMM_WORLD
    place = f"host {world.rank * hosts // world.size}"
    with (
        mock.patch.object(join, "place_of_this_process", return_value=place),
        _sockets_permitted(),
    ):
        return join.join_job(CollectiveSettings.from_environ(os.environ))


def _sockets_permitted() -> AbstractContextManager[object]:
    """Return a block in which hosts listen for connections only if the test permits it."""
    if WITHOUT_SOCKETS not in os.environ:
        return nullcontext()
    from popdist_py.collectives.between_hosts import tcp_connect

    return mock.patch.object(tcp_connect, "_listen", return_value=None)


def ways(words: Sequence[str], *, synchronises: bool = True) -> Iterator[tuple[str, Communicator]]:
    """Join the job again for every word, with the word's variables, ``A=1,B=2`` or none.

    So several ways of joining need only one start of the instances and of torch.
    """
    for word in words:
        variables = dict(pair.split("=") for pair in word.split(",") if pair)
        with mock.patch.dict(os.environ, variables):
            yield word, join()
            if synchronises:
                popdist_py.synchronize()
            context.finalize()
