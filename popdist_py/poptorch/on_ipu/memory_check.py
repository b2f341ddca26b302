"""Whether a model fits into the memory of its IPUs: an error, a line of the log, or nothing.

Nothing here computes memory, or knows what an option means.
"""

from __future__ import annotations

from typing import Final

from popdist_py.ipu.searches import Run
from popdist_py.ipu.what_if import OutOfMemory, explain
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.spelled_advice import spelled
from popdist_py.poptorch.options.options import Options

__all__ = ["check_memory"]

# PopTorch's name for what Poplar raises.
_ERROR_TYPE: Final = "poplar_graph_memory_allocation_error"
_UNKNOWN: Final = (
    "Whether an %s has room for this model cannot be told: its forward does what cannot be "
    "captured (POPTORCH_LOG_LEVEL=DEBUG says what). The emulation runs all the same"
)


def check_memory(run: Run | None, options: Options) -> None:
    """Look whether there is room for a run, and do what ``Emulator.memory`` says if not.

    All instances have the same run, so they decide alike; instance 0 warns. Where that cannot be
    told, the run goes on: it needs none of this.

    Args:
        run: what is compiled; None if the model of the device cannot be asked.
        options: of the run.

    Raises:
        Error: there is no room, and that is enforced.
    """
    mode = options.Emulator.memory_mode
    speaks = options.Distributed.processId == 0
    if mode == "off" or (mode == "warn" and not speaks):
        return
    try:
        lack = None if run is None else explain(run)
    except Exception:
        logger.debug("The model of the device has no answer", exc_info=True)
        run = lack = None
    if run is None and mode == "enforce" and speaks:
        logger.warning(_UNKNOWN, options.Emulator.ipu.name.capitalize())
    if run is None or lack is None:
        return
    if mode == "enforce":
        raise Error(str(spelled(lack)), type=_ERROR_TYPE)
    logger.warning("%s", _line(run, spelled(lack)))


def _line(run: Run, lack: OutOfMemory) -> str:
    """Return what lacks, the best advice, and how to see more, in one line."""
    lacking, *_ = str(lack).splitlines()
    helping = [advice for advice in lack.advice if advice.fits] or lack.advice
    better = "".join(
        f", {advice.saved / 1e6:,.1f} MB less with {advice.change}"
        + (", which fits" if advice.fits else "")
        + (f" ({advice.how})" if advice.how else "")
        for advice in helping[:1]
    )
    return (
        f"{lacking} That is of an {run.ipu.name.capitalize()}{better}. "
        "The emulation runs all the same: print(model.memoryReport()) shows more, "
        'Options.Emulator.memory("off") ends this line'
    )
