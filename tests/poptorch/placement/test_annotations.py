"""Annotations: blocks in every spelling, no effect outside, copies, removal, names."""

import copy
import io
import pickle

import pytest
import torch
from support.models import placement_of
from torch import nn
from torch.utils.hooks import RemovableHandle

from popdist_py import poptorch
from popdist_py.poptorch.enums import AutoStage
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.placement.annotations import (
    Attribute,
    BeginBlock,
    Block,
    BlockFunction,
    NameScope,
    removeBlocks,
)
from popdist_py.poptorch.placement.execution_strategies import PipelinedExecution

torch.set_num_threads(1)


def blocks_of(module, strategy=None):
    strategy = strategy or PipelinedExecution(AutoStage.AutoIncrement)
    x = torch.ones(1, 2)
    placement = placement_of(strategy, module, module, x)
    return [(block.user_id, block.ipu) for block in placement.blocks]


def layers():
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def annotated():
    model = layers()
    model[0] = BeginBlock(model[0], "x", ipu_id=0)
    model[2] = BeginBlock(model[2], user_id="y", ipu_id=3)
    return model


class Forward(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self._run = forward

    def forward(self, x):
        return self._run(x)


def test_begin_block_returns_the_module_itself():
    layer = nn.Linear(2, 2)
    assert BeginBlock(layer, "a", 1) is layer
    assert blocks_of(annotated()) == [("x", 0), ("y", 3)]


def test_a_module_begins_one_block():
    layer = BeginBlock(nn.Linear(2, 2), "a")
    with pytest.raises(Error, match="already been assigned to a block"):
        BeginBlock(layer, "b")
    removeBlocks(layer)
    assert BeginBlock(layer, "b") is layer


def test_begin_block_wraps_other_callables():
    wrapped = BeginBlock(torch.neg, user_id="neg", ipu_id=2)
    assert (wrapped._user_id, wrapped._ipu_id) == ("neg", 2)
    assert wrapped(torch.ones(1)).item() == -1
    assert blocks_of(Forward(wrapped)) == [("neg", 2)]
    with pytest.raises(Error, match=r"needs a torch.nn.Module or a function"):
        BeginBlock(3)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_their_blocks(copied):
    model = copied(annotated())
    assert blocks_of(model) == [("x", 0), ("y", 3)]
    removeBlocks(model)
    assert blocks_of(model) == []


def test_a_loaded_model_keeps_its_blocks_beside_new_hooks(monkeypatch):
    # Every process counts its hooks from 0.
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    file = io.BytesIO()
    torch.save(annotated(), file)
    file.seek(0)
    RemovableHandle.next_id = 0
    model = torch.load(file, weights_only=False)
    calls = []
    for layer in model:
        for _ in range(3):
            layer.register_forward_pre_hook(lambda *_: calls.append(1))
    assert blocks_of(model) == [("x", 0), ("y", 3)]
    assert len(calls) == 9
    removeBlocks(model)
    assert blocks_of(model) == []


def test_texts_of_blocks():
    assert repr(Block("a", 1)) == "Block(user_id=a, ipu_id=1)"
    wrapped = copy.deepcopy(BeginBlock(torch.neg, ipu_id=2))
    assert repr(wrapped).startswith("BeginBlock(user_id=None, ipu_id=2) <built-in")
    assert blocks_of(Forward(pickle.loads(pickle.dumps(wrapped)))) == [("0", 2)]


def test_remove_blocks_gives_the_devices_back():
    model = nn.Sequential(*(BeginBlock(nn.Linear(2, 2), ipu_id=i) for i in range(2)))
    options = poptorch.Options().showCompilationProgressBar(False).deviceIterations(2)
    inference = poptorch.inferenceModel(model, options)
    for num_ipus in (2, 1):
        inference(torch.ones(2, 2))
        placement = inference._compiled.executable.first_forward.placement
        assert (placement.num_ipus, placement.num_stages) == (num_ipus, num_ipus)
        assert ("BeginBlock" in repr(inference)) == (num_ipus == 2)
        removeBlocks(model)
        inference.destroy()


def test_remove_blocks_keeps_other_hooks():
    model = annotated()
    calls = []
    model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    removeBlocks(model)
    model(torch.ones(1, 2))
    assert calls == [1]
    with pytest.raises(AssertionError, match=r"torch.nn.Module"):
        removeBlocks(torch.relu)


def test_an_operation_of_an_earlier_hook_belongs_to_the_block_before():
    model = nn.Sequential(BeginBlock(nn.Linear(2, 2), "a", 0), nn.Linear(2, 2))
    model[1].register_forward_pre_hook(lambda _, args: (args[0] + 1,))
    BeginBlock(model[1], "b", 1)
    x = torch.ones(1, 2)
    placement = placement_of(PipelinedExecution(), model, model, x)
    assert [ipu for _, ipu in placement.operations] == [0, 0, 1]


def test_blocks_without_an_id_are_numbered():
    def forward(x):
        Block.useAutoId()
        with Block():
            x = x + 1
        with Block("named"):
            x = x + 1
        with Block():
            x = x + 1
        Block.useAutoId()
        Block.start()
        return x + 1

    assert [name for name, _ in blocks_of(Forward(forward))] == ["0", "named", "1", "0"]


def test_start_goes_on_and_a_function_can_be_a_block():
    @BlockFunction("double", ipu_id=1)
    def double(x, factor=2):
        """Doubles."""
        return x * factor

    def forward(x):
        Block.start("open", ipu_id=0)
        x = x + 1
        x = double(x, factor=3)
        Block.start("close", ipu_id=0)
        return x - 1

    assert double.__doc__ == "Doubles."
    assert blocks_of(Forward(forward)) == [("open", 0), ("double", 1), ("close", 0)]


def test_outside_of_wrappers_annotations_do_nothing():
    x = torch.ones(3, 2)
    plain = annotated()
    expected = plain(x)
    with Block("a", 0), NameScope("scope"), Attribute(__outline={"layer": "a"}):
        Block.useAutoId()
        Block.start("b")
        assert torch.equal(plain(x), expected)
    assert torch.equal(BlockFunction("c")(plain)(x) + 0, expected)
    removeBlocks(plain)
    assert torch.equal(plain(x), expected)


def test_a_scope_has_a_name():
    assert NameScope("encoder").name == "encoder"
    with pytest.raises(AssertionError, match="string"):
        NameScope(3)
