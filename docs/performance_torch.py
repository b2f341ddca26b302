"""The part of docs/performance.md on the back end of torch.distributed, beside gloo.

From benchmarks/torch_backend.py and benchmarks/torch_ddp.py. Nothing here measures or writes files.
"""

from __future__ import annotations

from typing import Any

from performance_collectives import size_of, table_line

__all__ = ["steps", "torch_distributed"]

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
