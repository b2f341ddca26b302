"""Rewriting of recorded graphs: fewer operations, the same values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from popdist_py.poptorch.execution.replica_graphs.graph_code import function_of
from popdist_py.poptorch.execution.replica_graphs.recording import record


def twice(x):
    return [x * 2, x * 2]


def changed_between(x):
    own = x.clone()
    first = own * 2
    own.add_(1)
    return [first, own * 2]


def changed_through_a_view(x):
    own = x.clone()
    first = own * 2
    own.view(-1)[0:1].add_(1)
    return [first, own * 2]


def one_result_changed(x):
    first, second = x * 2, x * 2
    return [first.add_(1), second + 0]


def statistics_changed(x):
    mean, var = torch.zeros(3), torch.ones(3)
    first = mean + 1
    out = F.batch_norm(x, mean, var, training=True)
    return [first, out, mean + 1]


def drawn(x):
    return [torch.rand_like(x), torch.rand_like(x)]


def cast_and_repeated(x):
    row = x[0]
    rounded = torch.cat([x.half().float(), x.to(torch.float16, copy=True).double().float()])
    return [rounded, torch.cat([row.repeat(3), row.repeat(2, 2).view(-1), row.repeat(0)])]


def added_to_products(x):
    """Vectors beside reshaped products: the columns' own, and others of the size of a dimension."""
    product = x @ x.t()  # 4 x 4
    columns, one = torch.arange(4.0), torch.ones(1)
    return [
        columns + (product * 1).view(2, 2, 4),
        columns + (x @ x.t()).view(2, 2, 4),
        columns + (x @ x.t()).view(16, 1),
        columns[:2] + (x @ x.t()).view(8, 2),
        one + (x @ x.t()).view(2, 2, 4),
    ]


def operand_changed_before_the_bias(x):
    own, bias = x.clone(), torch.arange(4.0)
    product = (own @ x.t()).view(2, 2, 4)
    own.add_(1)
    return [bias + product, own * 1]


def whole_numbers_times_one(x):
    return [torch.ops.aten.mul.Scalar(torch.ones_like(x, dtype=torch.int32), 1.0)]


CASES = [
    added_to_products,
    operand_changed_before_the_bias,
    whole_numbers_times_one,
    cast_and_repeated,
    twice,
    changed_between,
    changed_through_a_view,
    one_result_changed,
    statistics_changed,
]


@pytest.mark.parametrize("function", [*CASES, drawn], ids=lambda function: function.__name__)
def test_rewriting_keeps_the_values(function):
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    captured = record(function, [x.clone()])
    torch.manual_seed(0)
    expected = function(x.clone())
    run = function_of(captured, len(expected))
    for _ in range(1 if function is statistics_changed else 2):
        torch.manual_seed(0)
        for ours, value in zip(run(x.clone(), None), expected, strict=True):
            torch.testing.assert_close(ours, value)


def test_what_is_done_twice_is_done_once_beside_changes_in_place():
    def both(x):
        mean = torch.zeros(3)
        out = F.batch_norm(x, mean, torch.ones(3), training=True)
        return [out.half().float(), out.half().float()]

    captured = record(both, [torch.randn(4, 3)])
    function_of(captured, 2)
    casts = [node for node in captured.graph.nodes if "_to_copy" in str(node.target)]
    assert len(casts) == 2
