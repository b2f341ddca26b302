"""The memory of one stage over time: peaks in closed form, segments, memory of matrix products."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from popdist_py.ipu.graph import Placement, Product
from popdist_py.ipu.placed_stage import stage_of
from popdist_py.ipu.recomputation import kept, segments
from popdist_py.ipu.settings import Settings
from popdist_py.ipu.specification import MK2
from popdist_py.ipu.tensor_liveness import (
    Moment,
    backward_moments,
    forward_moments,
    peak,
    shapes,
    working_set,
)
from tools.device.ipu_graphs import Builder, cnn, mlp, resnet, transformer, with_checkpoints

blocks = st.sampled_from("abcdef")


@given(
    moments=st.lists(
        st.builds(
            Moment,
            st.just("moment"),
            st.lists(blocks, max_size=3).map(tuple),
            st.dictionaries(blocks, st.integers(1, 100), max_size=3),
            st.integers(0, 50),
        ),
        max_size=12,
    )
)
def test_a_peak_is_never_below_what_one_moment_needs(moments):
    found = peak(moments)
    first: dict[str, int] = {}
    for moment in moments:
        first |= {name: size for name, size in moment.makes.items() if name not in first}
    assert found.bytes >= max(
        (max(m.makes.values(), default=0) and m.temporary for m in moments), default=0
    )
    assert found.bytes <= sum(sum(moment.makes.values()) + moment.temporary for moment in moments)
    # A block that is live all the time is part of every peak.
    around = [Moment("first", (), {"whole": 7}), *moments, Moment("last", ("whole",))]
    assert peak(around).bytes == found.bytes + 7


def test_a_block_lives_from_the_first_to_the_last_moment_that_names_it():
    found = peak(
        [
            Moment("make a", (), {"a": 10}),
            Moment("make b", ("a",), {"b": 5}),
            Moment("make c", ("b",), {"c": 8}, temporary=1),
        ]
    )
    assert (found.name, dict(found.live), found.bytes) == ("make b", {"a": 10, "b": 5}, 15)


def test_forward_and_backward_of_an_mlp():
    """Each block of an MLP in float32 with widths 8, 16, 4 and a batch of 2, computed by hand."""
    graph = mlp([8, 16, 4], batch=2)
    stage = stage_of(graph, Placement.cut(graph), Settings(recompute="none"), MK2, 0)
    stage = replace(stage, memory=0)  # matrix products get no temporary memory
    keeps = kept(stage, "none")
    assert keeps == {"input", "layers.0:out", "layers.1:out", "labels"}
    forward, backward = forward_moments(stage), backward_moments(stage, keeps)
    x, hidden, out, labels = 2 * 8 * 4, 2 * 16 * 4, 2 * 4 * 4, 2 * 4
    assert peak(forward).name == "layers.0 (forward)"
    assert peak(forward).bytes == x + labels + hidden
    first, second = (8 * 16 + 16) * 4, (16 * 4 + 4) * 4
    found = peak([*forward, *backward])
    assert found.name == "layers.0 (backward)"
    assert found.bytes == x + hidden + first
    by_name = {moment.name: moment for moment in backward}
    assert by_name["layers.1 (backward)"].temporary == second
    assert by_name["layers.1 (backward)"].makes == {
        "layers.0:out": hidden,
        "gradient of layers.0:out": hidden,
    }
    # The input needs no gradient, because no trained weight precedes it.
    assert by_name["layers.0 (backward)"].makes == {"input": x}
    until = [m.name for m in backward].index("layers.1 (backward)")
    found = peak([*forward, *backward[: until + 1], Moment("later", ("input",))])
    assert found.bytes == x + hidden + out + hidden + second


def test_segments_begin_behind_checkpoints():
    graph = with_checkpoints(resnet([1, 2, 1, 1], 64, 1), ".relu3")
    settings = Settings(recompute="stage")
    stage = stage_of(graph, Placement.cut(graph), settings, MK2, 0)
    found = segments(stage, kept(stage, "stage"))
    assert [o for segment in found for o in segment.operations] == list(stage.operations)
    assert all(s.operations[-1].kind == "add" or s is found[-1] or s.again for s in found)
    whole = [o.name for s in reversed(found) for o in s.again]
    assert len(whole) == len(set(whole))
    # The second branch of a block is recomputed on its own, just before its own backward pass.
    assert [o.name for o in found[3].again] == ["layer2.0.downsample.0"]
    again = next(s.again for s in found if s.operations[-1].name == "layer2.1.add")
    assert [o.name for o in again] == [
        "layer2.1.conv1",
        "layer2.1.bn1",
        "layer2.1.relu1",
        "layer2.1.conv2",
        "layer2.1.bn2",
        "layer2.1.relu2",
        "layer2.1.conv3",
    ]


def test_recomputation_of_norms_only():
    graph = resnet([1, 1, 1, 1], 64, 1)
    stage = stage_of(graph, Placement.cut(graph), Settings(recompute="norm"), MK2, 0)
    again = {o.name for s in segments(stage, kept(stage, "norm")) for o in s.again}
    assert {"layer2.0.bn1", "layer2.0.relu1"} <= again
    assert not [name for name in again if "conv" in name or "add" in name]


def test_every_saved_tensor_is_recomputed_or_kept():
    graph = with_checkpoints(resnet([2, 2, 2, 2], 64, 1), ".relu3")
    for recompute in ("none", "norm", "stage"):
        stage = stage_of(graph, Placement.cut(graph), Settings(), MK2, 0)
        keeps = kept(stage, recompute)
        there = set(keeps)
        for segment in reversed(segments(stage, keeps)):
            there |= {graph.root_of[o.output.name] for o in segment.again}
            for operation in segment.operations:
                assert {graph.root_of[name] for name in operation.saved} <= there


def with_mask(length):
    """Return two stages of a layer whose scores get a mask that the first IPU computes."""
    build = Builder(1, "float16")
    x, ids = build.input("x", length * 8), build.input("ids", length)
    mask = build.add("mask", "elementwise", [ids], length * length, saved=[])
    x = build.linear("first", x, length, (8, 8))
    scores = build.add("scores", "product", [x, x], length * length,
        product=Product(length, 8, length))  # fmt: skip
    scores = build.add("masked", "add", [scores, mask], is_in_place=True)
    x = build.add("mix", "product", [scores, x], length * 8, product=Product(length, length, 8))
    graph = build.graph([build.add("loss", "loss", [x, ids], 1)])
    return graph, Placement.cut(graph, ["first"])


def masked_layers(layers, length, width, *, has_mask):
    """Return one stage of attention layers with checkpoints, which may all read one mask."""
    build = Builder(1, "float16")
    ids, x = build.input("ids", length), build.input("x", length * width)
    mask = build.add("mask", "elementwise", [ids], length * length, saved=[]) if has_mask else ""
    for index in range(layers):
        name = f"layers.{index}"
        x = build.linear(f"{name}.first", x, length, (width, width))
        scores = build.add(f"{name}.scores", "product", [x, x], length * length,
            product=Product(length, width, length))  # fmt: skip
        if has_mask:
            scores = build.add(f"{name}.masked", "add", [scores, mask], is_in_place=True)
        shares = build.add(f"{name}.softmax", "softmax", [scores])
        x = build.add(f"{name}.mix", "product", [shares, x], length * width,
            product=Product(length, length, width), is_checkpoint=True)  # fmt: skip
    graph = build.graph([build.add("loss", "loss", [x, ids], 1)])
    return stage_of(graph, Placement.cut(graph), Settings(), MK2, 0)


@given(layers=st.integers(2, 6), length=st.integers(16, 256), width=st.sampled_from([64, 512]))
def test_a_mask_that_all_layers_read_costs_its_own_bytes(layers, length, width):
    def backward(*, has_mask):
        stage = masked_layers(layers, length, width, has_mask=has_mask)
        return stage, backward_moments(stage, kept(stage, "stage"))

    stage, with_it = backward(has_mask=True)
    _, without = backward(has_mask=False)
    mask, ids = stage.graph.root_bytes["mask:out"], stage.graph.root_bytes["ids"]
    assert mask <= peak(with_it).bytes - peak(without).bytes <= mask + ids
    again = [moment.name for moment in with_it if moment.name.endswith("(recompute)")]
    assert again.count("mask (recompute)") == 1
    # The recomputation of the last layer does not contain operations of another layer.
    last = again[: again.index(f"layers.{layers - 1}.softmax (recompute)")]
    assert not any(name.startswith("layers.0") for name in last)
    assert [n for n in again if "masked" not in n and n != "mask (recompute)"] == [
        moment.name for moment in without if moment.name.endswith("(recompute)")
    ]


def test_old_elements_are_read_before_an_operation_in_place_is_recomputed():
    """``old`` reads ``x`` before the addition overwrites it, and is needed much later."""
    build = Builder(1)
    x = build.add("x", "add", [build.input("input", 8)])
    old = build.add("old", "add", [x])
    early = build.add("early", "elementwise", [old], saved=[old])
    x = build.add("more", "add", [x, build.input("other", 8)], is_in_place=True)
    build.add("late", "elementwise", [x, early], saved=[x])
    graph = build.graph(["late:out"])
    stage = stage_of(graph, Placement.cut(graph), Settings(), MK2, 0)
    again = [[o.name for o in segment.again] for segment in segments(stage, frozenset())]
    assert again == [["x", "old", "more"]]


def test_an_input_of_a_stage_is_kept_if_a_recomputed_operation_reads_it():
    graph, placement = with_mask(32)
    stage = stage_of(graph, placement, Settings(), MK2, 1)
    # The sum of scores and mask is computed again.
    assert kept(stage, "stage") == {"x", "mask:out", "ids"}
    marked = replace(stage, operations=tuple(
        replace(o, is_checkpoint=o.name == "masked") for o in stage.operations
    ))  # fmt: skip
    # A kept sum needs no mask again.
    assert kept(marked, "stage") == {"x", "scores:out", "ids"}


def test_a_checkpoint_that_nothing_reads_again_costs_nothing():
    graph = mlp([8, 8, 8], batch=2)
    first, relu, second, _ = graph.operations
    placement = Placement((0, 0, 0, 1), (0, 1))

    def keeps(*marked):
        operations = tuple(replace(o, is_checkpoint=o in marked) for o in graph.operations)
        made = replace(graph, operations=operations)
        return kept(stage_of(made, placement, Settings(), MK2, 0), "stage")

    assert keeps() == {"input"}
    assert keeps(relu) == {"input", first.output.name}
    # The last tensor goes to the next IPU, and no backward pass here reads it.
    assert keeps(second) == {"input"}


sides = st.integers(1, 5000)


@given(rows=sides, depth=sides, columns=sides, count=st.integers(1, 64), more=st.integers(1, 1000))
def test_working_sets_grow_with_the_product(rows, depth, columns, count, more):
    def held(r, d, c):
        return working_set(Product(r, d, c, count), "float16", "float32", 1472)

    least = held(rows, depth, columns)
    assert least > 0
    for larger in (
        held(rows + more, depth, columns),
        held(rows, depth + more, columns),
        held(rows, depth, columns + more),
    ):
        assert larger >= 0.999 * least - 2000
    assert working_set(Product(rows, depth, columns), "float32", "float32", 1472) >= working_set(
        Product(rows, depth, columns), "float16", "float16", 1472
    )


def test_working_set_of_a_cube():
    """Each of 8 tiles computes 32 x 32 x 32 of a 64 x 64 x 64 product, and stores three faces."""
    found = working_set(Product(64, 64, 64), "float32", "float32", 8)
    assert abs(found - 8 * 3 * 32 * 32 * 4) <= 8


def test_tiles_store_the_input_of_neighbouring_positions_once():
    """A 3 x 3 kernel reads each element nine times, but no pass stores an element nine times."""
    build = Builder(batch=8, type="float16")
    image = build.input("input", 64 * 32 * 32)
    x = build.conv("conv", image, (64, 64), 3, 32, groups=64)
    graph = build.graph([x])
    (operation,) = graph.operations
    passes = [
        *shapes(operation, graph, backward=False),
        *shapes(operation, graph, backward=True),
    ]
    assert [p.reads for p in passes] == [9.0, 9.0, 9.0]
    assert len({p.flops for p in passes}) == 1
    # The gradient of the input has as many elements as the input.
    assert passes[1].rows * passes[1].columns * passes[1].count == 8 * 64 * 32 * 32
    for shape in passes:
        whole = working_set(replace(shape, reads=1.0), "float16", "float16", 1472)
        assert working_set(shape, "float16", "float16", 1472) < whole / 2
    matrix = transformer(1, 64, 16, 2)
    for operation in matrix.operations:
        for shape in shapes(operation, matrix, backward=True):
            assert shape.reads == 1.0


def test_a_serialised_gradient_is_added_part_by_part():
    graph = transformer(1, 64, 8, 1, words=1000)
    parts = [
        replace(o, product=replace(o.product, serial=10)) if o.name == "head" else o
        for o in graph.operations
    ]

    def at_backward(operations, accumulation):
        made = replace(graph, operations=tuple(operations))
        settings = Settings(accumulation=accumulation)
        stage = replace(stage_of(made, Placement.cut(made), settings, MK2, 0), memory=0)
        moments = {m.name: m for m in backward_moments(stage, kept(stage, "none"))}
        return moments["head (backward)"].temporary

    gradient = 1000 * 64 * 2
    assert at_backward(graph.operations, accumulation=2) == gradient
    assert at_backward(parts, accumulation=2) == gradient // 10
    # Without a gradient accumulator, all parts stay in memory until the update.
    assert at_backward(parts, accumulation=1) == gradient


def test_tables_are_accumulated_row_by_row():
    graph = transformer(1, 64, 8, 1, words=1000)

    def at_backward(**options):
        stage = stage_of(graph, Placement.cut(graph), Settings(**options), MK2, 0)
        moments = {m.name: m for m in backward_moments(stage, kept(stage, "none"))}
        return moments["embedding (backward)"].temporary

    assert at_backward(accumulation=2) == 0
    assert at_backward() == 1000 * 64 * 2


def kept_bytes(graph):
    stage = stage_of(graph, Placement.cut(graph), Settings(), MK2, 0)
    return {root: graph.root_bytes[root] for root in kept(stage, "none")}


def test_kept_tensors_of_a_cnn():
    """In a CNN, the input of each module is kept, and the results of ReLU and pool."""
    batch, width = 2, 4
    assert kept_bytes(cnn(batch=batch)) == {
        "input": batch * 3 * 16 * 16 * width,
        "conv:out": batch * 8 * 16 * 16 * width,
        "norm:out": batch * 8 * 16 * 16 * width,  # ReLU works in place
        "pool:out": batch * 8 * 8 * 8 * width,
        "fc:out": batch * 10 * width,
        "labels": batch * 4,
    }


def test_kept_tensors_of_a_transformer_layer():
    """The kept tensors of a layer of width 64 with length 16, 2 heads, batch 3 and float16."""
    name, tokens = "layers.0", 3 * 16 * 64 * 2
    assert kept_bytes(transformer(1, 64, 16, 3, heads=2)) == {
        "input": tokens,
        f"{name}.attention.query:out": tokens,
        f"{name}.attention.key:out": tokens,
        f"{name}.attention.value:out": tokens,
        f"{name}.attention.scores:out": 3 * 2 * 16 * 16 * 2,
        f"{name}.attention.mix:out": tokens,
        f"{name}.attention.out:out": tokens,  # the sum is made in place
        f"{name}.attention.norm:out": tokens,
        f"{name}.inner:out": 4 * tokens,
        f"{name}.gelu:out": 4 * tokens,
        f"{name}.outer:out": tokens,
        f"{name}.norm:out": tokens,
        "labels": 3 * 16 * 4,
    }


def names_again(graph, before, recompute="stage"):
    placement = Placement.cut(graph, before)
    stage = stage_of(graph, placement, Settings(), MK2, len(before))
    keeps = kept(stage, recompute)
    return keeps, [o.name for segment in segments(stage, keeps) for o in segment.again]


def test_a_stage_that_begins_in_place_on_another_stage_s_tensor():
    """A received tensor is kept unchanged, so the operation that changes it in place runs again."""
    graph = mlp([8, 8, 8, 8], batch=2)
    keeps, again = names_again(graph, ["layers.1.relu"])
    assert "layers.1:out" in keeps
    assert again == ["layers.1.relu", "layers.2"]
    keeps, again = names_again(graph, ["layers.1.relu"], "none")
    assert "layers.1:out" in keeps
    assert again == []
    # If a stage begins with a residual sum, the received block and the sum are one block.
    blocks = resnet([1, 2, 1, 1], 64, 1)
    _, again = names_again(blocks, ["layer2.1.add"])
    assert again[:2] == ["layer2.1.add", "layer2.1.relu3"]
    stage = stage_of(blocks, Placement.cut(blocks, ["layer2.1.add"]), Settings(), MK2, 1)
    size = blocks.root_bytes["layer2.1.bn3:out"]
    assert forward_moments(stage)[1].makes == {
        "layer2.1.bn3:out": size,
        "layer2.0.bn3:out": size,
    }


def test_an_operation_s_own_proportion_bounds_its_working_set():
    graph = mlp([64, 4096, 4096], batch=512)
    operations = tuple(
        replace(o, memory_proportion=0.001) if o.name == "layers.1" else o for o in graph.operations
    )

    def temporaries(graph):
        stage = stage_of(graph, Placement.cut(graph), Settings(), MK2, 0)
        return {m.name.split()[0]: m.temporary for m in forward_moments(stage)}

    own, plain = temporaries(replace(graph, operations=operations)), temporaries(graph)
    # The planner counts six times the bytes that the tiles hold at a time.
    assert own["layers.1"] == round(0.001 * MK2.memory / 6) < plain["layers.1"]
    assert own["layers.0"] == plain["layers.0"]


def test_a_repeated_product_needs_the_memory_of_one_repeat():
    """A loop of 20 equal products (as in an LSTM) has 20 times the flops of one, and its memory."""
    one = Product(1, 64, 256)
    many = replace(one, repeats=20)
    assert many.flops == 20 * one.flops
    graph = mlp([64, 256], batch=32)
    (layer, *others) = graph.operations
    looped = replace(graph, operations=(replace(layer, product=many), *others))

    def moments(graph):
        stage = stage_of(graph, Placement.cut(graph), Settings(), MK2, 0)
        return [m.temporary for m in backward_moments(stage, kept(stage, "none"))]

    assert moments(looped) == moments(graph)
