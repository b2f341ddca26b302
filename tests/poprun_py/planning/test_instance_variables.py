"""The variables of instances, from the options, a file, the plan and the launcher's environment."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from support.launcher.plans import plan_blindly

from popdist_py.environment import INSTANCE_VARIABLES, InstanceEnvironment
from poprun_py import LaunchConfig, UsageError
from poprun_py.launching.attempts import job_of
from poprun_py.launching.run_record import AttemptRecord
from poprun_py.machines.host_checks import ProbedHosts
from poprun_py.machines.host_list import LOCALHOST, parse_host_list
from poprun_py.machines.remote_shell import Shell
from poprun_py.planning.cpu_placement import Placement
from poprun_py.planning.installed_mpi import MPICH, OPEN_MPI_5, Mpi
from poprun_py.planning.instance_variables import (
    mpi_environment,
    placement_variables,
    user_variables,
)
from poprun_py.planning.launch_plan import user_thread_counts
from poprun_py.planning.plan_file import plan_from_json, plan_to_json


def test_a_file_of_variables_reads_as_in_a_shell():
    text = "A=\"x y\"\r\nexport  B='z'\n# no\nC=it's\nD='\nE=a\u2028b\nHOME\n"
    assert dict(user_variables(LaunchConfig(), text, {"HOME": "/h"})) == {
        "A": "x y", "B": "z", "C": "it's", "D": "'", "E": "a\u2028b", "HOME": "/h",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("A=x\0y", "line 1 A: expected a value without NUL"),
        ("A=1\nA B=2", "line 2 'A B': expected NAME=VALUE"),
        ("POPRUN_CPUS=x", "only poprun-py may set this variable; choose another name"),
    ],
)
def test_impossible_variables_are_refused(text, said):
    with pytest.raises(UsageError, match=said):
        user_variables(LaunchConfig(), text, {})


# --- thread counts ------------------------------------------------------------------------------


def test_only_omp_num_threads_is_planned_and_the_users_value_wins():
    two = Placement(numa_nodes=(0,), memory_nodes=(), cpus=(), threads=2)
    assert placement_variables([two], set()) == [(("OMP_NUM_THREADS", "2"),)]
    assert placement_variables([two], {"OMP_NUM_THREADS"}) == [()]


def test_thread_variables_of_the_user_reach_other_hosts():
    command = told(environ={"OPENBLAS_NUM_THREADS": "3"})[1]
    assert ("-x", "OPENBLAS_NUM_THREADS") in pairwise(command)


def test_thread_counts_of_the_user_are_those_that_instances_get():
    arguments = ("-x", "MKL_NUM_THREADS=5", "-x", "OMP_NUM_THREADS")
    environ = {"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": "6", "OPENBLAS_NUM_THREADS": "7"}
    counts = {"OMP_NUM_THREADS": 4, "MKL_NUM_THREADS": 5, "OPENBLAS_NUM_THREADS": 7}
    assert user_thread_counts(arguments, (), environ) == counts
    user_env = (("MKL_NUM_THREADS", "1"), ("OMP_NUM_THREADS", ""))
    assert user_thread_counts(arguments, user_env, environ) == {
        "MKL_NUM_THREADS": 1, "OPENBLAS_NUM_THREADS": 7,
    }  # fmt: skip


@pytest.mark.parametrize("kind", [OPEN_MPI_5, MPICH])
def test_a_user_of_a_host_is_kept_in_a_plan_and_refused_for_mpich(kind):
    def planned():
        return plan_blindly(
            LaunchConfig(num_instances=2, program=("x",)),
            hosts=parse_host_list("me@n[0-1]", source="test"),
            mpi=Mpi(path="/mpi/bin/mpirun", kind=kind), environ={}, probed=_PROBED,
        )  # fmt: skip

    if kind == MPICH:
        with pytest.raises(UsageError, match="host me@n0: MPICH's mpirun does not accept a user"):
            planned()
    else:
        saved = plan_from_json(plan_to_json(planned()), {})
        assert [(host.user, host.name) for host in saved.topology.hosts] == [
            ("me", "n0"), ("me", "n1"),
        ]  # fmt: skip


def test_the_plan_shows_the_threads_that_the_user_set():
    config = LaunchConfig(
        num_instances=2, program=("x",), instance_mpi_local_args=("1:-x OMP_NUM_THREADS=4",)
    )
    planned = plan_blindly(
        config, hosts=(LOCALHOST,), mpi=Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5),
        environ={"OMP_NUM_THREADS": "3"},
    )  # fmt: skip
    assert [each.placement.threads for each in planned.instances] == [3, 4]


# --- settings of our libraries ------------------------------------------------------------------

_SETTINGS = {
    "POPDIST_DETERMINISTIC": "1",
    "POPDIST_SHARED_MEMORY": "",
    "POPTORCH_LOG_LEVEL": "DEBUG",
    "POPTORCH_CACHE_DIR": "/shared/cache",
    "POPLAR_LOG_LEVEL": "hush",
    "POPDIST_EXECUTABLE_CACHE_PATH": "/shared",
}
_PROBED = ProbedHosts(shell=Shell(words=("ssh",)), machines={}, hostnames={})


def told(hosts="127.0.0.2,127.0.0.3", environ=None, index=1, **options):
    """Return the variables that the launcher sends to an instance on ``hosts``, and the command."""
    job = plan_blindly(
        LaunchConfig(num_instances=2, program=("x",), **options),
        hosts=parse_host_list(hosts, source="test") if hosts else (LOCALHOST,),
        mpi=Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5),
        environ={"PATH": "/bin", **_SETTINGS, **(environ or {})},
        probed=_PROBED if hosts else None,
    )
    sent = dict(job_of(job, AttemptRecord("r")).command.variables[index])
    assert sent.pop("POPRUN_RUN_ID") == sent["TORCHELASTIC_RUN_ID"] == "r"
    return {n: v for n, v in sent.items() if not n.startswith("TORCHELASTIC")}, job.command


def test_settings_of_our_libraries_reach_other_hosts_outside_of_the_command():
    sent, command = told()
    assert sent == _SETTINGS
    assert not any("DETERMINISTIC" in word or "hush" in word for word in command)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_CPU", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_variables_that_instances_set_if_unset_reach_other_hosts_too(name):
    assert told(environ={name: "7"})[0] == {**_SETTINGS, name: "7"}


def test_local_instances_inherit_settings():
    assert told(hosts="")[0] == {}


def test_variables_of_the_user_win_over_settings():
    assert told(env=("POPDIST_DETERMINISTIC=0",))[0]["POPDIST_DETERMINISTIC"] == "0"
    words = ("-x POPDIST_DETERMINISTIC=0",)
    assert "POPDIST_DETERMINISTIC" not in told(mpi_local_args=words)[0]
    first = (f"0:{words[0]}",)
    assert "POPDIST_DETERMINISTIC" not in told(index=0, instance_mpi_local_args=first)[0]
    assert told(index=1, instance_mpi_local_args=first)[0]["POPDIST_DETERMINISTIC"] == "1"


def test_variables_of_the_plan_are_not_settings():
    sent, command = told(executable_cache_path="mine")
    assert "POPDIST_EXECUTABLE_CACHE_PATH" not in sent
    assert "POPDIST_EXECUTABLE_CACHE_PATH=mine" in command
    environ = {"POPLAR_TARGET_OPTIONS": "{}", "POPLAR_ENGINE_OPTIONS": "{}"}
    assert told(environ=environ)[0] == _SETTINGS


def test_the_ipu_of_the_model_reaches_every_instance():
    sent, command = told(ipu_model="bow", environ={"POPDIST_IPU": "mk1"})
    assert "POPDIST_IPU" not in sent
    assert "POPDIST_IPU=bow" in command
    sent, command = told(environ={"POPDIST_IPU": "mk1"})
    assert sent["POPDIST_IPU"] == "mk1"
    assert not any("POPDIST_IPU" in word for word in command)


@pytest.mark.parametrize("index", [0, 1])
def test_the_name_poprun_sets_a_variable_for_programs(monkeypatch, index):
    assert not any("POPDIST_SDK_COMMAND" in word for word in told(index=index)[1])
    monkeypatch.setattr(sys, "argv", ["/opt/bin/poprun"])
    assert "POPDIST_SDK_COMMAND=1" in told(index=index)[1]
    # An instance of a job that poprun started may start another launcher.
    assert "POPDIST_SDK_COMMAND" not in mpi_environment({"POPDIST_SDK_COMMAND": "1"})


def test_variables_of_an_outer_instance_are_left_out():
    assert told(environ=dict.fromkeys(INSTANCE_VARIABLES, "7"))[0] == _SETTINGS
    whole = InstanceEnvironment(node_device_id=1, executable_cache_path="x").to_environ()
    assert set(whole) - INSTANCE_VARIABLES == {"POPDIST_EXECUTABLE_CACHE_PATH"}


def test_mpi_variables_of_an_outer_instance_are_left_out():
    outer = {"OMPI_UNIVERSE_SIZE": "1", "OMPI_MCA_ess": "^singleton", "OMPI_MCA_pml": "ob1"}
    assert mpi_environment({**outer, "HOME": "/home"}) == {"OMPI_MCA_pml": "ob1", "HOME": "/home"}
