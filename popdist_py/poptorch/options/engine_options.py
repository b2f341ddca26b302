"""Names of Poplar's engine options, and the search for a name in the table of options' effects.

Programs set engine options with ``Options._Popart.setEngineOptions`` or in the environment variable
POPLAR_ENGINE_OPTIONS. The names of engine options are listed at the class Engine in the Poplar API
reference.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Final

from popdist_py.poptorch.options.option_effects import ENGINE, Effect, Option

__all__ = ["engine_option", "unknown"]

_HARDWARE_ONLY: Final = frozenset(
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


def engine_option(name: str) -> Option:
    """Return the row of an engine option in the table of options' effects, or a new row.

    A new row of the table of options' effects says that the engine option affects only hardware, or
    that its name is unknown.
    """
    if name in ENGINE:
        return ENGINE[name]
    if name in _HARDWARE_ONLY:
        return Option(f"engine option {name}", Effect.HARDWARE)
    why = unknown("key", name, _HARDWARE_ONLY | ENGINE.keys())
    return Option(f"engine option {name}", Effect.NOTHING, why)


def unknown(kind: str, name: str, known: Collection[str]) -> str:
    """Return the text of a warning about an unknown name, with the most similar known name.

    Args:
        kind: A word for the kind of name, such as ``variable`` (an environment variable).
        name: The unknown name.
        known: The known names of this kind, among which the most similar name is searched.
    """
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"an unknown {kind}" + (f": did you mean {close[0]}?" if close else "")
