"""The part of docs/performance.md on the back end of torch.distributed, beside gloo.

From benchmarks/torch_backend.py, torch_ddp.py and torch_hosts.py.
Nothing here measures or writes files.
"""

from __future__ import annotations

from typing import Any

from tools.pages.performance_collectives import size_of, table_line

__all__ = ["on_hosts", "steps", "torch_distributed"]

Row = dict[str, Any]

COLLECTIVES = """
## torch.distributed: collectives

Microseconds for one synchronous call of `torch.distributed` on float32, within a host, over the
[back end `popdist`](torch-backend.md) and over gloo (`benchmarks/torch_backend.py`): both in the
same processes, in turns. The size is that of the whole array of a rank.

| collective | ranks | size | popdist | gloo | gloo / popdist |
|---|--:|--:|--:|--:|--:|
"""
STEPS = """
## torch.distributed: training steps

Milliseconds for one step of DistributedDataParallel and SGD, likewise (`benchmarks/torch_ddp.py`);
one thread for each rank. *none*: buckets are filled, and nobody reduces them; *gloo / none* is what
a back end would reach that takes no time at all. *cpu*: time of the cores. The memory that a step
frees is kept for the next one over both back ends; programs that use gloo alone have to ask for it.
*bert-32*: BERT-base with a sequence of 32 tokens in place of 128.

| model | ranks | popdist | gloo | none | gloo / popdist | gloo / none | gloo / popdist, cpu |
|---|--:|--:|--:|--:|--:|--:|--:|
"""
ON_HOSTS = """
## torch.distributed: two hosts

The same between two hosts with a link of {rate} (`benchmarks/torch_hosts.py`), all on the cores of
one machine: microseconds for a call, milliseconds for a step.

| what | instances per host | size | popdist | gloo | gloo / popdist |
|---|--:|--:|--:|--:|--:|
"""


def torch_distributed(rows: list[Row]) -> list[str]:
    """Return the table of single calls; nothing where they were not measured."""
    chosen = [row for row in rows if row["mode"] == "sync"]
    return [COLLECTIVES, *map(_collective, chosen)] if chosen else []


def _collective(row: Row) -> str:
    times = [f"{row[name]:.0f}" for name in ("popdist_us", "gloo_us")]
    ratio = f"{row['popdist/gloo']:.1f}"
    size = size_of(row["bytes"]) if row["bytes"] else ""
    return table_line([row["collective"], row["instances"], size, *times, ratio])


def steps(rows: list[Row]) -> list[str]:
    """Return the table of training steps; nothing where they were not measured."""
    return [STEPS, *map(_step, rows)] if rows else []


def _step(row: Row) -> str:
    times = [f"{row[name]:.1f}" for name in ("popdist_ms", "gloo_ms", "none_ms")]
    names = ("gloo/popdist", "gloo/none", "cpu gloo/popdist")
    ratios = [f"{row[name]:.2f}" for name in names]
    return table_line([row["model"], row["instances"], *times, *ratios])


def on_hosts(rows: list[Row]) -> list[str]:
    """Return the table of two hosts; nothing where they were not measured."""
    return [ON_HOSTS.format(rate=rows[0]["rate"]), *map(_on_hosts, rows)] if rows else []


def _on_hosts(row: Row) -> str:
    if "model" in row:
        times = [f"{row[name]:.1f}" for name in ("popdist_ms", "gloo_ms")]
        what, size, ratio = f"step of {row['model']}", "", row["gloo/popdist"]
    else:
        times = [f"{row[name]:.0f}" for name in ("popdist_us", "gloo_us")]
        what, size, ratio = row["collective"], size_of(row["bytes"]), row["popdist/gloo"]
    return table_line([what, row["per_host"], size, *times, f"{ratio:.1f}"])
