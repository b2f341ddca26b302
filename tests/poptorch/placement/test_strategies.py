"""Strategies: which stage and IPU a block gets, what is refused, and what tracing records."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import placement_of, quiet_options
from torch import nn

from popdist_py.poptorch import inferenceModel
from popdist_py.poptorch.enums import AutoStage, Liveness
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.placement.annotations import BeginBlock, Block
from popdist_py.poptorch.placement.execution_strategies import (
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

torch.set_num_threads(1)


class Blocks(nn.Module):
    """Layers in blocks of the given ids and IPUs, one after the other."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = blocks
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in blocks)

    def forward(self, x):
        for layer, (user_id, ipu_id) in zip(self.layers, self.blocks, strict=True):
            with Block(user_id, ipu_id):
                x = layer(x)
        return x


def place(strategy, *blocks, training=False, module=None):
    module = module or Blocks(*blocks)
    x = torch.ones(3, 2)
    return placement_of(strategy, module, module, x, training=training)


def ipus(placement):
    return [block.ipu for block in placement.blocks]


def stages(placement):
    return [block.stage for block in placement.blocks]


def test_a_pipeline_has_one_of_two_schedules():
    strategy = PipelinedExecution("a", "b")
    plain = strategy._description()
    assert strategy.setSchedule("interleaved") is strategy
    assert strategy._description() != plain == strategy.setSchedule("grouped")._description()
    with pytest.raises(ValueError, match="expected 'grouped' or 'interleaved'"):
        strategy.setSchedule("sequential")


# --- Stages and ids -------------------------------------------------------------------------------


def test_the_default_is_one_stage_per_ipu():
    placement = place(PipelinedExecution(), ("a", 0), ("b", 1), ("c", 3))
    assert (ipus(placement), stages(placement)) == ([0, 1, 3], [0, 1, 3])
    assert placement.num_ipus == 4
    with pytest.raises(AssertionError, match="no IPU was specified"):
        place(PipelinedExecution(), ("a", None))


def test_auto_increment_counts_new_blocks_from_one():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    placement = place(strategy, ("a", None), ("b", 0), ("a", None), ("c", None))
    assert (stages(placement), ipus(placement)) == ([1, 2, 1, 3], [1, 0, 1, 3])


@pytest.mark.parametrize("kind", [PipelinedExecution, ShardedExecution])
def test_listed_stages_may_be_given_in_three_ways(kind):
    strategy = kind(Stage("a"), "b", ["c", "d"])
    placement = place(strategy, ("a", None), ("b", None), ("d", None), ("c", None))
    assert (stages(placement), ipus(placement)) == ([0, 1, 2, 2], [0, 1, 2, 2])
    assert strategy.stage("d").blocks == ["c", "d"]
    with pytest.raises(AssertionError, match="Unknown Block"):
        strategy.stage("e")
    with pytest.raises(AssertionError, match="Unknown Block"):
        place(strategy, ("e", 0))


def test_who_chooses_the_ipu():
    strategy = PipelinedExecution(Stage("a").ipu(5), "b", "c")
    placement = place(strategy, ("a", 1), ("b", 7), ("c", None))
    assert ipus(placement) == [5, 7, 2]


def test_a_block_is_in_one_stage():
    with pytest.raises(AssertionError, match="more than one stage"):
        PipelinedExecution(Stage("a"), ["b", "a"])
    with pytest.raises(AssertionError, match="more than one stage"):
        SerialPhasedExecution(Phase("a"), Phase("a"))


