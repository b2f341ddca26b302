"""The job of ``support/instances.py``: values, failures, and a fresh job after them."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from support.instances import InstanceFailedError, Instances
from support.processes import survivors

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Jobs of this file alone, since its tests end them."""
    jobs = Instances(tmp_path_factory.mktemp("instances"), os.environ)
    yield jobs
    jobs.close()


def _place(add):
    import popdist_py

    popdist_py.init()
    total = popdist_py.all_reduce(popdist_py.getInstanceIndex() + add)
    return os.getpid(), popdist_py.getInstanceIndex(), popdist_py.getNumLocalReplicas(), total


def _fail_on_the_second(what):
    print("before it failed", flush=True)
    if os.environ["RANK"] == "0":
        return 1 if what in ("raises", "returns") else threading.Event().wait()
    if what == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "hangs":
        threading.Event().wait()
    if what == "returns":
        return threading.Lock()
    raise SystemExit("not today")


def _pid():
    return os.getpid()


def _variable():
    return os.environ.get("TEST_VARIABLE")


def test_values_come_from_the_same_processes_at_every_call(jobs):
    first, second = jobs.run(_place, 1), jobs.run(_place, 2)
    assert [value[1:] for value in first] == [(0, 1, 3), (1, 1, 3)]
    assert [value[1:] for value in second] == [(0, 1, 5), (1, 1, 5)]
    assert [value[0] for value in first] == [value[0] for value in second]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raises", "instance 1: Traceback.*SystemExit: not today"),
        pytest.param("returns", "instance 1: Traceback.*cannot pickle", marks=pytest.mark.sweep),
        pytest.param("ends", "instance 1: ended.*SIGKILL", marks=pytest.mark.sweep),
        pytest.param(
            "hangs",
            "instance 1: ended.*Timeout.*in _fail_on_the_second",
            marks=pytest.mark.sweep,
        ),
    ],
    ids=["raises", "returns", "ends", "hangs"],
)
def test_a_failure_tells_where_and_the_next_call_has_a_fresh_job(jobs, what, said):
    before = jobs.run(_pid)
    with pytest.raises(InstanceFailedError, match=rf"(?s)^_fail_on_the_second failed.*{said}") as e:
        jobs.run(_fail_on_the_second, what, limit=1.0 if what == "hangs" else 60.0)
    assert "before it failed" in str(e.value)
    assert not set(before) & set(jobs.run(_pid))


def test_jobs_are_kept_by_size_and_variables_and_at_most_two_are_alive(jobs):
    before = jobs.run(_pid)
    ((_, index, replicas, _),) = jobs.run(_place, 0, count=1, replicas=2)
    assert (index, replicas) == (0, 2)
    assert jobs.run(_pid) == before
    oldest = next(iter(jobs._jobs.values()))
    assert survivors(oldest._mark)
    # This call ends the least recently used job and all its processes. A forked process, which
    # holds the same connections, does not prevent that.
    if (forked := os.fork()) == 0:
        signal.pause()
    assert jobs.run(_variable, count=1, environ={"TEST_VARIABLE": "given"}) == ["given"]
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)
    assert not survivors(oldest._mark)
    assert len(jobs._jobs) == 2
    assert jobs.run(_pid) == before
