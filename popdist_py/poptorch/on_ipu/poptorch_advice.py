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
        "batch": "batch_size of poptorch.DataLoader",
        "half inference": "model.half(), and inputs in torch.half",
        "half training": "model.half(), inputs in torch.half, and an optimiser of poptorch.optim "
        "with accum_type and first_order_momentum_accum_type (SGD, LARS: velocity_accum_type) "
        "torch.float16",
        "recomputation": 'options._Popart.set("autoRecomputation", '
        "int(popart.RecomputationType.Standard))",
        "checkpoints": "x = poptorch.recomputationCheckpoint(x) between layers; a model that is "
        'not pipelined also needs options._Popart.set("autoRecomputation", '
        "int(popart.RecomputationType.Standard))",
        "optimizer off chip": f"options.TensorLocations.setOptimizerLocation({_OFF_CHIP})",
        "activations off chip": f"options.TensorLocations.setActivationLocation({_OFF_CHIP})",
        "half accumulators": "an optimiser of poptorch.optim with accum_type=torch.float16",
        "no state": "poptorch.optim.SGD without momentum",
        "half state": "an optimiser of poptorch.optim with first_order_momentum_accum_type and "
        "second_order_momentum_accum_type (SGD, LARS: velocity_accum_type) torch.float16",
        "I/O tiles": "options.TensorLocations.numIOTiles",
        "proportion": 'options.setAvailableMemoryProportion({"IPU0": 0.1}), and so for each IPU',
        "half partials": "options.Precision.setPartialsType(torch.half)",
        "identical parts": "one module that the forward calls again, as in "
        "nn.ModuleList([layer] * n), where layers may share their weights",
        "profiling": "a run without options.enableProfiling(), and without autoReport in "
        "POPLAR_ENGINE_OPTIONS",
        "splits": "poptorch.BeginBlock(module, ipu_id=i) where stage i begins",
    }
)


def in_poptorch_terms(lack: OutOfMemory) -> OutOfMemory:
    """Return an out-of-memory explanation, with a PopTorch call or option added to each advice."""
    advice, together = (
        tuple(replace(one, how=_SPELLINGS[one.kind]) for one in each)
        for each in (lack.advice, lack.together)
    )
    return replace(lack, advice=advice, together=together)
