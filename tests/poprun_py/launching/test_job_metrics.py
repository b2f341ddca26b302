"""What is refused of a run's numbers before anything starts."""

from __future__ import annotations

from importlib.machinery import ModuleSpec

import pytest
from support.launcher.consoles import KeptConsole

from poprun_py import plan
from poprun_py.errors import UsageError
from poprun_py.launching import job_metrics
from poprun_py.launching.launch import Request, launch
from poprun_py.options.launch_config import LaunchConfig


@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)])
def test_a_missing_wandb_is_refused_with_what_to_install(monkeypatch, spec):
    # A folder ``wandb`` of earlier runs looks like a package without an origin.
    monkeypatch.setattr(job_metrics, "find_spec", lambda _: spec)
    planned = plan(LaunchConfig(program=("true",), metrics_to=("wandb:digits",)))
    with pytest.raises(UsageError) as caught:
        launch(Request(planned), KeptConsole())
    assert str(caught.value) == (
        "metrics_to=wandb:digits: the package wandb is not installed: pip install wandb"
    )
