"""``pod.toml`` and the folders that hold it: the known systems, and what cannot be read."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.pods.folder import pod_file
from popdist_py.pods.folder.pod_file import format_pod, parse_pod
from popdist_py.pods.folder.pod_folders import list_pods, make_pod, open_pod, pods_root, remove_pod
from popdist_py.pods.model.graphcore_systems import SYSTEMS, machine_pod, system_pod
from popdist_py.pods.model.pod_errors import (
    DamagedError,
    InUseError,
    InvalidRequestError,
    NameTakenError,
    PodError,
    UnknownNameError,
)
from popdist_py.pods.model.pod_parts import (
    Agent,
    Allocation,
    Cluster,
    PartitionRequest,
    Pod,
)


def test_the_file_of_a_known_system(golden):
    golden("POD16.toml", format_pod(system_pod("POD16", "pod16", ["h0"])))


@pytest.mark.parametrize("system", SYSTEMS)
def test_known_systems(system):
    num_machines, num_domains = SYSTEMS[system][:2]
    hosts = [f"h{i}" for i in range(max(1, num_machines // 16))]
    pod = system_pod(system, "p", hosts)
    assert parse_pod(format_pod(pod), "pod.toml") == pod
    assert len(pod.ipus()) == int(system[3:])
    assert {ipu.domain for ipu in pod.ipus()} == set(range(num_domains))
    names = tuple(f"ag{number:02}" for number in range(1, num_machines + 1))
    is_large = num_machines >= 16
    size = system[3:]
    assert tuple(agent.name for agent in pod.agents) == names
    cluster = Cluster(
        name=f"c{size}",
        agents=names,
        num_ilds=num_domains,
        topology="torus" if is_large else "mesh",
        is_looped=is_large,
    )
    assert pod.clusters == (cluster,)
    assert pod.allocations == (Allocation(name=f"a{size}", cluster=f"c{size}", agents=names),)
    assert [agent.num_ipus for agent in pod.agents] == [4] * num_machines
    of_each = num_machines // len(hosts)
    assert [agent.host for agent in pod.agents] == [host for host in hosts for _ in range(of_each)]


def test_this_machine_is_one_domain_of_machines_of_four():
    pod = machine_pod("here")
    assert {agent.host for agent in pod.agents} == {os.uname().nodename}
    assert [ipu.number for ipu in pod.ipus()] == [3, 2, 1, 0] * 4
    assert {ipu.domain for ipu in pod.ipus()} == {0}
    assert [agent.num_ipus for agent in machine_pod("small", 2).agents] == [2]
    with pytest.raises(InvalidRequestError, match="cannot have 12 IPUs"):
        machine_pod("odd", 12)


@pytest.mark.parametrize("hosts", [["a", "b", "c"], ["a"] * 2, [f"h{i}" for i in range(8)]])
def test_hosts_share_the_machines_equally(hosts):
    with pytest.raises(InvalidRequestError, match="4 IPU-Machines cannot be divided equally"):
        system_pod("POD16", "p", hosts)


def test_an_unknown_system_is_said_with_the_known():
    with pytest.raises(InvalidRequestError, match="POD4, POD16, POD64"):
        system_pod("POD32", "p")


NAMES = st.text("aZ09", min_size=1, max_size=8).map(lambda name: f"{name}_.-")


@given(
    st.lists(NAMES, min_size=1, max_size=3, unique=True),
    st.text("äb.-:[]'\"\\#", min_size=1, max_size=8),
    st.floats(0, 3600),
    st.sampled_from([1, 2, 8, 64]),
)
def test_every_pod_is_read_as_it_was_written(names, host, seconds, num_ipus):
    agents = tuple(Agent(name=name, host=host, num_ipus=num_ipus) for name in names)
    pod = Pod(name="p", agents=agents, clusters=(), allocations=(), create_seconds=seconds)
    assert parse_pod(format_pod(pod), "pod.toml") == pod


GOOD = format_pod(system_pod("POD4", "p", ["h"]))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "pod.name is missing; the fields of pod are: name, agents"),
        ("name = 'p'", "has no agent"),
        ("name = ", "is not valid TOML"),
        (GOOD.replace('name = "p"', "name = 3"), "pod.name is 3: expected text"),
        (GOOD.replace('name = "p"', "name = 2020-01-01"), 'pod.name is "2020-01-01": exp'),
        (
            GOOD.replace("num_ipus = 4", "num_ipus = true"),
            r"agents\[0\].num_ipus is true: expected",
        ),
        (GOOD.replace("num_ipus = 4", "num_ipus = 3"), "agent ag01 has 3 IPUs"),
        (
            GOOD.replace("num_ipus", "ipus"),
            r"unknown field \"ipus\"; the known fields are: name, host, num_ipus",
        ),
        (
            GOOD.replace('agents = ["ag01"]', "agents = 7"),
            r"pod.clusters\[0\].agents is 7: expected an array",
        ),
        (GOOD.replace('agents = ["ag01"]', 'agents = ["ag02"]'), "no agent 'ag02'"),
        (GOOD.replace('"mesh"', '"ring"'), "topology 'ring'"),
        (
            GOOD.replace("num_ilds = 1", "num_ilds = 2"),
            "cannot be divided into 2 equal IPU-Link domains",
        ),
        (
            GOOD.replace("create_seconds = 0.0", "create_seconds = nan"),
            "create_seconds is NaN: expected a finite number",
        ),
        (GOOD.replace("create_seconds = 0.0", "create_seconds = -1"), "expected 0 to 3600 seconds"),
        (GOOD + GOOD[GOOD.index("[[agents]]") :], "two agents have the name ag01"),
        ("agents = 3\nname = 'p'", "pod.agents is 3: expected an array"),
    ],
)
def test_a_file_that_describes_no_pod_is_said(text, words):
    with pytest.raises(DamagedError, match=words) as caught:
        parse_pod(text, "/x/pod.toml")
    assert "\n" not in str(caught.value)
    assert "/x/pod.toml" in str(caught.value)


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: b.decode("latin-1")))
def test_any_text_is_read_or_refused(text):
    with pytest.raises(DamagedError):
        parse_pod(text, "t")


def test_a_domain_has_64_ipus_at_most():
    agents = tuple(Agent(name=f"a{i}", host="h", num_ipus=64) for i in range(2))
    pod = Pod(name="p", agents=agents, clusters=(), allocations=())
    cluster = replace(system_pod("POD4", "q").clusters[0], agents=("a0", "a1"))
    with pytest.raises(InvalidRequestError, match="128 IPUs in each IPU-Link domain"):
        pod_file.check_pod(replace(pod, clusters=(cluster,)))


def test_pods_of_a_root(tmp_path):
    root = tmp_path / "deep" / "pods"
    assert list_pods(root) == ()
    for name in ("b", "a"):
        make_pod(root, system_pod("POD4", name))
    (root / "no pod").mkdir()
    assert list_pods(root) == ("a", "b")
    assert (root.stat().st_mode & 0o777) == 0o700
    with closing(open_pod(root, "b")) as store:
        assert store.pod().name == "b"
    with pytest.raises(UnknownNameError, match="existing pods: a, b"):
        open_pod(root, "c")


def test_a_pod_is_made_whole_or_not_at_all(tmp_path):
    make_pod(tmp_path, system_pod("POD4", "p"))
    with pytest.raises(NameTakenError, match="a pod named p already exists"):
        make_pod(tmp_path, system_pod("POD16", "p"))
    (tmp_path / "file").touch()
    with pytest.raises(NameTakenError):
        make_pod(tmp_path, system_pod("POD4", "file"))
    with pytest.raises(PodError, match="cannot be written"):
        make_pod(tmp_path / "file", system_pod("POD4", "q"))
    for name in ("none", "server"):
        with pytest.raises(InvalidRequestError, match="another name"):
            make_pod(tmp_path, system_pod("POD4", name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "p"]


def test_a_pod_is_removed_when_it_is_not_used(tmp_path):
    make_pod(tmp_path, system_pod("POD4", "p"))
    with closing(open_pod(tmp_path, "p")) as store:
        store.create_partition(PartitionRequest(name="mine", size=4))
    with pytest.raises(InUseError, match="partitions mine"):
        remove_pod(tmp_path, "p")
    remove_pod(tmp_path, "p", force=True)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnknownNameError, match="existing pods: none"):
        remove_pod(tmp_path, "p")


def test_where_pods_lie():
    assert str(pods_root({"POPRUN_PODS": "/pods"})) == "/pods"
    assert str(pods_root({"XDG_STATE_HOME": "/state"})) == "/state/poprun-py/pods"
    assert str(pods_root({})).endswith("/.local/state/poprun-py/pods")
