"""What stands in the files of leases, which anybody may have written."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.machines.lease_texts import document, holders_text, table
from poprun_py.machines.lease_values import Holder, Holding, Waiter, holding_of, text_of, waiter_of

NUMBERS = st.integers(0, 1 << 40)
NAMES = st.text(st.characters(categories=("L", "N", "P")), max_size=20)
HOLDERS = st.builds(Holder, pid=NUMBERS, process_start=NUMBERS, program=NAMES, run_id=NAMES)
CPUS = st.sets(st.integers(0, 500), min_size=1).map(lambda cpus: tuple(sorted(cpus)))
SINCE = st.floats(0, 1e12)
SOME = Holder(pid=7, process_start=3, program="train.py", run_id="r")


@given(HOLDERS, CPUS, CPUS, SINCE, st.booleans())
def test_a_lease_is_read_as_it_was_written(holder, cpus, nodes, since, is_shared):
    lease = Holding(name="n", user="u", holder=holder, cpus=cpus, numa_nodes=nodes,
                    since=since, is_shared=is_shared)  # fmt: skip
    assert holding_of("n", "u", text_of(lease).encode()) == lease
    assert waiter_of("n", "u", text_of(lease).encode()) is None


def test_the_longest_name_of_a_run_is_read_whole():
    """Names of runs are compared: a job knows its own leases on other hosts by them."""
    lease = Holding("n", "u", SOME._replace(run_id="r" * 128), (0,), (0,), 1.0)
    assert holding_of("n", "u", text_of(lease).encode()) == lease


@given(HOLDERS, NUMBERS, SINCE, NAMES)
def test_a_ticket_is_read_as_it_was_written(holder, number, since, outer):
    ticket = Waiter(name="n", user="u", holder=holder, number=number, since=since, outer=outer)
    assert waiter_of("n", "u", text_of(ticket).encode()) == ticket
    assert holding_of("n", "u", text_of(ticket).encode()) is None


@given(st.binary(max_size=200))
def test_any_bytes_are_no_lease(data):
    assert holding_of("n", "u", data) is None
    assert waiter_of("n", "u", data) is None


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
    lease = Holding(name="n", user="u", holder=SOME, cpus=(0,), numa_nodes=(0,), since=1.0)
    data = {**json.loads(text_of(lease)), **change}
    assert holding_of("n", "u", json.dumps(data).encode()) is None


def test_what_a_stranger_wrote_cannot_steer_a_terminal():
    odd = Holder(pid=7, process_start=3, program="\x1b[2J\nroot's x" + "y" * 500, run_id="\r")
    lease = Holding(name="n", user="u", holder=odd, cpus=(0, 1), numa_nodes=(0,), since=1.0)
    read = holding_of("n", "u", text_of(lease).encode())
    assert holders_text([read]).isprintable()
    assert len(read.holder.program) == 80
    assert len(table([read], []).splitlines()) == 2


def test_the_table_has_those_who_hold_and_those_who_wait_in_order():
    lease = Holding(name="n", user="ann", holder=SOME, cpus=(0, 1, 4), numa_nodes=(0,), since=1.0,
                    is_shared=True)  # fmt: skip
    tickets = [Waiter(name=n, user="bob", holder=SOME, number=i, since=2.0)
               for i, n in enumerate("ab")]  # fmt: skip
    rows = [line.split() for line in table([lease], tickets).splitlines()]
    assert rows[0][:4] == ["job", "user", "pid", "program"]
    assert rows[1][:7] == ["r", "ann", "7", "train.py", "0-1,4", "(shared)", "0"]
    assert [row[4:6] for row in rows[2:]] == [["waits", "(1)"], ["waits", "(2)"]]
    told = document([lease], tickets)
    assert told["jobs"][0] == {"run_id": "r", "user": "ann", "pid": 7, "program": "train.py",
                               "since": 1.0, "cpus": [0, 1, 4], "numa_nodes": [0],
                               "shared": True}  # fmt: skip
    assert len(told["waiting"]) == 2


def test_many_holders_are_cut_short():
    leases = [Holding(name=str(i), user="u", holder=SOME, cpus=(i,), numa_nodes=(0,), since=1.0)
              for i in range(9)]  # fmt: skip
    assert holders_text(leases).endswith("and 5 more (--print-leases)")
