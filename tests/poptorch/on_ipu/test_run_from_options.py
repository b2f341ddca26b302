"""Options that change memory or time on hardware change the estimates in the same direction."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import popdist_py.poptorch as poptorch
from popdist_py import popart
from popdist_py.ipu.graph import Placement
from popdist_py.ipu.memory import memory
from popdist_py.ipu.placed_stage import stage_of
from popdist_py.ipu.runs.model_graph import ModelGraph
from popdist_py.ipu.schedule import schedule
from popdist_py.ipu.settings import Optimizer, Settings
from popdist_py.ipu.specification import BOW, MK2
from popdist_py.ipu.tensor_liveness import forward_moments
from popdist_py.ipu.what_if import explain
from popdist_py.poptorch.on_ipu.run_from_options import optimizer_of, run_from_options
from tools.device.ipu_graphs import resnet, with_checkpoints

GRAPH = resnet([3, 4, 6, 3], 64, 32)
TWO = ModelGraph(GRAPH, Placement.cut(GRAPH, ["layer3.2"]))
ONE = ModelGraph(GRAPH, Placement.cut(GRAPH))
WEIGHTS = [torch.nn.Parameter(torch.zeros(2))]


def adam(**types):
    return poptorch.optim.Adam(WEIGHTS, lr=0.1, **types)


def training_options():
    options = poptorch.Options().replicationFactor(2)
    options.Training.gradientAccumulation(4)
    return options


def run(change=lambda _: None, graph=TWO, optimizer=None, training=True):
    options = training_options()
    change(options)
    return run_from_options(graph, options, optimizer or adam(), training=training)


def always(run, category):
    """Return the bytes of a category on all IPUs together."""
    report = memory(run.graph, run.placement, run.settings, run.ipu)
    return sum(ipu.by_category().get(category, 0) for ipu in report.ipus)


def place(**calls):
    location = poptorch.TensorLocationSettings()
    for name, value in calls.items():
        getattr(location, name)(value)
    return location


OFF_CHIP = {"useOnChipStorage": False}
SHARDED = {"useReplicatedTensorSharding": True}


@pytest.mark.parametrize(
    ("change", "category"),
    [
        (lambda o: o.TensorLocations.setWeightLocation(place(**OFF_CHIP)), "weights"),
        (lambda o: o.TensorLocations.setWeightLocation(place(**SHARDED)), "weights"),
        (lambda o: o.TensorLocations.setOptimizerLocation(place(**OFF_CHIP)), "optimiser state"),
        (lambda o: o.TensorLocations.setOptimizerLocation(place(**SHARDED)), "optimiser state"),
        (lambda o: o.TensorLocations.setAccumulatorLocation(place(**SHARDED)), "accumulators"),
        (lambda o: o.TensorLocations.setAccumulatorLocation(place(**OFF_CHIP)), "accumulators"),
        (lambda o: o.TensorLocations.setActivationLocation(place(**OFF_CHIP)), "stash"),
        (lambda o: o.Training.gradientAccumulation(1), "accumulators"),
        (lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()), "stash"),
        (lambda o: o._Popart.set("enablePipelining", False), "stash"),
        (lambda o: o.enableSyntheticData(True), "streams"),
        (lambda o: o.setAvailableMemoryProportion({"IPU0": 0.05, "IPU1": 0.05}), "working set"),
        (lambda o: o.Precision.setPartialsType(torch.half), "working set"),
    ],
)
def test_bytes_that_an_option_saves(change, category):
    assert 0 <= always(run(change), category) < always(run(), category)


def test_a_profile_needs_memory(monkeypatch):
    profiled = run(lambda options: options.enableProfiling("folder"))
    assert always(profiled, "profiling") > always(run(), "profiling") == 0
    (advice,) = (
        one
        for one in explain(replace(profiled, ipu=replace(MK2, tile_bytes=200_000))).advice
        if one.kind == "profiling"
    )
    assert advice.saved == profiled.fullest.needed - run().fullest.needed
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", '{"autoReport.all": "true"}')
    assert run().fullest == profiled.fullest


@pytest.mark.parametrize("kind", ["Weight", "Optimizer", "Accumulator"])
def test_small_tensors_stay(kind):
    """If all tensors are smaller than the threshold, no tensor is moved."""

    def change(options):
        location = place(**OFF_CHIP, **SHARDED, minElementsForOffChip=10**9)
        location.minElementsForReplicatedTensorSharding(10**9)
        getattr(options.TensorLocations, f"set{kind}Location")(location)

    assert run(change).fullest == run().fullest


def recomputing(mode):
    return lambda options: options._Popart.set("autoRecomputation", int(mode))


def test_recomputation():
    kinds = popart.RecomputationType
    none, norms, all_ = (
        run(recomputing(kind)) for kind in (kinds.NoRecompute, kinds.NormOnly, kinds.Pipeline)
    )
    assert always(none, "stash") > always(norms, "stash") > always(all_, "stash") > 0
    assert none.cycles < norms.cycles < all_.cycles
    # By default, a pipeline over several IPUs recomputes, and a model on one IPU does not.
    assert all_.fullest == run().fullest
    assert all_.cycles == run().cycles
    assert run(graph=ONE).fullest == run(recomputing(kinds.NoRecompute), graph=ONE).fullest


@pytest.mark.parametrize("graph", [ONE, TWO], ids=["one IPU", "two IPUs"])
def test_popart_s_own_checkpoints(graph):
    kinds = popart.RecomputationType
    none = run(recomputing(kinds.NoRecompute), graph=graph)
    standard = run(recomputing(kinds.Standard), graph=graph)
    assert standard.fullest.needed < none.fullest.needed
    assert standard.cycles > none.cycles
    assert run(recomputing(kinds.RecomputeAll), graph=graph) == standard
    # Checkpoints that the program marks replace the checkpoints that PopART chooses.
    marked = ModelGraph(with_checkpoints(graph.graph, "relu3"), graph.placement)
    assert run(recomputing(kinds.Standard), graph=marked).settings.recompute == "stage"


@pytest.mark.parametrize("given", [7, "Pipeline", None, [1]])
def test_recomputation_that_popart_does_not_know(given):
    if given is None:
        assert run(lambda o: o._Popart.set("autoRecomputation", None)) == run()
        return
    with pytest.raises(poptorch.Error, match=r"autoRecomputation is .*0 \(NoRecompute\)"):
        run(lambda o: o._Popart.set("autoRecomputation", given))


def test_the_last_stage_recomputes_if_it_contains_a_checkpoint():
    marked = with_checkpoints(GRAPH, "layer4.0.relu3")
    again = run(graph=ModelGraph(marked, TWO.placement))
    assert again.settings.recomputes_last
    assert again.cycles > run().cycles
    earlier = with_checkpoints(GRAPH, "layer1.0.relu3")
    assert not run(graph=ModelGraph(earlier, TWO.placement)).settings.recomputes_last


def test_counts():
    assert run().settings.replicas == 2
    assert run(lambda o: o.Distributed.configureProcessId(1, 3)).settings.replicas == 6
    longer = run(lambda o: o.deviceIterations(3))
    assert longer.settings.micro_batches == 12
    assert longer.cycles > run().cycles
    inference = run(lambda o: o.deviceIterations(4), training=False)
    assert inference.settings.micro_batches == 4
    assert inference.fullest.needed < run().fullest.needed


def test_io_tiles_leave_less_memory_and_allow_overlapped_streams():
    def with_tiles(options):
        options.TensorLocations.numIOTiles(64)
        options.setExecutionStrategy(poptorch.ShardedExecution())

    def overlapping(options):
        with_tiles(options)
        options.outputMode(poptorch.OutputMode.All)

    tiles = run(with_tiles)
    assert tiles.fullest.capacity == (MK2.tiles - 64) * MK2.tile_bytes
    assert not tiles.settings.overlaps_io
    assert run(overlapping).settings.overlaps_io
    in_pipeline = run(
        lambda o: o.outputMode(poptorch.OutputMode.All).TensorLocations.numIOTiles(64)
    )
    assert not in_pipeline.settings.overlaps_io


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (poptorch.OutputMode.All, "all"),
        (poptorch.OutputMode.Final, "final"),
        (poptorch.OutputMode.Sum, "sum"),
        (poptorch.OutputMode.Default, "final"),
    ],
)
def test_output_modes(mode, expected):
    assert run(lambda o: o.outputMode(mode)).settings.output_mode == expected


def test_all_outputs_take_longer_than_the_last():
    every = run(lambda o: o.outputMode(poptorch.OutputMode.All))
    assert every.cycles > run().cycles


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (poptorch.PipelinedExecution(), "grouped"),
        (poptorch.PipelinedExecution().setSchedule("interleaved"), "interleaved"),
        (poptorch.ShardedExecution(), "sharded"),
        (poptorch.SerialPhasedExecution("a"), "serial phased"),
        (poptorch.ParallelPhasedExecution("a"), "parallel phased"),
    ],
)
def test_strategies(strategy, expected):
    made = run(lambda o: o.setExecutionStrategy(strategy))
    assert made.settings.strategy == expected
    assert schedule(made.placement, made.settings).rows


def test_an_interleaved_pipeline_keeps_less_and_takes_longer():
    turns = run(
        lambda o: o.setExecutionStrategy(poptorch.PipelinedExecution().setSchedule("interleaved"))
    )
    assert 0 < always(turns, "stash") < always(run(), "stash")
    assert turns.cycles > run().cycles
    assert str(schedule(turns.placement, turns.settings)) != str(
        schedule(run().placement, run().settings)
    )

    def off(options):
        options.setExecutionStrategy(poptorch.PipelinedExecution().setSchedule("interleaved"))
        options._Popart.set("enablePipelining", False)

    assert run(off).settings.strategy == "sharded"


def test_stages_in_turn_take_longer_than_a_pipeline():
    sharded = run(lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()))
    assert sharded.cycles > run(recomputing(popart.RecomputationType.NoRecompute)).cycles


def test_each_ipu_has_a_memory_proportion():
    made = run(lambda o: o.setAvailableMemoryProportion({"IPU1": 0}))
    assert made.settings.memory_proportion == (Settings().proportion(0), 0.01)
    assert made.settings.matmul_proportion == made.settings.memory_proportion
    assert run().settings.memory_proportion == Settings().memory_proportion


def working_set(run, kind):
    """Return the largest temporary memory of a run's convolutions or other matrix products."""
    (stage,) = range(run.placement.num_stages)
    here = stage_of(run.graph, run.placement, run.settings, run.ipu, stage)
    kinds = {o.name: o.product.is_convolution for o in here.operations if o.product}
    sizes = {m.name.split()[0]: m.temporary for m in forward_moments(here)}
    return max(sizes[name] for name, is_one in kinds.items() if is_one == (kind == "convolution"))


