"""What a loader process iterates: an equal loader is made of a loader's arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.utils.data import DataLoader

from popdist_py.poptorch.data.sample_source import LoaderArguments, source_of


@pytest.mark.skipif(
    "in_order" not in inspect.signature(DataLoader).parameters,
    reason="torch before 2.6 takes batches in order alone",
)
@pytest.mark.parametrize("in_order", [True, False])
def test_a_loader_made_again_takes_batches_in_the_same_order(in_order):
    data = torch.utils.data.TensorDataset(torch.arange(4))
    items = source_of(DataLoader(data, batch_size=2, in_order=in_order), None).items
    assert isinstance(items, LoaderArguments)
    assert DataLoader(**items.arguments).in_order is in_order
