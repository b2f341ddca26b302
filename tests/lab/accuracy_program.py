"""The digits example, trained with several seeds and compressions; prints mean accuracies as JSON.

Arguments: the number of seeds, the number of epochs, and the names of the compressions. Run by
test_gradient_compression.py on all hosts.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import torch
import train

import popdist_py

# What gradientCompression() is given; powersgd after an epoch, of the rank that all matrices take.
COMPRESSIONS = {"none": "none", "fp16": "fp16", "bf16": "bf16", "powersgd": ["powersgd", 2, 90]}


def accuracy(compression, seed, epochs):
    # One back end: what measured faster would change the last bits from run to run.
    chosen = json.dumps(
        {
            "Training.gradientCompression": COMPRESSIONS[compression],
            "Emulator.replicaExecution": "loop",
        }
    )
    with (
        mock.patch.dict(os.environ, POPTORCH_DEFAULT_OPTIONS=chosen),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        return train.main(["--seed", str(seed), "--epochs", epochs])


def main():
    torch.set_num_threads(1)
    seeds, epochs = range(int(sys.argv[1])), sys.argv[2]
    found = {
        compression: sum(accuracy(compression, seed, epochs) for seed in seeds) / len(seeds)
        for compression in sys.argv[3:]
    }
    if popdist_py.getInstanceIndex() == 0:
        print(json.dumps(found))


main()
