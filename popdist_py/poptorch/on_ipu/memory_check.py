"""A check that raises an error or warns if a model does not fit into the memory of its IPUs.

The package ``popdist_py.ipu`` estimates the memory of a model, and finds advice if the model does
not fit. The module ``memory_check`` writes the messages about memory for the user.
"""

from __future__ import annotations

from typing import Final

from popdist_py.environment import IPU_MEMORY
from popdist_py.errors import counted
from popdist_py.ipu.memory_contents import IpuMemory
from popdist_py.ipu.searches import Run
from popdist_py.ipu.what_if import OutOfMemory, explain
from popdist_py.poptorch.errors import Error
from popdist_py.poptorch.logger import logger
from popdist_py.poptorch.on_ipu.poptorch_advice import in_poptorch_terms
from popdist_py.poptorch.options.options import Options
from popdist_py.poptorch.placement.execution_strategies import ShardedExecution
from popdist_py.poptorch.weights.device_state import DeviceState

__all__ = ["check_memory"]

# The name that PopTorch gives to Poplar's error for a model that needs too much memory.
_ERROR_TYPE: Final = "poplar_graph_memory_allocation_error"
_UNKNOWN: Final = (
    "The memory that this model needs on %s IPUs cannot be estimated, because the operations of "
    "its forward could not be recorded (POPTORCH_LOG_LEVEL=DEBUG logs the reason). The emulation "
    "runs the model anyway"
)
# The first sentences of the warnings that this process has logged. If a model is compiled again,
# the warning about its memory is not repeated.
_warned: Final[set[str]] = set()


def check_memory(run: Run | None, options: Options, state: DeviceState, num_ipus: int) -> None:
    """Raise an error or log a warning if a model does not fit into the memory of its IPUs.

    A model that is close to the limit gets only a warning, because the estimate is not exact enough
    to refuse it. The option ``Emulator.memory`` selects an error, a warning or no check. In a
    distributed job, all instances check the same model and get the same result, but only instance 0
    logs the warning. If the needed memory cannot be estimated from the model's graph, only the
    weights and buffers are counted.

    Args:
        run: The model's graph with the options of the run, or None if the graph is not known.
        options: The options of the PopTorch model.
        state: The weights and buffers of all replicas of the model.
        num_ipus: The number of IPUs of each replica.

    Raises:
        Error: The model does not fit into memory, and the option ``Emulator.memory`` is "enforce".
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
    is_close = fullest is not None and fullest.verdict == "close"
    if mode == "enforce" and not is_close:
        lack = _explained(run)
        raise Error(f"{lack or lacking}\n{_how_to_run(options)}", type=_ERROR_TYPE)
    if speaks and lacking not in _warned:
        _warned.add(lacking)
        logger.warning("%s", _line(lacking, _explained(run), options, is_close=is_close))


def _fullest(run: Run | None) -> IpuMemory | None:
    """Return the memory of the IPU with the fullest tile, or None if the estimate fails."""
    try:
        return None if run is None else run.fullest
    except Exception:
        logger.debug("The memory of the model on IPUs cannot be estimated", exc_info=True)
        return None


def _explained(run: Run | None) -> OutOfMemory | None:
    """Return an ``OutOfMemory``, the reason why a model does not fit into memory, with advice.

    The function returns None if the model's memory cannot be estimated, or if the model fits into
    memory.
    """
    try:
        lack = None if run is None else explain(run)
    except Exception:
        logger.debug("Advice about the memory of the model cannot be computed", exc_info=True)
        return None
    return None if lack is None else in_poptorch_terms(lack)


def _lacking_for_weights(options: Options, state: DeviceState, num_ipus: int) -> str:
    """Return an error message if the weights and buffers alone exceed the memory of the IPUs.

    If the weights and buffers fit into memory, the function returns an empty string.
    """
    is_on_chip = not options.TensorLocations.exists("location_weight")
    if not is_on_chip or not isinstance(options._execution_strategy, ShardedExecution):
        return ""
    # If a parameter differs between groups of replicas, ``state`` contains one copy of the
    # parameter for each group. The copies of a parameter are called name[0], name[1], and so on. An
    # IPU stores only one of the copies of a parameter.
    own = [p for name, p in state.parameters.items() if name.endswith("[0]") or name[-1] != "]"]
    needed = sum(tensor.nbytes for tensor in (*own, *state.buffers.values()))
    ipu = options.Emulator.ipu
    available = num_ipus * ipu.tiles * ipu.tile_bytes
    if needed <= available:
        return ""
    return (
        f"Out of memory: the model's weights and buffers alone need {needed:,} bytes but "
        f"{counted(num_ipus, 'IPU')} only {'has' if num_ipus == 1 else 'have'} {available:,} bytes."
    )


def _line(lacking: str, lack: OutOfMemory | None, options: Options, *, is_close: bool) -> str:
    """Return a warning with the missing memory, the best advice, and the memory check's options."""
    advice = () if lack is None else lack.advice
    helping = [each for each in advice if each.fits] or advice
    better = "".join(
        f"This change saves {each.saved / 1e6:,.1f} MB"
        + (", so that the model fits" if each.fits else "")
        + f": {each.change}"
        + (f" ({each.how})" if each.how else "")
        + ". "
        for each in helping[:1]
    )
    more = "" if lack is None else "print(model.memoryReport()) shows details. "
    if is_close:
        told = "The model may or may not fit"
    else:
        told = (
            f"The emulation runs the model anyway. {_how_to_enforce(options)} turns this warning "
            "into an error"
        )
    return (
        f"{lacking} The figures are for {options.Emulator.ipu.name.capitalize()} IPUs. {better}"
        f'{told}. {more}Options.Emulator.memory("off") turns this warning off'
    )


def _how_to_enforce(options: Options) -> str:
    """Return the name of the setting that makes the memory check raise an error."""
    if options.Emulator.exists("memory"):
        return 'Options.Emulator.memory("enforce")'
    if options.Emulator.device_named is not None:
        return f"{IPU_MEMORY}=enforce"
    return f"{IPU_MEMORY}=enforce or --ipu-model {options.Emulator.ipu.name}"


def _how_to_run(options: Options) -> str:
    """Return a sentence with the setting that makes the memory check only warn."""
    program = 'Options.Emulator.memory("warn")'
    if options.Emulator.exists("memory"):
        return f"To run the model anyway, call {program}."
    return f"To run the model anyway, set {IPU_MEMORY}=warn, or call {program}."


def _first_line(lack: OutOfMemory) -> str:
    return str(lack).partition("\n")[0]
