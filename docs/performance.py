"""Writes docs/performance.md from benchmarks/results.json: ``python docs/performance.py [--run]``.

With --run all benchmarks are run first, or those that are named: some fifteen minutes on a machine
that should do nothing else, as root for the one between hosts. Without it the page is made from
what was measured last.
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
BENCHMARKS = ("allreduce", "train_step", "multi_host", "replicas", "dataloader")

HEAD = """# Performance

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
HOSTS = """
## Between hosts

Two hosts with links of their own (`benchmarks/multi_host.py`: network namespaces, both on the same
cores). Milliseconds for an all-reduce, and for a step of the MLP above. *gradients*: ours on memory
that a host's instances share; *ours*: on any other array; gloo and DDP are started by torchrun.

| link | instances per host | what | gradients | ours | MPI | gloo or DDP | theirs / ours |
|---|--:|---|--:|--:|--:|--:|--:|
"""
REPLICAS = """
## Replicas on one instance

A step of R replicas as a multiple of a hand-written PyTorch step over the same global batch in one
piece (`benchmarks/replicas.py`); in brackets, as a multiple of R hand-written passes.

| model | R | {micro_batches} |
|---|--:|{lines}
"""
LOADING = """
## Data loading

Items per second that a loop consumes, as a multiple of torch's DataLoader with as many workers
(`benchmarks/dataloader.py`). *computing*: the loop also computes, for about as long as torch loads.

| data | workers | reading, Sync | reading, Async | computing, Sync | computing, Async |
|---|--:|--:|--:|--:|--:|
"""
NOTES = """
## How it works

- **Small arrays** are copied into a window that the instances of a host share; each reduces
  everybody's by itself, after one meeting. Which sizes count as small is measured once per machine
  when there are more than two instances.
- **Large arrays**: each instance reduces its own slice in chunks that fit the cache, then all have
  the slices of all. Gradients live in the window, so nothing is copied. Of other arrays, what an
  owner needs passes through the window in turns; large arrays of many instances, and those that go
  to other hosts, are read from where they lie in the other process.
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
    parts.append(HOSTS)
    parts += [_line(_host_cells(row)) for row in results["multi_host"]]
    return "".join(
        [*parts, *_replicas(results["replicas"]), *_loading(results["dataloader"]), NOTES]
    )


def _host_cells(row: dict[str, Any]) -> list[Any]:
    """Return the cells of an all-reduce or a training step between hosts."""
    what = row.get("model") or size_of(row["bytes"])
    times = [row.get(f"{way}_ms") for way in ("gradients", "ours", "mpi")]
    times.append(row.get("gloo_ms") or row.get("ddp_ms"))
    ratio = row.get("gradients/gloo") or row.get("ours/ddp")
    cells = ["" if time is None else f"{time:.2f}" for time in times]
    return [row["rate"], row["per_host"], what, *cells, f"{ratio:.2f}"]


def _replicas(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line for each model and number of replicas."""
    sizes = sorted({row["micro_batch"] for row in rows})
    titles = " | ".join(f"micro-batch {size}" for size in sizes)
    parts = [REPLICAS.format(micro_batches=titles, lines="--:|" * len(sizes))]
    for model, replicas in dict.fromkeys((row["model"], row["replicas"]) for row in rows):
        of_size = {
            row["micro_batch"]: f"{row['ours/plain']:.2f} ({row['ours/separate']:.2f})"
            for row in rows
            if (row["model"], row["replicas"]) == (model, replicas)
        }
        parts.append(_line([model, replicas, *(of_size[size] for size in sizes)]))
    return parts


def _loading(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line for each data set and number of workers."""
    parts = [LOADING]
    for case, workers in dict.fromkeys((row["case"], row["workers"]) for row in rows):
        ratios = {
            (row["loop"], row["loader"]): f"{row['against_torch']:.2f}"
            for row in rows
            if (row["case"], row["workers"]) == (case, workers)
        }
        order = [(loop, ours) for loop in ("reading", "computing") for ours in ("Sync", "Async")]
        parts.append(_line([case, workers, *(ratios[key] for key in order)]))
    return parts


def _line(cells: list[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |\n"


def measured(name: str) -> Any:
    """Run a benchmark and return its rows."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{name}.py", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


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
    parser.add_argument("--run", nargs="*", choices=BENCHMARKS, help="run them first; alone: all")
    wanted = parser.parse_args().run
    if wanted is not None:
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        results["machine"] = machine()
        for name in wanted or BENCHMARKS:
            results[name] = measured(name)
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


if __name__ == "__main__":
    main()
