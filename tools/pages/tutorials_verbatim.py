"""The page docs/tutorials-verbatim.md.

It puts together what tests/sdk_programs holds: programs, command lines, and what they printed when
``pytest tests/sdk_programs --rewrite-goldens`` was run last.
"""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

from tools.pages.tutorials_catalog import COMMANDS, HERE, RUNS, Command, Run

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = "../tests/sdk_programs"
_CELL = re.compile(r"^# %% (.+)$", re.M)

_HEAD = """# Graphcore's tutorials, unchanged

Programs of PopTorch's tutorials run here as they are printed, with `import poptorch`,
`import popdist` and `import horovod.torch`: alone under `python -m popdist_py PROGRAM`, or under
`poprun-py`. This page shows what they printed here, beside what their text printed on hardware. It
is made by `make generated`; tests run every program and compare.

- **Cells.** A tutorial prints blocks, not always a program. Each program below consists of cells:
  those *from the text* are as printed, and those *typed by the reader* are what the text leaves to
  its reader, such as imports. Repairs of the text's form are named.
- **Data.** No data set is downloaded. The files of MNIST, FashionMNIST and CIFAR-10 are made of
  scikit-learn's handwritten digits, shifted copies of them, and their outlines instead of clothes.
  torchvision reads them with its own code; its table of MD5 sums for CIFAR-10 gets the sums of the
  made files. So accuracies are not those of the text.
- **Size.** Data sets are small. Where a program makes its own, `SDK_PROGRAMS_ITEMS` lets
  `TensorDataset` keep its first items. Programs and their arguments stay as they are, except where
  it is said.
- **Seed.** Programs that have to reach an accuracy begin with a fixed seed: of some hundred first
  weights of a small net one never learns.
- **Measured here:** losses and accuracies (the training is real), throughputs and times of two
  cores that had other work too. **Modelled:** IPUs, their pipeline stages and replicas. **Not
  here:** cycles and memory of hardware, profiles of the Graph Analyser.
- **Compared:** every line, without its numbers where they vary between runs. Bars on their way and
  Python's advice about worker processes are left out.
"""

_LATER = """
## Not run

What the texts name and do not print cannot be run as it stands. [The texts, command by
command](seeds.md) shows what stands for it:

| command | what is missing |
|---|---|
| `python3 train.py --dataset imagenet --data-dir path-to/imagenet`, `--config my_config`, `--config my_config --epochs 50`, `--config mk2_resnet8_test --wandb` | the CNN application, which is written in TensorFlow; [the application here](cnns.md) has its options and commands |
| `python restore.py --restore-path ...`, `validation.py` | the same |
| the hands-on session's [commands](../tests/sdk_programs/commands/hands_on.sh) with a micro-batch of 64 | time: ResNet-101 on two cores. Two of them are run smaller, above. The first one, as it is printed, ends with an out-of-memory error here too. [The session here](hands-on.md) has a program that reads all of them, and one that goes through their steps, the out-of-memory error too |
| `distributed_example.py` of the course | its text; [the course here](course.md) has a program of that name |
| `python3 -m pip install -r requirements.txt`, `jupyter-notebook`, `ssh -NL` | nothing of this project |
"""  # noqa: E501


def page() -> str:
    """Return the page's text."""
    parts = [_HEAD]
    for title, runs in itertools.groupby(RUNS, key=lambda run: run.title):
        parts.append(f"\n## {title}\n")
        for file, same in itertools.groupby(runs, key=lambda run: run.file):
            parts += [_program(file), *map(_run, same)]
    parts.append("\n## README of the CNN application: PopRun's command lines\n")
    parts.append(_topology())
    parts += map(_command, COMMANDS)
    parts.append(_LATER)
    return "".join(parts)


def _program(file: str) -> str:
    """Name a program, its cells or what it re-creates."""
    text = (HERE / file).read_text(encoding="utf-8")
    said = ast.get_docstring(ast.parse(text)) or ""
    head = f"\n### [{file.partition('/')[2]}]({_FOLDER}/{file})\n\n{said}\n"
    cells = _CELL.split(text)[1:]
    if not cells:
        return head
    rows = [
        f"| {source} | {_first(body)} |\n"
        for source, body in zip(cells[::2], cells[1::2], strict=True)
    ]
    return f"{head}\n| cell | begins with |\n|---|---|\n{''.join(rows)}"


def _first(body: str) -> str:
    """Return the first line of code of a cell, as code of a table."""
    lines = (line.strip() for line in body.splitlines())
    line = next(line for line in lines if line and not line.startswith("#"))
    return f"`{line.replace('|', chr(92) + '|')}`"


def _run(run: Run) -> str:
    """Show a run: what the text prints, and what is printed here."""
    printed = (HERE / "printed" / f"{run.name}.txt").read_text(encoding="utf-8")
    words = " ".join(run.command.split()[1:])
    here = f"poprun-py {' '.join(run.launcher)}" if run.launcher else "python -m popdist_py"
    if run.notebook:
        here = "python -m popdist_py -c"
        words = f'"$(cat {words})"'
    parts = [f"\n`{run.command}`\n"]
    if run.about:
        parts.append(f"\n{run.about}\n")
    if run.text:
        parts.append(f"\nThe text shows:\n\n```text\n{run.text}\n```\n")
    vary = " Numbers vary." if run.numbers_vary else ""
    parts.append(f"\nHere, as `{here} {words}`{_ending(run)}.{vary}\n")
    parts.append(f"\n```text\n{printed}```\n")
    return "".join(parts)


def _ending(run: Run) -> str:
    return f", which ends with exit code {run.code}" if run.code else ""


def _topology() -> str:
    table = (HERE / "commands" / "topology.txt").read_text(encoding="utf-8")
    return (
        "\nThe README's table for 8 replicas and 2 instances is what the launcher prints, letter "
        f"for letter:\n\n```text\n{table}```\n"
    )


def _command(command: Command) -> str:
    """Show a command line as it is planned."""
    name = f"{command.name}.repaired.sh" if command.repaired else f"{command.name}.sh"
    text = (HERE / "commands" / name).read_text(encoding="utf-8")
    hosts, domains, instances, replicas = command.rows
    repaired = ""
    if command.repaired:
        repaired = f"\nRepaired: {command.repaired} As printed: {command.as_printed}.\n"
    return (
        f"\n### {command.name.upper()}\n{repaired}\n```text\n{text}```\n\n{command.about} Plan: "
        f"{hosts} host{'s' * (hosts > 1)}, {domains} IPU-Link domain{'s' * (domains > 1)}, "
        f"{instances} instances, {replicas} replicas.\n"
    )


def files() -> dict[Path, str]:
    """Return the page by its file."""
    return {_ROOT / "docs" / "tutorials-verbatim.md": page()}
