"""Each pass alone: what it replaces, what it leaves alone, and that all values stay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from popdist_py.poptorch.execution.replica_graphs import graph_code, passes
from popdist_py.poptorch.execution.replica_graphs.recording import record

ATEN = torch.ops.aten


def applied(graph_pass, function, *inputs):
    """Return the operations that remain after one pass alone, and check that the values stay."""
    recorded = record(function, [x.clone() for x in inputs])
    graph_pass(recorded.graph)
    run = graph_code._compiled(recorded, len(function(*inputs)))
    for ours, expected in zip(run(*inputs, None), function(*inputs), strict=True):
        torch.testing.assert_close(ours, expected)
        assert ours.dtype == expected.dtype
    return [node.target for node in recorded.graph.nodes if node.op == "call_function"]


def nodes(node_pass):
    return lambda graph: passes.rewrite_nodes(graph, [node_pass])


X = torch.arange(12.0).view(4, 3) - 5


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: [x.detach() + 1], [ATEN.add.Tensor]),
        (lambda x: [ATEN.alias.default(x) + 1], [ATEN.add.Tensor]),
        (lambda x: [x.permute(0, 1) + 1], [ATEN.add.Tensor]),
        (lambda x: [x.permute(1, 0) + 1], [ATEN.permute.default, ATEN.add.Tensor]),
        # ATEN.t.default of the first one stays, without a user.
        (lambda x: [x.t().t() + 1], [ATEN.t.default, ATEN.add.Tensor]),
        (lambda x: [ATEN.mul.Scalar(x, 1)], []),
        (lambda x: [ATEN.mul.Scalar(x, 2)], [ATEN.mul.Scalar]),
        (
            lambda x: [ATEN.mul.Scalar(x.int(), 1.0)],
            [ATEN._to_copy.default, ATEN.mul.Scalar],
        ),
    ],
)
def test_operations_that_change_nothing_are_removed(function, expected):
    assert applied(nodes(passes.remove_unchanging), function, X) == expected


def views(graph):
    passes.rewrite_nodes(graph, [passes.shorten_view])
    passes.eliminate_dead_code(graph)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: [x.view(12).view(3, 4) + 1], [ATEN.view.default, ATEN.add.Tensor]),
        (lambda x: [x.view(12).view(4, 3) + 1], [ATEN.add.Tensor]),
        (lambda x: [x.view(2, 2, 3).transpose(0, 1).transpose(0, 1).reshape(4, 3) + 1],
         [ATEN.add.Tensor]),
        (lambda x: [x.t().reshape(12) + 1],
         [ATEN.t.default, ATEN.clone.default, ATEN._unsafe_view.default, ATEN.add.Tensor]),
    ],
)  # fmt: skip
def test_views_are_shortened(function, expected):
    assert applied(views, function, X) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: [(x + 1).view(12).relu()], [ATEN.add.Tensor, ATEN.relu.default,
                                               ATEN.view.default]),
        (lambda x: [(x + 1).t().relu()], [ATEN.add.Tensor, ATEN.t.default, ATEN.relu.default]),
        (lambda x: [(x + 1).view(12).cumsum(0)], [ATEN.add.Tensor, ATEN.view.default,
                                                  ATEN.cumsum.default]),
    ],
)  # fmt: skip
def test_functions_of_single_elements_run_before_views(function, expected):
    def graph_pass(graph):
        passes.rewrite_nodes(graph, [passes.compute_before_views])
        passes.eliminate_dead_code(graph)

    assert applied(graph_pass, function, X) == expected


def test_a_view_does_not_read_memory_in_another_order():
    def function(x):
        return [x.permute(1, 0).view(12) + 1]

    kept = [ATEN.permute.default, ATEN.view.default, ATEN.add.Tensor]
    assert applied(views, function, X.t()) == kept


def test_functions_of_tensors_that_are_broadcast_run_behind_their_views():
    def function(gradient, out):
        return [ATEN.sigmoid_backward.default(gradient.view(12, 1), out.view(1, 12))]

    kept = [ATEN.view.default, ATEN.view.default, ATEN.sigmoid_backward.default]
    assert applied(nodes(passes.compute_before_views), function, X, X) == kept


BIAS = torch.arange(4.0)
UNFUSED = [ATEN.t.default, ATEN.mm.default, ATEN.view.default, ATEN.add.Tensor]
FUSED = [ATEN.t.default, ATEN.addmm.default, ATEN.view.default]


@pytest.mark.parametrize(
    ("bias", "shape", "expected"),
    [
        (BIAS, (2, 2, 4), FUSED),
        (BIAS[:2], (8, 2), UNFUSED),  # the view does not keep the columns
        (BIAS, (16, 1), UNFUSED),
        (BIAS[:1], (2, 2, 4), UNFUSED),  # one value for all columns
        (BIAS.double(), (2, 2, 4), UNFUSED),
    ],
)
def test_a_bias_is_fused_if_it_has_a_value_for_each_column(bias, shape, expected):
    def graph_pass(graph):
        passes.rewrite_nodes(graph, [passes.fuse_bias])
        passes.eliminate_dead_code(graph)

    def function(x, b):
        return [b + (x @ x.t()).view(shape)]

    assert applied(graph_pass, function, X, bias) == expected


def test_a_product_with_another_user_keeps_its_bias():
    def function(x, bias):
        product = x @ x.t()
        return [bias + product.view(2, 2, 4), product]

    assert ATEN.addmm.default not in applied(nodes(passes.fuse_bias), function, X, BIAS)


@pytest.mark.parametrize(("size", "dilation"), [(1, [2, 2]), (3, [1, 1])])
def test_kernels_of_one_element_are_dilated(size, dilation):
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    layer = nn.Conv2d(3, 2, size)
    kernels, bias = layer.weight.detach(), layer.bias.detach()
    recorded = record(
        lambda *tensors: [torch.conv2d(*tensors)], [torch.randn(2, 3, 8, 8), kernels, bias]
    )
    passes.rewrite_nodes(recorded.graph, [passes.prefer_onednn])
    [node] = [n for n in recorded.graph.nodes if n.target is ATEN.convolution.default]
    assert list(node.args[5]) == dilation


def test_operations_without_users_are_removed_unless_they_have_an_effect():
    def function(x):
        x.cos()
        own = x.clone()
        own.add_(1)
        torch.rand(1)
        return [own]

    kept = applied(passes.eliminate_dead_code, function, X)
    assert kept == [ATEN.clone.default, ATEN.add_.Tensor, ATEN.rand.default]


@pytest.mark.parametrize(
    ("function", "count"),
    [
        (lambda x: [x.cos() + x.cos()], 1),
        (lambda x: [x.cos() + (x + 1).cos()], 2),
        (lambda x: [x.cos().add_(1) + x.cos()], 2),
    ],
)
def test_an_operation_on_equal_arguments_is_done_once(function, count):
    assert applied(passes.merge_repetitions, function, X).count(ATEN.cos.default) == count


def test_an_operation_is_repeated_after_its_argument_was_changed():
    def function(x):
        own = x.clone()
        first = own.cos()
        own.view(-1)[:1].add_(1)
        return [first + own.cos()]

    assert applied(passes.merge_repetitions, function, X).count(ATEN.cos.default) == 2
