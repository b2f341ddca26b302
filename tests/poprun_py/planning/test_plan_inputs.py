"""The inputs of a plan, and the MPI arguments as words."""

from __future__ import annotations

import pytest

from poprun_py.command.cli import run
from poprun_py.errors import StartError, UsageError
from poprun_py.machines import host_checks
from poprun_py.machines.host_list import Host
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning.plan_inputs import Purpose, gather_inputs
from poprun_py.planning.user_mpi_arguments import split_mpi_arguments

NO_MPI = LaunchConfig(mpi="/no/such/mpirun")
ELSEWHERE = (Host(name="n0"),)


def test_hardware_of_this_machine_needs_no_mpi(capsys):
    inputs = gather_inputs(NO_MPI, {}, Purpose.HARDWARE)
    assert (inputs.mpi, len(inputs.machines)) == (None, 1)
    assert run(["--mpi", "/no/such/mpirun", "--print-hardware"]) == 0
    assert "NUMA node" in capsys.readouterr().out


@pytest.mark.parametrize("purpose", [Purpose.DRY_RUN, Purpose.LAUNCH, Purpose.CHECK])
def test_everything_else_needs_mpi(purpose):
    with pytest.raises(StartError, match="/no/such/mpirun"):
        gather_inputs(NO_MPI, {}, purpose)


@pytest.mark.parametrize(
    ("purpose", "contacts"),
    [
        (Purpose.DRY_RUN, [False]),
        (Purpose.LAUNCH, [True]),
        (Purpose.HARDWARE, [True]),
        (Purpose.CHECK, []),
    ],
)
def test_only_launch_and_hardware_contact_other_hosts(purpose, contacts, monkeypatch):
    asked = []

    def survey_hosts(config, hosts, *, mpirun, environ, contact):
        assert hosts == ELSEWHERE
        asked.append(contact)
        return host_checks.ProbedHosts(shell=host_checks.Shell(()), machines={}, hostnames={})

    monkeypatch.setattr(host_checks, "probe_hosts", survey_hosts)
    gather_inputs(LaunchConfig(), {}, purpose, hosts=ELSEWHERE)
    assert asked == contacts


def test_described_hardware_is_shown_without_contact(monkeypatch, tmp_path, capsys):
    assert run(["--print-hardware=json"]) == 0
    saved = tmp_path / "machine.json"
    saved.write_text(capsys.readouterr().out)
    monkeypatch.setattr(host_checks, "probe_hosts", None)
    config = LaunchConfig(hardware=str(saved))
    (machine,) = gather_inputs(config, {}, Purpose.HARDWARE, hosts=ELSEWHERE).machines
    assert machine is not None


def test_the_environment_file_is_read_for_plans_only(tmp_path):
    config = LaunchConfig(env_file=str(tmp_path / "missing"))
    assert gather_inputs(config, {}, Purpose.HARDWARE).env_file_text is None
    with pytest.raises(UsageError, match=r"^env_file "):
        gather_inputs(config, {}, Purpose.DRY_RUN)


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
