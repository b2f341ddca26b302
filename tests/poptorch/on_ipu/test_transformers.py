"""A transformer in plain torch needs the same memory as a graph of the same sizes made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.models import quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.settings import HALF_ADAM, Location, Settings
from popdist_py.ipu.specification import MK2
from popdist_py.poptorch.on_ipu.graph_of_model import graph_of_model
from tools.device.ipu_models import Transformer, bert_for_questions

LAYERS, WIDTH, LENGTH, BATCH = 4, 768, 384, 2


class Attention(nn.Module):
    """The attention of BERT, computed step by step or by one call of a torch function."""

    def __init__(self, is_fused, dropout):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.is_fused, self.dropout = nn.Linear(WIDTH, WIDTH), is_fused, dropout

    def forward(self, x, mask):
        query, key, value = (
            layer(x).view(*x.shape[:2], -1, 64).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        if self.is_fused:
            mixed = nn.functional.scaled_dot_product_attention(
                query, key, value, mask, self.dropout
            )
        else:
            scores = query @ key.transpose(-1, -2) / 8 + mask
            scores = nn.functional.dropout(torch.softmax(scores, -1), self.dropout)
            mixed = scores @ value
        mixed = self.out(mixed.transpose(1, 2).reshape(x.shape))
        # Each layer also returns its keys and values, as transformers do for later tokens.
        return nn.functional.dropout(mixed, self.dropout), key, value


class Layer(nn.Module):
    def __init__(self, is_fused, dropout):
        super().__init__()
        self.attention, self.dropout = Attention(is_fused, dropout), dropout
        self.first, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, mask):
        mixed, *present = self.attention(x, mask)
        x = self.first(mixed + x)
        made = self.outer(nn.functional.gelu(self.inner(x)))
        x = self.last(nn.functional.dropout(made, self.dropout) + x)
        return [poptorch.recomputationCheckpoint(one) for one in (x, *present)]


class Bert(nn.Module):
    def __init__(self, is_fused, dropout):
        super().__init__()
        self.words, self.positions = nn.Embedding(30_522, WIDTH), nn.Embedding(512, WIDTH)
        self.kinds, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(is_fused, dropout) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids, kinds, mask, labels):
        places = torch.arange(LENGTH)
        x = self.norm(self.words(ids) + self.positions(places) + self.kinds(kinds))
        mask = (1 - mask[:, None, None].half()) * -1e4
        for layer in self.layers:
            x, *_ = layer(x, mask)
        ends = self.head(x).transpose(1, 2).flatten(0, 1)
        return nn.functional.cross_entropy(ends, labels.flatten())


@pytest.mark.parametrize("is_fused", [False, True], ids=["in steps", "in one call"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_memory_is_that_of_the_graph_made_by_hand(is_fused, dropout):
    with torch.device("meta"):
        model = Bert(is_fused, dropout).half()
    tokens = torch.ones(BATCH, LENGTH, dtype=torch.int32)
    arguments = tokens, tokens, tokens, torch.ones(BATCH, 2, dtype=torch.int64)
    traced = graph_of_model(model, quiet_options(), arguments, training=True).graph
    sizes = Transformer(LAYERS, WIDTH, LENGTH, dropout=dropout > 0)
    made = bert_for_questions(sizes, BATCH)
    # Only the hidden tensors that the next layer reads are checkpoints.
    marked = [o.name.partition(".last")[0] for o in traced.operations if o.is_checkpoint]
    assert marked == [f"layers.{index}" for index in range(LAYERS)]
    settings = Settings(
        accumulation=4, optimizer=HALF_ADAM, optimizer_location=Location(on_chip=False),
        recompute="stage", recomputes_last=True,
    )  # fmt: skip
    theirs, ours = (
        memory(graph, Placement.cut(graph, ["layers.2"]), settings, MK2).ipus
        for graph in (traced, checkpointed(made))
    )
    for one, other in zip(theirs, ours, strict=True):
        assert one.share == pytest.approx(other.share, abs=0.01)


def checkpointed(graph):
    """Return the graph with a checkpoint after each layer."""
    ends = {f"layers.{index}.norm" for index in range(LAYERS)}
    operations = tuple(replace(o, is_checkpoint=o.name in ends) for o in graph.operations)
    return replace(graph, operations=operations)
