"""Names of Poplar's engine options, with and without an effect on emulated IPUs.

Programs set engine options with ``Options._Popart.setEngineOptions`` or in the environment variable
POPLAR_ENGINE_OPTIONS. The names are those of the class Engine in the Poplar API reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from popdist_py.poptorch.options import from_text

__all__ = ["ACTING", "IDLE", "REPORTS", "is_on", "trap"]

# On hardware, each of these options requests a part of the profile. In this library, each option
# requests the timeline of the process.
REPORTS: Final = frozenset(
    {
        "autoReport.all",
        "autoReport.outputArchive",
        "autoReport.outputDebugInfo",
        "autoReport.outputExecutionProfile",
        "autoReport.outputGraphProfile",
        "autoReport.outputLoweredVars",
        "autoReport.outputSerializedGraph",
    }
)
_TRAPS: Final = frozenset({"debug.floatPointOpException", "debug.nanOverflowException"})
ACTING: Final = frozenset(
    {
        *REPORTS,
        *_TRAPS,
        "autoReport.directory",
        # This library writes the memory report of a model that does not fit, with or without this
        # option.
        "debug.allowOutOfMemory",
    }
)
IDLE: Final = frozenset(
    {
        "autoReport.executionProfileProgramRunCount",
        "autoReport.streamAtEachRun",
        "debug.branchRecordEnabled",
        "debug.branchRecordTile",
        "debug.computeInstrumentationLevel",
        "debug.cpuMultiThreadExecution",
        "debug.exceptOnSOCError",
        "debug.executionProfileProgramRunCount",
        "debug.instrument",
        "debug.instrumentCompute",
        "debug.instrumentControlFlow",
        "debug.instrumentExternalExchange",
        "debug.outputAllSymbols",
        "debug.profilingTile",
        "debug.retainDebugInformation",
        "debug.runtimeVerify",
        "debug.supervisorStackSizeInBytes",
        "debug.trace",
        "debug.traceFile",
        "debug.verify",
        "debug.workerStackSizeInBytes",
        "exchange.enablePrefetch",
        "exchange.streamBufferOverlap",
        "opt.enableInlining",
        "opt.enableMultiAccessCopies",
        "opt.internalExchangeOptimisationTarget",
        "opt.limitVertexStateToLower256K",
        "opt.maxCompilationThreads",
        "opt.maxLinkerThreads",
        "opt.useAutoloader",
        "prng.enableStochasticRounding",
        "prng.seed",
        "profiler.format",
        "profiler.includeFlopEstimates",
        "profiler.perExecutionStreamCopyCycles",
        "profiler.replicaToProfile",
        "profiler.useZlib",
        "streamCallbacks.maxLookahead",
        "streamCallbacks.multiThreadMode",
        "streamCallbacks.numWorkerThreads",
        "target.deterministicWorkers",
        "target.extendedMemory",
        "target.gatewayMode",
        "target.gatewayWriteCombining",
        "target.hostSyncTimeout",
        "target.maxStreamCallbackThreadsPerNumaNode",
        "target.saveArchive",
        "target.supervisorStackSizeInBytes",
        "target.syncMethod",
        "target.syncPollPeriodUs",
        "target.syncReplicasIndependently",
        "target.textSectionSizeInBytes",
        "target.workerStackSizeInBytes",
    }
)


def is_on(value: Any) -> bool:
    """Tell whether the value of an engine option is ``true`` or ``1``."""
    return str(value).lower() in ("true", "1")


def trap(session_options: Mapping[str, Any]) -> bool:
    """Tell whether the session options or the environment enable floating-point exceptions."""
    if session_options.get("enableFloatingPointChecks"):
        return True
    given = {**session_options.get("engineOptions", {}), **from_text.engine_environment()}
    return any(is_on(given[name]) for name in _TRAPS & given.keys())
