"""The hosts and the MPI of a launch, and the user's MPI arguments as words."""

from __future__ import annotations

import pytest

from poprun_py import plan
from poprun_py.command.cli import run
from poprun_py.errors import StartError, UsageError
from poprun_py.machines import host_checks
from poprun_py.machines.host_list import LOCALHOST, Host
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.hosts_and_mpi import gather_inputs, shown_machines
from poprun_py.planning.instances_on_hosts import make_topology
from poprun_py.planning.mpi_commands import split_mpi_arguments

NO_MPI = LaunchConfig(mpi="/no/such/mpirun")
ELSEWHERE = (Host(name="n0"),)


def test_hardware_of_this_machine_needs_no_mpi(capsys):
    assert len(shown_machines(NO_MPI, {}, (LOCALHOST,))) == 1
    assert run(["--mpi", "/no/such/mpirun", "--print-hardware"]) == 0
    assert "NUMA node" in capsys.readouterr().out


def test_everything_else_needs_mpi(capsys):
    for contact in (False, True):
        with pytest.raises(StartError, match="/no/such/mpirun"):
            gather_inputs(NO_MPI, make_topology(NO_MPI, (LOCALHOST,)), {}, contact=contact)
    assert run(["--mpi", "/no/such/mpirun", "--check"]) == StartError.exit_code
    assert "/no/such/mpirun" in capsys.readouterr().err


def test_only_launch_and_hardware_contact_other_hosts(monkeypatch):
    asked = []

    def survey_hosts(config, hosts, *, mpirun, environ, contact):
        assert hosts == ELSEWHERE
        asked.append(contact)
        return host_checks.ProbedHosts(shell=host_checks.Shell(()), machines={}, hostnames={})

    monkeypatch.setattr(host_checks, "probe_hosts", survey_hosts)
    topology = make_topology(LaunchConfig(), ELSEWHERE)
    gather_inputs(LaunchConfig(), topology, {}, contact=False)
    gather_inputs(LaunchConfig(), topology, {}, contact=True)
    shown_machines(LaunchConfig(), {}, ELSEWHERE)
    assert asked == [False, True, True]


def test_described_hardware_is_shown_without_contact(monkeypatch, tmp_path, capsys):
    assert run(["--print-hardware=json"]) == 0
    saved = tmp_path / "machine.json"
    saved.write_text(capsys.readouterr().out)
    monkeypatch.setattr(host_checks, "probe_hosts", None)
    (machine,) = shown_machines(LaunchConfig(hardware=str(saved)), {}, ELSEWHERE)
    assert machine is not None


def test_the_environment_file_is_read_for_plans_only(tmp_path):
    config = LaunchConfig(env_file=str(tmp_path / "missing"))
    assert len(shown_machines(config, {}, (LOCALHOST,))) == 1
    with pytest.raises(UsageError, match=r"^env_file "):
        gather_inputs(config, make_topology(config, (LOCALHOST,)), {}, contact=False)


@pytest.mark.parametrize("words", [["--check"], ["--print-hardware"], ["--dry-run", "true"]])
def test_a_malformed_subnet_is_refused(words, capsys):
    assert run(["--host-subnet", "10.0.0.0/99", *words]) == UsageError.exit_code
    assert "--host-subnet" in capsys.readouterr().err


def test_mpi_arguments_are_split_into_words_once():
    config = LaunchConfig(
        num_instances=2,
        num_replicas=2,
        mpi_global_args=("--a 'b c'", "--d"),
        mpi_local_args=("-x E",),
        instance_mpi_local_args=("1:-x F", "1:-x G"),
    )
    same, arguments = split_mpi_arguments(config)
    assert same is config
    assert arguments.for_mpirun == ("--a", "b c", "--d")
    assert arguments.local(0) == ("-x", "E")
    assert arguments.local(1) == ("-x", "E", "-x", "F", "-x", "G")


@pytest.mark.parametrize(
    ("texts", "left", "words"),
    [
        (("--output-filename out",), ("",), ()),
        (("--a 'b' --output-filename=out:nocopy", "-d"), ("--a b", "-d"), ("--a", "b", "-d")),
        (("--output-filename first", "-output-filename out"), ("", ""), ()),
    ],
)  # fmt: skip
def test_output_filename_becomes_output_dir(texts, left, words):
    config, arguments = split_mpi_arguments(LaunchConfig(mpi_global_args=texts))
    assert (config.output_dir, config.mpi_global_args, arguments.for_mpirun) == ("out", left, words)
    given, _ = split_mpi_arguments(LaunchConfig(mpi_global_args=texts, output_dir="mine"))
    assert given.output_dir == "mine"


def test_output_filename_without_a_value_is_left_to_mpirun():
    config = LaunchConfig(mpi_global_args=("--output-filename",))
    same, arguments = split_mpi_arguments(config)
    assert (same.output_dir, arguments.for_mpirun) == (None, ("--output-filename",))


@pytest.mark.parametrize(
    "option", [{"mpi_local_args": ("-x 'A",)}, {"instance_mpi_local_args": ("7:-x A",)}]
)
def test_malformed_mpi_arguments_are_refused_before_other_hosts_are_contacted(option, monkeypatch):
    monkeypatch.setattr(host_checks, "probe_hosts", None)
    with pytest.raises(UsageError, match="mpi_local_args"):
        plan(LaunchConfig(program=("x",), host="n0", **option), contact_hosts=True)
