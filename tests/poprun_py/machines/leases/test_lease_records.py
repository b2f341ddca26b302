"""The records of leases and waiting jobs, which other users may have written, and their texts."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.machines.lease_files import (
    JobProcess,
    LeaseRecord,
    QueueRecord,
    parse_record,
    record_text,
)
from poprun_py.machines.lease_messages import (
    leases_json,
    leases_table,
    leases_text,
    refusal_text,
    sharing_text,
)

NUMBERS = st.integers(0, 1 << 40)
NAMES = st.text(st.characters(categories=("L", "N", "P")), max_size=20)
JOBS = st.builds(JobProcess, pid=NUMBERS, process_start=NUMBERS, program=NAMES, run_id=NAMES)
CPUS = st.sets(st.integers(0, 500), min_size=1).map(lambda cpus: tuple(sorted(cpus)))
SINCE = st.floats(0, 1e12)
JOB = JobProcess(pid=7, process_start=3, program="train.py", run_id="r")


LEASE = LeaseRecord("lease-a", "ann", JOB, cpus=(0, 1, 4), numa_nodes=(0,), since=1.0)


WAITER = QueueRecord("ticket-b", "bob", JOB, number=1, since=2.0)


def parsed(record):
    return parse_record(record.name, record.user, record_text(record).encode())


@given(JOBS, CPUS, CPUS, SINCE, st.booleans(), st.booleans())
def test_a_lease_is_read_as_it_was_written(job, cpus, nodes, since, is_shared, is_shareable):
    lease = LeaseRecord("lease-a", "u", job, cpus, nodes, since, is_shared, is_shareable)
    assert parsed(lease) == lease
    assert parsed(lease._replace(name="ticket-a")) is None
    assert parsed(lease._replace(name="other")) is None


@given(JOBS, NUMBERS, SINCE, NAMES)
def test_a_waiting_job_is_read_as_it_was_written(job, number, since, outer):
    waiting = QueueRecord("ticket-a", "u", job, number, since, outer)
    assert parsed(waiting) == waiting
    assert parsed(waiting._replace(name="lease-a")) is None


def test_a_lease_of_an_older_version_is_read():
    data = json.loads(record_text(LEASE))
    del data["shareable"]
    assert parse_record(LEASE.name, LEASE.user, json.dumps(data).encode()) == LEASE


def test_the_longest_name_of_a_run_is_not_cut():
    # A job compares the names of runs to recognise its own leases on other hosts.
    lease = LEASE._replace(job=JOB._replace(run_id="r" * 128))
    assert parsed(lease) == lease


@given(st.sampled_from(["lease-a", "ticket-a"]), st.binary(max_size=200))
def test_random_bytes_are_rejected(name, data):
    assert parse_record(name, "u", data) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"pid": -1}, {"pid": "7"}, {"pid": True}, {"cpus": []}, {"cpus": "0"},
        {"cpus": [-1]}, {"cpus": [True]}, {"cpus": [1 << 20]}, {"cpus": [0.0]},
        {"since": "x"}, {"since": float("inf")},
        {"program": 3}, {"numa_nodes": None}, {"run_id": None}, {"process_start": 1 << 60},
    ],
)  # fmt: skip
def test_an_invalid_lease_is_rejected(change):
    data = {**json.loads(record_text(LEASE)), **change}
    assert parse_record("lease-a", "u", json.dumps(data).encode()) is None


def test_control_codes_of_other_users_are_not_printed():
    odd = JobProcess(pid=7, process_start=3, program="\x1b[2J\nroot's x" + "y" * 500, run_id="\r")
    read = parsed(LEASE._replace(job=odd))
    assert leases_text([read]).isprintable()
    assert len(read.job.program) == 80
    assert len(leases_table([read], []).splitlines()) == 2


def test_the_table_lists_leases_and_then_waiting_jobs_in_their_order():
    lease = LEASE._replace(is_shared=True)
    queue = [QueueRecord(n, "bob", JOB, number=i, since=2.0) for i, n in enumerate("ab")]
    rows = [line.split() for line in leases_table([lease], queue).splitlines()]
    assert rows[0][:4] == ["job", "user", "pid", "program"]
    assert rows[1][:7] == ["r", "ann", "7", "train.py", "0-1,4", "(shared)", "0"]
    assert [row[4:6] for row in rows[2:]] == [["waits", "(1)"], ["waits", "(2)"]]
    document = leases_json([lease], queue)
    assert document["jobs"][0] == {"run_id": "r", "user": "ann", "pid": 7, "program": "train.py",
                                   "since": 1.0, "cpus": [0, 1, 4], "numa_nodes": [0],
                                   "shared": True, "shareable": False}  # fmt: skip
    assert len(document["waiting"]) == 2


def test_a_warning_about_shared_cores_is_one_short_line():
    me = LEASE._replace(user=str(os.geteuid()))
    assert sharing_text([me], {1, 2, 4}) == "this job shares CPUs 1,4 with run r (pid 7)"
    other = LEASE._replace(job=JOB._replace(run_id=""))
    assert sharing_text([other, me], host="b", has_advice=True) == (
        "this job shares CPUs 0-1,4 of host b with ann's train.py (pid 7) and 1 more job; to avoid "
        "sharing, give --share-cores no or --wait-for-resources"
    )


@given(
    st.lists(st.builds(LEASE._replace, job=JOBS, cpus=CPUS, user=NAMES), max_size=5),
    st.lists(st.builds(WAITER._replace, job=JOBS), max_size=2),
    st.sampled_from(["", "b"]),
    CPUS,
    st.booleans(),
)
def test_an_error_about_cores_fits_in_160_characters(leases, queue, host, free, has_waited):
    text = refusal_text(leases, queue, host=host, free=free, has_waited=has_waited)
    end = " (the time of POPRUN_WAIT_FOR_RESOURCES=86400 is over)" if has_waited else ""
    assert len(f"poprun-py: error: {text}{end}") <= 160
    assert "add --share-cores yes" in text
    assert has_waited == ("--wait-for-resources" not in text)


def test_an_error_about_cores_says_who_holds_them_and_what_is_free():
    me = LEASE._replace(user=str(os.geteuid()))
    assert refusal_text([me, me], [], free=(2, 3)) == (
        "this job got no CPUs; add --share-cores yes or --wait-for-resources: run r (pid 7) holds "
        "CPUs 0-1,4; CPUs 2-3 are free"
    )
    assert refusal_text([me], [WAITER], host="b", has_waited=True) == (
        "add --share-cores yes: bob's run r (pid 7) is ahead in the queue for CPUs of host b"
    )


def test_a_long_list_of_leases_is_cut():
    leases = [LEASE._replace(name=f"lease-{i}", cpus=(i,)) for i in range(9)]
    assert leases_text(leases).endswith("and 5 more jobs (--print-leases lists all)")
