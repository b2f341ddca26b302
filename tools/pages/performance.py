"""Writes docs/performance.md from benchmarks/results.json: ``make bench``.

With --run all benchmarks are run first, or those that are named: some fifty minutes on a machine
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

from tools.pages.performance_collectives import collectives_within_host, size_of, table_line
from tools.pages.performance_jobs import long_runs, many_instances
from tools.pages.performance_models import cnns, known_models
from tools.pages.performance_torch import on_hosts, steps, torch_distributed

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results.json"
PAGE = ROOT / "docs" / "performance.md"
# Each with what it is told besides --json.
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "allreduce": (),
    "train_step": (),
    "multi_host": (),
    "replicas": (),
    "models": ("--half", "--memory"),
    "cnns": (),
    "dataloader": (),
    "torch_backend": ("--modes", "sync"),
    "torch_ddp": ("--seconds", "3", "--turns", "7"),
    "torch_hosts": (),
    "many": (),
    "long_run": (),
}

HEAD = """# Performance

Made by `make bench`. All ways of a row are taken in turns in one run, and numbers are medians.
Measured on:

"""
MACHINE = """- {cpu}, {cores} cores, {system}; Python {python}, PyTorch {torch}, Open MPI {openmpi}:
  {benchmarks}
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
COMPRESSED = """
The same training step with compressed gradients (`Options.Training.gradientCompression`), powersgd
of rank 2 from its first step. *DDP*: over gloo, nothing compressed. The target of none / fp16 over
1 Gbit is 1.8: half of the bytes allow 2, less what a step computes before its first gradient.

| link | per host | none | fp16 | bf16 | powersgd | DDP | none / fp16 | target | none / powersgd |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
"""
ACCURACY = """
What the compressions cost: the digits example's accuracy in percent, over two hosts and {seeds}
seeds, and how far from *none* it may end; beside it what they bring, times as fast as *none* in the
table above. powersgd starts after an epoch here.

| compression | accuracy | less than none | at most | {links} |
|---|--:|--:|--:|{lines}
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
BOUND = """
A model that trains, with `enableSyntheticData(True)` and without: items per second on a loader's
batches, as a part of those of the model alone on data that the device makes.

| data | workers | Sync | Async |
|---|--:|--:|--:|
"""
NOTES = """
## How it works

- **Small arrays** are copied into a window that the instances of a host share; each reduces
  everybody's by itself, after one meeting. Which sizes count as small is measured once per machine
  when there are more than two instances.
- **Large arrays**: each instance reduces its own slice in chunks that fit the cache, then all have
  the slices of all. Gradients live in the window, so nothing is copied. Of other arrays, what an
  owner needs passes through the window slot by slot: while one is reduced, the next is copied in,
  and one meeting serves both. From two slots on, an owner can also read its slice from where it
  lies in the other processes and write the result there: the first six calls with arrays of one
  shape reduce one half in each way, later calls take the faster one. Between hosts it always reads
  and writes. Sums are added up in the
  order of the instances in every way. reduce_scatter is the first half of it.
- **Training steps** within a host send no sums round: the weights are in that window too, and each
  instance updates the slice whose gradients it has added up, for all.
- **Between hosts** the owners of one slice on all hosts exchange pieces of it over sockets while
  the next are reduced, so each byte crosses a link once per host.
  The parameters of a bucket are updated while the next ones travel.
- **Compressed gradients** are added up within a host as they are; pieces of the sums travel
  rounded to 16 bits, or matrices as two thin factors, and every host decodes the same bytes.
- **Waiting**: with a core for each instance, one that waits reads a counter for some 20
  microseconds, then lets others run and looks again for at most 5 milliseconds, then sleeps in the
  kernel. With fewer cores it lets others run at once, and sleeps after 0.3 milliseconds: instances
  that wait take no core from those that work.