def test_convolutions_and_matrix_products_have_options_of_their_own():
    def found(change=lambda _: None):
        made = run(change, ONE)
        return working_set(made, "convolution"), working_set(made, "matmul"), made.cycles

    def session(name, **values):
        return found(lambda o: o._Popart.set(name, values))

    conv, matmul, cycles = found()
    for name in ("availableMemoryProportion", "partialsType"):
        value = "half" if name == "partialsType" else "0.02"
        less = session("convolutionOptions", **{name: value})
        assert less[0] < conv
        assert less[1] == matmul
        assert (less[2] > cycles) == (name == "availableMemoryProportion")
    less = session("matmulOptions", availableMemoryProportion=0.001)
    assert less[0] == conv
    assert less[1] < matmul
    assert less[2] > cycles
    less = found(lambda o: o._Popart.set("partialsTypeMatMuls", "half"))
    assert less[0] == conv
    assert less[1] < matmul
    both = found(lambda o: o.Precision.setPartialsType(torch.half))
    assert both[0] < conv
    assert both[1] < matmul
    assert run(lambda o: o.Precision.setPartialsType(torch.float)) == run()


def test_the_proportion_of_an_ipu_precedes_that_of_a_kind_of_product():
    def change(options):
        options._Popart.set("convolutionOptions", {"availableMemoryProportion": "0.3"})
        options.setAvailableMemoryProportion({"IPU0": 0.1})

    made = run(change).settings
    assert made.memory_proportion == (0.1, 0.3)
    assert made.matmul_proportion == (0.1, Settings().proportion(0))


