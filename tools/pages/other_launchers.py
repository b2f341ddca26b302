"""The page docs/other-launchers.md, from the table of options of other launchers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from poprun_py.options.other_launchers import (
    ACCELERATE,
    DEEPSPEED,
    FOREIGN_OPTIONS,
    GUESSED,
    HOROVOD,
    MPICH,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "other-launchers.md"
TOP = """# From other launchers

You know another launcher, and want the same job with `poprun-py`. The tables below list options of
other launchers, with advice for each option. These options have the same names here: `-n`, `-np`,
`-H`, `--host`, `-m`, `--nproc-per-node`, `--max-restarts`, `--oversubscribe` and `--timeout`.

An option of another launcher is refused, and nothing starts. The message names the launcher and
says what to do. Hyphens and underscores are equal:

```console
$ poprun-py --num_processes 2 train.py  # exit code 2
poprun-py: error: unknown option --num_processes, an option of accelerate launch: give the number \
of instances with --num-instances N
$ poprun-py -n 2 --rdzv-id 1 train.py  # exit code 2
poprun-py: error: unknown option --rdzv-id, an option of torchrun: leave it out: the launcher \
connects the instances, and sets MASTER_ADDR, MASTER_PORT and the ranks
```
"""
# A command of each launcher, and the same job with poprun-py.
COMMANDS = {
    TORCHRUN: (
        "torchrun --standalone --nproc-per-node 4 --log-dir logs train.py",
        "poprun-py -n 4 --output-dir runs train.py",
    ),
    OPEN_MPI: (
        "mpirun -np 8 --hostfile hosts --bind-to core -x SEED python train.py",
        "poprun-py -n 8 --host-file hosts --env SEED train.py",
    ),
    MPICH: (
        "mpiexec -n 8 -ppn 4 -hosts node0,node1 python train.py",
        "poprun-py --nproc-per-node 4 --host node0,node1 train.py",
    ),
    ACCELERATE: (
        "accelerate launch --cpu --num_processes 4 train.py",
        "poprun-py -n 4 train.py",
    ),
    SLURM: (
        "srun --nodes 2 --ntasks-per-node 4 --job-name first python train.py",
        "poprun-py --nproc-per-node 4 --run-name first train.py",
    ),
    HOROVOD: (
        "horovodrun -np 8 -H node0:4,node1:4 --timeline-filename t.json python train.py",
        "poprun-py -n 8 -H node0:4,node1:4 --timeline t.json train.py",
    ),
    DEEPSPEED: (
        "deepspeed --num_gpus 4 train.py --deepspeed",
        "poprun-py -n 4 train.py",
    ),
}
OTHERS = "Names that users try"


def page() -> str:
    """Return the page."""
    sections = (line for launcher in (*COMMANDS, GUESSED) for line in _section(launcher))
    return "".join([TOP, *sections])


def _section(launcher: str) -> Iterator[str]:
    yield f"\n## {launcher or OTHERS}\n\n"
    if launcher:
        theirs, ours = COMMANDS[launcher]
        yield f"`{theirs}` becomes `{ours}`.\n\n"
    yield "| option | with poprun-py |\n|---|---|\n"
    for option in FOREIGN_OPTIONS:
        if launcher in option.spellings:
            names = ", ".join(f"`{name}`" for name in option.spellings[launcher].split())
            yield f"| {names} | {option.advice} |\n"


def files() -> dict[Path, str]:
    """Return the page by its file."""
    return {PAGE: page()}
