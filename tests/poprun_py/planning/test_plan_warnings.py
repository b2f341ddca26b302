"""Warnings about options without effect. Every other option is read by some code."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.launcher.plans import plan_blindly
from support.launcher.sysfs_trees import SNAPSHOTS
from support.repository import ROOT

from poprun_py.command.cli import run
from poprun_py.machines.host_checks import ProbedHosts
from poprun_py.machines.host_list import LOCALHOST, parse_host_list
from poprun_py.machines.remote_shell import Shell
from poprun_py.options.config_files import parse_config
from poprun_py.options.declared_options import OPTIONS
from poprun_py.options.gathered_options import from_environment
from poprun_py.options.launch_config import merged_config
from poprun_py.options.option_origins import from_command_line
from poprun_py.options.option_types import FLAG, YES_NO
from poprun_py.options.python_keywords import from_keywords
from poprun_py.planning.installed_mpi import MPICH, OPEN_MPI_5, Mpi
from poprun_py.planning.partition_decision import refusal
from poprun_py.planning.plan_warnings import plan_warnings, unused_option_warnings
from poprun_py.running.supervise.launch_result import LaunchResult

_PROBED = ProbedHosts(shell=Shell(words=("ssh",)), machines={}, hostnames={})
_WARNINGS = ROOT / "poprun_py" / "planning" / "plan_warnings.py"


def said(*sources, hosts="", kind=OPEN_MPI_5):
    """Return the warnings about options in a job on ``hosts``, or on this machine."""
    planned = plan_blindly(
        merged_config(*sources),
        hosts=parse_host_list(hosts, source="test") if hosts else (LOCALHOST,),
        mpi=Mpi(path="/mpi/bin/mpirun", kind=kind),
        environ={"PATH": "/bin"},
        probed=_PROBED if hosts else None,
    )
    found = unused_option_warnings(planned)
    assert set(found) <= set(plan_warnings(planned))
    return found


def typed(**values):
    return from_command_line({"program": ("x",), **values})


# --- every option -------------------------------------------------------------------------------


def read_fields():
    """Return the fields of configurations that code reads outside of their declaration."""
    names = set()
    for file in (ROOT / "poprun_py").rglob("*.py"):
        if file.parent.name == "options" or file == _WARNINGS:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("config"):
                names.add(node.attr)
    return names


# Options that never have an effect, with a value that asks for one.
_NEVER = {"synchronise_poplar_sdk": True, "distribute_ssh_key": True}
# Options that have no effect without a pod, apart from variables that are passed on.
_OF_PARTITIONS = {
    "vipu_partition_attempts": 2,
    "vipu_cluster": "c",
    "vipu_allocation": "a",
    "update_partition": True,
    "reset_partition": True,
    "remove_partition": True,
    "sync_type": "ST_GS2_DEFAULT",
    "vipu_server_host": "h",
    "vipu_server_port": 8090,
    "vipu_server_timeout": 9,
    "vipu_partition": "p",
}


def test_every_option_is_read_by_code_or_has_a_warning():
    # The name of a file is read before there is a configuration.
    unread = set(OPTIONS) - set(read_fields()) - {"import_config"}
    assert unread == set(_NEVER)


@pytest.mark.parametrize("name", [*_NEVER, *_OF_PARTITIONS])
def test_an_option_for_real_ipus_has_a_warning_without_a_pod(name):
    value = {**_NEVER, **_OF_PARTITIONS}[name]
    (sentence,) = said(typed(**{name: value}))
    assert sentence.startswith(f"--{name.replace('_', '-')} has no effect: ")
    text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    (sentence,) = said(from_environment({f"POPRUN_{name.upper()}": text})[0])
    assert sentence.startswith(f"POPRUN_{name.upper()} has no effect: ")
    (sentence,) = said(parse_config(json.dumps({name: value}), "job.json"), hosts="a")
    assert sentence.startswith(f"{name} in job.json has no effect: ")


def test_options_with_one_reason_share_a_sentence():
    given = {"vipu_cluster": "c", "sync_type": "ST_GS2_DEFAULT", "vipu_server_port": 8091}
    assert said(typed(**given, vipu_partition="p")) == (
        (
            "--vipu-server-port has no effect: the IPUs are emulated without a V-IPU server, and "
            "these values only go into the variables IPUOF_VIPU_API_* of the instances"
        ),
        (
            "--vipu-partition has no effect: the IPUs are emulated without a partition, and only "
            "IPUOF_VIPU_API_PARTITION_ID, gc-info and gc-monitor show the name"
        ),
        "--vipu-cluster, --sync-type have no effect: the IPUs are emulated, and no partition "
        "is made or changed",
    )


def test_with_a_pod_options_of_partitions_have_no_warning():
    planned = plan_blindly(
        merged_config(typed(**_OF_PARTITIONS)),
        hosts=(LOCALHOST,),
        mpi=Mpi(path="/mpi/bin/mpirun", kind=OPEN_MPI_5),
        environ={"PATH": "/bin"},
    )
    of_folder = replace(planned, partition=refusal("/pods/p", ""))
    assert unused_option_warnings(of_folder) == (
        (
            "--vipu-server-host, --vipu-server-port have no effect: the job uses the pod /pods/p; "
            "to use the server that these options name, add --pod server"
        ),
    )
    server = replace(of_folder, config=replace(of_folder.config, pod="server"))
    assert unused_option_warnings(server) == ()


def test_defaults_and_neutral_values_have_no_warning():
    assert said(typed()) == ()
    nothing = dict.fromkeys(
        (
            n
            for n in {**_NEVER, **_OF_PARTITIONS}
            if OPTIONS[n].type in (YES_NO, FLAG) and n != "remove_partition"
        ),
        False,
    )
    assert len(nothing) == 4
    assert said(typed(**nothing, remove_partition=False)) == ()


# --- options that do nothing in some jobs -------------------------------------------------------

_FOR_HOSTS = {
    "host_subnet": "banana",
    "ssh_args": "-p 2",
    "ssh_config": "/no/file",
    "no_check": True,
    "sync": "/no/folder",
    "synchronise_python_venv": True,
    "allow_fewer_hosts": True,
}


@pytest.mark.parametrize("name", _FOR_HOSTS)
def test_options_for_hosts_have_a_warning_for_a_local_job(name):
    layer = typed(**{name: _FOR_HOSTS[name]}, max_restarts=1)
    (sentence,) = said(layer)
    assert sentence == (
        f"--{name.replace('_', '-')} has no effect: all instances run on this machine"
    )
    assert said(layer, hosts="a,b") == ()


@pytest.mark.parametrize("place", ["file", "variable"])
def test_options_that_apply_to_all_jobs_have_no_warning_for_one(place):
    layer = (
        parse_config('{"host-subnet": "eth0"}', "job.json")
        if place == "file"
        else from_environment({"POPRUN_HOST_SUBNET": "eth0"})[0]
    )
    assert said(layer) == ()
    assert len(said(from_keywords({"host_subnet": "eth0"}))) == 1  # given for this job


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"allow_fewer_hosts": True},
         ("--allow-fewer-hosts has no effect: a job is only restarted if --max-restarts is "
          "given")),
        ({"process_placement": "packnuma", "numa_aware": True},
         "--process-placement has no effect: --numa-aware yes takes precedence"),
        ({"overwrite_config": True},
         "--overwrite-config has no effect: neither --export-config nor --export-plan is given"),
        ({"run": True}, ("--run has no effect: the job runs without this option, too; the "
                         "option is meant for --export-plan")),
        ({"print_topology": "tree", "export_plan": "-"},
         "--print-topology has no effect: --export-plan - prints the plan to standard output"),
        ({"allow_fewer_hosts": True, "max_restarts": 1}, None),
        ({"process_placement": "packnuma"}, None),
        ({"overwrite_config": True, "export_config": "c.toml"}, None),
        ({"overwrite_config": True, "export_plan": "p"}, None),
        ({"run": True, "export_plan": "p"}, None),
        ({"run": True, "export_config": "-"}, None),
        ({"print_topology": "tree", "export_plan": "p"}, None),
    ],
)  # fmt: skip
def test_an_option_that_another_one_overrides_has_a_warning(values, sentence):
    found = said(typed(num_instances=4, **values), hosts="a,b")
    assert found == ((sentence,) if sentence else ())


def test_options_for_open_mpi_have_a_warning_with_another_mpi():
    assert said(typed(mpi_fast_start=True)) == ()
    assert said(typed(mpi_fast_start=False), kind=MPICH) == ()
    (sentence,) = said(typed(mpi_fast_start=True), kind=MPICH)
    assert sentence.startswith(
        "--mpi-fast-start has no effect: this option only affects Open MPI on hosts"
    )
    assert said(typed(allow_run_as_root=False)) == ()
    assert said(typed(allow_run_as_root=True), kind=MPICH) == ()
    (sentence,) = said(typed(allow_run_as_root=False), kind=MPICH)
    assert sentence == (
        "--allow-run-as-root has no effect: this MPI always allows root to start jobs"
    )


@pytest.mark.parametrize(
    ("words", "machine", "part"),
    [
        (["--process-placement", "packnuma"], "two-socket-smt", "--process-placement has no"),
        (
            ["--numa-aware", "yes"],
            "two-socket-smt",
            "--numa-aware has no effect: a single instance",
        ),
        (["--numa-aware", "yes", "-n", "2"], "two-socket-smt", ""),
        (["--process-placement", "packnuma", "--cores-per-instance", "1"], "two-socket-smt", ""),
        (["--strict-binding"], "two-socket-smt", "--strict-binding has no effect: no instance is"),
        (["--strict-binding", "-n", "2"], "two-socket-smt", ""),
        (["--smt", "yes"], "two-socket-smt", ""),
        (["--smt", "yes"], "one-node", ""),
        (["--smt", "yes"], "hybrid", ""),
        (["--smt", "yes"], "bare", "--smt has no effect: no core has more than one hardware"),
    ],
)
def test_placement_options_without_effect_have_a_warning(words, machine, part, capsys):
    file = SNAPSHOTS / f"{machine}.json"
    assert run([*words, "--hardware", str(file), "--dry-run", "x"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "no effect" in line]
    assert len(lines) == bool(part)
    assert part in "".join(lines)


# --- through the command ------------------------------------------------------------------------


def test_a_launch_warns_before_it_runs(monkeypatch, capsys):
    said = []

    def launched():
        said.extend(capsys.readouterr().err.splitlines())
        return LaunchResult(exit_code=0)

    monkeypatch.setattr(
        "poprun_py.launching.launch.Attempts", lambda *_, **__: SimpleNamespace(run=launched)
    )
    assert run(["--host-subnet", "banana", "--vipu-cluster", "c", "true"]) == 0
    assert capsys.readouterr().err == ""
    assert said == [
        "poprun-py: warning: --vipu-cluster has no effect: the IPUs are emulated, and no "
        "partition is made or changed",
        "poprun-py: warning: --host-subnet has no effect: all instances run on this machine",
    ]


def test_options_beside_stacks_have_a_warning(capsys):
    assert run(["--stacks", "1", "-n", "2", "--timeout", "5m", "-v"]) == 3
    assert capsys.readouterr().err.splitlines()[0] == (
        "poprun-py: warning: --num-instances, --timeout have no effect: --stacks only queries a "
        "running job"
    )