@pytest.mark.parametrize("share", ["much", 1.5, -1])
def test_proportions_of_a_kind_of_product_are_numbers_from_0_to_1(share):
    with pytest.raises(poptorch.Error, match="matmulOptions has availableMemoryProportion"):
        run(lambda o: o._Popart.set("matmulOptions", {"availableMemoryProportion": share}))


def test_the_device_is_the_one_named():
    assert run().ipu == MK2
    assert run(lambda o: o.Emulator.device("bow")).ipu == BOW


HALF = torch.float16


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (torch.optim.SGD(WEIGHTS, lr=0.1), Optimizer()),
        (torch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9), Optimizer(state=("float32",))),
        (poptorch.optim.SGD(WEIGHTS, lr=0.1), Optimizer()),
        (
            poptorch.optim.SGD(
                WEIGHTS, lr=0.1, momentum=0.9, accum_type=HALF, velocity_accum_type=HALF
            ),
            Optimizer(state=("float16",), accumulator="float16"),
        ),
        (
            poptorch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9, use_combined_accum=True),
            Optimizer(state=("float32",), is_combined=True),
        ),
        (
            poptorch.optim.SGD(WEIGHTS, lr=0.1, use_combined_accum=True),
            Optimizer(state=("float32",), is_combined=True),
        ),
        (torch.optim.AdamW(WEIGHTS), Optimizer(state=("float32", "float32"))),
        (
            adam(accum_type=HALF, first_order_momentum_accum_type=HALF),
            Optimizer(state=("float16", "float32"), accumulator="float16"),
        ),
        (
            poptorch.optim.LAMB(WEIGHTS, second_order_momentum_accum_type=HALF),
            Optimizer(state=("float32", "float16")),
        ),
        (
            poptorch.optim.LARS(WEIGHTS, lr=0.1, velocity_accum_type=HALF),
            Optimizer(state=("float16",)),
        ),
        (poptorch.optim.LARS(WEIGHTS, lr=0.1, momentum=0.0), Optimizer()),
        (torch.optim.RMSprop(WEIGHTS), Optimizer(state=("float32",))),
        (
            poptorch.optim.RMSprop(WEIGHTS, momentum=0.9, centered=True),
            Optimizer(state=("float32", "float32", "float32")),
        ),
    ],
)
def test_state_tensors_of_optimizers(optimizer, expected):
    assert optimizer_of(optimizer) == expected


