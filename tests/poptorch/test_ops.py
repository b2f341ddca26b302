"""Operations: the same numbers as plain PyTorch, and the documented errors."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from popdist_py.poptorch import ops, tracing
from popdist_py.poptorch.enums import (
    MatMulSerializationMode,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
)
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.options import Options
from popdist_py.poptorch.strategies import PipelinedExecution, ShardedExecution, record_placement

torch.set_num_threads(1)


def inside(training=False, tracing_forward=False):
    """Be inside the forward of a wrapped model."""
    return tracing.entered(tracing.Phase(training=training, tracing=tracing_forward))


# --- Identities -----------------------------------------------------------------------------------


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


# --- Control flow ---------------------------------------------------------------------------------


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


# --- Dynamic slices -------------------------------------------------------------------------------


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
        (7, r"size of the slice \(7\) must be a factor of the slicing dimension \(8\)"),
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
    with pytest.raises(Error, match="same dimensionality"):
        ops.dynamic_update(torch.ones(4, 4), torch.ones(1), 0, start, 1)
    with pytest.raises(Error, match="same dtype"):
        ops.dynamic_update(torch.ones(4), torch.ones(1, dtype=torch.int), 0, start, 1)
    with pytest.raises(Error, match="one element"):
        ops.dynamic_slice(torch.ones(4), 0, torch.tensor([0, 1]), 1, 1)
    with pytest.raises(Error, match="integer"):
        ops.dynamic_slice(torch.ones(4), 0, torch.tensor(0.5), 1, 1)


# --- The host -------------------------------------------------------------------------------------


def test_a_module_on_the_host_is_frozen():
    layer = nn.Linear(2, 2)
    on_host = ops.CPU(layer, "host")
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    x = torch.ones(1, 2)
    with inside():
        assert torch.equal(on_host(x), layer(x))
    with inside(training=True), pytest.raises(Error, match="only supported in inference"):
        on_host(x)


# --- Printing -------------------------------------------------------------------------------------


def printed(capsys, tensor, title="t", **style):
    with inside():
        result = ops.ipu_print_tensor(tensor, title, **style)
    assert torch.equal(result, tensor)
    return capsys.readouterr().err


def test_rows_stand_on_their_own_lines(capsys):
    text = printed(capsys, torch.arange(8.0).reshape(2, 2, 2))
    assert text == (
        "t: (\n (\n  (0.000, 1.000)\n  (2.000, 3.000)\n )\n"
        " (\n  (4.000, 5.000)\n  (6.000, 7.000)\n )\n)\n"
    )
    assert printed(capsys, torch.tensor([1, 2])) == "t: (1, 2)\n"


def test_brackets_and_separators(capsys):
    text = printed(
        capsys, torch.tensor([[1, 2], [3, 4]]), separator=";", open_bracket="{", close_bracket="}"
    )
    assert text == "t: {\n {1;2}\n {3;4}\n}\n"


@pytest.mark.parametrize(
    ("value", "digits", "float_format", "text"),
    [
        (1.4962566, 8, "scientific", "1.4962566e+00"),
        (1.4962566, 4, "auto", "1.496"),
        (1.4962566e-9, 4, "auto", "1.496e-09"),
        (123456.0, 3, "fixed", "123456"),
        (0.0149625, 4, "fixed", "0.01496"),
        (0.0, 4, "auto", "0.000"),
        (float("inf"), 4, "auto", "inf"),
        (2.5, 4, "none", "2.5"),
    ],
)
def test_numbers(capsys, value, digits, float_format, text):
    tensor = torch.tensor([value], dtype=torch.float64)
    got = printed(capsys, tensor, digits=digits, float_format=float_format)
    assert got == f"t: ({text})\n"


def test_long_tensors_are_summarised_and_long_rows_wrapped(capsys):
    text = printed(capsys, torch.arange(100), summarise_threshold=10, edge_items=2)
    assert text == "t: (0, 1, ..., 98, 99)\n"
    lines = printed(capsys, torch.arange(60)[None], max_line_width=40).splitlines()
    assert len(lines) > 4
    assert all(len(line) <= 40 for line in lines)
    assert all(line.startswith("   ") for line in lines[2:-1])


def test_the_gradient_is_printed_too(capsys):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    for wanted in (True, False):
        with inside(training=True):
            (ops.ipu_print_tensor(x, "x", print_gradient=wanted) * 3).sum().backward()
        assert ("x_gradient: (3.000, 3.000)\n" in capsys.readouterr().err) == wanted


def test_nothing_is_printed_while_tracing_or_on_the_host(capsys):
    ops.ipu_print_tensor(torch.ones(1), "host")
    with inside(tracing_forward=True):
        ops.ipu_print_tensor(torch.ones(1), "traced")
    assert capsys.readouterr().err == ""


# --- CTC decoding, custom operations, point clouds ------------------------------------------------


def labels_of(alignment, blank):
    return tuple(label for label, _ in itertools.groupby(alignment) if label != blank)


@settings(max_examples=25)
@given(st.integers(1, 4), st.integers(2, 3), st.integers(0, 1), st.integers(0, 10_000))
def test_ctc_decoding_finds_the_most_likely_labels(time, classes, blank, seed):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.randn(time, 1, classes, generator=generator).log_softmax(-1)
    likelihood = {}
    for alignment in itertools.product(range(classes), repeat=time):
        log = sum(probs[t, 0, label].item() for t, label in enumerate(alignment))
        labels = labels_of(alignment, blank)
        likelihood[labels] = likelihood.get(labels, 0.0) + math.exp(log)
    ranking = sorted(likelihood.values(), reverse=True)
    paths = min(2, len(ranking))
    scores, lengths, labels = ops.ctc_beam_search_decoder(
        probs, torch.tensor([time]), blank=blank, top_paths=paths
    )
    assert (scores.shape, lengths.shape, labels.shape) == ((1, paths), (1, paths), (1, paths, time))
    assert labels.dtype == lengths.dtype == torch.int32
    torch.testing.assert_close(scores[0].exp(), torch.tensor(ranking[:paths]))
    found = tuple(labels[0, 0, : lengths[0, 0]].tolist())
    assert math.isclose(likelihood[found], ranking[0], rel_tol=1e-5)


def test_ctc_decoding_reads_only_the_valid_time_steps():
    probs = torch.full((3, 1, 2), -10.0)
    probs[:, 0, 1] = -0.001
    _, lengths, _ = ops.ctc_beam_search_decoder(probs, torch.tensor([0]))
    assert lengths.item() == 0


def test_a_custom_operation_runs_its_python_function():
    x = torch.tensor([2.0])
    arguments = ([x], "Cube", "test.ops", 1)
    with inside(), pytest.raises(Error, match="registerCustomOp"):
        ops.custom_op(*arguments, example_outputs=[x])
    ops.registerCustomOp("Cube", "test.ops", lambda t, scale: t**3 * scale)
    with inside():
        (result,) = ops.custom_op(*arguments, example_outputs=[x], attributes={"scale": 2.0})
        assert result.item() == 16.0
        with pytest.raises(Error, match="example_outputs"):
            ops.custom_op(*arguments, example_outputs=[x, x], attributes={"scale": 2.0})
    (on_host,) = ops.custom_op(*arguments, example_outputs=[x], attributes={"scale": 2.0})
    assert torch.equal(on_host, x)


@pytest.mark.parametrize(
    "attributes",
    [
        {1: 2.0},
        {"a": object()},
        {"a": [1, 2.0]},
        {"a": "ü"},
        {"ü": 1},
        {"a": {"b": 1}},
        {"a": [[1]]},
    ],
)
def test_attributes_of_custom_operations(attributes):
    with pytest.raises(ValueError):
        ops.custom_op([], "Name", "domain", 1, example_outputs=[], attributes=attributes)
    good = {"f": 1.0, "i": 1, "s": "x", "l": [1, 2], "t": ("a", "b")}
    assert ops.custom_op([], "Name", "domain", 1, [], good) == []


def test_farthest_points():
    line = torch.tensor([[0.0], [1.0], [10.0], [4.0], [0.0], [5.0]])
    assert ops.fps(line, [0, 4], ratio=0.75).tolist() == [0, 2, 3]
    assert ops.fps(line, [0, 4, 6], ratio=0.5).tolist() == [0, 2, 4]
    assert 0 <= ops.fps(line, [0, 6], ratio=0.1, random_start=True).item() < 6


def test_nearest_points():
    x, y = torch.tensor([[0.0], [9.0]]), torch.tensor([[8.0], [1.0], [0.5]])
    assert ops.nearest(x, y).tolist() == [2, 0]
    batch_x, batch_y = torch.tensor([0, 1]), torch.tensor([0, 0, 1])
    assert ops.nearest(x, y, batch_x, batch_y).tolist() == [1, 2]


# --- MultiConv ------------------------------------------------------------------------------------


@pytest.fixture
def conv():
    return nn.Conv2d(2, 2, 3)


def test_multi_conv_changes_no_number(conv):
    x = torch.randn(1, 2, 8, 8)
    for proportions in (0.5, [0.5, 0.25]):
        multi = ops.MultiConv().availableMemoryProportions(proportions).partialsTypes(torch.half)
        multi.planType(MultiConvPlanType.Serial).perConvReservedTiles(10).cycleBackOff(0.1)
        with inside(), multi.enableConvDithering(True):
            results = (conv(x), conv(x * 2))
        assert all(map(torch.equal, results, (conv(x), conv(x * 2))))


def test_multi_conv_counts_its_convolutions(conv):
    def run(multi, count):
        with inside(), multi:
            for _ in range(count):
                conv(torch.ones(1, 2, 8, 8))

    with pytest.raises(Error, match="2 convolutions but 3 available memory"):
        run(ops.MultiConv().availableMemoryProportions([0.1, 0.2, 0.3]), 2)
    with pytest.raises(Error, match="Unexpected end_multi_conv"):
        run(ops.MultiConv(), 0)
    run(ops.MultiConv(), 1)  # the errors before left nothing behind


def test_multi_convs_cannot_be_nested():
    with (
        inside(),
        pytest.raises(Error, match=r"Nested poptorch.MultiConv is not supported"),
        ops.MultiConv(),
        ops.MultiConv(),
    ):
        pass
    with ops.MultiConv(), ops.MultiConv():
        pass  # on the host it does nothing


@pytest.mark.parametrize(
    ("method", "value", "error"),
    [
        ("availableMemoryProportions", "0.1", AssertionError),
        ("availableMemoryProportions", [0.1, "0.2"], AssertionError),
        ("planType", 0, AssertionError),
        ("partialsTypes", torch.int, ValueError),
        ("partialsTypes", [torch.half, "half"], ValueError),
        ("enableConvDithering", "yes", ValueError),
        ("enableConvDithering", [True, 1], ValueError),
    ],
)
def test_multi_conv_settings(method, value, error):
    with pytest.raises(error, match="Invalid"):
        getattr(ops.MultiConv(), method)(value)


# --- Overlapped I/O -------------------------------------------------------------------------------

LOOP = OverlapMode.OverlapAccumulationLoop


class Overlapped(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self._run = forward

    def forward(self, x, y):
        return self._run(x, y)


def check(forward, *, options=None, training=False, strategy=None):
    module = Overlapped(forward)
    options = options or io_options(strategy)
    inputs = torch.ones(2), torch.ones(2)
    with record_placement(PipelinedExecution(), module, training, options, inputs=inputs):
        module(*inputs)


def io_options(strategy=None, tiles=32, mode=OutputMode.All):
    options = Options().setExecutionStrategy(strategy or ShardedExecution()).outputMode(mode)
    if tiles:
        options.TensorLocations.numIOTiles(tiles)
    return options


def mark_in(x, mode=LOOP):
    return ops.set_overlap_for_input(x, mode)


def mark_out(x, mode=LOOP):
    return ops.set_overlap_for_output(x, mode)


def test_marks_that_keep_the_rules():
    check(lambda x, y: mark_in(x) + y)
    check(lambda x, y: sum(mark_in((x, y))))
    check(lambda x, y: mark_out(x + y))
    check(lambda x, y: mark_out({"a": x + y, "b": [x * y]}))
    check(lambda x, y: (mark_out(z := x + y), z * 2))


@pytest.mark.parametrize("mode", list(OverlapMode))
@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x, y, m: mark_in(y, m) + x + y, r"only op applied to an input: input 1"),
        (lambda x, y, m: mark_in(x, m) + y + mark_in(x, m), "only op applied to an input: input 0"),
        (lambda x, y, m: mark_in(x + y, m), "node which is not a tensor input"),
        (lambda x, y, m: mark_out(x + y, m) * 2, "node which is not a tensor output"),
        (lambda x, y, m: (mark_out(z := x + y, m), z), "returned twice"),
        (lambda x, y, m: (z := mark_out(x + y, m), z), "returned twice"),
    ],
)
def test_marks_that_break_a_rule(forward, message, mode):
    for strategy in (PipelinedExecution(), ShardedExecution()):
        with pytest.raises(Error, match=message):
            check(lambda x, y: forward(x, y, mode), strategy=strategy)


def test_what_overlapping_needs():
    def forward(x, y):
        return mark_in(x) + y

    with pytest.raises(Error, match=r"not supported with poptorch.PipelinedExecution"):
        check(forward, options=io_options(PipelinedExecution()))
    with pytest.raises(Error, match="No IO tiles allocated"):
        check(forward, options=io_options(tiles=0))
    with pytest.raises(Error, match="output mode"):
        check(forward, options=io_options(mode=OutputMode.Final))
    with pytest.raises(Error, match="output mode"):
        check(forward, options=io_options(mode=OutputMode.Default), training=True)
    check(forward, options=io_options(mode=OutputMode.Default))
    check(
        lambda x, y: mark_in(x, OverlapMode.NoOverlap) + y,
        options=io_options(PipelinedExecution(), tiles=0, mode=OutputMode.Final),
    )
