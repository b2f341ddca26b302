"""Variables that depend on the host of an instance, and the user's own variables before them."""

import os

import pytest

from poprun_py.instance import program_environment
from poprun_py.instance.job_folders import folder_name
from poprun_py.instance.program_environment import shared_memory_variables


@pytest.mark.parametrize(
    ("devices", "visible", "found"),
    [
        ([], None, False),
        (["null", "kvm", "dri/card0", "dri/by-path", "vfio/vfio"], None, False),
        (["nvidia0", "nvidiactl"], None, True),
        (["nvidia0", "nvidiactl"], "", False),
        (["nvidia0"], "-1", False),
        (["dri/card1", "dri/renderD128"], None, True),
        (["vfio/vfio", "vfio/0"], None, True),
        (["kfd"], None, True),
        (["davinci0"], "", True),
    ],
)
def test_accelerators_are_recognised_by_their_devices(
    tmp_path, monkeypatch, devices, visible, found
):
    for name in devices:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert program_environment.has_accelerator(str(tmp_path)) == found


@pytest.mark.parametrize(
    ("size", "own", "has_accelerator", "told"),
    [
        ("2", None, False, "true"),
        ("2", None, True, None),
        ("2", "false", False, "false"),
        ("1", None, False, None),
    ],
)
def test_trainers_use_cpus_on_hosts_without_accelerators(
    monkeypatch, size, own, has_accelerator, told
):
    environ = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environ |= {"ACCELERATE_USE_CPU": own} if own else {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(program_environment, "has_accelerator", lambda: has_accelerator)
    program_environment.set_mpi_and_torchrun_variables()
    assert environ.get("ACCELERATE_USE_CPU") == told


@pytest.mark.parametrize(("mpi", "kept"), [("PMI_RANK", "lo"), ("OMPI_COMM_WORLD_RANK", None)])
def test_ucx_under_mpich_is_kept_on_the_network_of_the_job(monkeypatch, tmp_path, mpi, kept):
    """Programs find Open MPI's names under MPICH too, but the wrapper must not."""
    environ = {"RANK": "1", mpi: "1", "POPDIST_NETWORK": "lo"}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(program_environment, "_FABRIC", str(tmp_path / "absent"))
    program_environment.complete()
    assert environ["OMPI_COMM_WORLD_RANK"] == "1"
    assert environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert environ.get("UCX_NET_DEVICES") == kept


def test_open_mpi_shares_memory_in_the_folder_of_the_job_unless_the_user_chose_another():
    chosen = {
        "OMPI_MCA_btl_sm_backing_directory": "/tmp",
        "OMPI_MCA_osc_sm_backing_directory": f"/dev/shm/{folder_name('7')}",  # from an outer job
    }
    told = shared_memory_variables("/dev/shm/ours", chosen)
    assert "OMPI_MCA_btl_sm_backing_directory" not in told
    assert told["OMPI_MCA_osc_sm_backing_directory"] == "/dev/shm/ours"
    assert shared_memory_variables(None, chosen)["OMPI_MCA_osc_sm_backing_directory"] is None
