"""The variables that an instance is given by what its host has, and that the user's own count."""

import os

import pytest

from poprun_py.instance import launcher_channel


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
def test_which_devices_below_dev_compute(tmp_path, monkeypatch, devices, visible, found):
    for name in devices:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launcher_channel.has_accelerator(str(tmp_path)) == found


@pytest.mark.parametrize(
    ("size", "own", "has_accelerator", "told"),
    [
        ("2", None, False, "true"),
        ("2", None, True, None),
        ("2", "false", False, "false"),
        ("1", None, False, None),
    ],
)
def test_trainers_are_told_to_use_cpus(monkeypatch, size, own, has_accelerator, told):
    environ = {"RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    environ |= {"ACCELERATE_USE_CPU": own} if own else {}
    monkeypatch.setattr(os, "environ", environ)
    monkeypatch.setattr(launcher_channel, "has_accelerator", lambda: has_accelerator)
    launcher_channel.set_other_names()
    assert environ.get("ACCELERATE_USE_CPU") == told
