"""The table of old names and arguments from earlier PopTorch releases, and its look-up functions.

Most names and arguments of an earlier PopTorch release (old spellings) have the same effect as
their replacements (new spellings). Other old spellings do nothing or are refused. A program that
uses an old spelling gets one warning about it. The functions in ``old_spellings`` only translate
names and arguments. The reference on the site contains the same table of old spellings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial, wraps
from operator import attrgetter
from typing import Any, Final, TypeVar, cast

from popdist_py import context
from popdist_py.poptorch.logger import logger

__all__ = [
    "TABLE",
    "How",
    "Spelling",
    "attribute",
    "current_name",
    "find",
    "module_names",
    "say",
    "takes",
]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class How(Enum):
    """Whether an old spelling works like a new spelling, does nothing or is refused."""

    SAME = auto()
    NOTHING = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Spelling:
    """One old spelling of a name or an argument.

    Attributes:
        where: The module, group of options or enumeration that contains the old name. For an
            argument, ``where`` is the name of the function with ``()``.
        old: The old name or argument.
        new: The new name or argument with the same effect, which may be a dotted path.
        how: Whether the old spelling works like a new spelling, does nothing or is refused.
        why: The reason why the old spelling does nothing, or the replacement for a refused
            spelling.
        given: The additional arguments that give the new spelling the effect of the old spelling.
    """

    where: str
    old: str
    new: str = ""
    how: How = How.SAME
    why: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def old_text(self) -> str:
        """The old spelling as it appears in a program, such as ``poptorch.AnchorMode``."""
        return _written(self.where, self.old)

    @property
    def new_text(self) -> str:
        """The new spelling as it appears in a program; empty if there is no new spelling."""
        if self.how is not How.SAME:
            return ""
        arguments = ", ".join(f"{name}={value}" for name, value in self.given.items())
        return _written(self.where, self.new) + (f"(..., {arguments})" if arguments else "")


def _written(where: str, name: str) -> str:
    return f"{where[:-1]}{name}=)" if where.endswith("()") else f"{where}.{name}"


_NO_AUTOCAST: Final = (
    "half and float tensors mix as in torch; call .half() on modules and tensors that should be "
    "in half"
)

TABLE: Final = (
    # Earlier PopTorch releases called output modes (which outputs a call returns) "anchor modes".
    Spelling("poptorch", "AnchorMode", "OutputMode"),
    Spelling("poptorch.enums", "AnchorMode", "OutputMode"),
    Spelling("Options", "anchorMode", "outputMode"),
    Spelling("Options", "defaultAnchorMode", "defaultOutputMode"),
    Spelling("Options", "anchor_mode", "output_mode"),
    Spelling("Options", "anchor_return_period", "output_return_period"),
    Spelling("Options.outputMode()", "anchor_mode", "output_mode"),
    Spelling("Options.outputMode()", "anchor_return_period", "output_return_period"),
    Spelling("Options.anchorTensor()", "anchor_mode", "output_mode"),
    Spelling("Options.anchorTensor()", "anchor_return_period", "output_return_period"),
    # Old names of option groups, and old names of options.
    Spelling("Options", "Popart", "_Popart"),
    Spelling(
        "Options.Training",
        "accumulationReductionType",
        "accumulationAndReplicationReductionType",
    ),
    Spelling(
        "Options.Training",
        "accumulation_reduction_type",
        "accumulation_and_replication_reduction_type",
    ),
    # The mean reduction strategies (ways to average gradients) PostAndLoss and Post give the same
    # mean.
    Spelling("MeanReductionStrategy", "PostAndLoss", "Post"),
    Spelling(
        "Options.Jit",
        "traceModel",
        how=How.NOTHING,
        why="all models are traced in the same way; remove the call",
    ),
    Spelling("Options.Precision", "halfFloatCasting", how=How.NOTHING, why=_NO_AUTOCAST),
    Spelling(
        "Options.Precision",
        "runningStatisticsAlwaysFloat",
        how=How.NOTHING,
        why="running statistics keep the data type that the model chooses",
    ),
    Spelling("Options.Precision", "autocastEnabled", how=How.NOTHING, why=_NO_AUTOCAST),
    Spelling("Options.Precision", "autocastPolicy", how=How.NOTHING, why=_NO_AUTOCAST),
    Spelling(
        "Options.Distributed",
        "IPUoFConfigFiles",
        how=How.NOTHING,
        why="emulated IPUs have no configuration files",
    ),
    # PopTorch 3.0 removed automatic casts.
    Spelling("poptorch", "autocast", "autocasting.autocast", How.NOTHING, _NO_AUTOCAST),
    # Old names of execution strategies and of blocks of operations.
    Spelling("poptorch", "PhasedExecution", "SerialPhasedExecution"),
    Spelling(
        "poptorch",
        "IPU",
        how=How.REFUSED,
        why="use poptorch.BeginBlock(layer, ipu_id=n) for a layer, or poptorch.Block(ipu_id=n) "
        "around code",
    ),
    # Old arguments of model wrappers that were replaced by options, or by code in the model's
    # forward method.
    Spelling(
        "poptorch.trainingModel()",
        "loss",
        how=How.REFUSED,
        why="compute the loss in the model's forward, and return the loss",
    ),
    *(
        Spelling(
            f"poptorch.{wrap}()", name, how=How.REFUSED, why=f"use poptorch.Options().{setter}(n)"
        )
        for wrap in ("trainingModel", "inferenceModel")
        for name, setter in (
            ("device_iterations", "deviceIterations"),
            ("replication_factor", "replicationFactor"),
            ("gradient_accumulation", "Training.gradientAccumulation"),
        )
    ),
    # Old names and arguments of optimisers.
    *(
        Spelling("poptorch.optim", f"{name}NoBias", name, given={"bias_correction": False})
        for name in ("AdamW", "LAMB")
    ),
    *(
        Spelling(f"poptorch.optim.{kind}()", old, new)
        for kind in ("Adam", "AdamW", "LAMB", "RMSprop")
        for old, new in (
            ("accumType", "accum_type"),
            ("firstOrderMomentumAccumType", "first_order_momentum_accum_type"),
            ("secondOrderMomentumAccumType", "second_order_momentum_accum_type"),
        )
    ),
    *(
        Spelling(f"poptorch.optim.{kind}()", "biasCorrection", "bias_correction")
        for kind in ("AdamW", "LAMB")
    ),
)

_FOUND: Final = {(spelling.where, spelling.old): spelling for spelling in TABLE}
_said: set[str] = set()


def find(where: str, old: str) -> Spelling | None:
    """Return the entry of the table of old spellings for the name ``old`` in ``where``, or None."""
    return _FOUND.get((where, old))


def say(where: str, old: str) -> None:
    """Warn that a program uses an old name, once for each name and only on instance 0."""
    spelling = _FOUND[where, old]
    if spelling.old_text in _said or context.environment().instance_index != 0:
        return
    _said.add(spelling.old_text)
    if spelling.how is How.NOTHING:
        logger.warning("%s is deprecated and does nothing: %s", spelling.old_text, spelling.why)
    else:
        logger.warning("%s is deprecated: use %s", spelling.old_text, spelling.new_text)


def current_name(spelling: Spelling) -> str:
    """Log a warning about an old spelling, and return the new name.

    Raises:
        AttributeError: The old spelling is refused, because it has no replacement with the same
            effect.
    """
    if spelling.how is How.REFUSED:
        raise AttributeError(f"{spelling.old_text} was removed from PopTorch: {spelling.why}")
    say(spelling.where, spelling.old)
    return spelling.new


def attribute(spelling: Spelling, owner: Any) -> Any:
    """Return the attribute of ``owner`` that replaces an old name.

    Raises:
        AttributeError: The old name is refused, because it has no replacement with the same effect.
    """
    path = current_name(spelling)
    if not path:
        # A setter of earlier PopTorch releases that has no effect here accepts all arguments. The
        # setter returns the options object, so that a program can call further setters.
        return lambda *_, **__: owner
    value = attrgetter(path)(owner)
    return partial(value, **spelling.given) if spelling.given else value


def module_names(where: str, module: str) -> Callable[[str], Any]:
    """Return a function ``__getattr__`` that finds the old names of a module.

    Args:
        where: The name of the module in the table of old spellings.
        module: The full name of the module in ``sys.modules``.
    """

    def of_module(name: str) -> Any:
        spelling = find(where, name)
        if spelling is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return attribute(spelling, sys.modules[module])

    return of_module


def takes(where: str) -> Callable[[_Function], _Function]:
    """Return a decorator that lets a function accept its old arguments.

    Args:
        where: The name of the function in the table of old spellings, such as
            ``Options.outputMode()``.
    """
    spellings = {spelling.old: spelling for spelling in TABLE if spelling.where == where}

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def call(*args: Any, **arguments: Any) -> Any:
            for old in spellings.keys() & arguments.keys():
                _rename(arguments, spellings[old])
            return function(*args, **arguments)

        return cast(_Function, call)

    return decorate


def _rename(arguments: dict[str, Any], spelling: Spelling) -> None:
    """Rename an old argument in a function call's keyword arguments.

    Raises:
        TypeError: The old argument is refused, or the call passes both the old and the new
            argument.
    """
    if spelling.how is How.REFUSED:
        raise TypeError(f"{spelling.old_text} was removed from PopTorch: {spelling.why}")
    if spelling.new in arguments:
        raise TypeError(
            f"{spelling.old_text} is the old name of {spelling.new_text}, and both were given: "
            "remove the old argument"
        )
    say(spelling.where, spelling.old)
    arguments[spelling.new] = arguments.pop(spelling.old)
