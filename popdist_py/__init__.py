"""PopDist in Python: what the instances of a poprun-py job know about one another.

Importing this package imports neither torch, NumPy nor mpi4py; ``init()`` joins the job.
PopDist's own names keep their spelling. A module is imported at the first use of one of its names,
since the launcher needs only ``environment``. Nothing but this table of names lives here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from popdist_py.context import execute_on_instances, init
    from popdist_py.debugger import breakpoint
    from popdist_py.errors import (
        CollectiveMismatchError,
        ForgedObjectError,
        ForkedProcessError,
        InstanceLostError,
        NotInitialisedError,
        PopdistError,
        WireError,
    )
    from popdist_py.heartbeat import RESUME_EXIT_CODE, stopRequested
    from popdist_py.metrics.csv_sink import CsvSink
    from popdist_py.metrics.job_metrics import Metrics
    from popdist_py.metrics.sink import MetricsSink
    from popdist_py.metrics.tensorboard_sink import TensorBoardSink
    from popdist_py.metrics.wandb_sink import WandbSink
    from popdist_py.popdist_functions import (
        checkNumIpusPerReplica,
        finalizeBackend,
        getDeviceId,
        getInstanceIndex,
        getLocalInstanceIndex,
        getNumInstances,
        getNumIpusPerReplica,
        getNumLocalReplicas,
        getNumTotalReplicas,
        getReplicaIndexOffset,
        initializeBackend,
        isBackendInitialized,
        isPopdistEnvSet,
        registerBackend,
        registerDefaultBackend,
    )
    from popdist_py.public_collectives.calls import (
        all_gather,
        all_gather_object,
        all_reduce,
        barrier,
        broadcast,
        broadcast_object,
        gather,
        gather_object,
        reduce_scatter,
        synchronize,
    )
    from popdist_py.timeline.spans import span

__version__ = "0.2.0.dev0"

__all__ = [
    "RESUME_EXIT_CODE",
    "CollectiveMismatchError",
    "CsvSink",
    "ForgedObjectError",
    "ForkedProcessError",
    "InstanceLostError",
    "Metrics",
    "MetricsSink",
    "NotInitialisedError",
    "PopdistError",
    "TensorBoardSink",
    "WandbSink",
    "WireError",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "barrier",
    "breakpoint",
    "broadcast",
    "broadcast_object",
    "checkNumIpusPerReplica",
    "execute_on_instances",
    "finalizeBackend",
    "gather",
    "gather_object",
    "getDeviceId",
    "getInstanceIndex",
    "getLocalInstanceIndex",
    "getNumInstances",
    "getNumIpusPerReplica",
    "getNumLocalReplicas",
    "getNumTotalReplicas",
    "getReplicaIndexOffset",
    "init",
    "initializeBackend",
    "isBackendInitialized",
    "isPopdistEnvSet",
    "reduce_scatter",
    "registerBackend",
    "registerDefaultBackend",
    "span",
    "stopRequested",
    "synchronize",
]

# Module -> its public names.
_NAMES_OF_MODULE = {
    "public_collectives.calls": (
        "all_gather",
        "all_gather_object",
        "all_reduce",
        "barrier",
        "broadcast",
        "broadcast_object",
        "gather",
        "gather_object",
        "reduce_scatter",
        "synchronize",
    ),
    "context": (
        "execute_on_instances",
        "init",
    ),
    "debugger": ("breakpoint",),
    "errors": (
        "CollectiveMismatchError",
        "ForgedObjectError",
        "ForkedProcessError",
        "InstanceLostError",
        "NotInitialisedError",
        "PopdistError",
        "WireError",
    ),
    "heartbeat": (
        "RESUME_EXIT_CODE",
        "stopRequested",
    ),
    "metrics.csv_sink": ("CsvSink",),
    "metrics.job_metrics": ("Metrics",),
    "metrics.sink": ("MetricsSink",),
    "metrics.tensorboard_sink": ("TensorBoardSink",),
    "metrics.wandb_sink": ("WandbSink",),
    "popdist_functions": (
        "checkNumIpusPerReplica",
        "finalizeBackend",
        "getDeviceId",
        "getInstanceIndex",
        "getLocalInstanceIndex",
        "getNumInstances",
        "getNumIpusPerReplica",
        "getNumLocalReplicas",
        "getNumTotalReplicas",
        "getReplicaIndexOffset",
        "initializeBackend",
        "isBackendInitialized",
        "isPopdistEnvSet",
        "registerBackend",
        "registerDefaultBackend",
    ),
    "timeline.spans": ("span",),
}
# Public name -> its module.
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


_SUBMODULES = frozenset(
    {"checkpoint", "heartbeat", "horovod", "popart", "popdist_core", "poptorch"}
)


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF_NAME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
