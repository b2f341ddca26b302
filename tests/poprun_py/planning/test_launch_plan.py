"""Plans as values, in configuration files and as JSON, and properties of every plan."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launcher.plans import plan_blindly

from poprun_py.errors import UsageError
from poprun_py.launching import launch_planning
from poprun_py.launching.host_changes import JobHosts
from poprun_py.launching.replanning import lost_hosts
from poprun_py.machines import host_checks
from poprun_py.machines.host_checks import ProbedHosts
from poprun_py.machines.host_list import LOCALHOST, parse_host_file, parse_host_list
from poprun_py.machines.host_networks import Network
from poprun_py.machines.remote_shell import Shell
from poprun_py.options.config_files import config_text, parse_config
from poprun_py.options.launch_config import LaunchConfig, config_to_dict, merged_config
from poprun_py.planning.installed_mpi import MPICH, OPEN_MPI_4, OPEN_MPI_5, Mpi
from poprun_py.planning.plan_file import plan_from_json, plan_to_json, portable
from poprun_py.planning.plan_warnings import plan_warnings
from poprun_py.running.supervise.launch_result import InstanceResult, LaunchResult
from poprun_py.terminal import Console

PROBED = ProbedHosts(
    shell=Shell(words=("ssh",)), network=Network("10.1.0.0/16"), machines={}, hostnames={}
)
MPI = Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5)
ENVIRON = {"PATH": "/bin", "HF_TOKEN": "hush", "PLAIN": "p"}

_TEXT = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=12
)


@st.composite
def configs(draw):
    instances = draw(st.integers(1, 6))
    local, width = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 4]))
    ilds = draw(
        st.sampled_from(
            [
                None,
                *(
                    n
                    for n in range(1, instances + 1)
                    if instances % n == 0 and instances * local * width <= 64 * n
                ),
            ]
        )
    )
    values = {
        "num_instances": instances,
        "num_replicas": instances * local,
        "ipus_per_replica": width,
        "num_ilds": ilds,
        "program": tuple(draw(st.lists(_TEXT, max_size=3))),
        "executable_cache_path": draw(st.none() | _TEXT),
        "offline_mode": draw(st.booleans()),
        "mpi_global_args": tuple(draw(st.lists(st.sampled_from(["--a", "--mca x y"]), max_size=2))),
        "env": tuple(draw(st.lists(st.sampled_from(["PLAIN", "A=1 2", "B=ü\"'\n"]), max_size=2))),
        "timeout": draw(st.none() | st.integers(1, 9) | st.floats(0.5, 9)),
        "verbosity": draw(st.integers(0, 2)),
    }
    return LaunchConfig(**values)


def planned(config, hosts=(LOCALHOST,)):
    return plan_blindly(config, hosts=hosts, mpi=MPI, environ=ENVIRON)


@given(configs(), st.sampled_from(["c.toml", "c.json"]))
def test_export_then_import_gives_the_identical_plan(config, path):
    again = merged_config(parse_config(config_text(config_to_dict(config), {}, path), path))
    assert again == config
    assert planned(again) == planned(config)


@given(configs())
def test_json_round_trip_keeps_the_command_and_every_instance(config):
    plan = planned(
        LaunchConfig(**{**{f: getattr(config, f) for f in config.__slots__}, "program": ("x",)})
    )
    given = {**ENVIRON, **dict(plan.instances[0].user_env)}
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))), given)
    assert again.command == plan.command
    assert again.instances == plan.instances
    assert again.topology == plan.topology


@given(configs(), st.integers(1, 3))
def test_every_replica_and_ipu_belongs_to_one_instance(config, num_hosts):
    config = LaunchConfig(
        num_instances=config.num_instances * num_hosts,
        num_replicas=config.num_replicas * num_hosts,
        ipus_per_replica=config.ipus_per_replica,
    )
    hosts = parse_host_list(f"h[1-{num_hosts}]", source="test")
    plan = planned(config, hosts)
    owned = [r for p in plan.instances for r in p.instance.replicas]
    assert owned == list(range(config.num_replicas))
    ipus = [i for p in plan.instances for i in p.instance.ipus]
    assert ipus == list(range(config.num_replicas * config.ipus_per_replica))
    assert [p.instance.host_index for p in plan.instances] == sorted(
        p.instance.host_index for p in plan.instances
    )


@pytest.mark.parametrize(
    ("program", "hosts", "wanted"),
    [
        (("./train", "./train", "data"), "localhost", ("/made/train", "./train", "data")),
        (("/bin/x:", ":", "%:"), "localhost", ("/bin/x:", ":", "%:")),
        (("sh", "-c", "x"), "localhost", ("/bin/sh", "-c", "x")),
        (("sh", "-c", "x"), "a,b", ("sh", "-c", "x")),
        (("sub/x",), "a,b", ("/made/sub/x",)),
        (("no-such-program",), "localhost", ("no-such-program",)),
        ((sys.executable, "a.py", "b.py"), "localhost", (sys.executable, "/made/a.py", "b.py")),
        ((sys.executable, "-c", "1"), "localhost", (sys.executable, "-c", "1")),
    ],
)
def test_a_saved_plan_has_an_absolute_program_and_the_same_arguments(program, hosts, wanted):
    config = LaunchConfig(num_instances=2, num_replicas=2, program=program)
    found = (LOCALHOST,) if hosts == "localhost" else parse_host_list(hosts, source="test")
    made = replace(planned(config, found), folder="/made")
    saved = plan_to_json(portable(made))
    assert (saved["folder"], tuple(saved["program"])) == ("/made", wanted)
    again = plan_from_json(saved, ENVIRON)
    assert (again.folder, again.config.program) == ("/made", wanted)
    assert portable(again).command == again.command == portable(made).command


def test_a_plans_folder_is_absolute():
    with pytest.raises(UsageError, match="folder is 'here'; expected an absolute path"):
        plan_from_json({**_PLAN, "folder": "here"}, ENVIRON)


def test_values_of_variables_come_from_the_environment_not_from_the_plan():
    given = {"HF_TOKEN": "hush", "PLAIN": "p", "TYPED": "hush too"}
    plan = planned(LaunchConfig(program=("x",), env=("HF_TOKEN", "PLAIN", "TYPED=hush too")))
    data = plan_to_json(plan)
    assert data["instances"][0]["user_env"] == dict.fromkeys(given)
    assert "hush" not in json.dumps(data)
    assert not any("hush" in word for word in plan.command)
    again = plan_from_json(data, {**ENVIRON, "TYPED": "hush too"})
    assert dict(again.instances[0].user_env) == given
    again.require_fit()


def test_a_plan_with_missing_values_can_be_shown_but_not_launched():
    data = plan_to_json(planned(LaunchConfig(program=("x",), env=("A=1", "B=2"))))
    looked_at = plan_from_json(data, {"A": "1"})
    (warning,) = plan_warnings(looked_at)
    assert warning.startswith("this plan can be shown but not launched: ")
    with pytest.raises(UsageError, match=r"does not contain the values of .* set B in the env"):
        looked_at.require_fit()
    many = {"user_env": dict.fromkeys(f"V{n}" for n in range(10))}
    data["instances"][0] |= many
    assert "set V0, V1, V2, V3, V4, V5, V6, V7 and 2 more in" in plan_from_json(data, {}).refusal


def test_an_earlier_plan_with_values_is_read():
    data = plan_to_json(planned(LaunchConfig(program=("x",), env=("A=1", "B=2"))))
    data["instances"][0]["user_env"] = {"A": "1", "B": "2"}
    assert dict(plan_from_json(data, {}).instances[0].user_env) == {"A": "1", "B": "2"}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)
_PLAN = plan_to_json(planned(LaunchConfig(num_instances=2, num_replicas=4, program=("x",))))


@given(st.data())
def test_a_damaged_plan_is_refused_in_one_line(data):
    damaged = json.loads(json.dumps(_PLAN))
    where = damaged
    for _ in range(data.draw(st.integers(0, 2))):
        keys = [k for k, v in (where.items() if isinstance(where, dict) else enumerate(where))
                if isinstance(v, dict | list) and v]  # fmt: skip
        if not keys:
            break
        where = where[data.draw(st.sampled_from(keys))]
    key = data.draw(
        st.sampled_from(sorted(where) if isinstance(where, dict) else list(range(len(where))))
    )
    if data.draw(st.booleans()):
        where[key] = data.draw(_JSON)
    else:
        del where[key]
    # Some damage changes only texts. Any other damage raises UsageError.
    with contextlib.suppress(UsageError):
        plan_from_json(damaged, ENVIRON)


@pytest.mark.parametrize(
    ("keys", "value", "part"),
    [
        (["program"], ["y"], "program of the plan and of its mpirun command differ"),
        (
            ["instances", 1, "env", "RANK"],
            "5",
            ("RANK of instance 1 of the plan and of its mpirun command differ"),
        ),
        (["instances", 0, "cpus"], [3], "cpus and POPRUN_CPUS of instance 0 differ"),
        (["instances", 0, "user_env"], {"A=B": "x"}, "user_env 'A=B': expected NAME"),
        (["instances", 0, "user_env"], {"A": "x\0y"}, "user_env A: expected a value without NUL"),
        (["instances", 0, "threads"], 10**400, "whole numbers below"),
        (["command"], ["mpirun"], "instances of the plan and of its mpirun command differ"),
        (["hosts", 0, "name"], "a b", "without blanks"),
        (["hosts", 0, "name"], "a[1-2]", "different names"),
        (["hosts", 0, "name"], "-x", "different names"),
        (["hosts", 0, "name"], "a:2", "different names"),
        (["local"], "no", "true or false"),
    ],
)
def test_a_plan_that_was_edited_in_one_place_only_is_refused(keys, value, part):
    edited = json.loads(json.dumps(_PLAN))
    where = edited
    for key in keys[:-1]:
        where = where[key]
    where[keys[-1]] = value
    with pytest.raises(UsageError) as caught:
        plan_from_json(edited, ENVIRON)
    assert part in str(caught.value)


def test_addresses_in_a_plan_are_read_back():
    config = LaunchConfig(num_instances=4, num_replicas=4, program=("x",))
    text = "fd00::1 slots=2\nfd00::2 slots=2\n"
    made = plan_blindly(
        config,
        hosts=parse_host_file(text, source="test"),
        mpi=MPI,
        environ=ENVIRON,
        probed=PROBED,
    )
    again = plan_from_json(json.loads(json.dumps(plan_to_json(made))), ENVIRON)
    assert [host.name for host in again.topology.hosts] == ["fd00::1", "fd00::2"]


class Said(Console):
    """A console that keeps its messages in a list."""

    def __init__(self, said):
        super().__init__(is_verbose=False, prints_bindings=False)
        self.warn = self.tell = said.append


def changed(first, result, said, cpus=()):
    """Return the plan of the attempt after ``result``; messages are appended to ``said``."""
    hosts = JobHosts(first, Said(said), cpus)
    hosts.note_end(result, lost_hosts(first, result))
    assert hosts.choose(lambda _: 0, lambda: False) == 0
    return hosts.plan


def test_a_job_continues_with_the_names_and_slots_of_the_remaining_hosts(monkeypatch, tmp_path):
    monkeypatch.setattr(host_checks, "probe_hosts", lambda *_, **__: PROBED)
    monkeypatch.setattr(socket, "getnameinfo", lambda to, _: (f"node{to[0][-1]}", "0"))
    file = tmp_path / "hosts"
    file.write_text("".join(f"2001:db8::{index} slots=3\n" for index in (1, 2, 3)))
    config = LaunchConfig(
        num_instances=6, num_replicas=6, host_file=str(file), allow_fewer_hosts=True,
        program=("true",),
    )  # fmt: skip
    whole = launch_planning.plan(config, mpi=MPI, environ=dict(os.environ))
    ended = LaunchResult(
        exit_code=137,
        instances=(
            InstanceResult(index=0),
            *(InstanceResult(index=i, code=-9, was_lost=i in (1, 2)) for i in range(1, 6)),
        ),
    )
    said: list[str] = []
    fewer = changed(whole, ended, said)
    assert said == ["the job continues without host node1"]
    assert [(h.name, h.slots) for h in fewer.topology.hosts] == [("node2", 3), ("node3", 3)]
    assert fewer.config == whole.config


def test_a_job_that_shares_cores_has_its_fair_threads_also_on_fewer_hosts(monkeypatch):
    monkeypatch.setattr(host_checks, "probe_hosts", lambda *_, **__: PROBED)
    config = LaunchConfig(
        num_instances=2, num_replicas=2, host="localhost,node1", allow_fewer_hosts=True,
        program=("true",),
    )  # fmt: skip
    whole = launch_planning.plan(config, mpi=MPI, environ=dict(os.environ))
    here = whole.machines[0]
    jobs = (here.allowed_cpus,) * 99
    whole = replace(whole, machines=(replace(here, sharing_jobs=jobs), *whole.machines[1:]))
    ended = LaunchResult(
        exit_code=137,
        instances=(InstanceResult(index=0, code=1), InstanceResult(index=1, was_lost=True)),
    )
    said: list[str] = []
    cpus = tuple(here.allowed_cpus)
    fewer = changed(whole, ended, said, cpus)
    assert said == ["the job continues without host node1"]
    assert fewer.instances[0].placement.threads == 1
    assert fewer.machines[0].sharing_jobs == jobs


@pytest.mark.parametrize("kind", [OPEN_MPI_5, OPEN_MPI_4, MPICH])
def test_plans_for_every_mpi_are_read_back(kind):
    hosts = parse_host_list("a,b", source="test")
    config = LaunchConfig(num_instances=4, num_replicas=4, program=("x", ":", "%:"))
    made = plan_blindly(
        config,
        hosts=hosts,
        mpi=Mpi(path="/mpi/bin/mpirun", kind=kind),
        environ=ENVIRON,
        probed=PROBED,
    )
    again = plan_from_json(json.loads(json.dumps(plan_to_json(made))), ENVIRON)
    assert again.command == made.command
    assert again.network == made.network == "10.1.0.0/16"


@given(_JSON)
def test_arbitrary_json_is_refused(value):
    with pytest.raises(UsageError):
        plan_from_json(value, ENVIRON)


def test_thousands_of_instances_share_one_part_of_the_command():
    plan = planned(
        LaunchConfig(num_instances=2048, num_replicas=4096, program=("x",), env=("A=1",)),
        parse_host_list("n[1-128]", source="test"),
    )
    assert plan.compact
    assert sum(map(len, plan.command)) < 20_000
    assert plan.command.count(":") == 0
    told = plan.channel_variables(2047)
    assert told["RANK"] == "2047"
    assert told["POPDIST_REPLICA_INDEX_OFFSET"] == "4094"
    assert told["A"] == "1"
    again = plan_from_json(json.loads(json.dumps(plan_to_json(plan))), {"A": "1"})
    assert again.channel_variables(7) == plan.channel_variables(7)
    few = planned(LaunchConfig(num_instances=2, num_replicas=2, program=("x",), env=("A=1",)))
    assert not few.compact
    assert few.channel_variables(1) == {"A": "1"}
    with pytest.raises(
        UsageError, match=r"^instance_mpi_local_args: the mpirun command is too long with separate"
    ):
        planned(
            LaunchConfig(num_instances=2048, num_replicas=2048, instance_mpi_local_args=("1:-x A",))
        )
