"""Trains models with batch norms of groups on this instance's replicas; run by test_splits.py.

Arguments: a folder, the number of replicas, and group sizes. Every instance writes
exact-SIZE-INDEX.pt for each size, and fast-SIZE-INDEX.pt for the first one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import group_models
import torch

import popdist_py


def main():
    folder, replicas, *sizes = sys.argv[1:]
    popdist_py.init()
    place = {"first": popdist_py.getReplicaIndexOffset(), "replicas": int(replicas)}
    me = popdist_py.getInstanceIndex()

    def save(what, size, found):
        torch.save(tuple(found), Path(folder) / f"{what}-{size}-{me}.pt")

    for size in map(int, sizes):
        exact = group_models.options_for(
            size, accumulation=2, dtype=torch.float32, deterministic=True
        )
        save("exact", size, group_models.trained("random", exact, torch.float32, **place))
    size = int(sizes[0])
    fast = group_models.options_for(size, how="auto")
    save("fast", size, group_models.trained("residual", fast, **place))


if __name__ == "__main__":
    main()
