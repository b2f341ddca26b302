"""Operations: the same numbers as plain PyTorch, and the documented errors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import inside
from torch import nn

from popdist_py.poptorch import ops
from popdist_py.poptorch.enums import (
    MatMulSerializationMode,
    OverlapMode,
)
from popdist_py.poptorch.errors import Error


def test_identities_return_the_value_and_pass_gradients():
    x = torch.randn(3, requires_grad=True)
    for identity in (
        ops.nop,
        ops.recomputationCheckpoint,
        lambda t: ops.set_available_memory(t, 0.3),
        ops.ipu_print_tensor,
        lambda t: ops.set_overlap_for_input(t, OverlapMode.OverlapAccumulationLoop),
        lambda t: ops.set_overlap_for_output(t, OverlapMode.OverlapAccumulationLoop),
    ):
        result = identity(x)
        assert torch.equal(result, x)
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert torch.equal(gradient, torch.ones(3))


@pytest.mark.parametrize(
    "function",
    [
        ops.nop,
        lambda x: ops.set_available_memory(x, 0.5),
        ops.ipu_print_tensor,
        lambda x: ops.set_overlap_for_input([x], OverlapMode.NoOverlap),
        lambda x: ops.set_overlap_for_output({"a": x}, OverlapMode.NoOverlap),
        lambda x: ops.ctc_beam_search_decoder(x, torch.ones(1)),
        lambda x: ops.ctc_beam_search_decoder(torch.ones(1, 1, 1), x),
        lambda x: ops.fps(x, [0, 1]),
        lambda x: ops.fps(torch.ones(2, 2), x),
        lambda x: ops.nearest(x, torch.ones(2, 2)),
        lambda x: ops.nearest(torch.ones(2, 2), x),
        lambda x: ops.nearest(torch.ones(2, 2), torch.ones(2, 2), batch_x=x),
        lambda x: ops.dynamic_slice(x, 0, torch.tensor(0), 1, 1),
        lambda x: ops.dynamic_slice(torch.ones(4), x, torch.tensor(0), 1, 1),
        lambda x: ops.dynamic_slice(torch.ones(4), 0, x, 1, 1),
        lambda x: ops.dynamic_slice(torch.ones(4), 0, torch.tensor(0), x, 1),
        lambda x: ops.dynamic_slice(torch.ones(4), 0, torch.tensor(0), 1, x),
        lambda x: ops.dynamic_update(x, torch.ones(1), 0, torch.tensor(0), 1),
        lambda x: ops.dynamic_update(torch.ones(4), x, 0, torch.tensor(0), 1),
    ],
)
def test_wrong_types_are_errors(function):
    with pytest.raises(Error):
        function("wrong")


def test_recomputation_checkpoints_keep_the_structure():
    a, b = torch.ones(1), torch.zeros(1)
    assert isinstance(ops.recomputationCheckpoint(a), torch.Tensor)
    assert isinstance(ops.recomputationCheckpoint(a, b), tuple)
    for values in ([a, b], (a, b), [a], (a,)):
        result = ops.recomputationCheckpoint(values)
        assert type(result) is type(values)
        assert len(result) == len(values)
    for wrong in ("a", [a, 1], 3):
        with pytest.raises(ValueError, match="must be tensors"):
            ops.recomputationCheckpoint(wrong)
    with pytest.raises(ValueError, match="must be tensors"):
        ops.recomputationCheckpoint(a, "b")


@pytest.mark.parametrize("mode", list(MatMulSerializationMode))
def test_a_serialised_product_is_the_product(mode):
    lhs, rhs = torch.randn(2, 8, 4), torch.randn(4, 6)
    with inside():
        assert torch.equal(ops.serializedMatMul(lhs, rhs, mode, 2, True), lhs @ rhs)
        if mode != MatMulSerializationMode.Disabled:
            with pytest.raises(Error, match="factor"):
                ops.serializedMatMul(lhs, rhs, mode, 5)
    for wrong in ({"mode": "none"}, {"factor": 1.0}, {"keep_precision": 1}):
        with pytest.raises(AssertionError):
            ops.serializedMatMul(lhs, rhs, **({"mode": mode} | wrong))


@pytest.mark.parametrize("where", ["host", "device"])
def test_for_loop(where):
    x, y = torch.tensor([1.0]), torch.tensor([2.0])

    def body(a, b):
        a += 1  # the originals do not change
        return a, b * 2

    def run():
        return ops.for_loop(3, body, [x, y])

    if where == "device":
        with inside():
            result = run()
    else:
        result = run()
    assert isinstance(result, list)
    assert [value.item() for value in result] == [4.0, 16.0]
    assert (x.item(), y.item()) == (1.0, 2.0)
    assert ops.for_loop(2, lambda a: a * 3, [x])[0].item() == 9.0


def test_for_loop_errors():
    x = torch.ones(1)
    with pytest.raises(ValueError, match="list of tensors"):
        ops.for_loop(1, lambda a: a, (x,))
    with pytest.raises(ValueError, match="index 1"):
        ops.for_loop(1, lambda a, b: (a, b), [x, 3])
    with inside(training=True), pytest.raises(Error, match="only supported in inference"):
        ops.for_loop(1, lambda a: a, [x])
    with pytest.raises(Error, match="as many tensors"):
        ops.for_loop(1, lambda a: (a, a), [x])


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_cond(truth, shape):
    x, y, outer = torch.tensor([3.0]), torch.tensor([5.0]), torch.tensor([10.0])
    condition = torch.full(shape, truth)

    def run():
        return ops.cond(condition, lambda a: a.add_(outer), [x], lambda a, b: a * b, [x, y])

    results = [run()]
    with inside():
        results.append(run())
    for result in results:
        assert [value.tolist() for value in result] == [[13.0] if truth else [15.0]]
    assert x.item() == 3.0


def test_cond_errors():
    x, yes = torch.ones(1), torch.tensor(True)
    for then_inps, else_inps, name in (
        ((x,), [x], "then_inps"),
        ([x], (x,), "else_inps"),
        ([1], [x], "then_inps"),
    ):
        with pytest.raises(ValueError, match=rf"\({name}\) to be a list of tensors"):
            ops.cond(yes, lambda a: a, then_inps, lambda a: a, else_inps)
    with inside(), pytest.raises(Error, match="same number"):
        ops.cond(yes, lambda a: a, [x], lambda a: (a, a), [x])
    with inside(training=True), pytest.raises(Error, match="only supported in inference"):
        ops.cond(yes, lambda a: a, [x], lambda a: a, [x])


@given(
    st.sampled_from([(size, extent) for extent in (4, 6, 8) for size in range(1, extent + 1)
                     if extent % size == 0]),
    st.integers(0, 20), st.integers(1, 3), st.integers(-2, 1),
)  # fmt: skip
def test_a_dynamic_slice_is_a_slice_that_wraps(sizes, start, step, dim):
    size, extent = sizes
    tensor = torch.arange(extent * extent).reshape(extent, extent)
    wanted = [(start + offset) % extent for offset in range(0, size, step)]
    for begin in (torch.tensor(start), torch.tensor([start], dtype=torch.int32)):
        got = ops.dynamic_slice(tensor, dim, begin, size, step)
        assert torch.equal(got, tensor.index_select(dim, torch.tensor(wanted)))


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 1))
def test_a_dynamic_update_is_an_assignment(size, start, dim):
    tensor, source = torch.zeros(6, 6), torch.rand(6, 6).narrow(dim, 0, size)
    before = tensor.clone()
    got = ops.dynamic_update(tensor, source, dim, torch.tensor([start]), size)
    for offset in range(6):
        place = (offset - start) % 6
        expected = source.select(dim, place) if place < size else torch.zeros(6)
        assert torch.equal(got.select(dim, offset), expected)
    assert torch.equal(tensor, before)


def test_dynamic_slices_pass_gradients():
    x, source = torch.randn(8, requires_grad=True), torch.randn(2, requires_grad=True)
    ops.dynamic_slice(x, 0, torch.tensor(6), 2, 1).sum().backward()
    assert x.grad.tolist() == [0.0] * 6 + [1.0] * 2
    ops.dynamic_update(x, source, 0, torch.tensor(0), 2).sum().backward()
    assert source.grad.tolist() == [1.0] * 2


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "start and end of a slice must be different"),
        (-1, "end less than the start"),
        (7, r"size of the slice \(7\) must divide the size of the sliced dimension \(8\)"),
    ],
)
def test_sizes_of_slices(size, message):
    with pytest.raises(Error, match=message):
        ops.dynamic_slice(torch.ones(8), 0, torch.tensor(0), size, 1)
    if size < 7:
        with pytest.raises(Error, match=message):
            ops.dynamic_update(torch.ones(8), torch.ones(1), 0, torch.tensor(0), size)


def test_what_a_dynamic_update_must_share():
    start = torch.tensor(0)
    with pytest.raises(Error, match="same number of dimensions"):
        ops.dynamic_update(torch.ones(4, 4), torch.ones(1), 0, start, 1)
    with pytest.raises(Error, match="same dtype"):
        ops.dynamic_update(torch.ones(4), torch.ones(1, dtype=torch.int), 0, start, 1)
    with pytest.raises(Error, match="one element"):
        ops.dynamic_slice(torch.ones(4), 0, torch.tensor([0, 1]), 1, 1)
    with pytest.raises(Error, match="integer"):
        ops.dynamic_slice(torch.ones(4), 0, torch.tensor(0.5), 1, 1)


def test_a_module_on_the_host_is_frozen():
    layer = nn.Linear(2, 2)
    on_host = ops.CPU(layer, "host")
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    x = torch.ones(1, 2)
    with inside():
        assert torch.equal(on_host(x), layer(x))
    with inside(training=True), pytest.raises(Error, match="only supported in inference"):
        on_host(x)
