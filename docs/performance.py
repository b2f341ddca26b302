"""Writes docs/performance.md from benchmarks/results.json: ``python docs/performance.py [--run]``.

With --run the benchmarks are run first, which takes some ten minutes on a machine that should do
nothing else; without it the page is made from what was measured last.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = Path(__file__).with_suffix(".md")
BENCHMARKS = ("allreduce", "train_step")

HEAD = """# Performance of collectives and training steps

Made by `python docs/performance.py --run`. Measured on {cpu}, {cores} cores, {system}; Python
{python}, PyTorch {torch}, Open MPI {openmpi}. All ways of a row are taken in turns in one run, and
numbers are medians.
"""
ALL_REDUCE = """
## All-reduce within a host

Microseconds to sum a float32 array over all instances (`benchmarks/allreduce.py`). *window*: ours
on an array that lives in memory shared by the host's instances, as gradients do; *ours*: on any
other array; *copy*: every instance copies its array once, at the same time as the others.

| instances | size | window | ours | MPI_Allreduce | gloo | copy | gloo / window | MPI / window |
|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""
TRAINING = """
## Training step

Milliseconds for one step of SGD with momentum, global batch alike (`benchmarks/train_step.py`).
*unconnected*: two processes that train without exchanging anything, the bound for two instances;
*deterministic*: ours with the sum in a fixed tree over the replicas;
*DDP*: over gloo, with 2 processes; *one process*: with 2 threads.

| model | ours | DDP | deterministic | unconnected | one process | DDP / ours | unconnected / ours |
|---|--:|--:|--:|--:|--:|--:|--:|
"""
NOTES = """
## How it works

- **Small arrays** are copied into a window that the instances of a host share; each reduces
  everybody's by itself, after one meeting. Which sizes count as small is measured once per machine
  when there are more than two instances.
- **Large arrays**: each instance reduces its own slice in chunks that fit the cache, then all have
  the slices of all. Gradients live in the window, so nothing is copied; the slices of other arrays
  are read from where they lie in the other process.
- **Training steps** within a host send no sums round: the weights are in that window too, and each
  instance updates the slice whose gradients it has added up, for all.
- **Between hosts** the owners of one slice on all hosts exchange pieces of it over sockets while
  the next are reduced, so each byte crosses a link once per host.
- **Waiting** reads a counter for some 20 microseconds, then lets others run, then sleeps in the
  kernel: instances that wait take no core from those that work.
- **Deterministic mode** keeps one gradient per replica and adds them in one binary tree over the
  global replica index: equal bits however the replicas are split over instances and hosts.
"""


def size_of(count: int) -> str:
    """Return a size as people write it."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.0f} {unit}"
    return f"{count} B"


def page(results: dict[str, Any]) -> str:
    """Return the page for what was measured."""
    parts = [HEAD.format(**results["machine"]), ALL_REDUCE]
    for row in results["allreduce"]:
        cells = [row["instances"], size_of(row["bytes"])]
        cells += [f"{row[f'{way}_us']:,.0f}" for way in ("window", "ours", "mpi", "gloo", "copy")]
        cells += [f"{row['window/gloo']:.1f}", f"{row['window/mpi']:.1f}"]
        parts.append(_line(cells))
    parts.append(TRAINING)
    ways = ("ours", "ddp", "deterministic", "unconnected", "one process")
    for row in results["train_step"]:
        cells = [row["model"], *(f"{row[f'{way}_ms']:.1f}" for way in ways)]
        cells += [f"{row['ours/ddp']:.2f}", f"{row['ours/unconnected']:.2f}"]
        parts.append(_line(cells))
    return "".join([*parts, NOTES])


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def measured() -> dict[str, Any]:
    """Run the benchmarks."""
    results: dict[str, Any] = {"machine": machine()}
    for name in BENCHMARKS:
        done = subprocess.run(
            [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        results[name] = json.loads(done.stdout)
    return results


def machine() -> dict[str, Any]:
    """Describe this machine and what the numbers depend on."""
    information = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in information if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len([line for line in information if line.startswith("processor")]),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "openmpi")},
    }


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="run the benchmarks first")
    if parser.parse_args().run:
        RESULTS.write_text(json.dumps(measured(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
