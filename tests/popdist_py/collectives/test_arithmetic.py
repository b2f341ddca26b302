"""Element-wise reductions and the tree over replicas, without any communication."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from popdist_py.collectives.arithmetic import BFLOAT16, Reduction
from popdist_py.collectives.communicators.solo import SoloCommunicator
from popdist_py.collectives.tree import combine, nodes_of


@given(arrays.arrays(np.uint32, st.integers(1, 50)))
def test_bfloat16_is_rounded_as_torch_does(bits):
    values = bits.view(np.float32)
    out = np.empty(values.size, BFLOAT16)
    Reduction("sum", BFLOAT16, 1).narrow(values, out)
    expected = torch.from_numpy(values.copy()).bfloat16()
    found = torch.from_numpy(out.view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~found.isnan()], expected[~expected.isnan()])


@given(arrays.arrays(np.uint16, st.integers(1, 50)))
def test_bfloat16_is_widened_as_torch_does(bits):
    found = Reduction("sum", BFLOAT16, 1).widen(bits.view(BFLOAT16), np.empty(bits.size, "f4"))
    expected = torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16).float().numpy()
    assert np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("size", [1, 1000, 200_000])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_the_result_may_replace_any_source(size, where):
    sources = [np.full(size, float(2**n), np.float32) for n in range(3)]
    Reduction("sum", np.dtype("f4"), 3)(sources, sources[where])
    assert (sources[where] == 7).all()
    assert all((s == 2**n).all() for n, s in enumerate(sources) if n != where)


def test_halves_are_added_in_float32():
    sources = [np.array([v], np.float16) for v in (2048, 1, 1, 1, 1)]
    out = np.empty(1, np.float16)
    Reduction("sum", np.dtype("f2"), 5)(sources, out)
    assert out[0] == 2052  # in float16, 2048 + 1 is 2048


def test_a_mean_of_integers_is_refused():
    with pytest.raises(TypeError, match=r"dtype int32: op='mean' needs floats"):
        Reduction("mean", np.dtype("i4"), 2)


def test_text_is_refused():
    with pytest.raises(TypeError, match="expected booleans, integers or floats"):
        Reduction("sum", np.dtype("U3"), 2)


def shape_of_tree(leaves):
    """Return the tree as nested pairs, built level by level from its definition."""
    values = list(range(leaves))
    while len(values) > 1:
        pairs = list(zip(values[::2], values[1::2], strict=False))
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


def pair(left, right):
    return (left, right)


@given(st.data(), st.integers(1, 40))
def test_the_tree_does_not_depend_on_who_holds_which_leaves(data, leaves):
    cuts = data.draw(st.lists(st.integers(0, leaves), max_size=5).map(sorted))
    bounds = [0, *cuts, leaves]
    everything = {}
    for first, end in pairwise(bounds):
        held = combine({(0, leaf): leaf for leaf in range(first, end)}, leaves, pair)
        assert list(held) == nodes_of(range(first, end), leaves)
        everything.update(held)
    assert list(combine(everything, leaves, pair).values()) == [shape_of_tree(leaves)]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 12])
def test_replicas_are_added_in_the_order_of_the_tree(rows):
    leaves = np.random.default_rng(0).normal(size=(rows, 50_001)).astype(np.float32)
    expected = list(leaves.copy())
    while len(expected) > 1:
        pairs = [a + b for a, b in zip(expected[::2], expected[1::2], strict=False)]
        expected = pairs + expected[len(pairs) * 2 :]
    SoloCommunicator().add_replicas(leaves)
    assert np.array_equal(leaves[0], expected[0])


@pytest.mark.parametrize(("op", "expected"), [("band", 0b1000), ("bor", 0b1111), ("bxor", 0b0111)])
@pytest.mark.parametrize("dtype", ["u1", "i4", "u2", "u4", "u8"])
def test_bits_are_combined(op, expected, dtype):
    sources = [np.full(3, bits, dtype) for bits in (0b1100, 0b1011)]
    out = np.empty(3, dtype)
    Reduction(op, out.dtype, 2)(sources, out)
    assert out.tolist() == [expected] * 3


@pytest.mark.parametrize("dtype", [np.dtype("f4"), BFLOAT16])
def test_the_bits_of_floats_are_not_combined(dtype):
    with pytest.raises(TypeError, match=r"op='bor' needs booleans or integers"):
        Reduction("bor", dtype, 2)


@pytest.mark.parametrize("dtype", ["u2", "u4", "u8"])
def test_unsigned_integers_are_added(dtype):
    sources = [np.array([3, 2**15], dtype) for _ in range(2)]
    out = np.empty(2, dtype)
    Reduction("sum", out.dtype, 2)(sources, out)
    assert out.tolist() == [6, 0 if dtype == "u2" else 2**16]
