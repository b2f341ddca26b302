"""Execution of the catalogue's programs and command lines, with the lines that a terminal shows.

The data sets lie where the programs look for them; ``start/`` is on the PYTHONPATH, and says there
what it changes for generated data.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from sdk_programs.catalog import HERE, Command, Run
from support.repository import ROOT

from tools.running.printed import visible

__all__ = ["START", "plan", "run_program"]

START = HERE / "start"


def run_program(run: Run, folder: Path, data: Path, mark: tuple[str, str]) -> tuple[list[str], int]:
    """Run in ``folder`` with the data sets of ``data``; return the lines shown and the exit code.

    The environment of all its processes holds ``mark``, a name and a value.
    """
    work = folder / "work"
    work.mkdir()
    _link_data(work, data)
    source = HERE / run.file
    for path in source.parent.glob("*.py") if source.parent.name == "hands_on" else [source]:
        shutil.copy(path, work)
    program = ["-c", source.read_text()] if run.notebook else [source.name]
    if run.launcher:
        words = ["-m", "poprun_py", *run.launcher, *program, *run.words]
    else:
        words = ["-m", "popdist_py", *program, *run.words]
    environ = {"SDK_PROGRAMS_ITEMS": str(run.items)} if run.items else {}
    if run.within:
        environ["SDK_PROGRAMS_SEED"] = "1"
    done = _call(
        [sys.executable, *words], work,
        {"HOME": str(work), "SDK_PROGRAMS_CIFAR": str(data), **environ, **dict(run.environ)}, mark,
    )  # fmt: skip
    return visible(done.stdout)[-run.last :], done.returncode


def plan(command: Command, folder: Path, mark: tuple[str, str], **options: str) -> tuple[str, int]:
    """Give the command line to a shell, with ``poprun`` and these POPRUN_ options; return all.

    A stand-in for train.py says which replicas its instance has.
    """
    name = f"{command.name}.repaired.sh" if options.pop("repaired", "") else f"{command.name}.sh"
    launcher = folder / "bin" / "poprun"
    launcher.parent.mkdir(exist_ok=True)
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} -m poprun_py "$@"\n')
    launcher.chmod(0o755)
    (folder / "train.py").write_text(
        "import popdist\n"
        "first, count = popdist.getReplicaIndexOffset(), popdist.getNumLocalReplicas()\n"
        "print('replicas', *range(first, first + count))\n"
    )
    path = f"{launcher.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {f"POPRUN_{key.upper()}": value for key, value in options.items()}
    done = _call(["bash", str(HERE / "commands" / name)], folder, {"PATH": path, **variables}, mark)
    return done.stdout, done.returncode


def _call(words: list[str], folder: Path, environ: dict[str, str], mark: tuple[str, str]):
    return subprocess.run(
        words, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=280, check=False,
        env={
            **os.environ, "PYTHONPATH": f"{START}:{ROOT}", "OMP_NUM_THREADS": "1", mark[0]: mark[1],
            **environ,
        },
    )  # fmt: skip


def _link_data(work: Path, data: Path) -> None:
    """Put the data sets where the programs look for them."""
    for place in (work / "mnist_data", work / "data", work / "datasets", work.parent / "datasets",
                  work / ".torch" / "datasets"):  # fmt: skip
        place.parent.mkdir(exist_ok=True)
        place.symlink_to(data)
    # A link to a folder is not searched for pictures.
    shutil.copytree(data / "lfw", work / "lfw", copy_function=os.link)
