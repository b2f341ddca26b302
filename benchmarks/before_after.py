"""Whether a change made anything slower: the same work from two working trees, in turns.

python benchmarks/before_after.py --before ../old-tree [--rounds 9] [--parts launch replicas steps]
    [--json]

The other tree is a git worktree of an older commit, installed into a ``.venv`` of its own. For
every piece of work: the medians of both trees, and after / before.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
TWO = ("--num-instances", "2", "--num-replicas", "2")
ROWS = ("--models", "mlp", "cnn", "--replicas", "1", "4", "--micro-batches", "2", "16")

Figures = dict[str, float]


def run(tree: Path, *words: str) -> str:
    """Run a program of a tree's environment and return what it prints."""
    return subprocess.run(
        [str(tree / ".venv" / "bin" / words[0]), *words[1:]],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=tree,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tree)},
    ).stdout


def launch(tree: Path) -> Figures:
    """Return the seconds of what the launcher does without a program worth mentioning."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "mpi.py")
        program.write_text("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n")
        works = {
            "help": ("--help",),
            "dry run": (*TWO, "--dry-run", "true"),
            "two instances of true": (*TWO, "true"),
            "two instances of mpi4py": (*TWO, str(program)),
        }
        taken = {}
        for what, words in works.items():
            began = time.perf_counter()
            run(tree, "poprun-py", *words)
            taken[f"launch: {what}"] = time.perf_counter() - began
    return taken


def replicas(tree: Path) -> Figures:
    """Return one call's time over a plain step's, for models that dispatch and that compute.

    The plain step is timed in turns with the call: what disturbs one disturbs both.
    """
    rows = json.loads(
        run(tree, "python", "benchmarks/replicas.py", "--json", "--seconds", "0.6", *ROWS)
    )
    return {
        f"call / plain step: {r['model']} R={r['replicas']} micro-batch {r['micro_batch']}": r[
            "ours/plain"
        ]
        for r in rows
    }


def steps(tree: Path) -> Figures:
    """Return the seconds of a training step of two instances."""
    taken = {}
    for model in ("mlp", "cnn"):
        words = (*TWO, "benchmarks/train_step.py", "--models", model, "--seconds", "2")
        text = run(tree, "poprun-py", *words, "--worker", "poprun-py")
        line = next(line for line in text.splitlines() if '": [' in line)
        for what, seconds in json.loads(line.removeprefix("[1,0]<stdout>:")).items():
            taken[f"step: {model} {what}"] = statistics.median(seconds)
    return taken


PARTS: dict[str, tuple[Callable[[Path], Figures], int]] = {
    # What is measured, and in how many of the rounds: one in so many.
    "launch": (launch, 1),
    "replicas": (replicas, 3),
    "steps": (steps, 3),
}


def compared(before: Path, parts: list[str], rounds: int) -> Iterator[dict[str, object]]:
    """Yield one row for every piece of work: its medians in both trees, and their ratio."""
    for tree in (before, HERE):
        for package in ("poprun_py", "popdist_py"):
            compileall.compile_dir(tree / package, quiet=1)
    for part in parts:
        measure, share = PARTS[part]
        taken: dict[str, tuple[list[float], list[float]]] = {}
        for turn in range(max(3, rounds // share)):
            # Who comes first changes, so that a disturbance meets both.
            for side, tree in sorted(enumerate((before, HERE)), reverse=bool(turn % 2)):
                for what, figure in measure(tree).items():
                    taken.setdefault(what, ([], []))[side].append(figure)
        for what, (old, new) in taken.items():
            medians = statistics.median(old), statistics.median(new)
            yield {
                "what": what,
                "before": round(medians[0], 4),
                "after": round(medians[1], 4),
                "after/before": round(medians[1] / medians[0], 3),
                "fastest/fastest": round(min(new) / min(old), 3),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, required=True, help="the other working tree")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    for row in compared(arguments.before.resolve(), arguments.parts, arguments.rounds):
        rows.append(row)
        if not arguments.json:
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
