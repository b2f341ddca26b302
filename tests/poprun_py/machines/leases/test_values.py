"""What stands in the files of leases, which anybody may have written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.machines.lease_files import (
    JobProcess,
    LeaseRecord,
    QueueRecord,
    parse_lease,
    parse_queued,
    record_text,
)
from poprun_py.machines.lease_messages import leases_json, leases_table, leases_text

NUMBERS = st.integers(0, 1 << 40)
NAMES = st.text(st.characters(categories=("L", "N", "P")), max_size=20)
HOLDERS = st.builds(JobProcess, pid=NUMBERS, process_start=NUMBERS, program=NAMES, run_id=NAMES)
CPUS = st.sets(st.integers(0, 500), min_size=1).map(lambda cpus: tuple(sorted(cpus)))
SINCE = st.floats(0, 1e12)
SOME = JobProcess(pid=7, process_start=3, program="train.py", run_id="r")


@given(HOLDERS, CPUS, CPUS, SINCE, st.booleans())
def test_a_lease_is_read_as_it_was_written(holder, cpus, nodes, since, is_shared):
    lease = LeaseRecord(name="n", user="u", job=holder, cpus=cpus, numa_nodes=nodes,
                    since=since, is_shared=is_shared)  # fmt: skip
    assert parse_lease("n", "u", record_text(lease).encode()) == lease
    assert parse_queued("n", "u", record_text(lease).encode()) is None


def test_the_longest_name_of_a_run_is_read_whole():
    """Names of runs are compared: a job knows its own leases on other hosts by them."""
    lease = LeaseRecord("n", "u", SOME._replace(run_id="r" * 128), (0,), (0,), 1.0)
    assert parse_lease("n", "u", record_text(lease).encode()) == lease


@given(HOLDERS, NUMBERS, SINCE, NAMES)
def test_a_ticket_is_read_as_it_was_written(holder, number, since, outer):
    ticket = QueueRecord(name="n", user="u", job=holder, number=number, since=since, outer=outer)
    assert parse_queued("n", "u", record_text(ticket).encode()) == ticket
    assert parse_lease("n", "u", record_text(ticket).encode()) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_no_lease(data):
    assert parse_lease("n", "u", data) is None
    assert parse_queued("n", "u", data) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"pid": -1}, {"pid": "7"}, {"pid": True}, {"cpus": []}, {"cpus": "0"},
        {"cpus": [-1]}, {"cpus": [True]}, {"cpus": [1 << 20]}, {"cpus": [0.0]},
        {"since": "x"}, {"since": float("inf")},
        {"program": 3}, {"numa_nodes": None}, {"run_id": None}, {"process_start": 1 << 60},
    ],
)  # fmt: skip
def test_a_damaged_lease_is_none(change):
    lease = LeaseRecord(name="n", user="u", job=SOME, cpus=(0,), numa_nodes=(0,), since=1.0)
    data = {**json.loads(record_text(lease)), **change}
    assert parse_lease("n", "u", json.dumps(data).encode()) is None


def test_what_a_stranger_wrote_cannot_steer_a_terminal():
    odd = JobProcess(pid=7, process_start=3, program="\x1b[2J\nroot's x" + "y" * 500, run_id="\r")
    lease = LeaseRecord(name="n", user="u", job=odd, cpus=(0, 1), numa_nodes=(0,), since=1.0)
    read = parse_lease("n", "u", record_text(lease).encode())
    assert leases_text([read]).isprintable()
    assert len(read.job.program) == 80
    assert len(leases_table([read], []).splitlines()) == 2


def test_the_table_has_those_who_hold_and_those_who_wait_in_order():
    lease = LeaseRecord(name="n", user="ann", job=SOME, cpus=(0, 1, 4), numa_nodes=(0,), since=1.0,
                    is_shared=True)  # fmt: skip
    tickets = [QueueRecord(name=n, user="bob", job=SOME, number=i, since=2.0)
               for i, n in enumerate("ab")]  # fmt: skip
    rows = [line.split() for line in leases_table([lease], tickets).splitlines()]
    assert rows[0][:4] == ["job", "user", "pid", "program"]
    assert rows[1][:7] == ["r", "ann", "7", "train.py", "0-1,4", "(shared)", "0"]
    assert [row[4:6] for row in rows[2:]] == [["waits", "(1)"], ["waits", "(2)"]]
    told = leases_json([lease], tickets)
    assert told["jobs"][0] == {"run_id": "r", "user": "ann", "pid": 7, "program": "train.py",
                               "since": 1.0, "cpus": [0, 1, 4], "numa_nodes": [0],
                               "shared": True}  # fmt: skip
    assert len(told["waiting"]) == 2


def test_many_holders_are_cut_short():
    leases = [LeaseRecord(name=str(i), user="u", job=SOME, cpus=(i,), numa_nodes=(0,), since=1.0)
              for i in range(9)]  # fmt: skip
    assert leases_text(leases).endswith("and 5 more (--print-leases)")
