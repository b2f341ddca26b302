"""The leases of a host as a launcher on another one asks for them, takes them and is told."""

from __future__ import annotations

import contextlib
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.machines.lease_files import LeaseFolder
from poprun_py.machines.leases import (
    list_for_launcher,
    open_table,
    parse_other_jobs,
    take_for_launcher,
    this_job,
)

CPU = min(os.sched_getaffinity(0))


@pytest.fixture
def environ(place):
    return {"POPRUN_LEASES": str(place)}


@pytest.fixture
def taken(environ):
    """Take a CPU as what runs in front of the first instance of a job on another host does."""
    leases = []

    def take_cpu(cpus=(CPU,), run_id="mine", *, may_share=False, within="", environ=environ):
        request = {"cpus": list(cpus), "numa_nodes": [0], "program": "p.py", "run_id": run_id,
                   "may_share": may_share, "within": within}  # fmt: skip
        answer, lease = take_for_launcher(json.loads(json.dumps(request)), environ)
        leases.append(lease)
        return json.loads(json.dumps(answer)), lease

    yield take_cpu
    for lease in leases:
        lease.close()


def test_a_host_tells_who_holds_and_who_waits(environ, place, holder):
    assert list_for_launcher(environ) == []
    assert not place.exists()
    pids = [holder(cpus="0-1").process.pid, holder("queue").process.pid]
    leases, queue = parse_other_jobs(json.loads(json.dumps(list_for_launcher(environ))), "")
    assert [each.job.pid for each in (*leases, *queue)] == pids
    assert parse_other_jobs(list_for_launcher(environ), "").held_cpus == {0, 1}
    assert list_for_launcher({"POPRUN_LEASES": "none"}) == []


def test_what_is_leased_belongs_to_what_started_the_instances(taken, holder):
    answer, lease = taken()
    assert (answer, lease.cpus) == ({}, (CPU,))
    # Who looks is below this process, and so in an instance of the job.
    seen = holder("look").seen
    assert (seen["jobs"], seen["outer"][0]["pid"]) == ([], os.getppid())
    assert (seen["outer"][0]["run_id"], seen["outer"][0]["program"]) == ("mine", "p.py")


def test_who_is_in_the_way_is_told_and_nothing_is_taken(taken, holder, place):
    other = holder(cpus=str(CPU)).process
    answer, lease = taken()
    assert lease.cpus == ()
    assert [each.job.pid for each in parse_other_jobs(answer["other_jobs"], "").leases] == [
        other.pid
    ]
    assert len(list(place.glob("lease-*"))) == 1
    answer, lease = taken(may_share=True)
    assert [each.job.pid for each in parse_other_jobs(answer["shared_with"], "").leases] == [
        other.pid
    ]
    assert lease.cpus == (CPU,)
    assert holder("look").seen["outer"][0]["shared"] is True


def test_nobody_overtakes_who_waits(taken, holder):
    waiter = holder("queue").process
    answer, _ = taken()
    assert [each.job.pid for each in parse_other_jobs(answer["other_jobs"], "").queue] == [
        waiter.pid
    ]
    waiter.communicate("")
    assert taken()[0] == {}


def test_other_cpus_are_in_nobodys_way(taken, holder):
    holder(cpus="4000")
    assert taken()[0] == {}
    # And what this process may not use, none of its instances can.
    answer, lease = taken(cpus=(4001,))
    assert (answer, lease.cpus) == ({}, ())


@pytest.mark.parametrize("runs", [{"run_id": "outer"}, {"within": "outer"}])
def test_the_cpus_of_the_same_run_and_of_the_one_around_it_are_its_own(
    taken, environ, place, runs, holder
):
    with contextlib.closing(LeaseFolder(place)) as folder, open_table(folder) as table:
        lease = table.take(this_job("p")._replace(pid=1, run_id="outer"), (CPU,), (0,))
    assert "other_jobs" in taken()[0]
    assert parse_other_jobs(list_for_launcher(environ), "outer").held_cpus == frozenset()
    assert parse_other_jobs(list_for_launcher(environ), "other").held_cpus == {CPU}
    assert taken(**runs)[0] == {}
    lease.close()


def test_without_a_folder_the_problem_is_told(taken, place):
    place.write_text("no folder")
    answer, lease = taken()
    assert (list(answer), lease.cpus) == (["problem"], ())
    assert str(place) in answer["problem"]
    answer, _ = taken(environ={"POPRUN_LEASES": "here"})
    assert "expected an absolute path" in answer["problem"]
    assert taken(environ={"POPRUN_LEASES": "none"})[0] == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=10,
)


@given(JSON | st.lists(st.tuples(st.sampled_from(["lease-1", "ticket-1"]), JSON, JSON)))
def test_anything_may_be_told(told):
    assert parse_other_jobs(told, "x") == ((), ())
