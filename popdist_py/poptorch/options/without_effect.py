"""A search for options that do nothing on emulated IPUs, and warnings about them.

There are two kinds of options without effect, and each kind has its own line in the log. Options of
the first kind ask for something that this library does not have, such as a file. Options of the
second kind change only the speed or memory of hardware. Options that change the emulated memory or
time have an effect, so they belong to neither kind. This module only reads options.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from popdist_py.errors import counted
from popdist_py.poptorch.enums import Liveness
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options import engine_options
from popdist_py.poptorch.options.idle_variables import idle_variables, unknown_key
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.options.store import OptionStore
from popdist_py.poptorch.placement.execution_strategies import (
    ParallelPhasedExecution,
    SerialPhasedExecution,
)
from popdist_py.poptorch.tracing.block_places import Placement

__all__ = ["Idle", "idle_options", "say_idle_in_model", "say_idle_options"]


@dataclass(frozen=True, slots=True)
class Idle:
    """An option that a program has set and that does nothing.

    Attributes:
        name: The name of the option, as programs write it.
        why: The reason why the option does nothing. The text is empty if the option changes only
            the speed or memory of hardware.
    """

    name: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.why})" if self.why else self.name


@dataclass(frozen=True, slots=True)
class _Rule:
    idle: Idle
    applies: Callable[[Any], bool] = lambda _: True


_NO_FILES: Final = "no such files are written"
_BY_SETTER: Final = "the setters of Options decide"

# The rule for each option. The keys are the names of the stored values of the options.
_RULES: Final[Mapping[str, _Rule]] = {
    "log_dir": _Rule(Idle("logDir", "no logs are written to files")),
    "max_repeat_logs": _Rule(Idle("maxRepeatLogs", "repeated lines are all shown")),
    "use_model": _Rule(
        Idle("useIpuModel(False)", "there is no hardware to use"), lambda use: not use
    ),
    "model_name": _Rule(Idle("modelName")),
    "sync_pattern": _Rule(Idle("syncPattern")),
}

# The rule for each session option, by the part of its name before the first dot. Session options
# without a rule change only the speed or memory of hardware.
_SESSION_RULES: Final[Mapping[str, _Rule]] = {
    "enableStableNorm": _Rule(Idle("enableStableNorm")),
    **{
        name: _Rule(Idle(f"_Popart {name}", _NO_FILES))
        for name in (
            "exportPoplarComputationGraph",
            "exportPoplarVertexGraph",
            "saveInitializersToFile",
            "serializedPoprithmsShiftGraphsDir",
        )
    },
    **{
        name: _Rule(Idle(f"_Popart {name}", "nothing is shown"))
        for name in (
            "compilationProgressLogger",
            "dotChecks",
            "dotOpNames",
            "hardwareInstrumentations",
            "timePartitionLogger",
        )
    },
    **{
        name: _Rule(Idle(f"_Popart {name}", _BY_SETTER))
        for name in (
            "accumulationAndReplicationReductionType",
            "accumulationFactor",
            "enableGradientAccumulation",
            "enableReplicatedGraphs",
            "globalReplicaOffset",
            "globalReplicationFactor",
            "meanAccumulationAndReplicationReductionStrategy",
            "numIOTiles",
            "replicatedGraphCount",
        )
    },
}

# The full names of the session options that have an effect. Some of these session options affect
# only the emulated memory and time.
_READ: Final = frozenset(
    {
        "autoRecomputation",
        "automaticLossScalingSettings.binEdgeLocation",
        "automaticLossScalingSettings.enabled",
        "automaticLossScalingSettings.thresholdUpperCountProportion",
        "automaticLossScalingSettings.updatePeriod",
        "cachePath",
        "enableEngineCaching",
        "enableFloatingPointChecks",
        "enablePipelining",
        "enableStochasticRounding",
        "instrumentWithHardwareCycleCounter",
        "partialsTypeMatMuls",
        "syntheticDataMode",
        "updatableNamedBuffers",
    }
)

# For each session option that is a dictionary, the keys of that dictionary that affect the emulated
# memory and time.
_READ_OF_OPERATION: Final[Mapping[str, frozenset[str]]] = {
    "convolutionOptions": frozenset({"availableMemoryProportion", "partialsType"}),
    "matmulOptions": frozenset({"availableMemoryProportion"}),
}
_DITHERING: Final = "convolutionOptions enableConvDithering"

# Reasons for warnings about options of execution phases and I/O tiles. Hardware offers a choice of
# behaviours, but the emulation has only the behaviour that the reason states.
_PHASES: Final = "each phase fetches its tensors and sends them off the chip"
_LOADED: Final = "I/O tiles load and store only data from and to the host"

# The options that this program has already logged. An option is logged once, even if several models
# use it.
_said: set[Idle] = set()


def idle_options(options: Options) -> list[Idle]:
    """Return the changed options that do nothing, each once."""
    return list(dict.fromkeys(_find(options)))


def _find(options: Options) -> Iterator[Idle]:
    stores: tuple[OptionStore, ...] = (options, options.TensorLocations)
    for store in stores:
        for name, value in store.changed().items():
            rule = _RULES.get(name)
            if rule is not None and rule.applies(value):
                yield rule.idle
            if name.startswith("location_"):
                tiles = [key for key in ("useIOTilesToLoad", "useIOTilesToStore") if value.get(key)]
                yield from (Idle(f"TensorLocationSettings.{key}", _LOADED) for key in tiles)
    yield from _phases(options._execution_strategy)
    if options._source_location_excludes:
        yield Idle("sourceLocationExcludes")
    for name, value in options._Popart.changed().items():
        if name == "engineOptions":
            yield from _engine(value)
        elif name in _READ_OF_OPERATION:
            yield from _of_operation(name, value)
        elif name not in _READ:
            yield from _session(name, value)


def _phases(strategy: object) -> Iterator[Idle]:
    if not isinstance(strategy, SerialPhasedExecution | ParallelPhasedExecution):
        return
    if strategy._separate_backward_phase:
        yield Idle("useSeparateBackwardPhase", "the last forward and its backward are one phase")
    if isinstance(strategy, SerialPhasedExecution) and strategy._liveness != Liveness.AlwaysLive:
        yield Idle("setTensorsLiveness", _PHASES)
    if isinstance(strategy, ParallelPhasedExecution) and strategy._off_chip_after_forward:
        yield Idle("sendTensorsOffChipAfterFwd", _PHASES)


def _of_operation(name: str, given: Mapping[str, Any]) -> Iterator[Idle]:
    for key in given:
        option = f"{name} {key}"
        if option == _DITHERING:
            yield Idle("Training.setConvolutionDithering")
        elif key not in _READ_OF_OPERATION[name]:
            yield Idle(f"_Popart {option}")


def _session(name: str, value: Any) -> Iterator[Idle]:
    stem = name.partition(".")[0]
    rule = _SESSION_RULES.get(stem)
    if rule is None:
        yield Idle("_Popart.setPatterns" if stem.startswith("patterns") else f"_Popart {name}")
    elif rule.applies(value):
        yield rule.idle


def _engine(given: Mapping[str, str]) -> Iterator[Idle]:
    for name in given:
        if name not in engine_options.ACTING:
            yield Idle(f"engine option {name}", unknown_key(name))


def say_idle_in_model(options: Options, placement: Placement) -> None:
    """Log the settings that do nothing in a traced model, on instance 0 only.

    Memory proportions do nothing for IPUs that the model does not use. Some settings of operators
    in the forward pass have an effect on hardware only.
    """
    if options.Distributed.processId != 0:
        return
    ipus = placement.num_ipus
    if absent := sorted(ipu for ipu in options.available_memory_proportion if ipu >= ipus):
        logger.warning(
            "setAvailableMemoryProportion names %s, but the model uses %s, counted from IPU0",
            ", ".join(f"IPU{ipu}" for ipu in absent),
            counted(ipus, "IPU"),
        )
    _say(map(Idle, placement.idle_settings))


def say_idle_options(options: Options) -> None:
    """Log options and environment variables without effect, each once, on instance 0 only."""
    if options.Distributed.processId == 0:
        of_environment = [Idle(name, why) for name, why in idle_variables(os.environ)]
        _say((*idle_options(options), *of_environment))


def _say(idle: Iterable[Idle]) -> None:
    """Log the options that this program has not logged before, with one line for each kind."""
    found = [one for one in idle if one not in _said]
    _said.update(found)
    if missed := ", ".join(str(one) for one in found if one.why):
        logger.warning("These options do nothing on emulated IPUs: %s", missed)
    if for_hardware := ", ".join(str(one) for one in found if not one.why):
        logger.warning(
            "These options change the speed or memory of hardware only: %s", for_hardware
        )
