"""Instances that wait in MPI's start leave the cores to the other instances."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import types
from pathlib import Path

import pytest

from popdist_py.collectives.between_hosts.mpi_start import start_mpi

GET_TIMERSLACK = 30


def slack() -> int:
    return ctypes.CDLL(None).prctl(GET_TIMERSLACK, 0, 0, 0, 0)


@pytest.fixture
def seen(monkeypatch):
    """The timer slacks of the thread while MPI starts."""
    found = {"ended": threading.Event()}

    class Package(types.ModuleType):
        rc = types.SimpleNamespace(finalize=False)

        def __getattr__(self, name):
            if name != "MPI":
                raise AttributeError(name)
            found["slack"] = slack()
            born = threading.Thread(target=found["ended"].wait, args=(60,))
            born.start()
            found["thread"] = born.native_id
            found["is_numpy_there"] = "popdist_py.collectives.within_host.host_group" in sys.modules
            return object()

    monkeypatch.setitem(sys.modules, "mpi4py", Package("mpi4py"))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    yield found
    found["ended"].set()


@pytest.mark.parametrize(("instances", "is_late"), [(2, False), (3, True)])
def test_who_waits_sleeps_longer_only_where_cores_are_short(seen, instances, is_late):
    before = slack()
    start_mpi(instances)
    assert (seen["slack"] > 100 * before) is is_late
    assert slack() == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs CAP_SYS_NICE")
def test_threads_of_mpi_do_not_stay_late(seen):
    before = slack()
    start_mpi(3)
    assert int(Path(f"/proc/{seen['thread']}/timerslack_ns").read_text()) == before


def test_what_takes_long_is_imported_before_the_instances_meet(seen):
    start_mpi(2)
    assert seen["is_numpy_there"]
