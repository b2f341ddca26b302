"""Which options do nothing on emulated IPUs, and how a program learns of it.

There are two kinds, and one line of the log for each. Options of the first kind ask for something
that does not exist here, such as a file. Options of the second kind change only hardware, and the
model of the device does not know them. Options that change memory or time in that model have an
effect, so they are in neither kind. This module only reads options.
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
    """An option that was set and does nothing.

    Attributes:
        name: how a program sets it.
        why: what does not happen; empty for what only hardware can do better or worse.
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

# By the name under which the value is stored.
_RULES: Final[Mapping[str, _Rule]] = {
    "log_dir": _Rule(Idle("logDir", "no logs are written to files")),
    "max_repeat_logs": _Rule(Idle("maxRepeatLogs", "repeated lines are all shown")),
    "use_model": _Rule(
        Idle("useIpuModel(False)", "there is no hardware to use"), lambda use: not use
    ),
    "model_name": _Rule(Idle("modelName")),
    "sync_pattern": _Rule(Idle("syncPattern")),
}

# Session options, by what comes before the first dot. Those that are not named are hardware's.
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

# Session options that are read, by their whole names; some by the model of the device alone.
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

# Session options that are dictionaries, and the keys that the model of the device reads.
_READ_OF_OPERATION: Final[Mapping[str, frozenset[str]]] = {
    "convolutionOptions": frozenset({"availableMemoryProportion", "partialsType"}),
    "matmulOptions": frozenset({"availableMemoryProportion"}),
}
_DITHERING: Final = "convolutionOptions enableConvDithering"

# Reasons: the model of the device has one behaviour where hardware has several.
_PHASES: Final = "each phase fetches its tensors and sends them off the chip"
_LOADED: Final = "I/O tiles load and store only data from and to the host"

# What was said already: several models of a program have the same options.
_said: set[Idle] = set()


def idle_options(options: Options) -> list[Idle]:
    """Return the options that differ from their defaults and do nothing, each once."""
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
    """Log what does nothing in the model that was traced, on instance 0.

    These are memory proportions of IPUs that the model does not use, and settings of operators in
    its forward that only hardware has.
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
    """Log options and variables that do nothing, each once in a program, on instance 0."""
    if options.Distributed.processId == 0:
        of_environment = [Idle(name, why) for name, why in idle_variables(os.environ)]
        _say((*idle_options(options), *of_environment))


def _say(idle: Iterable[Idle]) -> None:
    """Log what was not logged before in this program: one line for each of the two kinds."""
    found = [one for one in idle if one not in _said]
    _said.update(found)
    if missed := ", ".join(str(one) for one in found if one.why):
        logger.warning("These options do nothing on emulated IPUs: %s", missed)
    if for_hardware := ", ".join(str(one) for one in found if not one.why):
        logger.warning(
            "These options change the speed or memory of hardware only: %s", for_hardware
        )
