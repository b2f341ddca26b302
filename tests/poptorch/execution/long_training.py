"""Trains 10,000 steps and prints the bytes that the last 9,000 added; run by test_memory.py.

Arguments: the way of running replicas, and where the batches come from.
"""

from __future__ import annotations

import itertools
import sys

import psutil
from support.models import Mlp, classified, quiet_options
from torch.utils.data import TensorDataset

import popdist_py.poptorch as poptorch

STEPS = 10_000


def by_hand(options):
    while True:
        yield classified(4)


def through_a_loader(options):
    loader = poptorch.DataLoader(options, TensorDataset(*classified(80)), batch_size=2)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def growth(execution, batches):
    """Return a wrapper that trained 10,000 steps, and the bytes that the last 9,000 added."""
    options = quiet_options().replicationFactor(2)
    options.Emulator.replicaExecution(execution)
    model = Mlp()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=1e-3)
    training = poptorch.trainingModel(model, options, optimizer)
    early = 0
    for step, batch in enumerate(itertools.islice(batches(options), STEPS), start=1):
        training(*batch)
        if step == STEPS // 10:
            early = psutil.Process().memory_info().rss
    return training, psutil.Process().memory_info().rss - early


kept, added = growth(sys.argv[1], {"by hand": by_hand, "loader": through_a_loader}[sys.argv[2]])
print(added)
