"""The group ``Options._Popart``, which stores PopART's session options by name.

Only a few session options have an effect on emulated IPUs. The table in the module
``option_effects`` lists the session options with an effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import Any, Final, TypeVar, cast

from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.options import from_text
from popdist_py.poptorch.options.engine_options import engine_option
from popdist_py.poptorch.options.option_effects import SESSION, Effect, Option
from popdist_py.poptorch.options.store import OptionStore

__all__ = ["_PopartOptions", "_SessionGroup", "session_option"]

Member = TypeVar("Member", bound=IntEnum)

_KNOWN: Final = frozenset(
    {
        "accumulateOuterFragmentSettings",
        "accumulationAndReplicationReductionType",
        "accumulationFactor",
        "accumulatorTensorLocationSettings",
        "activationTensorLocationSettings",
        "aliasZeroCopy",
        "autoRecomputation",
        "autodiffSettings",
        "automaticLossScalingSettings",
        "batchSerializationSettings",
        "bufferingDepthMap",
        "cachePath",
        "collectivesNetworkSettings",
        "compilationProgressLogger",
        "compilationProgressTotal",
        "compileEngine",
        "constantFoldingOfConstantWeights",
        "constantWeights",
        "convolutionOptions",
        "createHaloRegions",
        "createImplicitPipeliningFwdOnlyProgram",
        "customCodeletCompileFlags",
        "customCodelets",
        "decomposeGradSum",
        "defaultBufferingDepth",
        "defaultPrefetchBufferingDepth",
        "delayVarUpdates",
        "developerSettings",
        "disableGradAccumulationTensorStreams",
        "disableOptimizerStateTensorStreams",
        "dotChecks",
        "dotOpNames",
        "enableConstantFoldingOfMultipleConsumers",
        "enableDistributedReplicatedGraphs",
        "enableEfficientOverlapIOTopoCons",
        "enableEngineCaching",
        "enableExplicitIR",
        "enableExplicitMainLoops",
        "enableFloatingPointChecks",
        "enableFullyConnectedPass",
        "enableGradientAccumulation",
        "enableInplaceAmbiguityChecking",
        "enableLoadAndOffloadRNGState",
        "enableMergeExchange",
        "enableNonStableSoftmax",
        "enableOutlining",
        "enableOutliningCopyCostPruning",
        "enablePipelining",
        "enablePrefetchDatastreams",
        "enableReplicatedGraphs",
        "enableRngStateManagement",
        "enableSerializedMatmuls",
        "enableStableNorm",
        "enableStochasticRounding",
        "enableSupportedDataTypeCasting",
        "enableVariablesCaching",
        "engineOptions",
        "ensureFp32LossScaleTensor",
        "executionPhaseSettings",
        "explicitPipeliningEnabled",
        "explicitRecomputation",
        "exportPoplarComputationGraph",
        "exportPoplarVertexGraph",
        "finalDotOp",
        "firstDotOp",
        "gclOptions",
        "globalReplicaOffset",
        "globalReplicationFactor",
        "groupHostSync",
        "groupNormOptions",
        "groupNormStridedChannelGrouping",
        "hardwareInstrumentations",
        "implicitPipeliningEnabled",
        "instrumentWithHardwareCycleCounter",
        "kahnTieBreaker",
        "logDir",
        "loosenThreshold",
        "lstmOptions",
        "matmulOptions",
        "meanAccumulationAndReplicationReductionStrategy",
        "mergeVarUpdate",
        "mergeVarUpdateMemThreshold",
        "numIOTiles",
        "optimizerStateTensorLocationSettings",
        "opxAliasChecking",
        "opxModifyChecking",
        "outlineSequenceBreakCost",
        "outlineThreshold",
        "outputInstructionsForEngines",
        "partialsTypeMatMuls",
        "patterns_level",
        "prefetchBufferingDepthMap",
        "rearrangeAnchorsOnHost",
        "rearrangeStreamsOnHost",
        "replicatedCollectivesSettings",
        "replicatedGraphCount",
        "reportOptions",
        "saveInitializersToFile",
        "scheduleNonWeightUpdateGradientConsumersEarly",
        "separateCallOpPdfs",
        "serializedPoprithmsShiftGraphsDir",
        "shouldDelayVarUpdates",
        "stashIoPaths",
        "strictOpVersions",
        "subgraphCopyingStrategy",
        "swapLimitScheduler",
        "syncPatterns",
        "syntheticDataMode",
        "tensorLocationSettingsOverride",
        "timeLimitScheduler",
        "timePartitionLogger",
        "transitiveClosureOptimizationThreshold",
        "updatableNamedBuffers",
        "useHostCopyOps",
        "useLoopCandidateCreator",
        "virtualGraphMode",
        "weightTensorLocationSettings",
    }
)
# The session options of PopART whose values must be dictionaries, because this library reads single
# keys of the dictionaries.
_DICTIONARIES: Final = frozenset({"convolutionOptions", "engineOptions", "matmulOptions"})
# The session options of PopART for the cache of compiled executables. A compiled executable does
# not depend on the options for the cache of executables.
_CACHING: Final = ("enableEngineCaching", "cachePath")


def session_option(name: str) -> Option:
    """Return the row of a session option in the table of effects, or a new row "hardware only".

    The table of options' effects does not contain every name with dots. For a name with dots that
    is not in the table, ``session_option`` searches the table for the part of the name before the
    first dot. If the table row of the part before the first dot says that the option does nothing,
    ``session_option`` returns this row.

    Args:
        name: The name of the PopART session option, as in the table of options' effects. If the
            value of the session option is a dictionary, a space and a key may follow the name, as
            in ``convolutionOptions partialsType``.
    """
    stem = name.partition(".")[0]
    if name in SESSION:
        return SESSION[name]
    if stem in SESSION and SESSION[stem].is_idle:
        return SESSION[stem]
    written = "_Popart.setPatterns" if stem.startswith("patterns") else f"_Popart {name}"
    return Option(written, Effect.HARDWARE)


class _PopartOptions(OptionStore):
    """The session options of PopART, which a program sets by name.

    The code of this library calls one of four methods to read a session option or an engine option.
    The methods ``session_value``, ``session_member``, ``engine_value`` and ``is_engine_option_on``
    accept only options that have an effect on emulated IPUs.
    """

    def __init__(self) -> None:
        super().__init__(instrumentWithHardwareCycleCounter=False, rearrangeAnchorsOnHost=False)

    @property
    def options(self) -> dict[str, Any]:
        """The session options that a program has set or that have a default, with their values."""
        return cast(dict[str, Any], self._values)

    def session_value(self, option: str, default: Any = None) -> Any:
        """Return the value of a session option, which must have an effect on emulated IPUs.

        Args:
            option: The name of the session option, as in the table of options' effects. If the
                value of the session option is a dictionary, a space and a key may follow the name,
                as in ``convolutionOptions partialsType``.
            default: The result for a session option that is not set.
        """
        assert session_option(option).acts, f"{option} has no effect"
        name, _, key = option.partition(" ")
        values = self.options.get(name, {}) if key else self.options
        return values.get(key or name, default)

    def session_member(
        self, option: str, kind: type[Member], default: Member | None = None
    ) -> Member:
        """Return the value of a session option as a member of the given enumeration.

        Raises:
            Error: The value of the session option is not a member of the enumeration.
        """
        value = self.session_value(option, default)
        try:
            return kind(int(value))
        except (TypeError, ValueError):
            known = ", ".join(f"{each.value} ({each.name})" for each in kind)
            raise Error(
                f"The session option {option} is {value!r}: expected one of {known}"
            ) from None

    def engine_value(self, name: str) -> Any:
        """Return the value of an engine option with an effect, or None if it is not set.

        The environment variable ``POPLAR_ENGINE_OPTIONS`` overrides the value of an engine option
        that the program sets.

        Raises:
            Error: ``POPLAR_ENGINE_OPTIONS`` is not a JSON object.
        """
        assert engine_option(name).acts, f"{name} has no effect"
        set_by_program = self.options.get("engineOptions", {})
        return {**set_by_program, **from_text.engine_environment()}.get(name)

    def is_engine_option_on(self, *names: str) -> bool:
        """Tell whether at least one of the named engine options has the value ``true`` or ``1``.

        Raises:
            Error: ``POPLAR_ENGINE_OPTIONS`` is not a JSON object.
        """
        return any(str(self.engine_value(name)).lower() in ("true", "1") for name in names)

    def changed_rows(self) -> Iterator[Option]:
        """Yield the table rows of changed session options, and of keys of changed dictionaries."""
        for name, value in self.changed().items():
            if name == "engineOptions":
                yield from map(engine_option, value)
            elif name in _DICTIONARIES:
                yield from (session_option(f"{name} {key}") for key in value)
            else:
                yield session_option(name)

    def set(self, key: str, value: Any) -> _PopartOptions:  # type: ignore[override]
        """Set one session option.

        The name of the session option is checked when a model is compiled.

        As in PopTorch, the arguments are the name and the value of a session option. The names of
        session options cannot be keyword arguments, because the names may contain dots.
        """
        self.checkIsFrozen()
        self._change(key, value)
        return self

    def _change(self, name: str, value: Any) -> None:
        self._values[name] = value

    def update(self, key: str, entries: Mapping[str, Any]) -> None:
        """Add ``entries`` to the value of the session option ``key``, which is a dictionary."""
        self.set(key, {**self.options.get(key, {}), **entries})

    def check(self) -> None:
        """Check the names of session options, and that some options have dictionaries as values.

        If the name of a session option contains dots, only the part before the first dot is
        checked.

        Raises:
            Error: The name of a session option is unknown, or its value is not a dictionary
                although it must be one.
        """
        for name, value in self.options.items():
            stem = name.partition(".")[0]
            if stem not in _KNOWN and stem != "patterns":
                raise Error(
                    f"Unknown session option {name!r} in a call of Options._Popart.set(): correct "
                    "its name"
                )
            if name in _DICTIONARIES and not isinstance(value, Mapping):
                raise Error(f"The session option {name!r} is {value!r}: expected a dictionary")

    def setEngineOptions(self, engine_options: Mapping[str, str]) -> _PopartOptions:
        """Set the options of Poplar's class Engine."""
        return self.set("engineOptions", dict(engine_options))

    def setPatterns(self, patterns: Mapping[str, bool], level: int = 2) -> _PopartOptions:
        """Switch graph patterns of the compiler on or off, which does not change results."""
        assert isinstance(level, int), f"setPatterns() got level={level!r}: expected a whole number"
        self.set("patterns_level", level)
        for name, enabled in patterns.items():
            self.set(f"patterns.{name}", bool(enabled))
        return self

    def _description(self) -> tuple[Any, ...]:
        """Return all session options except the options for the cache of executables."""
        described = {key: value for key, value in self.options.items() if key not in _CACHING}
        return (type(self).__name__, sorted(described.items()))


class _SessionGroup(OptionStore):
    """A group of options whose setters also set session options of PopART.

    Args:
        popart: The session options of the same Options object.
        **defaults: The names of the group's own options, with their default values.
    """

    def __init__(self, popart: _PopartOptions, **defaults: Any) -> None:
        super().__init__(**defaults)
        self._declare(_popart=popart)

    def _groups(self) -> dict[str, OptionStore]:
        return {}