def test_ids_are_strings():
    with pytest.raises(AssertionError, match="strings"):
        Stage(0)
    with pytest.raises(AssertionError):
        PipelinedExecution(0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_the_number_of_stages(path):
    blocks = [(f"{index}", ipu) for index, ipu in enumerate(path)]
    changes = sum(path[i] != path[i + 1] for i in range(len(path) - 1))
    assert place(PipelinedExecution(), *blocks).num_stages == 1 + changes
    training = place(PipelinedExecution(), *blocks, training=True)
    assert training.num_stages == 2 * (1 + changes) - 1
    assert training.num_ipus == max(path) + 1


def test_operations_before_the_first_block_are_a_stage():
    module = nn.Sequential(nn.Linear(2, 2), BeginBlock(nn.Linear(2, 2), ipu_id=1))
    assert place(PipelinedExecution(), module=module).num_stages == 2
    # A block without operations is none.
    module = nn.Sequential(nn.Linear(2, 2), BeginBlock(nn.Identity(), ipu_id=1))
    assert place(PipelinedExecution(), module=module).num_stages == 1


def test_a_pipeline_with_operations_before_the_first_block_has_to_be_filled():
    module = nn.Sequential(nn.Linear(2, 2), BeginBlock(nn.Linear(2, 2), ipu_id=1))
    with pytest.raises(Error, match=r"has 2 stages: Options\.deviceIterations is 1"):
        inferenceModel(module, quiet_options())(torch.ones(1, 2))


# --- Phases ---------------------------------------------------------------------------------------


def test_a_phase_takes_stages_or_ids():
    assert [stage.blocks for stage in Phase("a", "b").stages] == [["a", "b"]]
    assert [stage.blocks for stage in Phase(Stage("a"), Stage("b")).stages] == [["a"], ["b"]]
    with pytest.raises(AssertionError, match="not both"):
        Phase("a", Stage("b"))
    with pytest.raises(AssertionError):
        Phase()


def test_a_phase_needs_one_ipu_for_each_stage():
    phase = Phase(Stage("a"), Stage("b")).ipus(3, 1)
    placement = place(SerialPhasedExecution(phase), ("a", None), ("b", None))
    assert ipus(placement) == [3, 1]
    assert phase.stage(1).blocks == ["b"]
    with pytest.raises(AssertionError, match="2 stages"):
        phase.ipus(1)


def test_phases_use_ipus_in_turn():
    phases = [Phase(Stage("a"), Stage("b")), [Stage("c"), Stage("d")], ["e"]]
    blocks = [(name, None) for name in "abcde"]
    serial = place(SerialPhasedExecution(*phases), *blocks)
    assert ipus(serial) == [0, 1, 0, 1, 0]
    assert [block.phase for block in serial.blocks] == [0, 0, 1, 1, 2]
    parallel = place(ParallelPhasedExecution(*phases), *blocks)
    assert ipus(parallel) == [0, 2, 1, 3, 0]


@pytest.mark.parametrize("kind", [SerialPhasedExecution, ParallelPhasedExecution])
def test_phases_have_to_be_given(kind):
    for wrong in ((), (AutoStage.SameAsIpu,)):
        with pytest.raises(AssertionError, match="not support AutoStage"):
            kind(*wrong)
    strategy = kind("a", "b")
    assert strategy.phase(1).stages[0].blocks == ["b"]
    for wrong in (-1, 2, "a"):
        with pytest.raises(AssertionError):
            strategy.phase(wrong)
    assert strategy.useSeparateBackwardPhase(True) is strategy


def test_settings_of_phased_strategies():
    serial = SerialPhasedExecution("a")
    assert serial.setTensorsLiveness(Liveness.OffChipAfterEachPhase) is serial
    with pytest.raises(AssertionError, match="Liveness"):
        serial.setTensorsLiveness(3)
    parallel = ParallelPhasedExecution("a")
    assert parallel.sendTensorsOffChipAfterFwd() is parallel


# --- What tracing records -------------------------------------------------------------------------


def test_parameters_are_where_they_are_used_first():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.unused = (nn.Linear(2, 2) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):
            x = self.first(x)
            with Block(ipu_id=1):
                x = self.second(x)
            with Block(ipu_id=2):
                return torch.nn.functional.linear(x * self.scale, self.first.weight)

    placement = place(PipelinedExecution(), module=Model())
    assert placement.ipu_of_parameter == {
        "first.weight": 0,
        "first.bias": 0,
        "second.weight": 1,
        "second.bias": 1,
        "scale": 2,
        "unused.weight": 0,
        "unused.bias": 0,
    }
    assert [ipu for _, ipu in placement.operations] == [0, 1, 2, 2]


def test_parameters_of_a_functional_call_are_found():
    module = nn.Sequential(nn.Linear(2, 2), BeginBlock(nn.Linear(2, 2), ipu_id=1))
    values = {name: value.detach().clone() for name, value in module.named_parameters()}
    x = torch.ones(1, 2)
    run = partial(torch.func.functional_call, module, values)
    placement = placement_of(PipelinedExecution(), module, run, x)
    assert placement.ipu_of_parameter["0.weight"] == 0
    assert placement.ipu_of_parameter["1.weight"] == 1


def test_an_operation_behind_a_block_is_refused():
    class Model(nn.Module):
        def __init__(self, after):
            super().__init__()
            self.after = after

        def forward(self, x):
            with Block(ipu_id=0):
                y = x * 2
            return self.after(y)

    for operation in (lambda y: y + 1, torch.relu, lambda y: y.view(-1), lambda y: y[0]):
        with pytest.raises(Error, match="No active Block"):
            place(PipelinedExecution(), module=Model(operation))
    # Neither looking at a value nor making a constant runs anything on the device.
    for harmless in (
        lambda y: y,
        lambda y: (y.shape, y.dtype, y.requires_grad, y.dim()),
        lambda y: (y, torch.ones(3) * 2),
    ):
        place(PipelinedExecution(), module=Model(harmless))


def test_leaving_an_inner_block_does_not_resume_the_outer_one():
    class Model(nn.Module):
        def forward(self, x):
            with Block("outer", 0):
                with Block("inner", 1):
                    x = x + 1
                return x + 1

    with pytest.raises(Error, match="No active Block"):
        place(PipelinedExecution(), module=Model())


def test_a_failed_forward_leaves_nothing_behind():
    model = Blocks(("a", None))
    with pytest.raises(AssertionError):
        place(PipelinedExecution(), module=model)
    assert not model._forward_pre_hooks
    model(torch.ones(1, 2)) + 1  # no recorder is active: nothing raises
