"""What the programs of this folder share: joining a job in the way that a test wants."""

from __future__ import annotations

import os

import popdist_py
from popdist_py import context
from popdist_py.environment import CollectiveSettings

HOSTS = "TEST_NUM_HOSTS"
WITHOUT_READING = "TEST_WITHOUT_READING"
WITHOUT_SOCKETS = "TEST_WITHOUT_SOCKETS"


def join():
    """Join the job; with TEST_NUM_HOSTS as if its instances were on so many hosts.

    With TEST_WITHOUT_READING as if the kernel let no process read another's memory, with
    TEST_WITHOUT_SOCKETS as if hosts took no connections.
    """
    hosts = int(os.environ.get(HOSTS, "1"))
    if hosts == 1:
        popdist_py.init()
        if WITHOUT_READING in os.environ:
            context.communicator()._sliced._can_read = False
        return context.communicator()
    from mpi4py import MPI

    from popdist_py.collectives.between_hosts import tcp_connect
    from popdist_py.collectives.communicators.shared_memory import SharedCommunicator
    from popdist_py.collectives.within_host.host_group import make_window

    if WITHOUT_SOCKETS in os.environ:
        tcp_connect._listen = lambda _: None

    world = MPI.COMM_WORLD
    host = world.rank * hosts // world.size
    local = world.Split(host, world.rank)
    settings = CollectiveSettings.from_environ(os.environ)
    context._communicator = SharedCommunicator(world, local, make_window(local), settings)
    if WITHOUT_READING in os.environ:
        context._communicator._sliced._can_read = False
    return context.communicator()
