"""Arguments of custom types: what a plain tensor gets, a tensor inside one gets too."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from support.models import quiet_options
from torch import nn

import popdist_py.poptorch as poptorch
from popdist_py.poptorch.calls.nested_values import flatten, map_tensors, tensors_of


class Box:
    def __init__(self, value, label=""):
        self.value, self.label = value, label


class BoxParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.value

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(next(tensor_iterator), original_structure.label)


@pytest.fixture(autouse=True)
def box_parser():
    poptorch.registerCustomArgParser(Box, BoxParser())
    yield
    poptorch.registerCustomArgParser(Box, None)


class Opens(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self._compute = compute

    def forward(self, input):
        return self._compute(input.value if isinstance(input, Box) else input)


@pytest.mark.parametrize("kind", [lambda t: t, Box])
def test_operations_have_names_and_anchors(kind):
    options = quiet_options()
    options.anchorTensor("product", "mul")
    model = poptorch.inferenceModel(Opens(lambda x: torch.relu(2 * x)), options)
    model(kind(torch.tensor([-1.0, 3.0])))
    assert model.getTensorNames() == ["input", "mul", "relu"]
    assert model.getAnchoredTensor("product").tolist() == [-2, 6]


def _behind_a_block(x):
    with poptorch.Block("a", ipu_id=0):
        x = x + 1
    return 2 * x


def _value_needed(x):
    return x if x.sum() > 0 else -x


@pytest.mark.parametrize("kind", [lambda t: t, Box])
@pytest.mark.parametrize(
    ("compute", "message"),
    [
        (_behind_a_block, "No active Block"),
        (_value_needed, "Python condition"),
        (torch.nonzero, "nonzero"),
    ],
)
def test_blocks_and_limits_are_checked(kind, compute, message):
    model = poptorch.inferenceModel(Opens(compute), quiet_options())
    with pytest.raises(poptorch.Error, match=message):
        model(kind(torch.ones(2)))


@pytest.mark.parametrize("kind", [lambda t: t, Box])
def test_overlapped_inputs_are_checked(kind):
    options = quiet_options().setExecutionStrategy(poptorch.ShardedExecution())
    options.outputMode(poptorch.OutputMode.All).TensorLocations.numIOTiles(32)
    loop = poptorch.OverlapMode.OverlapAccumulationLoop
    model = poptorch.inferenceModel(
        Opens(lambda x: 2 * poptorch.set_overlap_for_input(x, loop)), options
    )
    assert model(kind(torch.ones(2))).tolist() == [2, 2]
    twice = poptorch.inferenceModel(
        Opens(lambda x: x * poptorch.set_overlap_for_input(x, loop)), options.clone()
    )
    with pytest.raises(poptorch.Error, match="must be the only op applied to an input"):
        twice(kind(torch.ones(2)))


def test_overlap_marks_tensors_inside_custom_types_and_nothing_else():
    box = Box(torch.ones(2), "kept")
    marked = poptorch.set_overlap_for_input([box], poptorch.OverlapMode.NoOverlap)
    assert marked[0].label == "kept"
    with pytest.raises(poptorch.Error, match="accepts only tensors, got an object of the type int"):
        poptorch.set_overlap_for_input([box, 3], poptorch.OverlapMode.NoOverlap)


class Point(NamedTuple):
    x: object
    y: object


class Named(list):
    """Cannot be made from its items."""

    def __init__(self, name, items, /):
        super().__init__(items)
        self.name = name


class Registered(tuple):
    pass


class RegisteredParser(BoxParser):
    def yieldTensors(self, struct):
        yield struct[1]

    def reconstruct(self, original_structure, tensor_iterator):
        return Registered((original_structure[0], next(tensor_iterator)))


def test_one_walk_knows_all_kinds_of_values():
    a, b, c = (torch.full((1,), float(n)) for n in range(3))
    value = {"p": Point(a, [Box(b, "label"), 7]), "l": Named("n", [c]), "none": None}
    leaves = []
    flatten(value, leaves)
    assert [t.item() for t in leaves] == [t.item() for t in tensors_of(value)] == [0, 1, 2]
    other = {"none": None, "l": Named("n", [c]), "p": Point(a, [Box(b), 8])}
    total = map_tensors(torch.add, value, other)
    assert list(total) == ["p", "l", "none"]
    assert isinstance(total["p"], Point)
    assert total["p"].x.item() == 0
    assert (total["p"].y[0].value.item(), total["p"].y[0].label) == (2, "label")
    assert total["p"].y[1] == 7
    assert total["l"] == [4]
    assert total["none"] is None


def test_a_parser_of_a_kind_of_tuple_takes_it_apart():
    poptorch.registerCustomArgParser(Registered, RegisteredParser())
    try:
        value = Registered((torch.zeros(1), torch.ones(1)))
        assert tensors_of(value) == [value[1]]
        assert isinstance(map_tensors(torch.neg, value), Registered)
    finally:
        poptorch.registerCustomArgParser(Registered, None)


@pytest.mark.parametrize("execution", ["loop", "graph"])
def test_what_is_no_tensor_is_constant(execution):
    """As on a device, which has traced it; a graph and the Python code see the same."""
    options = quiet_options()
    options.Emulator.set(replica_execution=execution)
    model = poptorch.inferenceModel(Multiplied(), options)
    for label in (2, 3):
        assert model(Box(torch.ones(1), label)).item() == 2


class Multiplied(nn.Module):
    def forward(self, box):
        return box.value * box.label


class Boxes:
    def __init__(self, *values):
        self.values = values


class BoxesParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield from struct.values

    def reconstruct(self, original_structure, tensor_iterator):
        return Boxes(next(tensor_iterator), next(tensor_iterator))


@pytest.fixture
def boxes_parser():
    poptorch.registerCustomArgParser(Boxes, BoxesParser())
    yield
    poptorch.registerCustomArgParser(Boxes, None)


@pytest.mark.usefixtures("boxes_parser")
def test_parsers_and_numbers_of_tensors_that_do_not_fit():
    def model():
        return poptorch.inferenceModel(lambda boxes, y: boxes.values[0] + y, quiet_options())

    a, b, c = (torch.full((1,), float(n)) for n in range(3))
    with pytest.raises(
        poptorch.Error, match=r"BoxesParser.yieldTensors\(\) yields a value of type int for a Box"
    ):
        model()(Boxes(a, 3), b)
    with pytest.raises(poptorch.Error, match=r"reads more tensors than .* Boxes.* tensors: 1"):
        model()(Boxes(a), b)
    # A tensor that the parser leaves is none of the next argument's.
    compiled = model()
    assert compiled(Boxes(a, b, c), b).item() == 1
    with pytest.raises(poptorch.Error, match="Length mismatch for boxes: expected 3 but got 2"):
        compiled(Boxes(a, b), b)
