"""The PopTorch calls and options with which a user follows advice about too little memory.

The module ``ipu.what_if`` finds the advice and estimates the memory that the advice saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from popdist_py.ipu.what_if import Kind, OutOfMemory

__all__ = ["in_poptorch_terms"]

_OFF_CHIP: Final = "poptorch.TensorLocationSettings().useOnChipStorage(False)"
_SPELLINGS: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        "batch": "change batch_size of poptorch.DataLoader",
        "half inference": "call model.half(), and give the model inputs of the type torch.half",
        "half training": "call model.half(), give the model inputs of the type torch.half, and "
        "make an optimizer of poptorch.optim with accum_type=torch.float16 and "
        "first_order_momentum_accum_type=torch.float16 (for SGD and LARS: "
        "velocity_accum_type=torch.float16)",
        "recomputation": 'options._Popart.set("autoRecomputation", '
        "int(popart.RecomputationType.Standard))",
        "checkpoints": "add x = poptorch.recomputationCheckpoint(x) between layers; for a model "
        'without a pipeline, also call options._Popart.set("autoRecomputation", '
        "int(popart.RecomputationType.Standard))",
        "optimizer off chip": f"options.TensorLocations.setOptimizerLocation({_OFF_CHIP})",
        "activations off chip": f"options.TensorLocations.setActivationLocation({_OFF_CHIP})",
        "half accumulators": "make an optimizer of poptorch.optim with accum_type=torch.float16",
        "no state": "use poptorch.optim.SGD without momentum",
        "half state": "make an optimizer of poptorch.optim whose first_order_momentum_accum_type "
        "and second_order_momentum_accum_type are torch.float16 (for SGD and LARS: "
        "velocity_accum_type=torch.float16)",
        "I/O tiles": "set the number of I/O tiles with options.TensorLocations.numIOTiles",
        "proportion": 'call options.setAvailableMemoryProportion({"IPU0": 0.1}) with an entry for '
        "each IPU",
        "half partials": "options.Precision.setPartialsType(torch.half)",
        "identical parts": "if layers may share their weights, use one module that the forward "
        "calls several times, as in nn.ModuleList([layer] * n)",
        "profiling": "run the program without options.enableProfiling(), and without autoReport in "
        "POPLAR_ENGINE_OPTIONS",
        "splits": "call poptorch.BeginBlock(module, ipu_id=i) for the first module of each stage i",
    }
)


def in_poptorch_terms(lack: OutOfMemory) -> OutOfMemory:
    """Return an out-of-memory explanation, with a PopTorch call or option added to each advice."""
    advice, together = (
        tuple(replace(one, how=_SPELLINGS[one.kind]) for one in each)
        for each in (lack.advice, lack.together)
    )
    return replace(lack, advice=advice, together=together)
