"""The conversion of torch's operations to steps: views, copies, in-place changes and constants."""

from __future__ import annotations

import pytest
import torch
from support.models import quiet_options
from torch import nn

from popdist_py import poptorch
from popdist_py.poptorch.on_ipu.graph_of_model import graph_of_model


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 6))
        self.register_buffer("state", torch.zeros(6))
        self.function = function

    def forward(self, x):
        return self.function(x, self)


def graph(function, x=None):
    x = torch.rand(4, 6) if x is None else x
    return graph_of_model(Function(function), quiet_options(), (x,), training=False).graph


def steps(function, x=None):
    return [(o.kind, o.inputs, o.weights) for o in graph(function, x).operations]


def test_views_of_whole_tensors_and_copies_are_not_operations():
    found = steps(lambda x, _: torch.relu(x.t().reshape(2, 12).clone().contiguous().detach()))
    assert found == [("elementwise", ("x",), ())]


def test_a_view_of_a_part_is_an_operation():
    found = graph(lambda x, _: [torch.relu(part) for part in x[:, :4].split(2, 1)])
    assert [(o.kind, o.output.elements) for o in found.operations] == [
        ("view", 4), ("view", 2), ("view", 2), ("elementwise", 2), ("elementwise", 2),
    ]  # fmt: skip
    assert set(found.root_of.values()) == {"x", "relu:out", "relu.1:out"}


def test_an_expanded_tensor_needs_no_more_memory():
    found = graph(lambda x, _: x[:, :1].expand(4, 6) * x)
    assert [o.output.elements for o in found.operations] == [1, 6]


def test_later_operations_read_the_result_of_a_change_in_place():
    def function(x, _):
        whole = torch.relu(x)
        part = whole[:, :2]
        part.mul_(3)
        return whole + 1

    found = graph(function)
    assert [(o.name, o.inputs) for o in found.operations] == [
        ("relu", ("x",)), ("mul", ("relu:out",)), ("add", ("mul:out",)),
    ]  # fmt: skip
    assert [o.output.elements for o in found.operations] == [6, 6, 6]


def test_an_overwritten_value_is_not_read():
    assert steps(lambda x, _: torch.empty_like(x).copy_(x).mul_(2)) == [("elementwise", ("x",), ())]


def test_casts_and_transposes_of_weights_are_the_weights():
    found = graph(lambda x, m: x.half() @ m.weight.t().half().contiguous())
    product = found.operations[-1]
    assert (product.kind, product.weights) == ("product", ("weight",))
    assert len(found.operations) == 2
    assert product.output.type == "float16"


def test_values_that_depend_on_no_input_are_constants():
    found = graph(lambda x, _: x + torch.arange(6).float().sqrt() + torch.ones(1))
    assert [(w.elements, w.is_trained) for w in found.weights] == [(6, False)]
    assert [o.kind for o in found.operations] == ["add", "add"]


def test_random_numbers_are_made_on_the_device():
    found = graph(lambda x, _: x + torch.randn(4, 6))
    assert [(o.name, o.output.elements) for o in found.operations] == [("randn", 6), ("add", 6)]


def test_changes_of_buffers_alone_are_left_out():
    def function(x, module):
        result = x * module.state
        module.state.mul_(0.9).add_(x.mean(0))
        return result

    assert steps(function) == [("elementwise", ("x",), ("state",))]


@pytest.mark.parametrize(
    ("dtype", "type_"),
    [
        (torch.float64, "float32"), (torch.float16, "float16"), (torch.int64, "int32"),
        (torch.int16, "int16"), (torch.uint8, "uint8"), (torch.bool, "bool"),
    ],
)  # fmt: skip
def test_inputs_have_the_types_of_the_device(dtype, type_):
    found = graph(lambda x, _: x.float() * 2, torch.ones(4, 6).to(dtype))
    assert found.inputs[0].type == type_


def test_inputs_are_named_as_the_arguments_of_forward():
    class Nested(nn.Module):
        def forward(self, pair, *, scale):
            return pair["a"] * pair["b"] * scale

    x = torch.rand(4, 6)
    found = graph_of_model(
        Nested(), poptorch.Options(), ({"a": x, "b": x},), {"scale": x}, training=False
    )
    assert [tensor.name for tensor in found.graph.inputs] == ["pair.0", "pair.1", "scale"]


def test_dropout_saves_no_mask():
    """The backward pass of PopART's dropout computes the mask again from its seed."""
    found = graph(lambda x, m: nn.functional.dropout(x @ m.weight, 0.5, training=True))
    assert [(o.name, o.saved) for o in found.operations] == [("mm", ("x",)), ("mul", ())]


def test_a_mask_of_the_program_has_bits_and_is_saved():
    def masked(x, m):
        mask = torch.empty_like(x).bernoulli_(0.5)
        return (x @ m.weight) * mask

    found = graph(masked)
    assert [(o.name, o.output.type, o.saved) for o in found.operations] == [
        ("bernoulli", "bool", ()), ("mm", "float32", ("x",)),
        ("mul", "float32", ("bernoulli:out",)),
    ]  # fmt: skip


def test_dropout_in_attention_saves_no_mask():
    def attended(x, m):
        x = (x @ m.weight).view(1, 1, 4, 6)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    found = graph(attended)
    assert "bool" not in {o.output.type for o in found.operations}
    assert not [o.name for o in found.operations if "bernoulli" in o.name]


def test_the_mask_of_causal_attention_has_the_type_of_the_scores():
    def attended(x, m):
        x = (x @ m.weight).view(1, 1, 4, 6)
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)

    model, x = Function(attended).half(), torch.rand(4, 6).half()
    found = graph_of_model(model, quiet_options(), (x,), training=False).graph
    (mask,) = (weight for weight in found.weights if weight.name != "weight")
    assert (mask.elements, mask.type) == (4 * 4, "float16")


def test_a_value_that_a_cast_overwrites_is_not_read():
    found = steps(lambda x, m: m.state.clone().copy_(torch.relu(x[0]).half()))
    assert all(weights == () for *_, weights in found)
