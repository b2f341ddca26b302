"""Batches of a registered custom type: joined, cut and rebuilt between data set and model."""

import pickle

import pytest
import torch
from poptorch.data.loading import ASYNC, FORK, REBATCHED, numbers
from support.models import quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.poptorch import DataLoader
from popdist_py.poptorch.data.samplers import Concatenate

SYNC = {}


class Graph:
    def __init__(self, x, y, name):
        self.x, self.y, self.name = x, y, name


class GraphParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.x
        yield struct.y

    def reconstruct(self, original_structure, tensor_iterator):
        x, y = next(tensor_iterator), next(tensor_iterator)
        return Graph(x, y, original_structure.name)


@pytest.fixture(autouse=True)
def graph_parser():
    poptorch.registerCustomArgParser(Graph, GraphParser())
    yield
    poptorch.registerCustomArgParser(Graph, None)


def as_graph(samples):
    x, y = (torch.stack(column) for column in zip(*samples, strict=True))
    return Graph(x, y, "kept")


def as_dictionary(samples):
    return {"graph": as_graph(samples), "sizes": torch.tensor([len(samples)])}


class Pairs:
    """A batch sampler that knows neither its length nor the size of its batches."""

    def __iter__(self):
        return iter([[i, i + 1] for i in range(0, 40, 2)])


def options():
    made = quiet_options().deviceIterations(2).replicationFactor(2)
    made.Training.gradientAccumulation(2)
    return made


BATCHES = {
    "batch size": lambda: {"batch_size": 2},
    "sampler": lambda: {
        "batch_sampler": torch.utils.data.BatchSampler(range(40), 2, drop_last=False)
    },
    "sampler of unknown length": lambda: {"batch_sampler": Pairs()},
}


@pytest.mark.parametrize(
    ("mode", "workers", "batches"),
    [
        (SYNC, 0, "batch size"),
        (SYNC, 2, "sampler"),
        (SYNC, 0, "sampler of unknown length"),
        (ASYNC, 2, "batch size"),
        (ASYNC, 0, "sampler"),
        (ASYNC, 0, "sampler of unknown length"),
        (REBATCHED, 0, "batch size"),
        (REBATCHED, 0, "sampler"),
        (REBATCHED, 2, "sampler of unknown length"),
    ],
)
def test_batches_are_joined_in_every_mode(mode, workers, batches):
    loader = DataLoader(
        options(),
        numbers(40),
        num_workers=workers,
        collate_fn=as_graph,
        **BATCHES[batches](),
        **mode,
    )
    for _ in range(2):
        got = [(type(b), b.x.tolist(), b.y[0].item(), b.name) for b in loader]
        assert got == [
            (Graph, list(range(16)), 0.0, "kept"),
            (Graph, list(range(16, 32)), 8.0, "kept"),
        ]
    loader.terminate()


def test_they_may_be_part_of_a_batch():
    loader = DataLoader(
        options(), numbers(40), batch_sampler=Pairs(), collate_fn=as_dictionary, drop_last=False
    )
    first, _, last = loader
    assert (first["graph"].x.tolist(), first["sizes"].tolist()) == (list(range(16)), [2] * 8)
    assert (last["graph"].x.tolist(), last["sizes"].tolist()) == (list(range(32, 40)), [2] * 4)


def test_accessors_rebatch_them():
    graphs = [as_graph([(torch.tensor(i), torch.tensor(0))] * 3) for i in range(4)]
    accessor = poptorch.AsynchronousDataAccessor(graphs, rebatched_size=4, **FORK)
    assert [b.x.tolist() for b in accessor] == [[0, 0, 0, 1], [1, 1, 2, 2], [2, 3, 3, 3]]
    accessor.terminate()


def test_another_process_learns_the_parsers_with_its_work():
    join = pickle.dumps(Concatenate())
    poptorch.registerCustomArgParser(Graph, None)
    graph = Graph(torch.ones(1), torch.zeros(2), "kept")
    with pytest.raises(TypeError, match="registerCustomArgParser"):
        Concatenate()([graph, graph])
    joined = pickle.loads(join)([graph, graph])
    assert (joined.x.tolist(), joined.y.tolist()) == ([1, 1], [0] * 4)


@pytest.mark.sweep
def test_spawned_workers_learn_the_parsers():
    loader = DataLoader(
        options(),
        numbers(40),
        batch_sampler=Pairs(),
        collate_fn=as_graph,
        num_workers=1,
        multiprocessing_context="spawn",
        **ASYNC,
    )
    assert [b.x.tolist() for b in loader] == [list(range(16)), list(range(16, 32))]
    loader.terminate()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, graph):
        out = self.layer(graph.x.float().unsqueeze(1)).squeeze(1)
        loss = poptorch.identity_loss((out - graph.y).pow(2), "mean")
        return Graph(out, graph.y, graph.name), loss


def test_a_model_takes_and_returns_what_the_loader_gives():
    loader = DataLoader(options(), numbers(40), 2, collate_fn=as_graph)
    model = Model()
    reference = nn.Linear(1, 1)
    reference.load_state_dict(model.layer.state_dict())
    made = options().outputMode(poptorch.OutputMode.All)
    made.Emulator.replicaExecution("loop")
    training = poptorch.trainingModel(model, made, torch.optim.SGD(model.parameters(), lr=1e-4))
    ours = torch.optim.SGD(reference.parameters(), lr=1e-4)
    for batch in loader:
        out, losses = training(batch)
        assert (type(out), out.x.shape, out.name) == (Graph, (16,), "kept")
        assert torch.equal(out.y, batch.y.to(out.y.dtype))
        assert losses.shape == (8,)
        for rows in torch.arange(16).split(8):  # one update for each device iteration
            ours.zero_grad()
            x, y = batch.x[rows].float().unsqueeze(1), batch.y[rows]
            (reference(x).squeeze(1) - y).pow(2).mean().backward()
            ours.step()
    torch.testing.assert_close(model.layer.weight.detach(), reference.weight.detach())
