"""Printed options: PopTorch's fields, grouped, one field a line, changed values marked."""

from __future__ import annotations

import pickle

import pytest

import popdist_py.poptorch as poptorch

# The names in what PopTorch 2.6 prints for the four cells of its pipelining tutorial that end
# with a call of a setter, by the group that the cell shows.
_POPART = {"instrumentWithHardwareCycleCounter", "rearrangeAnchorsOnHost"}
_EVERY = {"_warnings", "_warnings_disabled", "_is_frozen"}
_TRAINING = {
    "gradient_accumulation",
    "accumulation_and_replication_reduction_type",
    "meanAccumulationAndReplicationReductionStrategy",
    "_popart_options",
}
_PRECISION = {
    "autocast_enabled",
    "autocast_policy",
    "autocast_policy_dict",
    "half_float_casting",
    "_popart_options",
}
_OPTIONS = {
    *("replication_factor", "broadcast_buffers", "device_iterations", "log_dir"),
    *("auto_round_num_ipus", "anchored_tensors", "output_mode", "output_return_period"),
    *("connection_type", "sync_pattern", "available_memory_proportion"),
    *("Distributed", "num_distributed_processes", "distributed_process_id", "ipuof_configs"),
    *("_gcd_mappings", "Jit", "trace_model", "Precision", "TensorLocations", "Training"),
    "_Popart",
}


def _pipelined(options):
    return options.setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.Stage("B1").ipu(0), "B2")
    )


def _offloaded(options):
    return options.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False)
    )


_CELLS = {
    "setExecutionStrategy": (_pipelined, _OPTIONS | _TRAINING | _PRECISION | _POPART | _EVERY),
    "gradientAccumulation": (
        lambda options: options.Training.gradientAccumulation(10),
        _TRAINING | _POPART | _EVERY,
    ),
    "setOptimizerLocation": (_offloaded, {"location_optimizer"} | _EVERY),
    "outputMode": (
        lambda options: options.outputMode(poptorch.OutputMode.All),
        _OPTIONS | _TRAINING | _PRECISION | _POPART | _EVERY,
    ),
}


def _fields(text):
    """Return the fields of a text by name; each has a line of its own."""
    lines = (line.strip().partition("=") for line in text.splitlines() if "=" in line)
    return {name: value for name, _, value in lines}


@pytest.mark.parametrize("cell", _CELLS)
def test_every_field_that_poptorch_prints_is_there(cell):
    act, names = _CELLS[cell]
    found = _fields(repr(act(poptorch.Options())))
    assert names <= found.keys(), names - found.keys()


def test_changed_values_are_marked_with_their_defaults():
    options = _pipelined(poptorch.Options()).deviceIterations(10)
    _offloaded(options)
    options.Training.gradientAccumulation(10)
    found = _fields(repr(options))
    marked = {name: value for name, value in found.items() if "#" in value}
    assert marked == {
        "device_iterations": "10,  # default: 1",
        "gradient_accumulation": "10,  # default: 1",
        "location_optimizer": "{'onChip': 0},  # default: not set",
    }
    assert found["_execution_strategy"] == "PipelinedExecution(Stage('B1').ipu(0), Stage('B2')),"
    assert "#" not in repr(poptorch.Options())


def test_parts_are_indented_and_say_shared_fields_once():
    text = repr(poptorch.Options())
    assert text.startswith("Options(\n    replication_factor=1,\n")
    assert text.endswith(
        "\n    _warnings={},\n    _warnings_disabled=set(),\n    _is_frozen=False,\n)"
    )
    assert "\n    TensorLocations=_TensorLocationOptions(),\n" in text
    assert "\n    Training=_TrainingOptions(\n        gradient_accumulation=1,\n" in text
    assert text.count("_is_frozen") == 1
    assert max(map(len, text.splitlines())) < 100


def test_frozen_options_and_those_of_the_launcher_print_too():
    options = poptorch.Options(ipus_per_replica=1)
    options._freeze()
    text = repr(pickle.loads(pickle.dumps(options)))
    assert text.startswith("DistributedOptions(\n")
    assert "    _is_frozen=True,\n" in text
    assert "_is_frozen=True" in repr(options.Training)


def test_autocast_can_be_read_and_is_off():
    precision = poptorch.Options().Precision
    assert precision.autocast_enabled is False
    assert precision.autocast_policy is None
    assert precision.autocast_policy_dict == {}
    with pytest.raises(AssertionError, match="Invalid option autocast_enabled"):
        precision.autocast_enabled = True


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (poptorch.PipelinedExecution(), "PipelinedExecution(<AutoStage.SameAsIpu: 0>)"),
        (
            poptorch.ShardedExecution(["a", "b"], "c"),
            "ShardedExecution(Stage('a', 'b'), Stage('c'))",
        ),
        (
            poptorch.SerialPhasedExecution("a", poptorch.Phase("b").ipus(1)),
            "SerialPhasedExecution(Phase(Stage('a')), Phase(Stage('b').ipu(1)))",
        ),
    ],
)
def test_strategies_print_their_stages(strategy, text):
    assert repr(strategy) == text