- **Replicas** of one instance run as one recorded graph where that agrees with running them one
  after the other;
  [how that is decided](emulation.md#how-replicas-are-executed).
- **Convolutions with kernels of one element** are oneDNN's in a recorded graph. With one thread and
  fewer than 16 images torch computes them itself, one image after the other.
- **Deterministic mode** keeps one gradient per replica and adds them in one binary tree over the
  global replica index: equal bits however the replicas are split over instances and hosts.
"""


def page(results: dict[str, Any]) -> str:
    """Return the page for what was measured."""
    parts = [HEAD, *_machines(results["machines"])]
    parts += [*collectives_within_host(results["allreduce"]), TRAINING]
    ways = ("ours", "ddp", "deterministic", "unconnected", "one process")
    for row in results["train_step"]:
        cells = [row["model"], *(f"{row[f'{way}_ms']:.1f}" for way in ways)]
        cells += [f"{row['ours/ddp']:.2f}", f"{row['ours/unconnected']:.2f}"]
        parts.append(table_line(cells))
    parts.append(HOSTS)
    parts += [table_line(_host_cells(row)) for row in results["multi_host"] if "rate" in row]
    compressed = [row for row in results["multi_host"] if "fp16_ms" in row]
    parts += _compressed(compressed)
    for row in results["multi_host"]:
        parts += _accuracies(row, compressed) if "example" in row else []
    parts += _replicas(results["replicas"])
    parts += known_models(results["models"]) if "models" in results else []
    parts += cnns(results.get("cnns", []))
    parts += _loading(results["dataloader"])
    parts += torch_distributed(results.get("torch_backend", []))
    parts += steps(results.get("torch_ddp", []))
    parts += on_hosts(results.get("torch_hosts", []))
    parts += many_instances(results["many"]) if "many" in results else []
    parts += long_runs(results["long_run"]) if "long_run" in results else []
    return "".join([*parts, NOTES])


def _machines(machines: dict[str, dict[str, Any]]) -> list[str]:
    """Return a line for every machine with the benchmarks that ran there."""
    lines: dict[str, list[str]] = {}
    for name, machine in machines.items():
        lines.setdefault(json.dumps(machine), []).append(f"`{name}`")
    return [
        MACHINE.format(**json.loads(machine), benchmarks=", ".join(names))
        for machine, names in lines.items()
    ]


def _host_cells(row: dict[str, Any]) -> list[Any]:
    """Return the cells of an all-reduce or a training step between hosts."""
    what = row.get("model") or size_of(row["bytes"])
    times = [row.get(f"{way}_ms") for way in ("gradients", "ours", "mpi")]
    times.append(row.get("gloo_ms") or row.get("ddp_ms"))
    ratio = row.get("gradients/gloo") or row.get("ours/ddp")
    cells = ["" if time is None else f"{time:.2f}" for time in times]
    return [row["rate"], row["per_host"], what, *cells, f"{ratio:.2f}"]


def _compressed(rows: list[dict[str, Any]]) -> list[str]:
    """Return the table of compressed gradients; nothing where it was not measured."""
    parts = [COMPRESSED] if rows else []
    for row in rows:
        times = [f"{row[f'{way}_ms']:.0f}" for way in ("ours", "fp16", "bf16", "powersgd", "ddp")]
        fp16, powersgd = (f"{row[f'{way}/ours']:.2f}" for way in ("fp16", "powersgd"))
        target = "1.8" if row["rate"] == "1gbit" else ""
        parts.append(table_line([row["rate"], row["per_host"], *times, fp16, target, powersgd]))
    return parts


def _accuracies(found: dict[str, Any], steps: list[dict[str, Any]]) -> list[str]:
    """Return a line for every compression: what it leaves of the accuracy, and its speeds."""
    links = " | ".join(f"{step['rate']}, {step['per_host']} per host" for step in steps)
    parts = [ACCURACY.format(seeds=found["seeds"], links=links, lines="--:|" * len(steps))]
    for way in ("none", "fp16", "bf16", "powersgd"):
        accuracy = found[f"{way}_percent"]
        cells = [way, f"{accuracy:.2f}"]
        if way == "none":
            cells += ["", "", *("" for _ in steps)]
        else:
            cells += [f"{found['none_percent'] - accuracy:.2f}", "0.2"]
            cells += [f"{step[f'{way}/ours']:.2f}" for step in steps]
        parts.append(table_line(cells))
    return parts


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
        parts.append(table_line([model, replicas, *(of_size[size] for size in sizes)]))
    return parts


def _loading(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line for each data set and number of workers."""
    bounds = [row for row in rows if "against_synthetic" in row]
    rows = [row for row in rows if "against_torch" in row]
    parts = [LOADING]
    for case, workers in dict.fromkeys((row["case"], row["workers"]) for row in rows):
        ratios = {
            (row["loop"], row["loader"]): f"{row['against_torch']:.2f}"
            for row in rows
            if (row["case"], row["workers"]) == (case, workers)
        }
        order = [(loop, ours) for loop in ("reading", "computing") for ours in ("Sync", "Async")]
        parts.append(table_line([case, workers, *(ratios[key] for key in order)]))
    return [*parts, *_bounds(bounds)]


def _bounds(rows: list[dict[str, Any]]) -> list[str]:
    """Return how near trainings come to their bound; nothing where it was not measured."""
    parts = [BOUND] if rows else []
    for case, workers in dict.fromkeys((row["case"], row["workers"]) for row in rows):
        parts_of_bound = {
            row["data"]: f"{row['against_synthetic']:.2f}"
            for row in rows
            if (row["case"], row["workers"]) == (case, workers)
        }
        parts.append(table_line([case, workers, parts_of_bound["Sync"], parts_of_bound["Async"]]))
    return parts


def files() -> dict[Path, str]:
    """Return the page that the last results make."""
    return {PAGE: page(json.loads(RESULTS.read_text(encoding="utf-8")))}


def measured(name: str) -> Any:
    """Run a benchmark and return its rows."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / f"{name}.py", *BENCHMARKS[name], "--json"],
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
        for name in wanted or BENCHMARKS:
            results[name] = measured(name)
            results.setdefault("machines", {})[name] = machine()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    PAGE.write_text(files()[PAGE], encoding="utf-8")


if __name__ == "__main__":
    main()
