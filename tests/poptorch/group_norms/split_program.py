"""Trains models with batch norms of groups on this instance's replicas; run by test_splits.py.

Arguments: a folder, the number of replicas, and group sizes. Every instance writes SIZE-INDEX.pt.
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
    for size in map(int, sizes):
        exact = group_models.options_for(
            size, accumulation=2, dtype=torch.float32, deterministic=True
        )
        fast = group_models.options_for(size, how="auto")
        found = {
            "exact": tuple(group_models.trained("random", exact, torch.float32, **place)),
            "fast": tuple(group_models.trained("residual", fast, **place)),
        }
        torch.save(found, Path(folder) / f"{size}-{popdist_py.getInstanceIndex()}.pt")


if __name__ == "__main__":
    main()
