"""Whether a model fits into the memory of its IPUs: an error, a line of the log, or nothing.

Nothing here computes memory, or knows what an option means.
"""

from __future__ import annotations

from typing import Final

from popdist_py.ipu.what_if import OutOfMemory, Run, explain
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.options.device_choice import MemoryMode

__all__ = ["check_memory"]

# PopTorch's name for what Poplar raises.
_ERROR_TYPE: Final = "poplar_graph_memory_allocation_error"


def check_memory(run: Run, mode: MemoryMode, *, shows: bool) -> None:
    """Look whether there is room for a run.

    All instances have the same run, so they decide alike.

    Args:
        run: what is compiled.
        mode: what to do if there is no room; ``off`` does not look.
        shows: whether this instance speaks for all.

    Raises:
        Error: there is no room, and the mode is ``enforce``.
    """
    if mode == "off" or (mode == "warn" and not shows):
        return
    lack = explain(run)
    if lack is None:
        return
    if mode == "enforce":
        raise Error(str(lack), type=_ERROR_TYPE)
    logger.warning("%s", _line(run, lack))


def _line(run: Run, lack: OutOfMemory) -> str:
    own = lack.memory
    better = "; ".join(
        f"{advice.change} would need {advice.saved / 1e6:,.1f} MB less"
        + (", then it fits" if advice.fits else "")
        for advice in lack.advice[:1]
    )
    return (
        f"Out of memory on IPU {own.ipu} of an {run.ipu.name.capitalize()}: "
        f"{own.needed:,} bytes needed but only {own.capacity:,} available"
        f"{f' ({better})' if better else ''}. It runs all the same: print(model.memoryReport()) "
        'shows more, Options.Emulator.memory("off") ends this line'
    )
