"""Whether a model fits into the memory of its IPUs: an error, a line of the log, or nothing.

Nothing here computes memory, or knows what an option means.
"""

from __future__ import annotations

from typing import Final

from popdist_py.environment import IPU_MEMORY
from popdist_py.errors import counted
from popdist_py.ipu.memory_report import IpuMemory
from popdist_py.ipu.searches import Run
from popdist_py.ipu.what_if import OutOfMemory, explain
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.spelled_advice import spelled
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.placement.execution_strategies import ShardedExecution
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["check_memory"]

# PopTorch's name for what Poplar raises.
_ERROR_TYPE: Final = "poplar_graph_memory_allocation_error"
_UNKNOWN: Final = (
    "Whether an %s has room for this model cannot be told: its forward does what cannot be "
    "captured (POPTORCH_LOG_LEVEL=DEBUG says what). The emulation runs all the same"
)
# The first sentences of this process's warnings, so that a model compiled again warns only once.
_warned: Final[set[str]] = set()


def check_memory(run: Run | None, options: Options, state: DeviceState, num_ipus: int) -> None:
    """Check whether a run fits into memory; if not, do what ``Emulator.memory`` says.

    All instances have the same run, so all decide alike; instance 0 warns. If the model of the
    device cannot compute the memory of a run, only its weights and buffers are counted.

    Args:
        run: what is compiled; None if the model of the device cannot be asked.
        options: of the run.
        state: the weights and buffers of the replicas.
        num_ipus: the number of IPUs of a replica.

    Raises:
        Error: there is no room, and that is enforced.
    """
    mode = options.Emulator.memory_mode
    speaks = options.Distributed.processId == 0
    if mode == "off" or (mode == "warn" and not speaks):
        return
    fullest = _fullest(run)
    if run is None or fullest is None:
        lacking = _lacking_for_weights(options, state, num_ipus)
        if not lacking and mode == "enforce" and speaks:
            logger.warning(_UNKNOWN, options.Emulator.ipu.name.capitalize())
    else:
        lacking = "" if fullest.fits else _first_line(OutOfMemory(fullest, ()))
    if not lacking:
        return
    if mode == "enforce":
        lack = _explained(run)
        raise Error(f"{lack or lacking}\n{_how_to_run(options)}", type=_ERROR_TYPE)
    if lacking not in _warned:
        _warned.add(lacking)
        logger.warning("%s", _line(lacking, _explained(run), options))


def _fullest(run: Run | None) -> IpuMemory | None:
    """Return the IPU with the least room; None if the model of the device has no answer."""
    try:
        return None if run is None else run.fullest
    except Exception:
        logger.debug("The model of the device has no answer", exc_info=True)
        return None


def _explained(run: Run | None) -> OutOfMemory | None:
    """Return why a run does not fit, with advice; None if the model of the device cannot tell."""
    try:
        lack = None if run is None else explain(run)
    except Exception:
        logger.debug("The model of the device has no advice", exc_info=True)
        return None
    return None if lack is None else spelled(lack)


def _lacking_for_weights(options: Options, state: DeviceState, num_ipus: int) -> str:
    """Return an error text if the weights alone exceed the IPUs' memory; else an empty text."""
    is_on_chip = not options.TensorLocations.exists("location_weight")
    if not is_on_chip or not isinstance(options._execution_strategy, ShardedExecution):
        return ""
    # A parameter that differs between groups of replicas is there once for each group, as name[0],
    # name[1], and so on. An IPU holds one of these.
    own = [p for name, p in state.parameters.items() if name.endswith("[0]") or name[-1] != "]"]
    needed = sum(tensor.nbytes for tensor in (*own, *state.buffers.values()))
    ipu = options.Emulator.ipu
    available = num_ipus * ipu.tiles * ipu.tile_bytes
    if needed <= available:
        return ""
    return (
        f"Out of memory: weights and buffers alone need {needed:,} bytes but "
        f"{counted(num_ipus, 'IPU')} only {'has' if num_ipus == 1 else 'have'} {available:,}."
    )


def _line(lacking: str, lack: OutOfMemory | None, options: Options) -> str:
    """Return the warning: the missing memory, the best advice, and which options change this."""
    advice = () if lack is None else lack.advice
    helping = [each for each in advice if each.fits] or advice
    better = "".join(
        f", {each.saved / 1e6:,.1f} MB less with {each.change}"
        + (", which fits" if each.fits else "")
        + (f" ({each.how})" if each.how else "")
        for each in helping[:1]
    )
    more = "" if lack is None else "print(model.memoryReport()) shows more, "
    return (
        f"{lacking} That is of an {options.Emulator.ipu.name.capitalize()}{better}. "
        f"The emulation runs all the same: {_how_to_enforce(options)} refuses such a model, "
        f'{more}Options.Emulator.memory("off") ends this line'
    )


def _how_to_enforce(options: Options) -> str:
    """Return the setting that turns the warning into an error."""
    if options.Emulator.exists("memory"):
        return 'Options.Emulator.memory("enforce")'
    if options.Emulator.device_named is not None:
        return f"{IPU_MEMORY}=enforce"
    return f"{IPU_MEMORY}=enforce, or --ipu-model {options.Emulator.ipu.name},"


def _how_to_run(options: Options) -> str:
    """Return a sentence with the setting that turns the error into a warning."""
    program = 'Options.Emulator.memory("warn")'
    if options.Emulator.exists("memory"):
        return f"The emulation runs such a model all the same with {program}."
    return f"The emulation runs such a model all the same with {IPU_MEMORY}=warn, or {program}."


def _first_line(lack: OutOfMemory) -> str:
    return str(lack).partition("\n")[0]
