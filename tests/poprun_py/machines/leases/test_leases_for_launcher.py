"""The leases of a host on request of a launcher on another host."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.machines.lease_files import LeaseFolder
from poprun_py.machines.lease_sharing import SHARES_WITH_ALL, SharingRule
from poprun_py.machines.leases import open_table, this_job
from poprun_py.machines.remote_leases import list_for_launcher, parse_other_jobs, take_for_launcher

NOT_AT_ALL = SharingRule(with_all=False, with_shareable=False)
CPU = min(os.sched_getaffinity(0))


@pytest.fixture
def environ(place):
    return {"POPRUN_LEASES": str(place)}


@pytest.fixture
def taken(environ):
    """Take a CPU as the wrapper of a job's first instance on another host does."""
    leases = []

    def take_cpu(cpus=(CPU,), run_id="mine", *, sharing=NOT_AT_ALL, within="", environ=environ):
        request = {"cpus": list(cpus), "numa_nodes": [0], "program": "p.py", "run_id": run_id,
                   "sharing": sharing, "is_shareable": False, "within": within}  # fmt: skip
        answer, lease = take_for_launcher(json.loads(json.dumps(request)), environ, os.getppid())
        leases.append(lease)
        return json.loads(json.dumps(answer)), lease

    yield take_cpu
    for lease in leases:
        lease.close()


def test_leases_and_waiting_jobs_are_listed(environ, place, holder):
    assert list_for_launcher(environ) == []
    assert not place.exists()
    pids = [holder(cpus="0-1").process.pid, holder("queue").process.pid]
    leases, queue = parse_other_jobs(json.loads(json.dumps(list_for_launcher(environ))), "")
    assert [each.job.pid for each in (*leases, *queue)] == pids
    assert parse_other_jobs(list_for_launcher(environ), "").held_cpus == {0, 1}
    assert list_for_launcher({"POPRUN_LEASES": "none"}) == []


def test_a_lease_names_the_parent_of_the_wrapper_as_its_job(taken, holder):
    answer, lease = taken()
    assert (answer, lease.cpus) == ({}, (CPU,))
    # The process that looks is a child of this one, so it counts as an instance of the job.
    seen = holder("look").seen
    assert (seen["jobs"], seen["outer"][0]["pid"]) == ([], os.getppid())
    assert (seen["outer"][0]["run_id"], seen["outer"][0]["program"]) == ("mine", "p.py")


def test_leases_of_other_jobs_prevent_a_lease_unless_cores_are_shared(taken, holder, place):
    other = holder(cpus=str(CPU)).process
    answer, lease = taken()
    assert lease.cpus == ()
    assert [each.job.pid for each in parse_other_jobs(answer["other_jobs"], "").leases] == [
        other.pid
    ]
    assert len(list(place.glob("lease-*"))) == 1
    answer, lease = taken(sharing=SHARES_WITH_ALL)
    assert [each.job.pid for each in parse_other_jobs(answer["shared_with"], "").leases] == [
        other.pid
    ]
    assert lease.cpus == (CPU,)
    assert holder("look").seen["outer"][0]["shared"] is True


def test_the_cores_of_a_shareable_lease_are_shared_if_the_job_allows_it(taken, holder):
    holder("hold-shareable", cpus=str(CPU))
    answer, lease = taken()
    assert "other_jobs" in answer
    answer, lease = taken(sharing=SharingRule(with_all=False, with_shareable=True))
    assert (len(answer["shared_with"]), lease.cpus) == (1, (CPU,))


def test_a_waiting_job_goes_first(taken, holder):
    waiter = holder("queue").process
    answer, _ = taken()
    assert [each.job.pid for each in parse_other_jobs(answer["other_jobs"], "").queue] == [
        waiter.pid
    ]
    waiter.communicate("")
    assert taken()[0] == {}


def test_leases_of_other_cpus_do_not_matter(taken, holder):
    holder(cpus="4000")
    assert taken()[0] == {}
    # This process may not use CPU 4001, so its instances cannot use it.
    answer, lease = taken(cpus=(4001,))
    assert (answer, lease.cpus) == ({}, ())


@pytest.mark.parametrize("runs", [{"run_id": "outer"}, {"within": "outer"}])
def test_leases_of_the_same_run_and_of_the_outer_run_do_not_matter(
    taken, environ, place, runs, holder
):
    with contextlib.closing(LeaseFolder(place)) as folder, open_table(folder) as table:
        lease = table.take(this_job("p")._replace(pid=1, run_id="outer"), (CPU,), (0,))
    assert "other_jobs" in taken()[0]
    assert parse_other_jobs(list_for_launcher(environ), "outer").held_cpus == frozenset()
    assert parse_other_jobs(list_for_launcher(environ), "other").held_cpus == {CPU}
    assert taken(**runs)[0] == {}
    lease.close()


def test_an_unusable_folder_is_reported_as_a_problem(taken, place):
    place.write_text("no folder")
    answer, lease = taken()
    assert (list(answer), lease.cpus) == (["problem"], ())
    assert str(place) in answer["problem"]
    answer, _ = taken(environ={"POPRUN_LEASES": "here"})
    assert "expected the absolute path of a folder, or none" in answer["problem"]
    assert taken(environ={"POPRUN_LEASES": "none"})[0] == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)


@given(JSON | st.lists(st.tuples(st.sampled_from(["lease-1", "ticket-1"]), JSON, JSON)))
def test_invalid_answers_of_a_host_are_ignored(answer):
    assert parse_other_jobs(answer, "x") == ((), ())
