"""The assignment of kept wrappers to the instances of the next attempt."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from poprun_py.running.supervise.job_description import Command
from poprun_py.running.supervise.job_processes import JobProcesses, assign

_HOSTS = st.lists(st.sampled_from("abc"), max_size=8)


@given(_HOSTS, _HOSTS, st.data())
def test_every_wrapper_runs_at_most_one_instance_of_its_own_host(before, after, data):
    indices = st.sampled_from(range(len(before))) if before else st.nothing()
    connected = data.draw(st.sets(indices))
    found = assign(connected, before, after)
    assert sorted([*found.kept, *found.missing]) == list(range(len(after)))
    assert len(set(found.kept.values())) == len(found.kept)
    assert connected.issuperset(found.kept.values())
    assert all(after[new] == before[old] for new, old in found.kept.items())
    # No instance lacks a wrapper while a wrapper of its host has no instance.
    unused = {before[index] for index in connected.difference(found.kept.values())}
    assert unused.isdisjoint(after[index] for index in found.missing)


@given(_HOSTS)
def test_wrappers_stay_where_the_hosts_do(hosts):
    found = assign(range(len(hosts)), hosts, hosts)
    assert found.kept == {index: index for index in range(len(hosts))}
    assert found.missing == ()


@pytest.mark.parametrize(
    ("connected", "before", "after", "kept", "missing"),
    [
        ((0, 2, 3), "aaaa", "aaaa", {0: 0, 2: 2, 3: 3}, (1,)),
        ((2, 3), "aabb", "bb", {0: 2, 1: 3}, ()),
        ((2, 3), "aabb", "bbbb", {0: 2, 1: 3}, (2, 3)),
        ((0,), "a", "ab", {0: 0}, (1,)),
        ((1, 2), "abc", "abc", {1: 1, 2: 2}, (0,)),
        ((1,), "aab", "ab", {0: 1}, (1,)),
    ],
)
def test_lost_wrappers_and_other_hosts(connected, before, after, kept, missing):
    found = assign(connected, before, after)
    assert (found.kept, found.missing) == (kept, missing)


def test_kept_wrappers_lose_variables_that_the_next_command_does_not_set():
    command = Command(
        words=(), environ={"A": "own", "B": "own"}, variables=({"B": "0"}, {"B": "1"})
    )
    found = command.resetting({"A", "B", "C"})
    own = {"A": "own", "C": None}
    assert found.variables == ({**own, "B": "0"}, {**own, "B": "1"})
    assert found.environ_of(1) == {"A": "own", "B": "1"}


def test_no_wrappers_are_started_ahead_while_those_of_the_attempt_connect():
    processes = JobProcesses()
    processes.control = SimpleNamespace(is_complete=False)
    assert processes.start_next(None, None, None) is None
