"""What is noted of operations: memory by number, places, and nothing that keeps tensors alive."""

from __future__ import annotations

import pickle
import weakref

import pytest
import torch
from torch import nn

from popdist_py import poptorch
from popdist_py.poptorch.tracing.block_recorder import BlockRecorder
from popdist_py.poptorch.tracing.forward_watch import ForwardWatch
from popdist_py.poptorch.tracing.recorded_operations import (
    CHECKPOINT,
    Observer,
    Seen,
    note_checkpoint,
)


def new_observer():
    return Observer(BlockRecorder(poptorch.PipelinedExecution(), nn.Identity(), []), None)


def observed(model, *inputs):
    blocks = BlockRecorder(poptorch.PipelinedExecution(), model, inputs)
    observer = Observer(blocks, None)
    observer.begin(model, [f"input{index}" for index, _ in enumerate(inputs)], inputs)
    with ForwardWatch(blocks=blocks, observer=observer).following():
        observer.finish(model(*inputs))
    return observer.observed()


class Forgetting(nn.Module):
    """Frees memory of one size again and again, which so gets the same address."""

    def forward(self, x):
        self.dead = []
        for _ in range(20):
            y = x + 1
            self.dead.append(weakref.ref(y))
            del y
        return x * 2


def test_memory_that_is_freed_is_not_taken_for_what_comes_after():
    model = Forgetting()
    found = observed(model, torch.rand(1000))
    assert all(dead() is None for dead in model.dead)
    made = [one.outputs[0].storage for one in found.operations]
    assert len(set(made)) == len(made) == 21


def test_notes_hold_no_tensors():
    found = observed(nn.Linear(3, 4), torch.rand(2, 3))
    assert pickle.loads(pickle.dumps(found)) == found
    product = found.operations[-1]
    assert product.operator == "addmm"
    assert all(isinstance(value, Seen) for value in product.arguments)
    assert [weight.name for weight in found.weights] == ["weight", "bias"]


def test_views_share_the_number_of_their_memory():
    found = observed(nn.Flatten(), torch.rand(2, 3, 4))
    (view,) = found.operations
    assert view.outputs[0].storage == found.inputs[0][1].storage
    assert found.outputs == view.outputs


def test_operations_know_module_function_and_place():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    poptorch.BeginBlock(model[1], ipu_id=1)
    found = {one.operator: one for one in observed(model, torch.rand(2, 3)).operations}
    product, relu = found["addmm"], found["relu_"]
    assert (product.module, product.function[0], product.place) == ("0", "linear", (0, 0))
    assert (relu.module, relu.place) == ("1", (0, 1))
    assert relu.written == product.outputs


def test_expanded_dimensions_count_once():
    assert Seen(0, (4, 5, 6), (0, 6, 1), 0, torch.float32).elements == 30
    assert Seen(0, (4, 0), (0, 1), 0, torch.float32).elements == 0


def test_checkpoints_are_noted_by_who_observes_and_by_nobody_else():
    note_checkpoint(torch.rand(2))
    (note,) = observed(Marking(), torch.rand(2)).operations
    assert note.operator == CHECKPOINT


class Marking(nn.Module):
    def forward(self, x):
        note_checkpoint(x)
        return x


def test_what_goes_wrong_is_told_at_the_end_and_not_before():
    sparse = torch.rand(2).to_sparse()
    alive = weakref.ref(sparse)
    observer = new_observer()
    observer.begin(nn.Identity(), ["x"], [sparse])
    with observer:
        assert float(torch.ones(2).sum()) == 2
    del sparse
    assert alive() is None  # the error that is kept keeps no tensor
    with pytest.raises(Exception, match=r"storage"):
        observer.observed()


def test_inputs_without_names_stop_no_forward():
    observer = new_observer()
    observer.begin(nn.Identity(), [], [torch.rand(2)])
    with observer:
        assert float(torch.ones(2).sum()) == 2
    with pytest.raises(ValueError, match="argument 2"):
        observer.observed()


class Branching(nn.Module):
    """Calls an operation of higher order, which torch's modes have to allow."""

    def forward(self, x):
        return torch.ops.higher_order.cond(True, torch.sin, torch.cos, (x,))


def test_operations_of_higher_order_run_unobserved():
    x = torch.rand(3, 2)
    options = poptorch.Options()
    options.Emulator.replicaExecution("loop")
    wrapper = poptorch.inferenceModel(Branching(), options)
    assert torch.equal(wrapper(x), x.sin())
    with pytest.raises(poptorch.Error, match="some forward passes cannot be recorded"):
        wrapper.memoryReport()
    wrapper.destroy()
