"""Tests of Horovod's API, which run each check in one process and all checks as a job."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path

import pytest

from popdist_py.horovod import torch as hvd
from popdist_py.horovod.common import util

PROGRAM = Path(__file__).with_name("checks.py")
_spec = importlib.util.spec_from_file_location("horovod_checks", PROGRAM)
checks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(checks)


@pytest.fixture
def alone():
    hvd.init()
    yield
    hvd.shutdown()


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_alone(check, alone):
    check()


def _make_all_checks():
    hvd.shutdown()  # an earlier example of this job may have called init()
    with warnings.catch_warnings():
        checks.make_all()
    place = hvd.rank(), hvd.size()
    hvd.shutdown()
    return place


@pytest.mark.mpi
def test_two_ranks(instances):
    assert instances.run(_make_all_checks) == [(0, 2), (1, 2)]


@pytest.mark.mpi
@pytest.mark.sweep
def test_a_job_of_three_ranks(poprun, warm):
    done = poprun("--num-instances", 3, "--num-replicas", 3, "--oversubscribe", *warm, PROGRAM)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-3000:]}"
    for rank in range(3):
        assert f"rank {rank} of 3: {len(checks.CHECKS)} checks" in done.stdout


def test_nothing_works_before_init_and_after_shutdown():
    hvd.init()
    hvd.shutdown()
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.barrier, hvd.mpi_threads_supported):
        with pytest.raises(ValueError, match="Horovod has not been initialized"):
            call()


def test_every_public_name_is_there():
    assert all(getattr(hvd, name) is not None for name in hvd.__all__)


def test_the_helpers_of_horovod(monkeypatch):
    assert [util.num_rank_is_power_2(n) for n in (0, 1, 2, 3, 4)] == [
        False,
        True,
        True,
        False,
        True,
    ]
    assert util.split_list([1, 2, 3, 4, 5], 2) == [[1, 2, 3], [4, 5]]
    assert util.is_iterable([1])
    assert not util.is_iterable(1)
    assert util.extension_available("torch")
    assert util.mpi_built()
    assert not util.gpu_available("torch")
    monkeypatch.setenv("GIVEN", "before")
    monkeypatch.delenv("ABSENT", raising=False)
    with util.env(GIVEN="now", ABSENT="1", LEFT_OUT=None):
        assert (os.environ["GIVEN"], os.environ["ABSENT"]) == ("now", "1")
        assert "LEFT_OUT" not in os.environ
    assert os.environ["GIVEN"] == "before"
    assert "ABSENT" not in os.environ
