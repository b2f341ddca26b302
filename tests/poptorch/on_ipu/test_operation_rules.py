"""The sizes of matrix products follow from shapes, and every operation has a kind."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.graph import Product
from popdist_py.poptorch.on_ipu.operation_rules import (
    attention_products,
    multiplied,
    per_sample,
    rule_of,
)
from popdist_py.poptorch.tracing.recorded_operations import Seen


def seen(*shape):
    return Seen(0, shape, torch.empty(shape, device="meta").stride(), 0, torch.float32)


def product(operator, *arguments, output=(), batch=1, weight_first=False):
    found = multiplied(operator, arguments, seen(*output), batch=batch, weight_first=weight_first)
    return found.product


def convolution(image, kernel, output, *, batch=1, transposed=False, groups=1):
    arguments = (seen(*image), seen(*kernel), None, (1,), (0,), (1,), transposed, (0,), groups)
    return product("convolution", *arguments, output=output, batch=batch)


conv = partial(Product, is_convolution=True)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (product("mm", seen(8, 3), seen(3, 5), batch=4), Product(2, 3, 5)),
        (product("addmm", seen(5), seen(8, 3), seen(3, 5), batch=4), Product(2, 3, 5)),
        (product("mm", seen(5, 3), seen(3, 8), batch=4, weight_first=True), Product(2, 3, 5)),
        (product("bmm", seen(8, 6, 3), seen(8, 3, 5), batch=4), Product(6, 3, 5, 2)),
        # A mixture of three experts, whose weights are applied to all samples.
        (product("bmm", seen(3, 8, 2), seen(3, 2, 5), batch=4), Product(2, 2, 5, 3)),
        (product("mv", seen(8, 3), seen(3), batch=4), Product(2, 3, 1)),
        (product("linear", seen(8, 7, 3), seen(5, 3), seen(5), batch=4), Product(14, 3, 5)),
        (convolution((2, 4, 9, 9), (6, 4, 3, 3), (2, 6, 7, 7), batch=2), conv(49, 36, 6)),
        (
            convolution((2, 4, 9, 9), (4, 1, 3, 3), (2, 4, 7, 7), batch=2, groups=4),
            conv(49, 9, 1, 4),
        ),
        (convolution((2, 4, 9), (6, 4, 3), (2, 6, 7), batch=2), conv(7, 12, 6)),
        (
            convolution((2, 4, 5, 5), (4, 6, 2, 2), (2, 6, 10, 10), batch=2, transposed=True),
            conv(25, 4, 24),
        ),
    ],
)
def test_products(found, expected):
    assert found == expected


@given(st.lists(st.integers(1, 9), min_size=5, max_size=5))
def test_products_of_attention_have_the_flops_of_their_matrices(sizes):
    batch, heads, length, depth, other = sizes
    query, value = seen(batch, heads, length, depth), seen(batch, heads, other, depth)
    scores, mix = attention_products(query, value, batch)
    flops = 2 * heads * length * other * depth
    assert scores.flops == mix.flops == flops


@given(st.integers(0, 1000), st.integers(1, 50))
def test_the_share_of_a_sample_covers_everything(total, batch):
    assert per_sample(total, batch) * batch >= total


def test_in_place_operations_follow_the_rule_of_the_others():
    assert rule_of("relu_") == rule_of("relu")
    assert rule_of("_softmax").kind == "softmax"
    assert rule_of("something_new") == rule_of("another")
    assert rule_of("something_new").kind == "elementwise"
