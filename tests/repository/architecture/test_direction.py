"""What a fresh interpreter holds after an import: nothing heavy where starts have to be quick."""

from __future__ import annotations

import os
import subprocess
import sys

from support.repository import ROOT


def imports_of(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return set(done.stdout.split("\n")[-2].split())


HEAVY = {"torch", "numpy", "mpi4py", "torchvision", "asyncio", "rich"}


def test_launcher_imports_nothing_heavy():
    modules = (
        *("command.cli", "command.pods.graphcore_tools", "python_api.launch", "launching.launch"),
        *("running.supervise.supervisor", "planning.launch_plan", "planning.views.plan_text"),
    )
    code = "\n".join(f"import poprun_py.{module}" for module in modules)
    assert not imports_of(code) & HEAVY


def test_planning_and_running_import_nothing_heavy():
    code = (
        "from poprun_py.command.cli import run\n"
        "words = '--num-instances 2 --num-replicas 2 --print-topology tree true'.split()\n"
        "assert run(words) == 0"
    )
    assert not imports_of(code) & (HEAVY - {"rich"})


def test_library_imports_nothing_heavy():
    heavy = {"torch", "numpy", "mpi4py", "poprun_py"}
    assert not imports_of("import popdist_py; from popdist_py import horovod, popart") & heavy


def test_model_of_the_device_imports_nothing_heavy():
    code = "from popdist_py.ipu import reports, runs, schedule_views\n"
    code += "from popdist_py.ipu.searches import search_answers\n"
    code += "from popdist_py.ipu.runs import device_document, graph_of_steps, run_from_command"
    assert not imports_of(code) & {*HEAVY, "poprun_py", "popdist_py.poptorch"}