def test_a_group_with_momentum_is_enough():
    groups = [{"params": WEIGHTS}, {"params": [torch.nn.Parameter(torch.zeros(1))], "momentum": 1}]
    assert optimizer_of(torch.optim.SGD(groups, lr=0.1)).state == ("float32",)


def test_an_optimizer_that_the_device_does_not_know():
    with pytest.raises(AssertionError, match="expected SGD"):
        optimizer_of(torch.optim.Adagrad(WEIGHTS))


def test_the_optimizers_bytes():
    """Adam stores two moments more than SGD. In half precision, they need half of the bytes."""
    bare = run(optimizer=torch.optim.SGD(WEIGHTS, lr=0.1))
    half = adam(first_order_momentum_accum_type=HALF, second_order_momentum_accum_type=HALF)
    assert always(bare, "optimiser state") == 0
    trained = sum(weight.elements for weight in GRAPH.weights if weight.is_trained)
    assert always(run(), "optimiser state") == 8 * trained
    assert always(run(optimizer=half), "optimiser state") == 4 * trained
    lars = poptorch.optim.LARS(WEIGHTS, lr=0.1)
    assert always(run(optimizer=lars), "optimiser state") == 4 * trained
    combined = poptorch.optim.SGD(WEIGHTS, lr=0.1, momentum=0.9, use_combined_accum=True)
    assert always(run(optimizer=combined), "accumulators") == 0
    assert always(run(optimizer=adam(accum_type=HALF)), "accumulators") == 2 * trained
